"""Energy of a run: sensors, measurement windows, one meter per node, the ledger and carbon. No torch."""
