"""Energy windows over sensors, and carbon."""
