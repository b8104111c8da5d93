"""Perplexity, downstream tasks, generation, export and import."""
