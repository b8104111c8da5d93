"""What happens when ...? The long form of tests/faults: every fault we can cause, more often.

python -m benchmarks.faults                     all cases, written to benchmarks/results/faults.md and faults.json
python -m benchmarks.faults --only killed       the cases whose names contain a word
python -m benchmarks.faults --list
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tests.faults.lab import (
    Lab,
    Row,
    clock_jumps,
    damaged,
    disk_full,
    hung,
    killed_after_rename,
    killed_at_random,
    killed_before_manifest,
    killed_before_rename,
    killed_in_validation,
    killed_while_removing,
    killed_while_restoring,
    killed_while_saving,
    locks,
    nan_on_one_rank,
    other_layouts,
    other_world_sizes,
    read_only,
    rolled_back,
    signalled,
    stuck,
    unreadable_version,
)

from windlass.errors import WindlassError

CASES: dict[str, Callable[[Lab], Row]] = {
    "killed all": killed_at_random,
    "killed one": lambda lab: killed_at_random(lab, kills=8, one=True),
    "killed saving": killed_while_saving,
    "killed before manifest": killed_before_manifest,
    "killed before rename": killed_before_rename,
    "killed after rename": killed_after_rename,
    "killed removing": killed_while_removing,
    "killed validating": killed_in_validation,
    "killed restoring": killed_while_restoring,
    "sigterm one": lambda lab: signalled(lab, signal.SIGTERM, (1,)),
    "sigusr1 all": lambda lab: signalled(lab, signal.SIGUSR1, (0, 1)),
    "sigint all": lambda lab: signalled(lab, signal.SIGINT, (0, 1)),
    "flipped": lambda lab: damaged(lab, "bit-flipped shard"),
    "truncated": lambda lab: damaged(lab, "truncated shard"),
    "missing": lambda lab: damaged(lab, "missing shard"),
    "no manifest": lambda lab: damaged(lab, "missing manifest"),
    "bad metadata": lambda lab: damaged(lab, "damaged metadata"),
    "version": unreadable_version,
    "full": disk_full,
    "readonly": read_only,
    "lock": locks,
    "clock": clock_jumps,
    "hang": hung,
    "stuck": stuck,
    "nan": nan_on_one_rank,
    "rollback": rolled_back,
    "worlds": other_world_sizes,
    "layouts": other_layouts,
}
NEED_ROOT = ("full", "readonly")


def table(rows: list[Row]) -> str:
    head = "| fault | times | outcome | steps lost | seconds to recover |\n| --- | --- | --- | --- | --- |\n"
    return head + "\n".join(
        f"| {r.fault} | {r.times} | {'' if r.ok else '**FAILED**: '}{r.outcome} | {'' if r.steps_lost is None else r.steps_lost} | "
        f"{'' if r.seconds_to_recover is None else f'{r.seconds_to_recover:.1f}'} |"
        for r in rows
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="cases whose names contain this word")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--merge", action="store_true", help="with --only: replace these rows in the results")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    chosen = {n: c for n, c in CASES.items() if not given.only or given.only in n}
    if given.list:
        print("\n".join(chosen))
        return 0
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="windlass-faults-") as folder:
        lab = Lab(Path(folder), given.seed)
        for name, case in chosen.items():
            if name in NEED_ROOT and os.geteuid():
                print(f"{name}: needs root for a small tmpfs; left out", file=sys.stderr)
                continue
            begin = time.time()
            try:
                rows.append(case(lab))
            except (WindlassError, AssertionError, OSError) as error:
                rows.append(Row(name, 0, f"{type(error).__name__}: {error}", None, None, False))
            print(
                f"{name} ({time.time() - begin:.0f} s): {'ok' if rows[-1].ok else 'FAILED'}: {rows[-1].outcome}",
                file=sys.stderr,
                flush=True,
            )
    if not given.only:
        write_results(rows, given)
    elif given.merge:
        old = json.loads((given.out / "faults.json").read_text())["rows"]
        kept = [r for r in old if r["fault"] not in {n.fault for n in rows}]
        write_results([*(Row(**r) for r in kept), *rows], given)
    print(table(rows))
    return 0 if all(r.ok for r in rows) else 1


def write_results(rows: list[Row], given: argparse.Namespace) -> None:
    from windlass.runs.manifest import commit, cpu_name

    facts = {
        "command": "python -m benchmarks.faults" + (f", then --only {given.only} --merge" if given.only else ""), "commit": commit(), "torch": torch.__version__,
        "python": platform.python_version(), "cpu": cpu_name(), "cores": len(os.sched_getaffinity(0)),
        "kills": sum(r.times for r in rows if "SIGKILL" in r.fault),
    }  # fmt: skip
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "faults.json").write_text(json.dumps({**facts, "rows": [vars(r) for r in rows]}, indent=2) + "\n")
    words = "\n".join(f"- {k}: {v}" for k, v in facts.items())
    text = f"# Faults and recovery\n\n{words}\n\n{table(rows)}\n\nLosses are compared as hexadecimal floats, weights and moments bit by bit, "
    text += "sequences by their checksums, against the uninterrupted run at the same number of processes. Seconds to recover: median from the fault (or the end of the start that it ended) to the first step of the next start, on a shared machine.\n"
    (given.out / "faults.md").write_text(text)


if __name__ == "__main__":
    sys.exit(main())
