"""How do time and memory of `windlass tokenize` grow with the number of small input files?

    python benchmarks/many_files.py --files 40000                      the complete command
    python benchmarks/many_files.py --files 1000000 --plan             only find the files and plan the work
    python benchmarks/many_files.py --files 10000 20000 40000 --per-folder 100000 --json

Makes text files of about 100 bytes in a temporary folder (by default in memory, /dev/shm) and removes it. Each count runs
in a process of its own; `peak_bytes` is the largest memory of that process, or of the largest of its workers, and
`start_bytes` that of the process before it begins.
`cpu_seconds` is the time of that process and its workers: on a shared machine wall time says little (the results in
results/many_files.jsonl were taken at a load of 9 on 2 cores).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any


def make_files(folder: Path, count: int, per_folder: int) -> None:
    for first in range(0, count, per_folder):
        below = folder / f"{first // per_folder:05d}"
        below.mkdir(parents=True)
        for number in range(first, min(first + per_folder, count)):
            handle = os.open(below / f"{number:07d}.txt", os.O_WRONLY | os.O_CREAT)
            os.write(handle, f"document {number}: the windlass hoists the load and the wind turns it\n".encode() * 2)
            os.close(handle)


def measure(folder: Path, count: int, plan_only: bool, results: Any) -> None:
    from windlass.config.sources import DataFile, DataSource
    from windlass.data.inputs import find_files, make_schedule, plan_items
    from windlass.data.tokenize import tokenize
    from windlass.data.tokenizer import train_bpe

    tokenizer = train_bpe(["document: the windlass hoists the load and the wind turns it"] * 10, 300, folder)
    source = DataSource(paths=[str(folder / "in")])
    file = DataFile(output=str(folder / "store"), tokenizer=str(tokenizer.path), sources={"s": source})
    started, cpu_before = time.monotonic(), sum(os.times()[:4])
    result: dict[str, Any] = {"files": count, "start_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
    if plan_only:
        files = {"s": find_files("s", source)}
        result["find_seconds"] = time.monotonic() - started
        items = plan_items(file, files, "settings")
        make_schedule(items, {})
        result["items"] = len(items)
    else:
        result["tokens"] = tokenize(file).tokens
    result |= {"seconds": time.monotonic() - started, "cpu_seconds": sum(os.times()[:4]) - cpu_before}
    usage = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    results.put({**result, "peak_bytes": 1024 * max(usage)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, nargs="+", default=[40_000])
    parser.add_argument("--per-folder", type=int, default=1000)
    parser.add_argument("--plan", action="store_true", help="only find the files and plan the work")
    parser.add_argument("--folder", default="/dev/shm" if Path("/dev/shm").is_dir() else None)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    for count in options.files:
        folder = Path(tempfile.mkdtemp(prefix="many_files-", dir=options.folder))
        try:
            make_files(folder / "in", count, options.per_folder)
            results = context.SimpleQueue()
            process = context.Process(target=measure, args=(folder, count, options.plan, results))
            process.start()
            process.join()
            if process.exitcode:
                raise SystemExit(process.exitcode)
            result = results.get()
        finally:
            shutil.rmtree(folder)
        rate, peak = result["files"] / result["seconds"], result["peak_bytes"] / 2**20
        cpu = f"{result['cpu_seconds']:.1f} s of CPU"
        line = f"{count:,} files: {result['seconds']:.1f} s, {cpu}, {rate:,.0f} files/s, peak {peak:,.0f} MiB"
        print(json.dumps(result) if options.json else line, flush=True)


if __name__ == "__main__":
    main()
