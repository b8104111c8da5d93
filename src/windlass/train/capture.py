"""The passes of a step and its update as CUDA graphs, for models whose kernels end before the host has launched the
next."""

import logging
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from windlass.config import Recipe
from windlass.layout.types import StepSpec
from windlass.train.mesh import World

logger = logging.getLogger(__name__)

# Calls before the one that is recorded: they compile, and let libraries allocate what they keep.
WARM_CALLS = 2


def obstacle(recipe: Recipe, step: StepSpec, world: World) -> str | None:
    """Why a step cannot be replayed; None: it can."""
    reasons = {
        "no CUDA device": not world.cuda,
        f"{world.size} processes": world.size > 1,
        "a model of transformers": not step.native,
        "masks change with the documents of a batch": step.mask_documents,
        "the batch grows (data.batch_ramp)": bool(recipe.data.batch_ramp),
        "layers are measured (train.instruments, optim.qk_clip)": bool(
            recipe.train.instruments or recipe.optim.qk_clip
        ),
        "optimizer states or weights are in host memory": world.layout.offload != "none",
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


class Replayed:
    """A function of tensors, recorded at its third call and replayed from then on: the same kernels on the same memory,
    so the numbers do not change. What it reads beside its inputs must stay where it is; the results are overwritten."""

    def __init__(
        self, function: Callable[..., Any], stream: torch.cuda.Stream | None = None, pool: Any | None = None
    ) -> None:
        self.function, self.calls, self.pool = function, 0, pool
        self.graph: torch.cuda.CUDAGraph | None = None
        self.stream = stream or torch.cuda.Stream()

    def __call__(self, *inputs: Tensor, **constants: Any) -> Any:
        self.calls += 1
        if self.calls <= WARM_CALLS:
            # On the stream of the recording: a hook on a gradient stays with the stream on which it first ran.
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                result = self.function(*inputs, **constants)
            torch.cuda.current_stream().wait_stream(self.stream)
            return result
        if self.graph is None:
            self.inputs, graph = [x.clone() for x in inputs], torch.cuda.CUDAGraph()
            # Other threads may go on: the reader of batches pins host memory, for one.
            with torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local"):
                self.result = self.function(*self.inputs, **constants)
            self.graph = graph
        for static, x in zip(self.inputs, inputs, strict=True):
            static.copy_(x)
        self.graph.replay()
        return self.result


class ReplayedByShape:
    """`Replayed` for first inputs of a few shapes: a graph for each, in the same memory. A function that waits for the
    device cannot be recorded: it is called as before, and `failure` says why."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function
        self.graphs: dict[torch.Size, Replayed] = {}
        self.stream, self.pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        self.failure: str | None = None

    def __call__(self, *inputs: Tensor) -> Tensor:
        if self.failure is None:
            replayed = self.graphs.setdefault(inputs[0].shape, Replayed(self.function, self.stream, self.pool))
            try:
                return cast(Tensor, replayed(*inputs)).clone()
            except RuntimeError as error:
                if replayed.calls <= WARM_CALLS or replayed.graph is not None:
                    raise
                self.failure = str(error).splitlines()[0]
                logger.warning("passes are launched kernel by kernel, a CUDA graph is not possible: %s", self.failure)
        return self.function(*inputs)
