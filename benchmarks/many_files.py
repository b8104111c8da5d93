"""Time and memory to plan the tokenization of many small files, in a process of its own.

python benchmarks/many_files.py --files 1000000 --out benchmarks/results/many_files.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from windlass.config.sources import DataFile, DataSource
from windlass.data.inputs import find_files, plan_items

FOLDERS = 100


def plan(root: str) -> dict[str, Any]:
    def peak_mb() -> float:
        return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)

    before, began = peak_mb(), time.process_time()
    source = DataSource(paths=[root])
    files = find_files("texts", source)
    data = DataFile(output="store", tokenizer="tokenizer.json", sources={"texts": source})
    items = plan_items(data, {"texts": files}, "settings")
    seconds = round(time.process_time() - began, 1)
    return {
        "files": len(files),
        "work_items": len(items),
        "cpu_seconds": seconds,
        "mb_before": before,
        "mb_peak": peak_mb(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="windlass-many-files-"))
    try:
        for number in range(FOLDERS):
            (root / f"{number:03d}").mkdir()
        for number in range(args.files):
            (root / f"{number % FOLDERS:03d}" / f"document-{number:08d}.txt").touch()
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            result = pool.apply(plan, (str(root),))
        print(result)
        if args.out:
            args.out.write_text(json.dumps(result, indent=2) + "\n")
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
