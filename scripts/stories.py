"""Runs the "on this machine" blocks of the stories and records their results.

python scripts/stories.py              # run every story in a new folder; write benchmarks/results/stories.json and docs/pictures/story-*
python scripts/stories.py --show       # only print the commands

These are the blocks with the fence ```console title="on this machine". tests/story runs the same lines.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parents[1]
GUIDES = TOP / "docs" / "guides"
PICTURES = TOP / "docs" / "pictures"
RESULTS = TOP / "benchmarks" / "results" / "stories.json"
STORIES = ("italia", "gptnl", "lumi", "hackathon", "ultrascale")
HERE = 'title="on this machine"'
FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```", re.M | re.S)


def commands(page: Path) -> list[str]:
    """The lines of a page that run on the reader's own machine, in order."""
    blocks = [body for kind, info, body in FENCE.findall(page.read_text()) if kind == "console" and HERE in info]
    return [line[2:] for body in blocks for line in joined(body).splitlines() if line.startswith("$ ")]


def joined(body: str) -> str:
    """A block with commands that continue after a backslash joined into one line."""
    return re.sub(r" *\\\n *", " ", body)


def page_of(story: str) -> Path:
    return GUIDES / (f"story-{story}.md" if story != "start" else "stories.md")


def prepare(folder: Path) -> dict[str, str]:
    """Make `folder` look like a checkout in which windlass is on the path; the environment for its commands."""
    for name in ("recipes", "tests", "benchmarks"):
        (folder / name).symlink_to(TOP / name)
    binaries = folder / "bin"
    binaries.mkdir()
    for name, arguments in (("windlass", "-m windlass"), ("python", "")):
        (binaries / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        (binaries / name).chmod(0o755)
    # One thread per process: the models are too small for more, and two workers share a laptop.
    return {**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}", "COLUMNS": "140", "OMP_NUM_THREADS": "1"}


def run(command: str, folder: Path, env: dict[str, str], timeout: float = 1500) -> str:
    """The output of a command; raises an error with its output if it fails."""
    done = subprocess.run(["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True, timeout=timeout)
    if done.returncode != 0:
        raise RuntimeError(f"$ {command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}\nended with {done.returncode}")
    return done.stdout


# -- recorded results ----------------------------------------------------------------------------------------------------


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def events(run_folder: Path, name: str) -> list[dict[str, Any]]:
    return [e for e in lines(run_folder / "events.jsonl") if e["event"] == name]


def italia(folder: Path) -> dict[str, Any]:
    first, second = folder / "runs" / "italia-small", folder / "runs" / "italia-small-cpt"
    saved = sorted(int(p.name.removeprefix("step-")) for p in (first / "checkpoints").glob("step-*"))
    return {
        "resumed_at": events(first, "resumed")[0]["step"],
        "steps": lines(first / "metrics.jsonl")[-1]["step"],
        "kept": saved,
        "validation": [(e["step"], e["val_loss"]) for e in events(first, "evaluated")],
        "interval": events(second, "interval")[0]["reason"],
        "continued": [(m["step"], m["loss"], m["lr"]) for m in lines(second / "metrics.jsonl")][:6],
    }


def gptnl(folder: Path) -> dict[str, Any]:
    keep = ("point", "outcome", "tokens_per_second", "memory_bytes", "step_seconds", "loss")
    return {"grid": [{k: row.get(k) for k in keep} for row in sweep_rows(folder / "runs" / "grid-small")]}


def sweep_rows(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "results.json").read_text())["rows"]


def lumi(folder: Path) -> dict[str, Any]:
    scores = [e for e in lines(folder / "runs" / "viking-small" / "eval.jsonl") if e["group"].startswith("language ")]
    by = {(e["group"].removeprefix("language "), e["metric"]): e for e in scores}
    return {
        "languages": {
            k[0]: [e["value"], e["low"], e["high"], e["count"]] for k, e in by.items() if k[1] == "bits_per_byte"
        }
    }


def hackathon(folder: Path) -> dict[str, Any]:
    keep = ("point", "outcome", "devices", "tokens_per_second", "macro_f1", "accuracy")
    losses = [m["loss"] for m in lines(folder / "runs" / "retnet-small" / "metrics.jsonl")]
    rows = sweep_rows(folder / "runs" / "finetune-small")
    return {"matrix": [{k: row.get(k) for k in keep} for row in rows], "retnet_loss": [losses[0], losses[-1]]}


PICKED = {
    "pictures/run0-training-loss.svg": "story-italia-loss.svg",
    "runs/grid-small/pictures/best.png": "story-gptnl-best.png",
}
"""Images that the commands write, and their names in the documentation."""
COLLECT = {"italia": italia, "gptnl": gptnl, "lumi": lumi, "hackathon": hackathon}


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", action="store_true")
    parser.add_argument(
        "--folder", type=Path, help="work here and keep it; stories that ran here before are only collected"
    )
    options = parser.parse_args()
    if options.show:
        print("\n".join(c for story in ("start", *STORIES) for c in commands(page_of(story))))
        return 0
    folder = options.folder or Path(tempfile.mkdtemp(prefix="stories-"))
    folder.mkdir(exist_ok=True)
    before = (folder / "runs").is_dir()
    env, kept = {} if before else prepare(folder), {}
    for story in ("start", *STORIES):
        for command in [] if before else commands(page_of(story)):
            started = cpu_seconds()
            print(f"$ {command}", flush=True)
            run(command, folder, env)
            print(f"  {cpu_seconds() - started:.1f} s of CPU", flush=True)
        if story in COLLECT:
            kept[story] = COLLECT[story](folder)
    about = {"command": "python scripts/stories.py", "hardware": f"{os.cpu_count()} CPU cores, {platform.machine()}", "python": platform.python_version()}  # fmt: skip
    for source, name in PICKED.items():
        shutil.copy(folder / source, PICTURES / name)
    RESULTS.write_text(json.dumps({"about": about, **kept}, indent=1) + "\n")
    print(f"wrote {RESULTS.relative_to(TOP)}")
    if options.folder is None:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
