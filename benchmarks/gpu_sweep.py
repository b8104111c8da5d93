"""A grid of one GPU through `windlass sweep`, with predictions for that very device.

    python benchmarks/gpu_sweep.py --device h200 --out benchmarks/results/gpu_sweep [--limit SECONDS]

Writes the sweep folder beside OUT and keeps results.csv, results.json, report.html and the pictures in OUT. Restartable: run it again
and only what is missing runs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
CLUSTER = """title = "One {device}"
device = "{device}"
nodes = 1
[node]
devices = 1
cores = {cores}
[links]
intra_gbs = 300
[energy]
sources = ["nvml", "amdsmi"]
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="h200", help="name in clusters/data/devices.toml")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("runs/one-gpu"), help="sweep folder")
    parser.add_argument("--limit", type=float, default=None, help="stop after so many seconds; run again to go on")
    args = parser.parse_args()
    config = args.work.parent.absolute() / "one-gpu-config"
    (config / "windlass" / "clusters").mkdir(parents=True, exist_ok=True)
    (config / "windlass" / "clusters" / "one-gpu.toml").write_text(
        CLUSTER.format(device=args.device, cores=os.cpu_count() or 1)
    )
    env = {**os.environ, "XDG_CONFIG_HOME": str(config)}
    words = [
        sys.executable,
        "-m",
        "windlass",
        "sweep",
        str(HERE / "recipes/sweeps/one_gpu.toml"),
        "--cluster",
        "one-gpu",
    ]
    words += ["--run", str(args.work)]
    try:
        subprocess.run([*words, "--all"], env=env, timeout=args.limit, check=False)
    except subprocess.TimeoutExpired:
        print("time is up; what is done is kept")
    code = subprocess.run([*words, "--report"], env=env, check=False).returncode
    args.out.mkdir(parents=True, exist_ok=True)
    for name in ("results.csv", "results.json", "report.html"):
        if (args.work / name).is_file():
            shutil.copy2(args.work / name, args.out / name)
    shutil.copytree(args.work / "pictures", args.out / "pictures", dirs_exist_ok=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
