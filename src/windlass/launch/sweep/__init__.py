"""Which settings are fastest, and which fail? A matrix of runs, their outcomes with evidence, tables, charts and the winner."""
