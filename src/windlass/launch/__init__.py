"""Batch scripts, SLURM, local runs, chains, sweeps, doctor."""
