"""Loads checkpoints: the newest complete one of a run, on any world size and layout.

A damaged or interrupted checkpoint is reported, set aside, and the one before it is used. Weights alone (a warm start,
an evaluation) are read from a checkpoint, a run or a Hugging Face folder, with or without a process group.
"""

import contextlib
import logging
import os
import pickle
import warnings
import zipfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.tensor import DTensor

from windlass.blocks.initial_values import local_part, local_tensor
from windlass.checkpoint import files, names, rng
from windlass.checkpoint.files import SavedCheckpoint
from windlass.checkpoint.missing import report_missing
from windlass.checkpoint.reader import UNSAFE_HINT, CheckpointReader, ValuePlanner
from windlass.errors import CheckpointError
from windlass.files import read_json
from windlass.runs.events import CheckpointDamaged
from windlass.runs.folder import Run

logger = logging.getLogger(__name__)
ADAPTER = ".adapter."  # in the names of a LoRA adapter's weights
PICKLED = ".bin"
DAMAGED_HINT = "copy the file again: it is truncated or damaged"
# DCP warns at every load of a single process, which is intended here.
warnings.filterwarnings("ignore", message=".*torch.distributed is (disabled|unavailable).*")


def find_latest(run: Run, verify: bool = True, before: int | None = None) -> SavedCheckpoint | None:
    """The newest complete checkpoint (below step `before`), or None. Call it on all ranks; they share the reading.

    It is an error if all checkpoints of a run are damaged: starting from scratch unasked could lose months of work.
    """
    if _rank() == 0:
        _tidy_temporaries(run, verify)
    notes: list[str] = []
    limit = before
    while True:
        candidates = [item for item in _on_rank_0(files.steps_on_disk, run) if limit is None or item[0] < limit]
        if not candidates:
            if before is None:
                _on_rank_0(report_missing, run, None)
            aside = _on_rank_0(_reasons_set_aside, run) if before is None else []
            if aside:
                raise CheckpointError(
                    "checkpoint.all-damaged",
                    f"no complete checkpoint is left in {run.checkpoints}; "
                    f"{len(aside)} were set aside: {'; '.join(aside[-3:])}",
                    hint="to start again from step 0, delete the damaged-... folders; to resume from one of them "
                    "unchecked, rename it back and resume with save.verify=false",
                )
            return None
        limit, folder = candidates[-1]
        manifest, problem = _on_rank_0(_open, folder)
        problem = problem or (_content_problem(folder, manifest) if verify else None)
        if problem is None:
            latest = SavedCheckpoint(folder, manifest, set_aside=tuple(notes))
            return latest if before is not None else replace(latest, missing=_on_rank_0(report_missing, run, latest))
        notes.append(_on_rank_0(_set_aside, run, folder, problem))


def find_best(run: Run) -> SavedCheckpoint | None:
    """The checkpoint with the best metric, the latest of equal ones; None: none has a metric. Rank 0 decides: it may
    have removed some that the others still see."""

    def choose() -> SavedCheckpoint | None:
        kept = [saved for saved in files.list_saved(run) if saved.metric is not None]
        return min(kept, key=lambda saved: (saved.metric or 0.0, -saved.step), default=None)

    best: SavedCheckpoint | None = _on_rank_0(choose)
    return best


def _open(folder: Path) -> tuple[dict[str, Any] | None, str | None]:
    """(manifest, problem) of a checkpoint, by the names and sizes of its files."""
    try:
        manifest = files.read_manifest(folder)
    except files.UnknownFormatError:
        raise
    except CheckpointError as error:
        return None, error.message
    if folder.name != f"step-{manifest['step']:09d}":
        return None, f"its manifest is for step {manifest['step']}"
    problems = list(files.size_problems(folder, manifest))
    forbidden = sorted(name for name in manifest["files"] if not os.access(folder / name, os.R_OK))
    if forbidden and not problems:  # not damaged: report it and set nothing aside
        raise CheckpointError(
            "checkpoint.permission-denied",
            f"{len(forbidden)} of {len(manifest['files'])} files of {folder} cannot be read "
            f"({', '.join(forbidden[:3])}): permission denied",
            hint=f"`ls -l {folder}` shows their owner; change the permissions, or copy the run as its owner",
        )
    return manifest, "; ".join(problems[:4]) or None


def _content_problem(folder: Path, manifest: dict[str, Any]) -> str | None:
    """Compare checksums; the files are divided among the ranks."""
    own_problems = list(files.content_problems(folder, manifest, sorted(manifest["files"])[_rank() :: _world_size()]))
    all_problems = [own_problems] * _world_size()
    if _world_size() > 1:
        dist.all_gather_object(all_problems, own_problems)
    return "; ".join([problem for problems in all_problems for problem in problems][:4]) or None


def _set_aside(run: Run, folder: Path, problem: str) -> str:
    reason = _reason(folder, problem)
    try:
        moved_to = files.set_aside(folder, reason).name
    except OSError as error:  # a read-only folder: it is skipped nevertheless
        moved_to = f"not moved: {error.strerror}"
    with contextlib.suppress(OSError):
        run.record(CheckpointDamaged(checkpoint=folder.name, reason=reason, moved_to=moved_to))
    return f"{reason} (now {moved_to})"


def _reason(folder: Path, problem: str | None) -> str:
    return f"{folder.name}: {(problem or 'unknown').removeprefix(f'{folder} ')}"


def _reasons_set_aside(run: Run) -> list[str]:
    """Name and problem of each checkpoint that was set aside, oldest first."""
    return [str((read_json(path / files.REASON) or {}).get("reason") or path.name) for path in files.damaged(run)]


def discard_after(run: Run, step: int, reason: str) -> None:
    """Set aside what is newer than `step`: after a rollback nothing may resume from it. Rank 0 only."""
    for newer, folder in files.steps_on_disk(run):
        if newer > step:
            _set_aside(run, folder, reason)


def _tidy_temporaries(run: Run, verify: bool) -> None:
    """A save that was killed before its rename is adopted when it is complete, else deleted."""
    files.sweep_removed(run)
    for step, folder in files.temporaries(run):
        with contextlib.suppress(OSError, files.UnknownFormatError):  # an unknown format is never deleted
            try:
                files.complete(folder, verify=verify)
                files.adopt(folder, run.checkpoint(step))
            except files.UnknownFormatError:
                raise
            except CheckpointError as error:
                files.remove(folder)
                reason = f"the save was interrupted: {error.message}"
                run.record(CheckpointDamaged(checkpoint=folder.name, reason=reason))


def restore(checkpoint: SavedCheckpoint, state: dict[str, Any], *, seed: int = 0) -> dict[str, Any]:
    """Fill `state` in place from a checkpoint of any layout, set the random generators, and return its `extra`."""
    read_tensors(CheckpointReader(checkpoint.path), state)
    record = read_extra(checkpoint.path)
    if checkpoint.world_size == _world_size():
        rng.apply(record["rng"][_rank()])
    else:
        rng.restart(seed, _rank(), checkpoint.step)
    extra: dict[str, Any] = record["extra"]
    return extra


def read_extra(path: Path) -> dict[str, Any]:
    """`extra` as it was saved, and the generators' states by rank."""
    record = read_json(path / files.EXTRA)
    if record is None or "extra" not in record:
        raise CheckpointError(
            "checkpoint.damaged", f"{path / files.EXTRA} is missing or damaged", hint=files.EARLIER_HINT
        )
    return record


def read_tensors(reader: CheckpointReader, state: dict[str, Any]) -> None:
    """Fill `state` in place, on one rank or on all."""
    # Not inside `load`, where DCP turns every error into an AssertionError.
    _on_rank_0(reader.load_metadata)
    try:
        load_distributed(state, storage_reader=reader, planner=ValuePlanner(), no_dist=_world_size() == 1)
    except (CheckpointException, RuntimeError, ValueError, KeyError) as error:
        # A CheckpointException holds the failures of all ranks: report the first.
        cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        if isinstance(cause, (CheckpointError, KeyboardInterrupt)):
            raise cause from None
        lines = str(cause).strip().splitlines() or [type(cause).__name__]
        if isinstance(cause, pickle.UnpicklingError):  # of weights_only=True; a later line names the function
            reason = next((line.strip() for line in lines if "GLOBAL" in line), lines[0])
            raise CheckpointError(
                "checkpoint.unsafe", f"a value in {reader.path} cannot be read safely: {reason}", hint=UNSAFE_HINT
            ) from cause
        raise CheckpointError(
            "checkpoint.model-mismatch",
            f"{reader.path} does not fit this model: {lines[0]}",
            hint="compare the recipe's [model] table with that of the checkpoint",
        ) from cause


def weights_source(path: Path | str) -> Path:
    """The folder that holds weights: a checkpoint, the newest checkpoint of a run, or a Hugging Face folder."""
    folder = Path(path)
    is_checkpoint = (folder / files.MANIFEST).is_file() and (folder / ".metadata").is_file()
    has_weights = any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model.bin*"))
    if is_checkpoint or ((folder / "config.json").is_file() and has_weights):
        return folder
    if (folder / "checkpoints").is_dir():
        run = Run(folder)
        saved = files.complete_by_size(run)
        if saved:
            return saved[-1].path
        if problems := _reasons_set_aside(run) + [_reason(p, _open(p)[1]) for _, p in files.steps_on_disk(run)]:
            raise CheckpointError(
                "checkpoint.all-damaged",
                f"the run {folder} has no complete checkpoint; {len(problems)} are damaged: {'; '.join(problems[-3:])}",
                hint="copy the run again, or name another run",
            )
        report_missing(run, None)
        raise CheckpointError(
            "checkpoint.none-finished",
            f"the run {folder} has no finished checkpoint",
            hint="wait for its first save, or name another run",
        )
    content = sorted(p.name for p in folder.iterdir())[:6] if folder.is_dir() else []
    state = f"contains {', '.join(content) or 'nothing'}" if folder.is_dir() else "does not exist"
    raise CheckpointError(
        "checkpoint.no-weights",
        f"{folder} has no weights: it {state}",
        hint="name a checkpoint folder, a run folder or a Hugging Face folder with *.safetensors or pytorch_model.bin",
    )


def load_model_weights(path: Path | str, model: Any, *, verify: bool = True) -> Path:
    """Fill `model` from a checkpoint, run or Hugging Face folder, on one rank or on all. Returns the folder.

    Weights in `model.new_names` (the head of another task, adapters) keep their initial values where the folder has
    none of their shape."""
    source = weights_source(path)
    logger.info("weights: %s", source)
    own, twins = model.state_dict(), getattr(model, "twins", {})
    new_names: Collection[str] = getattr(model, "new_names", ())
    if not (source / files.MANIFEST).is_file():
        weights: Mapping[str, torch.Tensor] = read_weight_files(source)
        if not set(own) <= set(weights):
            weights = names.from_hf(model.family, weights, own, twins)
        own = {n: t for n, t in own.items() if n not in new_names or (n in weights and weights[n].shape == t.shape)}
        _assign(model, weights, source, own)
        return source
    # The same check as before a resume; but nothing is set aside in a folder of another run.
    manifest = _on_rank_0(files.complete, source, verify=False).manifest
    if verify and (problem := _content_problem(source, manifest)):
        raise CheckpointError("checkpoint.damaged", f"{source} is damaged: {problem}", hint=files.EARLIER_HINT)
    reader = CheckpointReader(source)
    stored = _on_rank_0(lambda: reader.read_metadata().state_dict_metadata)
    shapes = {name.removeprefix("model."): getattr(entry, "size", None) for name, entry in stored.items()}
    # Adapters of the folder become part of the weights beside them, whatever adapters this model has.
    own = {n: t for n, t in own.items() if n not in new_names or (shapes.get(n) == t.shape and ADAPTER not in f".{n}")}
    # A checkpoint has a weight with two names (a tied head) once.
    tensors = {name: tensor for name, tensor in own.items() if name not in twins}
    read_tensors(reader, {"model": tensors})
    for name in (n for n in tensors if f"{n.removesuffix('weight')}adapter.a" in shapes):
        _add(tensors[name], read_adapter(source, name.removesuffix(".weight"), shapes))
    _assign(model, tensors | {name: tensors[first] for name, first in twins.items()}, source, own)
    return source


def read_adapter(folder: Path, layer: str, shapes: Mapping[str, Any]) -> torch.Tensor:
    """What the LoRA adapter of a layer adds to its weights, in fp32."""
    lora = read_extra(folder)["extra"]["config"]["tune"]["lora"]
    parts = {f"{layer}.adapter.{part}": torch.empty(shapes[f"{layer}.adapter.{part}"]) for part in "ab"}
    read_tensors(CheckpointReader(folder), {"model": parts})
    a, b = parts.values()
    return torch.mul(b @ a, lora["alpha"] / lora["rank"])


def _add(weight: torch.Tensor, full: torch.Tensor) -> None:
    with torch.no_grad():
        part = local_part(full, weight) if isinstance(weight, DTensor) else full
        target = local_tensor(weight)
        target.copy_(target.float() + part.to(target.device))


def read_weight_files(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for part in weight_files(folder):
        try:
            tensors |= read_pickled(part) if part.suffix == PICKLED else load_file(part)
        except SafetensorError as error:
            raise CheckpointError(
                "checkpoint.weights-damaged", f"{part} cannot be read: {error}", hint=DAMAGED_HINT
            ) from None
    return {current_name(name): tensor for name, tensor in tensors.items()}


def read_pickled(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a pytorch_model.bin, the form of older models. No code in the file is run."""
    try:
        # Files written before torch 1.6 are not archives and cannot be mapped.
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
        return {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
    except pickle.UnpicklingError:
        raise CheckpointError(
            "checkpoint.unsafe", f"{file} has pickled Python objects beside its tensors", hint=UNSAFE_HINT
        ) from None
    except (RuntimeError, EOFError, AttributeError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(
            "checkpoint.weights-damaged", f"{file} cannot be read: {reason[0]}", hint=DAMAGED_HINT
        ) from None


def current_name(name: str) -> str:
    """Layer norms of older encoders have the names that TensorFlow gave them."""
    for old, new in (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")):
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def weight_files(folder: Path) -> list[Path]:
    """The files with the weights: those in the index, since the folder may contain a second form of the weights;
    *.safetensors before pytorch_model.bin."""
    parts: list[Path] = []
    for pattern, name in (("*.safetensors", "model.safetensors"), ("pytorch_model.bin", "pytorch_model.bin")):
        index = (read_json(folder / f"{name}.index.json") or {}).get("weight_map") or {}
        parts = parts or [folder / part for part in sorted(set(index.values()))] or sorted(folder.glob(pattern))
    if not parts:
        raise CheckpointError(
            "checkpoint.no-safetensors",
            f"{folder} has no *.safetensors files and no pytorch_model.bin",
            hint="convert other formats with transformers' save_pretrained",
        )
    if absent := [part.name for part in parts if not part.is_file()]:
        raise CheckpointError(
            "checkpoint.weights-incomplete",
            f"{folder} lacks {len(absent)} of its {len(parts)} weight files ({', '.join(absent[:3])})",
            hint="copy the missing files: the copy is incomplete",
        )
    return parts


def _assign(
    model: torch.nn.Module, weights: Mapping[str, torch.Tensor], source: Path, own: Mapping[str, torch.Tensor]
) -> None:
    """Give the model the weights named in `own`, a part of its state."""
    if problems := names.misfits(weights, own):
        unknown = sorted(set(weights) - set(own))
        problems += [f"{len(unknown)} unknown ({', '.join(unknown[:3])})"] if unknown else []
        raise CheckpointError(
            "checkpoint.model-mismatch",
            f"the weights in {source} do not fit the model: {'; '.join(problems)}",
            hint="compare the recipe's [model] table with the model they come from",
        )
    is_full = not any(isinstance(weights[name], DTensor) for name in own)
    options = StateDictOptions(full_state_dict=is_full, strict=len(own) == len(model.state_dict()))
    set_model_state_dict(model, {name: weights[name] for name in own}, options=options)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _on_rank_0(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a function on rank 0 and return its result on all ranks; an error is raised on all, which wait for it."""
    answer: list[Any] = [None, None]
    if _rank() == 0:
        try:
            answer[0] = function(*args, **options)
        except CheckpointError as error:
            answer[1] = error
        except OSError as error:
            answer[1] = CheckpointError(
                "checkpoint.unreadable",
                f"{error.filename or 'a checkpoint file'} cannot be read: {error.strerror or error}",
                hint="check that the disk is mounted and works",
            )
    if _world_size() > 1:
        dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise answer[1]
    return answer[0]
