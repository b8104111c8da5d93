"""A stand-in for `python -m windlass.train.worker` that keeps its contract with the launcher (events, exit codes, signals) without torch.

STANDIN says what it does: finish; stop (saves, stops with 75, and finishes when started again); fail (code 1, nothing
saved); hold (works until SIGUSR1 or SIGTERM, then saves and stops with 75; finishes when
started or requeued again).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from windlass.clusters.scheduler import job_id, restart_count
from windlass.runs import Run
from windlass.runs.events import Finished, Resumed, Saved, Started
from windlass.runs.starts import start_name, wait_for_start


def main() -> int:
    run = Run(Path(sys.argv[1]))
    rank, mode = int(os.environ["SLURM_PROCID"]), os.environ["STANDIN"]
    # As the worker does it: the job's first command must have written exactly this start.
    start = wait_for_start(run, start_name(job_id() or "", restart_count()), 10)
    assert start.devices == int(os.environ["SLURM_NTASKS"]), start
    steps = [e.step for e in run.events() if e.event == "saved"]
    done = max(steps, default=10 if "SLURM_RESTART_COUNT" in os.environ else 0)
    heard: list[int] = []
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda got, frame: heard.append(got))
    print(f"rank {rank} on {os.uname().nodename} begins at step {done} ({mode})", flush=True)
    if rank == 0:
        run.record(Resumed(step=done) if done else Started())
    if mode == "fail":
        return 1
    if mode == "hold" and not done:
        while not heard:
            time.sleep(0.05)
        print(f"rank {rank} heard {signal.Signals(heard[0]).name}", flush=True)
    if mode in ("stop", "hold") and not done:
        if rank == 0:
            run.record(Saved(step=10, write_seconds=0.1))
        time.sleep(0.2)
        return 75
    if rank == 0:
        run.record(Saved(step=20, write_seconds=0.1))
        run.record(Finished(step=20, tokens=10240))
    return 0


if __name__ == "__main__":
    sys.exit(main())
