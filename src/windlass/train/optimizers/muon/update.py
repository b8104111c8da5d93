"""Muon (Jordan et al. 2024) for the matrices of layers, AdamW for everything else.

The mean of the gradients is orthogonalised by Newton-Schulz iterations, all matrices of one shape in one chain of
batched products. The update is scaled by 0.2 sqrt(max(rows, columns)), which gives it the RMS of an AdamW update (Liu
et al., arXiv 2502.16982), so that AdamW's learning rate and weight decay can be kept. torch.optim.Muon, which the tests
compare with, takes one undivided matrix at a time.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from windlass.blocks.initial_values import local_tensor
from windlass.cost.muon import ROUND_SIZE, grouped_iterations
from windlass.train.optimizers.adamw.update import AdamW
from windlass.train.optimizers.base import ParameterState, store_rounded
from windlass.train.optimizers.muon.exchange import as_stack, plan_rounds
from windlass.train.optimizers.spec import is_matrix

COEFFICIENTS, EPS = (3.4445, -4.7750, 2.0315), 1e-7
# RMS of an update of AdamW.
UPDATE_RMS = 0.2


class Muon(AdamW):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.matrices = [slot for slot in self.slots if is_matrix(slot.name, slot.parameter.shape)]
        self._names = {slot.name for slot in self.matrices}
        self.shared_rounds = plan_rounds([slot.weights for slot in self.matrices])

    def step_host(self, slots: list[ParameterState], lr: float, scale: float) -> None:
        super().step_host([slot for slot in slots if slot.name not in self._names], lr, scale)

        def direction(slot: ParameterState) -> Tensor:
            gradient = local_tensor(cast(Tensor, slot.gradient)).to("cpu", torch.float32) * scale
            mean = local_tensor(slot.moments["exp_avg"])
            new, step = mean_and_direction(gradient, mean.float(), *self._mean_constants)
            self._store(slot, "exp_avg", mean, new)
            return step

        def move(slot: ParameterState, step: Tensor, step_size: float, shrink: float) -> None:
            weights = local_tensor(slot.weights)
            new = weights.float() * shrink - step_size * step.to("cpu", torch.float32)
            self._store(slot, "weights", weights, new)
            if slot.master is not None:
                local_tensor(slot.parameter).copy_(new)

        self._step_matrices(lr, direction, move)

    def step_device(self, slots: list[ParameterState], lr: float, scale: Tensor, good: Tensor) -> None:
        super().step_device([slot for slot in slots if slot.name not in self._names], lr, scale, good)
        update_mean, update_weights = compiled(mean_in_place), compiled(weights_in_place)

        def direction(slot: ParameterState) -> Tensor:
            mean = local_tensor(slot.moments["exp_avg"])
            step = torch.empty_like(mean, dtype=iteration_dtype(mean.device))
            gradient = local_tensor(cast(Tensor, slot.gradient))
            flat = gradient.view(-1), mean.view(-1), step.view(-1)
            update_mean(*flat, scale, good, *self._mean_constants)
            return step

        def move(slot: ParameterState, step: Tensor, step_size: float, shrink: float) -> None:
            shadow = None if slot.master is None else local_tensor(slot.parameter).view(-1)
            numbers = (torch.full_like(scale, step_size), torch.full_like(scale, shrink))
            update_weights(local_tensor(slot.weights).view(-1), shadow, step.reshape(-1), *numbers, good)

        self._step_matrices(lr, direction, move)

    @property
    def _mean_constants(self) -> tuple[float, bool]:
        return self.config.muon_momentum, self.config.nesterov

    def _step_matrices(
        self,
        lr: float,
        direction: Callable[[ParameterState], Tensor],
        move: Callable[[ParameterState, Tensor, float, float], None],
    ) -> None:
        """`direction` moves the mean of a slot and returns this rank's part of what is orthogonalised; `move` moves
        the weights by the result."""
        for current in self.shared_rounds:
            slots = {number: self.matrices[number] for number in current.first}
            device = compute_device(next(iter(slots.values())).parameter)
            options: dict[str, Any] = {"dtype": iteration_dtype(device), "device": device}
            steps = {number: as_stack(direction(slot).to(**options)) for number, slot in slots.items()}
            results = current.scatter(orthogonalise(current.gather(steps, **options)))
            step_size = lr * UPDATE_RMS * math.sqrt(max(current.rows, current.columns))
            for number, step in results.items():
                slot = slots[number]
                move(slot, step.view_as(local_tensor(slot.weights)), step_size, 1.0 - lr * slot.decay)


def mean_and_direction(gradient: Tensor, mean: Tensor, momentum: float, nesterov: bool) -> tuple[Tensor, Tensor]:
    """The new running mean, and what is orthogonalised: the mean itself, or one step ahead of it (Nesterov)."""
    mean = mean + (gradient - mean) * (1.0 - momentum)
    return mean, gradient + (mean - gradient) * momentum if nesterov else mean


def mean_in_place(
    gradient: Tensor, mean: Tensor, step: Tensor, scale: Tensor, good: Tensor, momentum: float, nesterov: bool
) -> None:
    old = mean.float()
    new, direction = mean_and_direction(gradient.float() * scale, old, momentum, nesterov)
    store_rounded(mean, torch.where(good, new, old))
    step.copy_(direction)


def weights_in_place(
    weights: Tensor, shadow: Tensor | None, step: Tensor, step_size: Tensor, shrink: Tensor, good: Tensor
) -> None:
    old = weights.float()
    new = torch.where(good, old * shrink - step_size * step.float(), old)
    store_rounded(weights, new)
    if shadow is not None:
        shadow.copy_(new)


@cache
def compiled(function: Callable[..., None]) -> Callable[..., None]:
    return torch.compile(function, dynamic=True)


def compute_device(parameter: Tensor) -> torch.device:
    """Where matrices are multiplied: on the GPU also where parameters or states lie in host memory."""
    if isinstance(parameter, DTensor):
        kind = parameter.device_mesh.device_type
        return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    return parameter.device


def iteration_dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def orthogonalise(matrices: Tensor) -> Tensor:
    """Every matrix of the batch (n, rows, columns) with its singular values moved to about 1, in the same dtype.

    An iteration multiplies x by a polynomial of its Gram matrix x x^T. The next Gram matrix can be computed from these
    two, without x. So the polynomials of several iterations are multiplied first where x has a long side: a quarter
    less arithmetic for 2,048 x 5,632."""
    tall = matrices.shape[1] > matrices.shape[2]
    short, long = sorted(matrices.shape[1:])
    results = []
    for x in matrices.split(max(1, ROUND_SIZE // (short * long))):
        norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.float32).clamp(min=EPS)
        # In [-1, 1] from here on, where fp16 has three bits more than bf16 and is as fast.
        x = (x / norm).to(torch.float16 if x.dtype == torch.bfloat16 else x.dtype)
        for iterations in grouped_iterations(short, long):
            factor = combined_polynomials(x.mT @ x if tall else x @ x.mT, iterations)
            x = x @ factor if tall else factor @ x
        results.append(x.to(matrices.dtype))
    return results[0] if len(results) == 1 else torch.cat(results) if results else matrices


def combined_polynomials(gram: Tensor, iterations: int) -> Tensor:
    """The factor by which this many iterations multiply a matrix, from its Gram matrix. Polynomials of one matrix
    commute, so the order of the products does not matter."""
    product = polynomial = polynomial_of(gram)
    for _ in range(iterations - 1):
        gram = polynomial @ gram @ polynomial
        polynomial = polynomial_of(gram)
        product = polynomial @ product
    return product


def polynomial_of(gram: Tensor) -> Tensor:
    a, b, c = COEFFICIENTS
    out = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
    out.diagonal(dim1=1, dim2=2).add_(a)
    return out
