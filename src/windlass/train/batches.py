"""Which tokens does the next step see? Batches from the stream's position on, read ahead by a thread and already on the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from windlass.data.loader import Loader
from windlass.errors import DataError
from windlass.train.job import Job
from windlass.train.profiler import marked


def open_batches(job: Job) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Batches from the stream's position on, already on the device, read ahead by a thread."""
    geometry, world, documents = job.geometry, job.world, job.recipe.data.mask_documents
    start, cuda = job.sequences, world.device.type == "cuda"
    # Our own stores know their largest token, and it was compared before; of a foreign one each batch is looked at.
    unknown_tokens = job.stream.store is not None and job.stream.store.max_token is None
    loader = Loader(
        job.stream,
        lambda n: geometry.indexes(start + n * geometry.batch, world.data_rank),
        pin=cuda,
        documents=documents,
    )
    try:
        for item in marked(loader):
            tokens, numbers = item if documents else (item, None)
            if unknown_tokens:
                check_tokens(tokens, job.parts.modules[0].vocab)
            job.data_seconds = loader.last_wait_seconds
            yield to_device(tokens, world.device), None if numbers is None else to_device(numbers, world.device)
    finally:
        loader.close()


def check_tokens(tokens: Any, vocab: int) -> None:
    """Refuse a token that the model does not know: on a GPU the look-up would end the process without a word."""
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab:
        raise DataError(
            "train.batch-holds-token-but",
            f"a batch holds token {low if low < 0 else high:,}, but model.vocab is {vocab:,}",
            hint=f"set model.vocab to at least {high + 1:,}, or tokenize with the model's tokenizer",
        )


def to_device(array: Any, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True).long()
