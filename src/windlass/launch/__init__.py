"""Jobs: batch scripts, checks, job chains, SLURM, sweeps and the doctor."""
