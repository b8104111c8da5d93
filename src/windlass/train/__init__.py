"""The training loop, its step, and the one ordered function that parallelises a model."""
