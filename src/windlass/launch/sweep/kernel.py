"""Did the kernel kill a process for memory? Its own counter says so, in the control group that the scheduler put this job in.

A process that is killed this way leaves no word of its own, and inside an allocation the scheduler gives its verdict only at the end.
"""

from __future__ import annotations

from pathlib import Path


def oom_kills(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Processes killed for memory in this job so far; None where no counter can be read."""
    counts = [count for file in _files(own, root) if (count := _count(file)) is not None]
    return sum(counts) if counts else None


def _files(own: Path, root: Path) -> list[Path]:
    """Version 2 counts for a group and all below it, so the whole job is asked; version 1 only for the group itself, which we share with our points."""
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return []
    found = []
    for controllers, path in ((line[1], line[2].strip("/")) for line in lines if len(line) == 3):
        if controllers == "":
            found.append(root / _job(path) / "memory.events")
        elif "memory" in controllers.split(","):
            found.append(root / "memory" / path / "memory.oom_control")
    return found


def _job(path: str) -> str:
    """`slurm/job_7/step_batch/user` -> `slurm/job_7`: steps that srun starts lie beside this one."""
    parts = path.split("/")
    level = next((i for i, part in enumerate(parts) if part.startswith("job_")), len(parts) - 1)
    return "/".join(parts[: level + 1])


def _count(file: Path) -> int | None:
    try:
        values = dict(line.split()[:2] for line in file.read_text().splitlines() if len(line.split()) >= 2)
        return int(values["oom_kill"])
    except (OSError, KeyError, ValueError):
        return None
