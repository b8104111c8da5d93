"""Whether a start trains on the data of the starts before it."""

import time
from collections.abc import Callable
from pathlib import Path

from windlass.clusters.scheduler import Place
from windlass.config import Recipe
from windlass.data.identity import differences, identify, recheck
from windlass.data.store import open_store
from windlass.errors import DataError
from windlass.files import read_json, write_json
from windlass.runs.events import DataChanged
from windlass.runs.folder import Run


def check_data(recipe: Recipe, run: Run, place: Place, say: Callable[[str], object]) -> None:
    """Write down the identity of the token store at a run's first start; refuse other data at a later one.

    Rank 0 does it, and one rank per node where each node has a copy of the store."""
    # A worker may read a copy on a disk of its node: then the run's config names another folder.
    path = (read_json(run.config_file) or {}).get("data", {}).get("store", recipe.data.store)
    is_copy = recipe.data.store != path
    if place.rank == 0 or (is_copy and place.local_rank == 0):
        _compare(recipe, run, path, say, is_main=place.rank == 0)


def accept_data(recipe: Recipe, run: Run, say: Callable[[str], object]) -> None:
    """Make the recipe's token store that of the run, and record what differs: `--new-data`."""
    _compare(recipe, run, recipe.data.store, say, accept=True)


def _compare(
    recipe: Recipe,
    run: Run,
    path: str | None,
    say: Callable[[str], object],
    *,
    is_main: bool = True,
    accept: bool = False,
) -> None:
    is_copy = recipe.data.store != path
    recorded = read_json(run.store_file)
    has_trained = run.metrics_file.exists() or any(run.checkpoints.glob("step-*"))
    # A run of an earlier version has only the hash of the ledger, in its manifest.
    old = recorded or {"ledger_hash": run.manifest().get("data_ledger")}
    store = None if recipe.data.store is None else open_store(Path(recipe.data.store))
    new = identify(store, old.get("sampling"))
    lines = differences(old, new) if has_trained else []
    files, old_files = new["files"], old.get("files", {})
    touched = [name for name in files if old_files.get(name, {}).get("modified") != files[name]["modified"]]
    if store is not None and recorded and has_trained and not is_copy and not lines:
        lines = recheck(store, touched)
    if lines and not accept:
        listed = "\n  ".join(lines[:10]) + (f"\n  and {len(lines) - 10:,} more" if len(lines) > 10 else "")
        raise DataError(
            "data.changed",
            f"{run.path} was trained on other data than {recipe.data.store or 'synthetic tokens'} holds now "
            f"({len(lines):,} difference{'s' * (len(lines) != 1)}):\n  {listed}",
            hint="restore the token store, or point data.store to where it is; to continue with this data anyway, "
            "add --new-data to `windlass train`, `resume` or `launch`. `windlass data STORE --verify` checks every byte of a store",
        )
    if not is_main:
        return
    new["store"] = path
    is_moved = recorded is not None and recorded["store"] != path
    if has_trained and (lines or is_moved):
        run.record(DataChanged(store=path, old_store=old.get("store"), differences=lines[:100]))
        say(
            f"data: {len(lines):,} differences accepted by --new-data" if lines else f"data: the store is now in {path}"
        )
    elif has_trained and recorded is None:
        say("data: earlier starts did not record the token store, so changes before this start are not detected")
    if recorded is None or lines or is_moved or not has_trained or (touched and not is_copy):
        write_json(run.store_file, {**new, "recorded_at": time.time()})
