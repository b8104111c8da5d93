"""From which checkpoint does a run go on? The newest that is complete and verified; any world size and layout can read it.

A damaged or cut-off one is named, set aside and the one before it is used. Weights alone (a warm start, an evaluation) are read
from a checkpoint, a run or a Hugging Face folder, without a process group.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from windlass.checkpoint import files, names, rng
from windlass.errors import CheckpointError
from windlass.files import read_json
from windlass.runs.events import CheckpointDamaged
from windlass.runs.folder import Run

# DCP warns at every load of a single process, which is no accident here.
warnings.filterwarnings("ignore", message=".*torch.distributed is (disabled|unavailable).*")


@dataclass(frozen=True)
class Found:
    """A checkpoint to go on from."""

    path: Path
    step: int
    tokens: int | None
    world_size: int | None
    """Of the job that wrote it."""
    bytes: int
    save_seconds: float | None = None
    """How long training would have waited for it, had it been written without a copy; None: not known."""
    set_aside: tuple[str, ...] = ()
    """Sentences about newer ones that could not be used."""


def find_latest(run: Run, verify: bool = True, before: int | None = None) -> Found | None:
    """The newest complete checkpoint (below step `before`), or None. Call it on all ranks; they share the reading.

    A run whose checkpoints are all damaged is refused: to begin again from nothing, unasked, could throw months away.
    """
    wanted_before = before
    if _rank() == 0:
        _tidy_temporaries(run, verify)
    notes: list[str] = []
    while True:
        step, folder = _together(_newest, run, before) or (None, None)
        if folder is None:
            if wanted_before is None:
                _together(_refuse_to_begin_again, run)
            return None
        manifest, problem = _together(_opened, folder)
        problem = problem or (_content_problem(folder, manifest) if verify else None)
        if problem is None:
            saved = files.Saved(folder, manifest)
            return Found(
                folder, saved.step, saved.tokens, saved.world_size, saved.bytes, saved.save_seconds, tuple(notes)
            )
        notes.append(_together(_refuse, run, folder, problem))
        before = step


def _newest(run: Run, before: int | None) -> tuple[int, Path] | None:
    candidates = [(step, path) for step, path in files.steps_on_disk(run) if before is None or step < before]
    return candidates[-1] if candidates else None


def _opened(folder: Path) -> tuple[dict[str, Any] | None, str | None]:
    try:
        manifest = files.read_manifest(folder)
    except files.UnknownFormatError:
        raise
    except CheckpointError as error:
        return None, error.message
    if folder.name != f"step-{manifest['step']:09d}":
        return None, f"its manifest is of step {manifest['step']}"
    problems = list(files.size_problems(folder, manifest))
    if not problems:
        _refuse_forbidden(folder, manifest)
    return manifest, "; ".join(problems[:4]) or None


def _refuse_forbidden(folder: Path, manifest: dict[str, Any]) -> None:
    """A file that we may not read is not damaged: say so, and set nothing aside."""
    closed = [name for name in manifest["files"] if not os.access(folder / name, os.R_OK)]
    if closed:
        raise CheckpointError(
            "checkpoint.files-may-read-permission",
            f"{len(closed)} of {len(manifest['files'])} files of {folder} may not be read ({', '.join(sorted(closed)[:3])}): permission denied",
            hint=f"whose are they? `ls -l {folder}`; chmod, or copy the run as its owner",
        )


def _refuse_to_begin_again(run: Run) -> None:
    aside = files.damaged(run)
    if not aside:
        return
    reasons = [(read_json(path / files.REASON) or {}).get("reason") or path.name for path in aside]
    raise CheckpointError(
        "checkpoint.whole-checkpoint-left-set",
        f"no whole checkpoint is left in {run.checkpoints}; {len(aside)} were set aside: {'; '.join(map(str, reasons[-3:]))}",
        hint="to begin again from step 0, delete the damaged-... folders; to go on from one of them unchecked, give it its name back and resume with save.verify=false",
    )


def _content_problem(folder: Path, manifest: dict[str, Any]) -> str | None:
    """Checksums, the files dealt out over the ranks."""
    names = sorted(manifest["files"])[_rank() :: _world_size()]
    mine = list(files.content_problems(folder, manifest, names))
    every = [mine]
    if _world_size() > 1:
        every = [[] for _ in range(_world_size())]
        dist.all_gather_object(every, mine)
    return "; ".join([problem for part in every for problem in part][:4]) or None


def _refuse(run: Run, folder: Path, problem: str) -> str:
    reason = f"{folder.name}: {problem.removeprefix(f'{folder} ')}"
    try:
        where = files.set_aside(folder, reason).name
    except OSError as error:  # a read-only folder: it is passed over all the same
        where = f"left where it is: {error.strerror}"
    with contextlib.suppress(OSError):
        run.record(CheckpointDamaged(checkpoint=folder.name, reason=reason, moved_to=where))
    return f"{reason} (now {where})"


def discard_after(run: Run, step: int, reason: str) -> None:
    """Set aside what is newer than `step`: after a rollback nothing may go on from it. Rank 0 only."""
    for newer, folder in files.steps_on_disk(run):
        if newer > step:
            _refuse(run, folder, reason)


def _tidy_temporaries(run: Run, verify: bool) -> None:
    """A save that was killed before its rename is finished when it is whole, else deleted: it was never a checkpoint."""
    files.sweep_removed(run)
    for step, folder in files.temporaries(run):
        target = run.checkpoint(step)
        with contextlib.suppress(OSError):
            try:
                files.complete(folder, verify=verify)
            except files.UnknownFormatError:  # never ours to delete
                continue
            except CheckpointError as error:
                files.remove(folder)
                run.record(
                    CheckpointDamaged(
                        checkpoint=folder.name, reason=f"the save was cut off: {error.message}", moved_to=None
                    )
                )
                continue
            files.adopt(folder, target)


# -- reading --------------------------------------------------------------------------------------------------------------


def restore(found: Found, state: dict[str, Any], *, seed: int = 0) -> dict[str, Any]:
    """Fill `state` in place from a checkpoint of any layout, set the random generators, and return its `extra`."""
    _read(found.path, state)
    record = read_extra(found.path)
    if found.world_size == _world_size():
        rng.apply(record["rng"][_rank()])
    else:
        rng.restart(seed, _rank(), found.step)
    return record["extra"]


def read_extra(path: Path) -> dict[str, Any]:
    """`extra` as it was saved, and the generators' states by rank."""
    record = read_json(path / files.EXTRA)
    if record is None or "extra" not in record:
        raise CheckpointError(
            "checkpoint.missing-damaged",
            f"{path / files.EXTRA} is missing or damaged",
            hint="use an earlier checkpoint of the run",
        )
    return record


class ParallelReader(dcp.FileSystemReader):
    """Reads with several threads: one alone does not keep a fast disk busy, and the tensors do not depend on each other."""

    def read_data(self, plan: Any, planner: Any) -> Any:
        items = sorted(
            plan.items,
            key=lambda item: (
                self.storage_data[item.storage_index].relative_path,
                self.storage_data[item.storage_index].offset,
            ),
        )
        read, threads = super().read_data, files.worker_threads()
        # Dealt out in turn, so that each thread gets its share of the large ones.
        parts = [items[number::threads] for number in range(threads) if items[number::threads]]
        with ThreadPoolExecutor(max(1, len(parts))) as pool:
            for done in [pool.submit(read, replace(plan, items=part), planner) for part in parts]:
                done.result()
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future


def _read(path: Path, state: dict[str, Any], *, partial: bool = False) -> None:
    try:
        dcp.load(
            state,
            storage_reader=ParallelReader(path),
            planner=DefaultLoadPlanner(allow_partial_load=partial),
            no_dist=_world_size() == 1,
        )
    except dcp.CheckpointException as error:
        inner = next(iter(error.failures.values()))[0]
        raise _unfit(path, inner) from inner
    except (RuntimeError, ValueError, KeyError) as error:
        raise _unfit(path, error) from error


def _unfit(path: Path, error: BaseException) -> CheckpointError:
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return CheckpointError(
        "checkpoint.does-fit-model",
        f"{path} does not fit this model: {first}",
        hint="is the recipe's [model] table the one that the checkpoint was made with?",
    )


# -- weights only ---------------------------------------------------------------------------------------------------------


def weights_source(path: Path | str) -> Path:
    """The folder that holds weights: a checkpoint, the newest checkpoint of a run, or a Hugging Face folder."""
    given = Path(path)
    if (given / files.MANIFEST).is_file() and (given / ".metadata").is_file():
        return given
    if (given / "config.json").is_file() and list(given.glob("*.safetensors")):
        return given
    if (given / "checkpoints").is_dir():
        saved = files.whole_by_size(Run(given))
        if saved:
            return saved[-1].path
        raise CheckpointError(
            "checkpoint.run-finished-checkpoint",
            f"the run {given} has no finished checkpoint",
            hint="wait for its first save, or name another run",
        )
    found = sorted(p.name for p in given.iterdir())[:6] if given.is_dir() else []
    what = f"holds {', '.join(found) or 'nothing'}" if given.is_dir() else "does not exist"
    raise CheckpointError(
        "checkpoint.holds-weights",
        f"{given} holds no weights: it {what}",
        hint="name a checkpoint folder, a run folder or a Hugging Face folder with *.safetensors",
    )


def load_model_weights(path: Path | str, model: torch.nn.Module, *, verify: bool = True) -> Path:
    """Fill `model` from a checkpoint, run or Hugging Face folder; the folder that was read. Works with and without a process group."""
    source = weights_source(path)
    if (source / files.MANIFEST).is_file():
        _check_whole(source, verify)
        # A trained checkpoint holds a weight with two names (a tied head) once.
        twins: dict[str, str] = getattr(model, "twins", {})
        found = {name: tensor for name, tensor in model.state_dict().items() if name not in twins}
        _read(source, {"model": found})
        _assign(model, found | {name: found[first] for name, first in twins.items()}, source)
    else:
        weights, own = read_safetensors(source), model.state_dict()
        fits = set(own) <= set(weights)
        _assign(model, weights if fits else names.from_hf(weights, own, getattr(model, "twins", None)), source)
    return source


def _check_whole(source: Path, verify: bool) -> None:
    """The same check as before a resume, the files dealt out over the ranks; but nothing is set aside in a folder that is not ours."""
    manifest = _together(files.complete, source, verify=False).manifest
    problem = _content_problem(source, manifest) if verify else None
    if problem is not None:
        raise CheckpointError(
            "checkpoint.damaged", f"{source} is damaged: {problem}", hint="name an earlier checkpoint of the run"
        )


def read_safetensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a Hugging Face folder's *.safetensors files."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for part in safetensors_files(folder):
        try:
            found |= load_file(part)
        except SafetensorError as error:
            raise CheckpointError(
                "checkpoint.cannot-read",
                f"{part} cannot be read: {error}",
                hint="the copy was cut off or damaged: compare it with the original",
            ) from None
    return found


def safetensors_files(folder: Path) -> list[Path]:
    """The files with the weights: those that the index names, which may stand beside a second form of the same weights."""
    index = (read_json(folder / "model.safetensors.index.json") or {}).get("weight_map") or {}
    parts = [folder / name for name in sorted(set(index.values()))] or sorted(folder.glob("*.safetensors"))
    if not parts:
        raise CheckpointError(
            "checkpoint.safetensors-files",
            f"{folder} has no *.safetensors files",
            hint="convert older .bin weights with transformers' save_pretrained first",
        )
    if absent := [part.name for part in parts if not part.is_file()]:
        raise CheckpointError(
            "checkpoint.lacks-weight-files",
            f"{folder} lacks {len(absent)} of its {len(parts)} weight files ({', '.join(absent[:3])})",
            hint="the copy was cut off: copy what is missing",
        )
    return parts


def _assign(model: torch.nn.Module, weights: Mapping[str, torch.Tensor], source: Path) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    own = model.state_dict()
    missing, extra = sorted(set(own) - set(weights)), sorted(set(weights) - set(own))
    wrong = [k for k in own if k in weights and own[k].shape != weights[k].shape]
    if missing or wrong:
        parts = [f"{len(missing)} missing ({', '.join(missing[:3])})"] if missing else []
        parts += (
            [
                f"{len(wrong)} of another shape ({wrong[0]}: {tuple(weights[wrong[0]].shape)} there, {tuple(own[wrong[0]].shape)} here)"
            ]
            if wrong
            else []
        )
        parts += [f"{len(extra)} unknown ({', '.join(extra[:3])})"] if extra else []
        raise CheckpointError(
            "checkpoint.weights-do-fit-model",
            f"the weights in {source} do not fit the model: {'; '.join(parts)}",
            hint="compare the recipe's [model] table with the model they come from",
        )
    full = not any(hasattr(weights[k], "placements") for k in own)
    set_model_state_dict(
        model, {k: weights[k] for k in own}, options=StateDictOptions(full_state_dict=full, strict=True)
    )


# -- ranks ----------------------------------------------------------------------------------------------------------------


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _together(ask: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Rank 0 asks and tells the others; an error of rank 0 is raised on all, for they would wait for its answer."""
    box: list[Any] = [None, None]
    if _rank() == 0:
        try:
            box[0] = ask(*args, **options)
        except CheckpointError as error:
            box[1] = error
        except OSError as error:
            box[1] = CheckpointError(
                "checkpoint.cannot-read",
                f"{error.filename or 'a checkpoint file'} cannot be read: {error.strerror or error}",
                hint="is the disk mounted and well?",
            )
    if _world_size() > 1:
        dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise box[1]
    return box[0]
