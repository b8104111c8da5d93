"""Hugging Face import and export, proved by comparing logits."""
