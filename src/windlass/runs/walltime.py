"""How long before the wall-time limit a job must stop, in seconds. Pure arithmetic: no torch, no I/O."""

# Before the first save was timed: the lead that LUMI's guide uses.
UNMEASURED_LEAD_SECONDS = 300.0


def wall_time_lead_seconds(save_seconds: float | None, step_seconds: float | None = None) -> float:
    """The lead before the wall-time limit; `save_seconds` is the longest save so far, None before the first.

    Three saves, three steps and a minute. The signal that SLURM sends (60 s + 3 saves) and the check inside the
    training loop (2 saves + 3 steps + 30 s) used to have rules of their own; this sum is at least as large as either,
    so neither stops later than before: three steps until all ranks agree, a save that is up to three times slower than
    the slowest so far, and a minute for a scheduler that looks at its clock every 30 s.
    """
    if save_seconds is None:
        return UNMEASURED_LEAD_SECONDS
    return 60.0 + 3 * save_seconds + 3 * (step_seconds or 0.0)
