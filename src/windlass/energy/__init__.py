"""How much energy did it take? Sensors, windows, one meter per node, reconciliation and carbon. No torch."""

from windlass.energy.measure import Measurement, SourceEnergy

__all__ = ["Measurement", "SourceEnergy"]
