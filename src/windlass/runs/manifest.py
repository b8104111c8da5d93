"""The manifest of a start: code version, packages, hardware and host."""

import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import windlass
from windlass.config import Recipe, recipe_hash
from windlass.files import read_json, write_json
from windlass.runs.folder import Run

RECORDED_PACKAGES = (
    "torch",
    "numpy",
    "pydantic",
    "transformers",
    "tokenizers",
    "safetensors",
    "deepspeed",
    "triton",
    "nvidia-ml-py",
    "wandb",
    "plotly",
)


def collect(recipe: Recipe, **extra: Any) -> dict[str, Any]:
    """Everything that is the same on all ranks; the caller adds devices, world size and the data ledger's hash."""
    packages = [(name, importlib.metadata.distributions(name=name)) for name in RECORDED_PACKAGES]
    return {
        "windlass": windlass.__version__,
        "commit": commit(),
        "python": sys.version.split()[0],
        "packages": {name: d.version for name, installed in packages for d in list(installed)[:1]},
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu_name(),
        "cpu_count": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "recipe_hash": recipe_hash(recipe),
        "started_at": time.time(),
        **extra,
    }


def write(run: Run, manifest: dict[str, Any]) -> None:
    """The newest start's manifest; its `earlier` list keeps the ones before it, for the report."""
    old = read_json(run.manifest_file)
    earlier = [*(old.pop("earlier", []) if old else []), *([old] if old else [])]
    write_json(run.manifest_file, {**manifest, "earlier": earlier[-20:]})


def commit() -> str | None:
    """The source tree's commit, with + when it has changes; None outside a checkout."""
    top = Path(windlass.__file__).resolve().parents[2]
    if not (top / ".git").exists():
        return None
    argv = ["git", "-C", str(top), "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+"]
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.TimeoutExpired):
        return None


def cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
