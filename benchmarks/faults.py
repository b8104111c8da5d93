"""What happens when ...? The long form of tests/faults: every fault we can cause, more often, and random kills.

python -m benchmarks.faults                     all cases, written to benchmarks/results/faults.md and faults.json
python -m benchmarks.faults --only killed       the cases whose names contain a word
python -m benchmarks.faults --only random --kills 20 --merge --works training-2 --seed 7
python -m benchmarks.faults --only random --kills 60 --merge --works sweep eval stage export finetune
python -m benchmarks.faults --list
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import psutil
import torch
from tests.faults import kills as random_kills
from tests.faults.kills import Kill
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
from tests.slurm.conftest import SCRIPT

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
RANDOM = "random"


def table(rows: list[Row]) -> str:
    head = "| fault | times | outcome | steps lost | seconds to recover |\n| --- | --- | --- | --- | --- |\n"
    return head + "\n".join(
        f"| {r.fault} | {r.times} | {'' if r.ok else '**FAILED**: '}{r.outcome} | {'' if r.steps_lost is None else r.steps_lost} | "
        f"{'' if r.seconds_to_recover is None else f'{r.seconds_to_recover:.1f}'} |"
        for r in rows
    )


def slurm_kills(place: Path, runs: int, seed: int) -> Iterator[Kill]:
    subprocess.run([str(SCRIPT), "up", "--fresh"], check=True, stdout=subprocess.DEVNULL)
    try:
        yield from random_kills.slurm_kills(place, runs, seed)
    finally:
        subprocess.run([str(SCRIPT), "down"], check=True, stdout=subprocess.DEVNULL)


# Name -> (share of the kills, `work` of its kills, what is killed).
WORKS: dict[str, tuple[float, str, Callable[[Path, int, int], Iterator[Kill]]]] = {
    "training-2": (
        1 / 4,
        "training on 2 processes",
        lambda place, runs, seed: random_kills.training_kills(place, 2, runs, seed),
    ),
    "training-3": (
        1 / 4,
        "training on 3 processes",
        lambda place, runs, seed: random_kills.training_kills(place, 3, runs, seed),
    ),
    "tokenising": (1 / 10, "tokenising", random_kills.tokenizing_kills),
    "slurm": (3 / 20, "SLURM chain", slurm_kills),
    "sweep": (1 / 20, "sweep", random_kills.sweep_kills),
    "eval": (1 / 20, "eval", random_kills.eval_kills),
    "stage": (1 / 20, "staging", random_kills.stage_kills),
    "export": (1 / 20, "export and import", random_kills.export_kills),
    "finetune": (1 / 20, "fine-tuning two seeds", random_kills.finetuning_kills),
}
RUNS_PER_TURN = 4  # they share one uninterrupted run, and one SLURM


def works_here() -> list[str]:
    if shutil.which("slurmctld", path=f"{os.environ['PATH']}:/usr/sbin") is not None and not os.geteuid():
        return list(WORKS)
    print("no SLURM here, or not root: no chain is killed", file=sys.stderr)
    return [name for name in WORKS if name != "slurm"]


def kill_at_random(
    folder: Path, count: int, seed: int, works: Iterable[str], earlier: Sequence[Kill] = ()
) -> list[Kill]:
    """About `count` kills, a few runs at a time of the work that lacks most of its share, `earlier` ones included.

    Ctrl-C or SIGTERM ends them early; those until then are kept, and they are spread over the works too.
    """
    kills: list[Kill] = []
    done = {name: sum(kill.work == WORKS[name][1] for kill in earlier) for name in works}
    turn = 0
    try:
        while done and len(kills) < count:
            name = min(done, key=lambda name: done[name] / WORKS[name][0])
            place, before = folder / f"{name}-{turn}", len(kills)
            place.mkdir()
            for kill in WORKS[name][2](place, RUNS_PER_TURN, seed + turn):
                kills.append(kill)
                done[name] += 1
                outcome = "good" if kill.good else f"FAILED: {kill}"
                print(f"{name}: kill {len(kills)}: {outcome}", file=sys.stderr, flush=True)
            turn += 1
            if len(kills) == before:  # every kill came too late
                del done[name]
    except KeyboardInterrupt:
        print(f"interrupted after {len(kills)} kills", file=sys.stderr)
        for process in psutil.Process().children(recursive=True):
            process.kill()
    return kills


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="cases whose names contain this word")
    parser.add_argument("--list", action="store_true")
    parser.add_argument(
        "--merge", action="store_true", help="with --only: replace these rows in the results, add the kills"
    )
    parser.add_argument("--kills", type=int, default=300, help="number of random kills (case `random`)")
    parser.add_argument(
        "--works", nargs="*", choices=WORKS, help="what is killed at random; default: all that work here"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    chosen = {n: c for n, c in CASES.items() if not given.only or given.only in n}
    if given.list:
        print("\n".join([*chosen, *([RANDOM] if not given.only or given.only in RANDOM else [])]))
        return 0
    rows: list[Row] = []
    kills: list[Kill] = []
    old = json.loads((given.out / "faults.json").read_text()) if given.merge else {}
    earlier = [Kill(**kill) for kill in old.get("random_kills", [])]
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
        if not given.only or given.only in RANDOM:
            kills = kill_at_random(Path(folder), given.kills, given.seed, given.works or works_here(), earlier)
    machines = [f"{len(kills)} kills: torch {torch.__version__}, {len(os.sched_getaffinity(0))} cores"] if kills else []
    if not given.only:
        write_results(rows, kills, machines, given)
    elif given.merge:
        kept = [Row(**r) for r in old["rows"] if r["fault"] not in {n.fault for n in rows}]
        write_results([*kept, *rows], [*earlier, *kills], [*old.get("kills_on", []), *machines], given)
    print("\n\n".join([*([table(rows)] if rows else []), *([random_kills.table(kills)] if kills else [])]))
    return 0 if all(r.ok for r in rows) and all(k.good for k in kills) else 1


def write_results(rows: list[Row], kills: list[Kill], machines: list[str], given: argparse.Namespace) -> None:
    from windlass.runs.manifest import commit, cpu_name

    facts = {
        "command": "python -m benchmarks.faults" + (f", then --only {given.only} --merge" if given.only else ""), "commit": commit(), "torch": torch.__version__,
        "python": platform.python_version(), "cpu": cpu_name(), "cores": len(os.sched_getaffinity(0)),
        "kills": sum(r.times for r in rows if "SIGKILL" in r.fault) + len(kills),
    }  # fmt: skip
    record = {**facts, "rows": [vars(r) for r in rows], "kills_on": machines, "random_kills": [vars(k) for k in kills]}
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "faults.json").write_text(json.dumps(record) + "\n")
    words = "\n".join(f"- {k}: {v}" for k, v in facts.items())
    text = f"# Faults and recovery\n\n{words}\n\n{table(rows)}\n\nLosses are compared as hexadecimal floats, weights and moments bit by bit, "
    text += "sequences by their checksums, against the uninterrupted run at the same number of processes. Seconds to recover: median from the fault (or the end of the start that it ended) to the first step of the next start, on a shared machine.\n"
    if kills:
        text += f"\n## Random kills\n\n{'; '.join(machines)}.\n\n{random_kills.table(kills)}\n\n"
        text += "A phase is chosen, its mark awaited, and after a random part of it one process of the tree gets a SIGKILL: a rank, the supervisor, a tokenising worker, a point of a sweep, the batch shell, srun. "
        text += "Bit-identical: losses, weights and moments of training; the bytes of a store, a copy, an exported folder and imported weights; outcome and loss of every point of a sweep, none run twice to its end; the records of an evaluation; scores and weights of every seed. "
        text += "After each kill of a copy, export or import, and before the command was given again, nothing incomplete was marked as complete or had the target's name. "
        text += "Seconds to detection: from the kill to the record of the fault, or to the end of every process where nobody is left to write one. Named: the record has the rank, the signal and the node.\n"
    (given.out / "faults.md").write_text(text)


if __name__ == "__main__":
    sys.exit(main())
