"""How fast and in how much memory is a large trace read?

    python -P benchmarks/profile_read.py                      # generates traces of 100 and 300 MB
    python -P benchmarks/profile_read.py --trace FILE ...     # measures given files instead

Each size runs in a process of its own: CPU seconds (user + system) and peak resident memory, with orjson and with the
standard library alone. `--out FILE` appends one JSON line per measurement, with versions and commit.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def generate(path: Path, megabytes: int) -> int:
    """Steps like those of a transformer: nested operators with shapes and stacks, launches, kernels, flow events."""
    target, written, count, number, clock = megabytes * 1_000_000, 0, 0, 0, 0.0
    with gzip.open(path, "wt", compresslevel=1) if path.suffix == ".gz" else path.open("w") as file:
        written += file.write(
            '{"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "made up", "totalGlobalMem": 1}], "traceEvents": [\n'
        )
        while written < target:
            number += 1
            start = clock
            parts = [event("user_annotation", f"ProfilerStep#{number}", start, 4000.0, {"External id": number})]
            for layer in range(400):
                clock = start + layer * 10.0
                parts += block(number * 1000 + layer, clock)
            text = ",\n".join(parts)
            written += file.write((",\n" if count else "") + text)
            count += len(parts)
            clock = start + 4200.0
        file.write('\n], "traceName": "made up"}\n')
    return count


def block(ident: int, at: float) -> list[str]:
    dims = {
        "External id": ident,
        "Record function id": 0,
        "Input Dims": [[4096, 4096], [4096, 4096]],
        "Input type": ["c10::BFloat16", "c10::BFloat16"],
        "Ev Idx": ident,
    }
    launch = {"External id": ident, "cbid": 211, "correlation": ident}
    kernel = {**launch, "device": 0, "context": 1, "stream": 7, "registers per thread": 168, "shared memory": 213016, "blocks per SM": 0.97, "warps per SM": 11.6,
              "grid": [2, 66, 1], "block": [384, 1, 1], "est. achieved occupancy %": 18}  # fmt: skip
    name = (
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        if ident % 7 == 0
        else "nvjet_tst_192x192_64x4_1x2_h_bz_coopB_TNT"
    )
    flow = {"ph": "s", "id": ident, "pid": 1, "tid": 1, "ts": at + 3, "cat": "ac2g", "name": "ac2g"}
    return [
        event("cpu_op", "aten::linear", at, 9.0, dims),
        event("cpu_op", "aten::mm", at + 1, 7.0, dims),
        event("cuda_runtime", "cudaLaunchKernelExC", at + 3, 2.0, launch),
        json.dumps(flow),
        event("kernel", name, at + 6, 9.5, kernel, pid=0, tid=7),
    ]


def event(cat: str, name: str, ts: float, dur: float, args: dict, pid: int = 1, tid: int = 1) -> str:
    return json.dumps(
        {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}, indent=2
    )


def measure(path: Path, plain: bool) -> dict:
    """In this process: read and summarise."""
    from windlass.profile import trace
    from windlass.profile.job_profile import profile_traces

    if plain:
        trace.orjson = None
    began, wall = time.process_time(), time.monotonic()
    job = profile_traces([path])
    return {
        "file_mb": round(path.stat().st_size / 1e6, 1),
        "cpu_seconds": round(time.process_time() - began, 2),
        "wall_seconds": round(time.monotonic() - wall, 2),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "steps": job.steps,
        "step_us": job.step_us,
        "parser": "json" if trace.orjson is None else "orjson",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="*", default=[100, 300])
    parser.add_argument("--trace", type=Path, nargs="*", default=[])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args.plain)))
        return
    with tempfile.TemporaryDirectory() as folder:
        files = [(str(p), p, None) for p in args.trace]
        if not files:
            for size in args.sizes:
                path = Path(folder) / f"made-{size}.json"
                files.append((f"generated {size} MB", path, generate(path, size)))
        for label, path, events in files:
            for plain in (False, True):
                show({"trace": label, "events": events, **child(path, plain)}, args.out)


def child(path: Path, plain: bool) -> dict:
    command = [sys.executable, "-P", __file__, "--measure", str(path), *(["--plain"] if plain else [])]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    return json.loads(done.stdout.splitlines()[-1])


def show(line: dict, out: Path | None) -> None:
    from windlass.runs.manifest import commit, cpu_name

    line = {**line, "cpu": cpu_name(), "python": platform.python_version(), "commit": commit()}
    print(json.dumps(line))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
