"""Tuning on preference pairs: what the starting model thinks of them, computed once and kept in the run folder."""

import io
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from windlass.blocks.head.preference import PairScorer
from windlass.data.stream import StoreStream
from windlass.errors import CheckpointError, DataError
from windlass.files import open_file, write_atomic
from windlass.train.batches import token_batch
from windlass.train.hooks import Training
from windlass.train.pipeline import Pipeline
from windlass.train.targets import TargetMaker
from windlass.train.validate import Validator, without_dropout

# Chosen minus rejected log-probability of every pair.
Margins = np.ndarray[Any, np.dtype[np.float32]]


def attach_references(training: Training) -> None:
    """Give the streams of training and validation the reference of every pair."""
    stream, validator, path = training.stream, training.validator, training.run.held_out_reference_file
    assert isinstance(stream, StoreStream)
    training.say(attach_reference(training, stream, training.run.reference_file))
    if not isinstance(validator, Validator):
        return
    assert isinstance(validator.stream, StoreStream)
    if training.step > 0 and not path.is_file():  # a run of version 0.7 or before
        validator.held.clear()
        training.say(f"no validation: {path} is missing, and the starting model is no longer available")
        return
    training.say(attach_reference(training, validator.stream, path))


def attach_reference(training: Training, stream: StoreStream, path: Path) -> str:
    """From the file, or at step 0 by the weights as they are."""
    assert stream.packings is not None
    sizes = [len(packing.begins) for packing in stream.packings]
    if path.is_file():
        margins, source = read_reference(path), f"from {path}"
    elif training.step > 0:
        raise CheckpointError(
            "tune.reference-missing",
            f"{path} is missing: the starting model's scores of the pairs are unknown at step {training.step}",
            hint="restore the file, or start a new run",
        )
    else:
        margins, source = compute_reference(training, stream, sum(sizes)), "by the starting weights"
        if training.world.is_main:
            write_reference(path, margins)
    if len(margins) != sum(sizes):
        raise DataError(
            "tune.reference-differs",
            f"{path} has {len(margins):,} pairs, but the token store has {sum(sizes):,}",
            hint="start a new run: the token store or data.seq_len has changed",
        )
    stream.reference = np.split(margins, np.cumsum(sizes)[:-1])
    return f"reference of {len(margins):,} pairs ({stream.split}): {source}"


def write_reference(path: Path, margins: Margins) -> None:
    """An .npy file with a checksum behind the array, which other readers of .npy do not see."""
    buffer = io.BytesIO()
    np.save(buffer, margins)
    write_atomic(path, buffer.getvalue() + crc32(margins.tobytes()).to_bytes(4, "little"))


def read_reference(path: Path) -> Margins:
    """A damaged file is refused: it would change what is learned. Nothing is unpickled."""
    try:
        with open_file(path) as file:
            buffer = io.BytesIO(file.read())
        margins: Margins = np.lib.format.read_array(buffer, allow_pickle=False)
        checksum = buffer.read()
        if margins.ndim != 1 or margins.dtype != np.float32:
            raise ValueError(f"{margins.dtype} of shape {margins.shape}, not one row of float32")
        # A file of version 0.7 or before has no checksum.
        if not np.isfinite(margins).all() or checksum not in (b"", crc32(margins.tobytes()).to_bytes(4, "little")):
            raise ValueError("the numbers differ from what was written")
    except (ValueError, EOFError, MemoryError) as error:
        raise CheckpointError(
            "tune.reference-damaged",
            f"{path} is damaged ({error}): the starting model's scores of the pairs are unknown",
            hint="restore the file, or start a new run; before the first step, delete it and it is computed again",
        ) from None
    return margins


def compute_reference(training: Training, pairs_stream: StoreStream, count: int) -> Margins:
    """Chosen minus rejected log-probability of every pair, on all ranks together."""
    recipe, world, parts, size = training.recipe, training.world, training.parts, training.plan.sequences_per_pass
    vocab = parts.modules[0].vocab
    plain = recipe.data.model_copy(update={"mix": {}, "stages": [], "epochs": {}})
    stream = StoreStream(pairs_stream.store, plain, seed=0, split=pairs_stream.split, vocab=vocab)
    assert stream.packings is not None
    stream.reference = [np.zeros(len(packing.begins), dtype=np.float32) for packing in stream.packings]
    # In natural proportion the first pass over all sources ends together: each window comes once.
    windows = int(stream.mixture.windows.sum())
    targets = TargetMaker(recipe, world, vocab, held_out=True)
    # Its own schedule: the head returns other shapes than in training.
    pipeline = None if parts.num_stages == 1 else Pipeline(parts, world, Tensor.sum)
    # How many ranks have computed a pair, and the sum of their margins, which are the same.
    totals = torch.zeros(2, count, dtype=torch.float64, device=world.device)
    heads = [(module.head, module.head.loss) for module in parts.modules if module.head is not None]
    for head, _ in heads:
        head.loss = PairScorer(recipe.train.loss_chunk, head.logits, world.block_meshes.context).numbered_margins
    try:
        with torch.no_grad(), without_dropout(parts.modules):
            for start in range(0, windows, size * world.layout.data):
                own = np.minimum(start + world.data_rank * size + np.arange(size), windows - 1)
                part = targets.make(token_batch(stream.batch(own, documents=True), world.device), salt=0)
                if pipeline is None:
                    outputs = [parts.modules[0](part.inputs, part.targets, part.documents)]
                else:
                    outputs = pipeline.run("eval", part)
                for numbers, margins in outputs:
                    pairs = numbers[numbers >= 0].long()
                    totals[0, pairs], totals[1, pairs] = 1.0, margins[numbers >= 0]
    finally:
        for head, loss in heads:
            head.loss = loss
    world.sum_(totals)
    return (totals[1] / totals[0].clamp(min=1)).float().cpu().numpy()
