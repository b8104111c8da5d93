"""Save, load, keep and verify checkpoints."""
