"""How does DeepSpeed train the same recipe? It takes over sharding, reduction and update (ZeRO 0 to 3, offload); all else stays ours.

Checkpoints hold whole fp32 tensors under the model's own names, so that both engines read each other's.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from windlass.config import OptimConfig, Recipe
from windlass.errors import ConfigError
from windlass.models.parts import Model
from windlass.train import parallelize as native
from windlass.train.attention import apply_attention
from windlass.train.failure import DivergedError
from windlass.train.geometry import Geometry
from windlass.train.guard import Guard
from windlass.train.mesh import World
from windlass.train.optimizers import decays
from windlass.train.parallelize import Parts, Sync
from windlass.train.step import StepResult, Stopwatch, cut

STAGES = {"none": 0, "zero1": 1, "zero2": 2, "full": 3}
INSTALL = "DS_BUILD_OPS=0 pip install -c constraints.txt 'windlass[deepspeed]'"


def check(recipe: Recipe) -> None:
    """Refuse what this engine does not do, and say what does it."""
    layout, train, optim = recipe.layout, recipe.train, recipe.optim
    wrong = [f"layout.{n} = {v}" for n in ("tensor", "pipeline", "context") if (v := getattr(layout, n)) > 1]
    wrong += [f'layout.shard = "{layout.shard}"'] if layout.shard not in STAGES else []
    wrong += [f'train.precision = "{train.precision}"'] if train.precision not in ("fp32", "bf16") else []
    wrong += [f'optim.name = "{optim.name}"'] if optim.name != "adamw" else []
    wrong += [f'optim.moments = "{optim.moments}"'] if optim.moments != "fp32" else []
    wrong += ["train.skip_spike_sigma"] if train.skip_spike_sigma else []
    wrong += ["train.rollback"] if train.rollback else []
    if layout.offload != "none" and layout.shard == "none":
        wrong.append(f'layout.offload = "{layout.offload}" with layout.shard = "none"')
    if layout.offload == "parameters" and layout.shard != "full":
        wrong.append(f'layout.offload = "parameters" with layout.shard = "{layout.shard}"')
    if layout.shard == "none" and train.precision == "bf16":
        wrong.append(
            'train.precision = "bf16" with layout.shard = "none" (its stage 0 keeps no fp32 weights that could be saved)'
        )
    if wrong:
        raise ConfigError(
            "train.train-engine-deepspeed-does",
            f'train.engine = "deepspeed" does not know {", ".join(wrong)}',
            hint='it has AdamW in fp32 or bf16, shard none, zero1, zero2 and full, offload beside sharding; train.engine = "native" has the rest',
        )
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(
            "train.train-engine-deepspeed-but",
            'train.engine = "deepspeed", but DeepSpeed is not installed',
            hint=INSTALL,
        )


def config_of(recipe: Recipe, geometry: Geometry) -> dict[str, Any]:
    """DeepSpeed's own settings for this recipe."""
    layout, bf16 = recipe.layout, recipe.train.precision == "bf16"
    zero: dict[str, Any] = {"stage": STAGES[layout.shard]}
    if layout.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu"}
    if layout.offload == "parameters":
        zero["offload_param"] = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": geometry.micro_batch, "gradient_accumulation_steps": geometry.micro_batches,
        "train_batch_size": geometry.batch, "gradient_clipping": recipe.optim.clip or 0.0, "zero_optimization": zero,
        # Our AdamW is PyTorch's; DeepSpeed's own would be compiled at the first start, for minutes.
        "zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True, "steps_per_print": 10**9, "wall_clock_breakdown": False,
    }  # fmt: skip
    if bf16:
        # As our own engine: computed in bf16, summed and reduced in fp32.
        config |= {"bf16": {"enabled": True}, "communication_data_type": "fp32"}
        config |= {"data_types": {"grad_accum_dtype": "fp32"}} if layout.shard in ("zero1", "zero2") else {}
    return config


def assemble(model: Model, recipe: Recipe, world: World, geometry: Geometry) -> tuple[Parts, Adapter, DeepSpeedStepper]:
    """The model (on the meta device) under DeepSpeed, in the three parts that the loop knows."""
    check(recipe)
    notes = _prepare(model, recipe, world)
    model.to_empty(device="cpu" if recipe.layout.shard == "full" else world.device)
    model.init_weights(recipe.seed)
    if recipe.layout.shard == "full":
        model.prepare(world.device)
    deepspeed = _load(world)
    with _no_compiler():
        engine, _, _, _ = deepspeed.initialize(
            model=model, optimizer=_optimizer(model, recipe.optim), config=config_of(recipe, geometry), dist_init_required=False
        )  # fmt: skip
    parts = Parts([engine.module], [0], 1, notes=[*notes, f"engine: deepspeed {deepspeed.__version__}, ZeRO stage {STAGES[recipe.layout.shard]}"])  # fmt: skip
    adapter = Adapter(engine, recipe.optim, world.device)
    return parts, adapter, DeepSpeedStepper(engine, adapter, recipe, world, geometry)


def _prepare(model: Model, recipe: Recipe, world: World) -> list[str]:
    notes: list[str] = []
    apply_attention(model, recipe.train.attention)
    native._loss(model, recipe, world, notes)
    native._recompute(model, recipe.train.recompute, notes)
    if recipe.train.recompute == "budget" or recipe.train.compile:
        raise ConfigError(
            "train.train-compile-train-recompute",
            'train.compile and train.recompute = "budget" are of the native engine: DeepSpeed\'s hooks break the graphs',
            hint='leave them out, or use train.engine = "native"',
        )
    return notes


def _load(world: World) -> Any:
    """Import DeepSpeed, and give it the process group that is there (a single process gets one of its own)."""
    os.environ.setdefault("LOCAL_RANK", str(world.place.local_rank))
    if world.device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if not dist.is_initialized():
        dist.init_process_group("gloo" if world.device.type == "cpu" else "cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)  # fmt: skip
    with _without("mlflow"):  # its autotuner, which nobody asks for, would import it: seconds of every start
        import deepspeed
    from deepspeed.utils import logger

    logger.setLevel(logging.WARNING)
    if world.device.type == "cpu":
        # Its shared-memory collectives are compiled at the first start, and a killed build leaves a lock that others wait for. Gloo is there.
        importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    deepspeed.init_distributed(dist_backend=dist.get_backend(), dist_init_required=False, verbose=False)
    return deepspeed


@contextlib.contextmanager
def _without(name: str) -> Iterator[None]:
    """As if the package were not installed; what was imported before stays."""
    there = name in sys.modules
    if not there:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if not there:
            del sys.modules[name]


@contextlib.contextmanager
def _no_compiler() -> Iterator[None]:
    """DeepSpeed looks whether we gave it Muon and for that compiles parts of Muon, which loads torch's compiler; we give it AdamW."""
    ours, torch.compile = torch.compile, lambda model=None, **_: model or (lambda given: given)
    try:
        yield
    finally:
        torch.compile = ours


def _optimizer(model: Model, config: OptimConfig) -> torch.optim.Optimizer:
    """PyTorch's AdamW; weight decay on matrices only, as in our own."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        groups[decays(name, parameter, model.undecayed)].append(parameter)
    listed = [{"params": p, "weight_decay": config.weight_decay if decay else 0.0} for decay, p in groups.items() if p]
    return torch.optim.AdamW(listed, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps)


@dataclass
class WholeSlot:
    """One parameter as checkpoints know it: whole and in fp32, wherever DeepSpeed keeps its parts."""

    name: str
    weights: Tensor
    moments: dict[str, Tensor] = field(default_factory=dict)


class Adapter:
    """DeepSpeed's optimizer in the words of ours: slots with whole tensors for checkpoints, written back after a restore.

    Reading `slots` is a collective: every rank reads them in the same order."""

    moment_names = ("exp_avg", "exp_avg_sq")

    def __init__(self, engine: Any, config: OptimConfig, device: torch.device) -> None:
        self.engine, self.config = engine, config
        self.count = torch.zeros((), dtype=torch.float32, device=device)
        self._taken: list[WholeSlot] = []
        self._taken_at: int | None = None

    def named(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.engine.module.named_parameters())

    @property
    def slots(self) -> list[WholeSlot]:
        """Gathered into host memory once per step, always into the same tensors: a restore fills them, `refresh` reads them."""
        if not self._taken:
            self._taken = [self._empty(name, parameter) for name, parameter in self.named()]
        if self._taken_at != self.engine.global_steps:
            self._take()
        return self._taken

    def _empty(self, name: str, parameter: nn.Parameter) -> WholeSlot:
        tensors = [torch.zeros(tuple(_shape(parameter)), dtype=torch.float32) for _ in ("weights", *self.moment_names)]
        return WholeSlot(name, tensors[0], dict(zip(self.moment_names, tensors[1:], strict=True)))

    def _take(self) -> None:
        stepped = float(self.count) > 0  # before the first step there are no moments: they are zero
        if stepped:
            self._link()
        for (_, parameter), slot in zip(self.named(), self._taken, strict=True):
            slot.weights.copy_(self._weights(parameter))
            for name in self.moment_names if stepped else ():
                slot.moments[name].copy_(self._moment(parameter, name))
        self._taken_at = self.engine.global_steps

    def _plain(self) -> bool:
        """ZeRO stage 0 in fp32: PyTorch's own optimizer, nothing is divided."""
        return isinstance(self.engine.optimizer, torch.optim.Optimizer)

    def _weights(self, parameter: nn.Parameter) -> Tensor:
        from deepspeed.utils import safe_get_full_fp32_param

        if self._plain():
            return parameter.detach()
        return safe_get_full_fp32_param(parameter).detach().reshape(_shape(parameter))

    def _moment(self, parameter: nn.Parameter, name: str) -> Tensor:
        from deepspeed.utils import safe_get_full_optimizer_state

        if self._plain():
            return self.engine.optimizer.state[parameter][name].detach()
        return safe_get_full_optimizer_state(parameter, name).detach().reshape(_shape(parameter))

    def refresh(self) -> None:
        """What a restore has filled the slots with, back into DeepSpeed's parts."""
        if float(self.count) > 0:
            self._make_state()
        for (_, parameter), slot in zip(self.named(), self._taken, strict=True):
            self._set(parameter, slot)

    def _set(self, parameter: nn.Parameter, slot: WholeSlot) -> None:
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        stepped = float(self.count) > 0
        if self._plain():
            with torch.no_grad():
                parameter.copy_(slot.weights)
                if stepped:
                    state = self.engine.optimizer.state[parameter]
                    state["step"].fill_(float(self.count))
                    for name in self.moment_names:
                        state[name].copy_(slot.moments[name])
            return
        where = self.count.device
        self._set_computed(parameter, slot.weights)
        safe_set_full_fp32_param(parameter, slot.weights.to(where))
        if stepped:
            for name in self.moment_names:
                safe_set_full_optimizer_state(parameter, slot.moments[name].to(where), name)

    def _set_computed(self, parameter: nn.Parameter, whole: Tensor) -> None:
        """The weights that the next forward pass reads; under stage 3 each rank keeps its part of them."""
        from deepspeed.runtime.zero import GatheredParameters

        divided = hasattr(parameter, "ds_id")
        with GatheredParameters([parameter], modifier_rank=0, enabled=divided), torch.no_grad():
            if not divided or dist.get_rank() == 0:
                parameter.data.copy_(whole)

    def _partitions(self) -> list[Tensor]:
        """The fp32 tensors that the inner optimizer works on: one per group (stages 1 and 2) or sub-group (stage 3)."""
        outer = self.engine.optimizer
        if self._plain():
            return [p for group in outer.param_groups for p in group["params"]]
        for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
            if hasattr(outer, name):
                return list(getattr(outer, name))
        raise ConfigError(
            "train.deepspeed-s-known-here",
            f"DeepSpeed's {type(outer).__name__} is not known here",
            hint="pip install 'deepspeed>=0.16'",
        )

    def _make_state(self) -> None:
        """Moments exist only after a first step, so a new process makes them before it can fill them."""
        inner = self.engine.optimizer if self._plain() else self.engine.optimizer.optimizer
        for partition in self._partitions():
            state = inner.state[partition]
            for name in self.moment_names:
                state.setdefault(name, torch.zeros_like(partition, requires_grad=False))
            state["step"] = torch.tensor(float(self.count))
        self._link()

    def _link(self) -> None:
        """Tell DeepSpeed where each parameter's moments lie. It does so itself after the first group's step, when later groups have none yet."""
        outer = self.engine.optimizer
        if hasattr(outer, "_lazy_init_hp_params_optimizer_state"):
            outer._hp_optimizer_states_linked = False
            outer._lazy_init_hp_params_optimizer_state()

    def adopt(self) -> None:
        """Weights were loaded into the module: DeepSpeed's master copies follow."""
        for (_, parameter), slot in zip(self.named(), self.slots, strict=True):
            slot.weights.copy_(self._computed(parameter))
        self.refresh()

    def _computed(self, parameter: nn.Parameter) -> Tensor:
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            return parameter.detach().float().cpu().clone()

    def zero_grad(self) -> None:
        self.engine.zero_grad()


def _shape(parameter: nn.Parameter) -> Any:
    return getattr(parameter, "ds_shape", parameter.shape)


class DeepSpeedStepper:
    """One optimizer step by DeepSpeed, with the numbers that our own step gives."""

    schedule = None

    def __init__(self, engine: Any, adapter: Adapter, recipe: Recipe, world: World, geometry: Geometry) -> None:
        self.engine, self.optimizer, self.recipe, self.world, self.geometry = engine, adapter, recipe, world, geometry
        self.guard = Guard(recipe.train, world.device)
        self.scale = 1.0 / geometry.tokens_per_step
        # DeepSpeed takes the mean over ranks and micro-batches; our losses are divided by the tokens of the whole batch already.
        self.loss_scale = self.scale * world.size * geometry.micro_batches
        self.sync = Sync(True, False, False, "")
        self.beat: Callable[[str], None] = lambda phase: None

    def step(self, tokens: Tensor, documents: Tensor | None, lr: float) -> StepResult:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        inputs, targets, numbers = cut(tokens, documents, self.world)
        watch, sums = Stopwatch(self.world.device), torch.zeros(2, device=self.world.device)
        for index in range(self.geometry.micro_batches):
            part = slice(index * self.geometry.micro_batch, (index + 1) * self.geometry.micro_batch)
            self.beat("forward")
            watch.start()
            out = self.engine(inputs[part], targets[part], None if numbers is None else numbers[part])
            watch.stop()
            sums += out.detach().float()
            self.beat("backward")
            self.engine.backward(out[0] * self.loss_scale)
            if index == self.geometry.micro_batches - 1:
                total, before = self._reduce(sums), self._plain_norm()
            self.beat("update")
            self.engine.step()
        self.optimizer.count += 1
        norm = float(self.engine.get_global_grad_norm() or 0.0) if before is None else before
        self._refuse_nan(norm, "gradient norm")
        values = torch.stack((total[1], torch.as_tensor(norm, device=total.device), total.new_zeros(()), total[0] - total[1]))  # fmt: skip
        return StepResult(values, lr, watch)

    def _reduce(self, sums: Tensor) -> Tensor:
        """Loss over all ranks, before the update: a loss that is not finite must not reach the weights."""
        self.beat("reduce")
        total = self.world.sum_(sums * self.scale)
        self._refuse_nan(float(total[1]), "loss")
        return total

    def _plain_norm(self) -> float | None:
        """Stage 0 in fp32 leaves the norm to PyTorch, which keeps it to itself; the gradients are whole and reduced by now."""
        if not self.optimizer._plain():
            return None
        gradients = [p.grad for _, p in self.optimizer.named() if p.grad is not None]
        return float(torch.stack(torch._foreach_norm(gradients)).norm())

    def _refuse_nan(self, value: float, what: str) -> None:
        if self.recipe.train.skip_nonfinite and not math.isfinite(value):
            raise DivergedError(
                f"the {what} is not finite, and the deepspeed engine cannot leave a step out",
                hint='go on from the newest checkpoint with a lower learning rate, or use train.engine = "native", which skips such steps',
            )
