"""The passes of a step and its update as CUDA graphs, for models whose kernels end before the host has launched the
next."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from windlass.config import Recipe
from windlass.layout.types import StepSpec
from windlass.train.mesh import World

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

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.calls = function, 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.stream = torch.cuda.Stream()

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
            self.inputs, self.graph = [x.clone() for x in inputs], torch.cuda.CUDAGraph()
            # Other threads may go on: the reader of batches pins host memory, for one.
            with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
                self.result = self.function(*self.inputs, **constants)
        for static, x in zip(self.inputs, inputs, strict=True):
            static.copy_(x)
        self.graph.replay()
        return self.result
