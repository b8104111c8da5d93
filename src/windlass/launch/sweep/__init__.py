"""Sweeps: a matrix of runs or commands, their outcomes with evidence, tables, charts and the winner."""
