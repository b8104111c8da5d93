"""Does the GPT-NL grid run end to end on a CPU, every strategy in both engines, within six minutes?

    python benchmarks/cpu_grid.py                 # writes benchmarks/results/cpu_grid.json and .md
    python benchmarks/cpu_grid.py --sweep recipes/sweeps/cpu_grid.toml --out /tmp/other

Runs `windlass sweep recipes/sweeps/cpu_engines.toml` in a new folder: two and four processes, one point that runs out of memory by
a limit on its processes, one that fails. Wall time is of this machine as it was; CPU time over the cores is what two idle cores
could not go below. Exit code 1 when a point ends otherwise than expected, or when strategies disagree about the loss.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EXPECTED = {"out-of-memory": "oom", "failing": "error"}
"""Points that must not end well; all others must."""
GOAL_SECONDS = 360.0
LOSS_SPREAD = 1e-5
"""Relative: the same batches on the same weights, summed in another order."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", type=Path, default=ROOT / "recipes/sweeps/cpu_engines.toml")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "cpu_grid")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="windlass-grid-") as folder:
        result = run(args.sweep, Path(folder) / "sweep")
    problems = list(judge(result))
    result["problems"] = problems
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(markdown(result))
    print(markdown(result))
    return 1 if problems else 0


def run(sweep: Path, folder: Path) -> dict[str, Any]:
    """The sweep as a person would run it; the clock and the CPU time of all its processes."""
    words = [sys.executable, "-m", "windlass", "sweep", str(sweep), "--run", str(folder), "--json"]
    load, began, before = os.getloadavg()[0], time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)  # fmt: skip
    wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"windlass sweep ended with exit code {done.returncode}")
    said = json.loads(done.stdout)
    keys = ("point", "outcome", "evidence", "detail", "engine", "devices", "seconds", "tokens_per_second", "memory_bytes", "loss")  # fmt: skip
    cores = len(os.sched_getaffinity(0))
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "command": "python benchmarks/cpu_grid.py", "sweep": sweep.name, "commit": commit(), "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "cores": cores, "cpu": cpu_name(), "python": platform.python_version(), "load_before": load, "wall_seconds": wall, "cpu_seconds": cpu,
        "least_seconds": cpu / cores, "goal_seconds": GOAL_SECONDS, "counts": said["counts"], "points": [{k: row.get(k) for k in keys} for row in said["rows"]],
    }  # fmt: skip


def judge(result: dict[str, Any]) -> Any:
    """Every point as expected, and one loss for all that ended well."""
    for row in result["points"]:
        expected = EXPECTED.get(row["point"], "ok")
        if row["outcome"] != expected:
            yield f"{row['point']}: {row['outcome']} instead of {expected}: {row['detail']}"
    losses = [row["loss"] for row in result["points"] if row["outcome"] == "ok" and row["loss"]]
    if losses and max(losses) - min(losses) > LOSS_SPREAD * min(losses):
        yield f"the losses after the last step differ: {min(losses):.7g} to {max(losses):.7g}"


def commit() -> str | None:
    words = ["git", "describe", "--always", "--dirty=+"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or None


def cpu_name() -> str | None:
    sys.path.insert(0, str(ROOT / "src"))
    from windlass.runs.manifest import cpu_name as name

    return name()


def markdown(r: dict[str, Any]) -> str:
    good = [row for row in r["points"] if row["outcome"] == "ok" and row["loss"]]
    counts = ", ".join(f"{n} {word}" for word, n in r["counts"].items())
    lines = [
        "# The GPT-NL grid on a CPU: every strategy in both engines", "",
        f"`{r['command']}` ({r['sweep']}), {r['date']}, commit {r['commit'] or 'unknown'}, {r['cores']} cores of {r['cpu'] or 'an unknown CPU'}, Python {r['python']}.", "",
        f"{len(r['points'])} points ({counts}) in {r['wall_seconds']:.0f} s; the goal is {r['goal_seconds']:.0f} s on two idle cores.",
        f"All processes together used {r['cpu_seconds']:.0f} s of CPU time, so {r['cores']} cores need at least {r['least_seconds']:.0f} s; the load average before the start was {r['load_before']:.1f}.",
    ]  # fmt: skip
    if good:
        low, high = min(row["loss"] for row in good), max(row["loss"] for row in good)
        lines.append(f"Loss after the last step: {low:.7f} to {high:.7f} over {len(good)} points.")
    lines += ["", *(f"Problem: {p}" for p in r["problems"]), "| point | outcome | engine | processes | s | tokens/s | loss | why |", "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    return "\n".join([*lines, *(line_of(row) for row in r["points"])]) + "\n"


def line_of(row: dict[str, Any]) -> str:
    def show(key: str, words: str) -> str:
        return "" if row[key] is None else format(row[key], words)

    why = "" if row["outcome"] == "ok" else str(row["detail"])[:160]
    cells = [row["point"], str(row["outcome"]), row["engine"] or "", show("devices", "d"), show("seconds", ".1f"), show("tokens_per_second", ",.0f"), show("loss", ".6f"), why]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
