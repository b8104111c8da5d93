"""What do large folders cost? `windlass watch --once` on a long metrics.jsonl, and the first list of a dashboard with many runs:

    python benchmarks/big_runs.py --lines 1000000 --runs 500 --out benchmarks/results/big_runs.json

Each is measured once, in a process of its own. CPU seconds are the figure to compare: wall time depends on who shares the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parents[1]
sys.path[:1] = [str(TOP / "src"), str(TOP)]  # instead of this folder, whose names hide those of the standard library

from benchmarks.dash_load import Viewer, start  # noqa: E402
from tests.report.sample_run import BATCH, BEGIN, STEP_SECONDS, make_run, metric  # noqa: E402


def write_long_metrics(file: Path, lines: int) -> None:
    """A line per step, as training writes them: step, tokens, energy and time grow, the loss falls."""
    head = {"step": 0, "tokens": 0, "loss": 0.0, "energy_joules": 0.0, "time": 0.0}
    constant = json.dumps({key: value for key, value in metric(1, BEGIN, 1.0).items() if key not in head})[1:]
    with file.open("w") as out:
        for i in range(1, lines + 1):
            out.write(
                f'{{"step": {i}, "tokens": {i * BATCH}, "loss": {2 + 8 / (1 + i / 9000) + i % 97 / 2000:.6f}, '
                f'"energy_joules": {i * 3300.0}, "time": {BEGIN + 30 + i * STEP_SECONDS}, {constant}\n'
            )


def measure_watch(run: Path) -> dict[str, Any]:
    argv = [sys.executable, "-m", "windlass", "watch", str(run), "--once"]
    began = time.perf_counter()
    process = subprocess.Popen(
        argv, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(TOP / "src")}
    )
    assert process.stdout is not None
    text = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, process.returncode
    return {
        "wall_seconds": round(time.perf_counter() - began, 2),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 2),
        "peak_mb": round(usage.ru_maxrss / 1024, 1),
        "text": text,
    }


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure_first_list(root: Path) -> dict[str, Any]:
    """The first list, also with the start of the server's process, and whether every row has its numbers."""
    began = time.perf_counter()
    process, _, port, token = start(root)
    try:
        before, viewer = cpu_seconds(process.pid), Viewer(port, token, timeout=300)
        first_seconds, body, status = viewer.get("/api/runs")
        assert status == 200, status
        listed, wall_seconds, rows = json.loads(body), first_seconds, {}
        while True:  # a large folder comes in parts
            rows |= {row["id"]: row for row in listed["runs"]}
            if not listed.get("reading"):
                break
            seconds, body, _ = viewer.get(f"/api/runs?have={listed['version']}")
            listed, wall_seconds = json.loads(body), wall_seconds + seconds
        cpu_before = cpu_seconds(process.pid)
        time.sleep(1)
        again_seconds, body, _ = viewer.get(f"/api/runs?have={listed.get('version', 0)}")
        return {
            "first_part_seconds": round(first_seconds, 2),
            "again_seconds": round(again_seconds, 2),
            "again_cpu_seconds": round(cpu_seconds(process.pid) - cpu_before, 2),
            "again_bytes": len(body),
            "wall_seconds": round(wall_seconds, 2),
            "cpu_seconds": round(cpu_before - before, 2),
            "with_start_wall_seconds": round(time.perf_counter() - began, 2),
            "with_start_cpu_seconds": round(cpu_seconds(process.pid), 2),
            "runs": len(rows),
            "complete": all(row["loss"] is not None for row in rows.values()),
        }
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="windlass-big-runs-"))
    try:
        long_run = make_run(folder / "long", name="long")
        write_long_metrics(long_run / "metrics.jsonl", args.lines)
        megabytes = (long_run / "metrics.jsonl").stat().st_size / 1e6
        watch = measure_watch(long_run)
        print(watch.pop("text"))
        print(f"watch --once, {args.lines:,} lines, {megabytes:.0f} MB: {watch}")
        shutil.rmtree(long_run)
        template = make_run(folder / "runs" / "run-0000", name="sample")
        for number in range(1, args.runs):
            shutil.copytree(template, folder / "runs" / f"run-{number:04}")
        first_list = measure_first_list(folder / "runs")
        print(f"first list of {args.runs} runs: {first_list}")
        if args.out:
            result = {"lines": args.lines, "megabytes": round(megabytes), "watch_once": watch, "first_list": first_list}
            args.out.write_text(json.dumps(result, indent=2) + "\n")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
