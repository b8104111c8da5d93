"""Legal layouts -> estimates -> ranked plans with reasons; budget curves; calibration from measured runs."""
