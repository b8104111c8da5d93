"""Capture a trace, read traces, and summarise or compare them."""
