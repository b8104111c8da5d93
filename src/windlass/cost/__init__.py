"""Pure arithmetic: parameters, FLOPs, memory, traffic, step time, power. No torch, no files, no network."""
