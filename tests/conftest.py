"""What several test packages share: a private configuration folder, and forked processes with a gloo process group."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Cluster files of the user, and constants that a test calibrates, must not change predictions.
os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="windlass-test-config-")

# Files that run complete commands, real libraries or the compiler: part of `make test`, not of `make unit`.
INTEGRATION = (
    "docs/", "story/", "faults/", "evaluate/", "convert/", "cli/", "data/test_tokenize", "data/test_bad_input", "data/test_cli_data",
    "data/test_corpus", "data/test_megatron_core", "launch/test_cli_exit", "launch/test_dry_run", "launch/sweep/test_lepiszcze",
    "checkpoint/test_names", "profile/test_recorded", "report/test_dash_descriptors", "train/test_compile",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here) and str(item.path.relative_to(here)).startswith(INTEGRATION):
            item.add_marker(pytest.mark.integration)


def _child(
    rank: int, world: int, rendezvous: str, body: Callable[..., Any], results: Any, args: tuple[Any, ...]
) -> None:
    import torch.distributed as dist

    try:
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
        results.put((rank, "ok", body(rank, world, *args)))
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, "error", traceback.format_exc()))
    results.close()
    results.join_thread()
    os._exit(0)


@pytest.fixture
def spread(tmp_path: Path) -> Callable[..., list[Any]]:
    """`spread(4, body, *args)` runs body(rank, world, *args) in forked processes and returns their answers by rank."""

    import torch.distributed  # noqa: F401  once here, so that no child pays for it

    def go(world: int, body: Callable[..., Any], *args: Any) -> list[Any]:
        context = multiprocessing.get_context("fork")
        results = context.Queue()
        rendezvous = str(tmp_path / f"rendezvous-{os.urandom(4).hex()}")
        children = [
            context.Process(target=_child, args=(r, world, rendezvous, body, results, args)) for r in range(world)
        ]
        for child in children:
            child.start()
        answers = {rank: (kind, value) for rank, kind, value in (results.get(timeout=120) for _ in children)}
        for child in children:
            child.join(timeout=20)
        failed = [f"rank {r}:\n{v}" for r, (kind, v) in sorted(answers.items()) if kind == "error"]
        assert not failed, "\n".join(failed)
        return [answers[r][1] for r in range(world)]

    return go
