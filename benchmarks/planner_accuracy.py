"""Errors of the planner on a table of measured runs, and the fit of its few constants.

    python benchmarks/planner_accuracy.py --rows FILE.csv [--json] [--rows-out OUT.csv]   # score the shipped constants
    python benchmarks/planner_accuracy.py --rows FILE.csv --leave-out [--experts MOE.csv]   # fit without each source in turn and score that source
    python benchmarks/planner_accuracy.py --rows FILE.csv --fit            # print constants fitted to all rows
    python benchmarks/planner_accuracy.py --rows FILE.csv --calibrate CLUSTER [--json]    # fit and store a cluster's constants
    python benchmarks/planner_accuracy.py --energy FILE.csv [--json]       # score the power model on published energy

--leave-out scores models with experts from a table of their own: their constants are fitted with all others held. It writes benchmarks/results/planner_accuracy.md and .json with command, commit and date.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.pop(0)  # this folder: its tokenize.py would hide Python's own module
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import argparse
import json
import platform
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from benchmarks.published import fit
from benchmarks.published.report import OUTSIDE, leave_out_table, print_score
from benchmarks.published.score import iterate_rows, read_rows, score_rows, write_rows
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from windlass.cli.output import print_json
from windlass.cost.memory import SHARDED_SLACK
from windlass.cost.step import DEFAULTS
from windlass.errors import WindlassError

ROOT = Path(__file__).resolve().parents[1]


def with_progress(rows: Iterable[dict[str, str]]) -> Iterator[dict[str, str]]:
    """The rows, counted on the terminal: a million take minutes."""
    columns = (SpinnerColumn(), TextColumn("{task.completed:,.0f} rows predicted"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        yield from bar.track(rows, total=None)


def score(arguments: argparse.Namespace) -> None:
    result = score_rows(with_progress(iterate_rows(arguments.rows)))
    if arguments.rows_out is not None:
        write_rows(result, arguments.rows_out)
    if arguments.json:
        print_json(result.as_dict())
    else:
        print_score(result.as_dict(), arguments.rows)


def score_power(arguments: argparse.Namespace) -> None:
    from benchmarks.published.energy import print_energy, read_energy_rows, score_energy

    result = score_energy(read_energy_rows(arguments.energy))
    if arguments.json:
        print_json(result)
    else:
        print_energy(result, arguments.energy)


def calibrate(arguments: argparse.Namespace) -> None:
    """Fit the cluster's [efficiency] table to the rows that were measured on its device."""
    from benchmarks.published.calibrate import measured_runs

    from windlass.clusters import load_cluster
    from windlass.planner.calibrate import calibrate_runs

    cluster = load_cluster(arguments.calibrate)
    runs, skipped = measured_runs(arguments.rows, cluster.device)
    result = calibrate_runs(runs, cluster.name, skipped)
    if arguments.json:
        print_json(result.json())
    else:
        print(result.text())


def fit_all(arguments: argparse.Namespace) -> None:
    rows = read_rows(arguments.rows)
    best = fit.Fit(rows).run(fit.neutral(), rounds=arguments.rounds * 2)
    print(json.dumps({k: round(v, 4) for k, v in asdict(best).items()}, indent=1))
    print(json.dumps({k: v for k, v in score_rows(rows, best).as_dict().items() if k != "by_source"}))


def leave_out(arguments: argparse.Namespace) -> None:
    """Score every source with constants fitted to the others, and record the result."""
    rows = read_rows(arguments.rows)
    started = time.process_time()
    left_out, constants = fit.leave_out(rows, arguments.rounds, fit.source_of)
    left_out, slacks = fit.refit_slack(left_out, rows, fit.source_of)
    splits: dict[str, Any] = {}
    for name, group in fit.SPLITS.items():
        split, _ = fit.refit_slack(fit.leave_out(rows, arguments.rounds, group)[0], rows, group)
        splits[name] = {k: v for k, v in split.as_dict().items() if k != "by_source"}
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False, cwd=ROOT).stdout.strip()
    values = {n: [getattr(c, n) for c in constants.values()] for n in asdict(DEFAULTS)}
    result = {
        "command": f"python benchmarks/planner_accuracy.py --rows {arguments.rows.name} --leave-out"
        + (f" --experts {arguments.experts.name}" if arguments.experts else ""),
        "commit": commit or "unknown",
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "rows": len(rows),
        "shipped": score_rows(rows).as_dict(),
        "left_out": left_out.as_dict(),
        "splits": splits,
        "outside": score_rows(read_rows(OUTSIDE)).as_dict(),
        "slack": {"shipped": SHARDED_SLACK, "left_out": slacks},
        "terms": fit.term_shares(rows, left_out),
        "eight_bit": fit.eight_bit_errors(left_out.predictions, rows),
        "constants": asdict(DEFAULTS),
        "ranges": {name: [min(column), max(column)] for name, column in values.items()},
        "cpu_seconds": round(time.process_time() - started, 1),
    }
    if arguments.experts is not None:
        result["experts"] = leave_out_experts(arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "planner_accuracy.json").write_text(json.dumps(result, indent=1) + "\n")
    text = leave_out_table(result)
    (arguments.out / "planner_accuracy.md").write_text(text)
    print(text)


def leave_out_experts(arguments: argparse.Namespace) -> dict[str, Any]:
    rows = read_rows(arguments.experts)
    left_out, constants = fit.leave_out(rows, arguments.rounds, fit.source_of, fit.EXPERT_FITTED)
    by_publisher, _ = fit.leave_out(rows, arguments.rounds, fit.publisher_of, fit.EXPERT_FITTED)
    values = {name: [getattr(c, name) for c in constants.values()] for name in fit.EXPERT_FITTED}
    return {
        "file": arguments.experts.name,
        "rows": len(rows),
        "shipped": score_rows(rows).as_dict(),
        "left_out": left_out.as_dict(),
        "publisher_left_out": by_publisher.as_dict(),
        "ranges": {name: [getattr(DEFAULTS, name), min(column), max(column)] for name, column in values.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    table = parser.add_mutually_exclusive_group(required=True)
    table.add_argument("--rows", type=Path, help="CSV of measured runs (docs/concepts/predictions-table.md)")
    table.add_argument(
        "--energy", type=Path, help="CSV of runs with published energy (docs/concepts/predictions-energy.md)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--rows-out", type=Path, help="write one prediction per row to this CSV file")
    parser.add_argument("--experts", type=Path, help="CSV of runs of models with experts, for --leave-out")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--leave-out", action="store_true", help="score each source with constants fitted to the others")
    mode.add_argument("--fit", action="store_true", help="fit to all rows and print the constants")
    mode.add_argument("--calibrate", metavar="CLUSTER", help="fit and store the constants of this cluster")
    parser.add_argument("--rounds", type=int, default=6, help="rounds of coordinate descent of a fit")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for --leave-out")
    arguments = parser.parse_args()
    command = score
    if arguments.energy is not None:
        command = score_power
    elif arguments.leave_out:
        command = leave_out
    elif arguments.fit:
        command = fit_all
    elif arguments.calibrate:
        command = calibrate
    try:
        command(arguments)
    except WindlassError as error:
        print(f"error: {error.message}\nhint:  {error.hint}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
