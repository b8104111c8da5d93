"""Peak memory of the engine's own training step, traced on fake tensors and a fake process group."""
