"""Runs the benchmarks that need no GPU and no files from elsewhere, one after another; each writes to benchmarks/results/.

python benchmarks/run_cpu.py            # all, about twenty minutes on two cores
python benchmarks/run_cpu.py faults     # one of them
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

TOP = Path(__file__).resolve().parents[1]
RESULTS = TOP / "benchmarks" / "results"

COMMANDS = {
    "planner": ["benchmarks/planner_accuracy.py", "--rows", "benchmarks/published/sample_runs.csv", "--leave-out", "--out", "{results}/planner_sample"],
    "profile": ["-P", "benchmarks/profile_read.py", "--out", "{results}/profile_read.jsonl"],
    "step": ["benchmarks/cpu_step.py", "--out", "{results}/cpu_step"],
    "dash": ["benchmarks/dash_load.py", "--lines", "1000000", "--viewers", "50", "--seconds", "30", "--out", "{results}/dash_load.json"],
    "faults": ["-m", "benchmarks.faults"],
    "grid": ["benchmarks/cpu_grid.py"],
}  # fmt: skip


def main() -> int:
    names = sys.argv[1:] or list(COMMANDS)
    unknown = [n for n in names if n not in COMMANDS]
    if unknown:
        print(f"unknown: {', '.join(unknown)}; known: {', '.join(COMMANDS)}")
        return 2
    failed = []
    for name in names:
        began = time.monotonic()
        words = [w.format(results=RESULTS) for w in COMMANDS[name]]
        print(f"== {name}: python {' '.join(words)}", flush=True)
        code = subprocess.run(
            [sys.executable, *words], cwd=TOP, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
        ).returncode
        print(f"== {name}: exit code {code} after {time.monotonic() - began:.0f} s", flush=True)
        failed += [name] if code else []
    print(f"failed: {', '.join(failed)}" if failed else "all done")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
