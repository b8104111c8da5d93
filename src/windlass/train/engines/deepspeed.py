"""DeepSpeed for sharding, reduction and update (ZeRO 0 to 3, offload) under our own loop.

Checkpoints hold complete fp32 tensors under the model's own names, so that both engines read each other's.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from windlass.blocks.attention.kernels import attention_core
from windlass.config import Recipe
from windlass.errors import ConfigError
from windlass.layout.types import AXES, Layout, StepSpec
from windlass.models.decoder import DecoderModel
from windlass.train.batches import Batch, BatchPlan, TokenBatch
from windlass.train.failure import DivergedError
from windlass.train.guard import Guard
from windlass.train.mesh import World
from windlass.train.optimizers.base import decays
from windlass.train.parallelize import ModelParts, set_loss, set_recompute
from windlass.train.step import Mark, StepResult, mark
from windlass.train.targets import TargetMaker

STAGES = {"none": 0, "zero1": 1, "zero2": 2, "full": 3}


def assemble(
    model: DecoderModel, recipe: Recipe, step: StepSpec, world: World, plan: BatchPlan, beat: Callable[[str], None]
) -> tuple[ModelParts, DeepSpeedOptimizer, DeepSpeedStepper]:
    check_supported(recipe, world.layout)
    stage, notes = STAGES[world.layout.shard], list[str]()
    for block in model.blocks():
        if block.core is not None:
            block.core = attention_core(step.attention)
    set_loss(model, recipe, step, world, notes)
    set_recompute(model, step, notes)
    model.to_empty(device="cpu" if stage == 3 else world.device)
    model.init_weights(recipe.seed)
    if stage == 3:
        model.prepare(world.device)
    # PyTorch's AdamW; weight decay on matrices only, as in our own.
    optim, groups = recipe.optim, {True: list[nn.Parameter](), False: list[nn.Parameter]()}
    for name, parameter in model.named_parameters():
        groups[decays(name, parameter, model.undecayed)].append(parameter)
    listed = [{"params": p, "weight_decay": optim.weight_decay if decay else 0.0} for decay, p in groups.items() if p]
    adamw = torch.optim.AdamW(listed, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps)
    deepspeed = _import_deepspeed(world)
    # DeepSpeed compiles parts of Muon to check for it, which loads torch's compiler; it is not used here.
    with mock.patch.object(torch, "compile", lambda model=None, **_: model or (lambda function: function)):
        engine, _, _, _ = deepspeed.initialize(
            model=model, optimizer=adamw, config=deepspeed_config(recipe, world.layout), dist_init_required=False
        )
    notes.append(f"engine: deepspeed {deepspeed.__version__}, ZeRO stage {stage}")
    optimizer, parts = DeepSpeedOptimizer(engine, world.device), ModelParts([engine.module], [0], 1, notes=notes)
    return parts, optimizer, DeepSpeedStepper(engine, optimizer, recipe, world, plan, beat)


def check_supported(recipe: Recipe, layout: Layout) -> None:
    train, optim, tune = recipe.train, recipe.optim, recipe.tune
    unsupported = {
        **{f"layout.{axis} = {getattr(layout, axis)}": getattr(layout, axis) > 1 for axis in AXES},
        f'layout.shard = "{layout.shard}"': layout.shard not in STAGES,
        f'train.precision = "{train.precision}"': train.precision not in ("fp32", "bf16"),
        f'optim.name = "{optim.name}"': optim.name != "adamw",
        f'optim.moments = "{optim.moments}"': optim.moments != "fp32",
        "data.batch_ramp": bool(recipe.data.batch_ramp),
        "train.goldfish_k": bool(train.goldfish_k),
        "train.instruments": bool(train.instruments),
        "optim.qk_clip": bool(optim.qk_clip),
        "train.skip_spike_sigma": bool(train.skip_spike_sigma),
        "train.rollback": train.rollback,
        f'layout.offload = "{layout.offload}" with layout.shard = "none"': layout.offload != "none"
        and layout.shard == "none",
        f'layout.offload = "parameters" with layout.shard = "{layout.shard}"': layout.offload == "parameters"
        and layout.shard != "full",
        'train.precision = "bf16" with layout.shard = "none" (stage 0 keeps no fp32 weights to save)': (
            layout.shard == "none" and train.precision == "bf16"
        ),
        "model.experts": recipe.model.experts is not None,
        '[tune], except task = "chat" without adapters': tune is not None
        and (tune.task != "chat" or tune.lora is not None),
        "train.compile (DeepSpeed's hooks break the graphs)": bool(train.compile),
        'train.recompute = "budget" (it needs train.compile)': train.recompute == "budget",
    }
    if any(unsupported.values()):
        raise ConfigError(
            "train.deepspeed-unsupported",
            f'train.engine = "deepspeed" does not support {", ".join(key for key, bad in unsupported.items() if bad)}',
            hint="it supports AdamW in fp32 or bf16, shard none, zero1, zero2 and full, and offload with sharding; "
            'train.engine = "native" supports the others',
        )
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(
            "train.deepspeed-not-installed",
            'train.engine = "deepspeed", but DeepSpeed is not installed',
            hint="DS_BUILD_OPS=0 pip install -c constraints.txt 'windlass[deepspeed]'",
        )


def deepspeed_config(recipe: Recipe, layout: Layout) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": STAGES[layout.shard]}
    if layout.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu"}
    if layout.offload == "parameters":
        zero["offload_param"] = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.accumulation,
        "train_batch_size": layout.sequences_per_step,
        "gradient_clipping": recipe.optim.clip or 0.0,
        "zero_optimization": zero,
        # Our AdamW is PyTorch's; DeepSpeed's own would be compiled at the first start, for minutes.
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }
    if recipe.train.precision == "bf16":
        # As our own engine: computed in bf16, summed and reduced in fp32.
        config |= {"bf16": {"enabled": True}, "communication_data_type": "fp32"}
        config |= {"data_types": {"grad_accum_dtype": "fp32"}} if layout.shard in ("zero1", "zero2") else {}
    return config


def _import_deepspeed(world: World) -> Any:
    """Import DeepSpeed and give it the existing process group (a single process gets one of its own)."""
    cpu = world.device.type == "cpu"
    os.environ.setdefault("LOCAL_RANK", str(world.place.local_rank))
    if cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if not dist.is_initialized():
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo" if cpu else "cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    # Its unused autotuner would import mlflow, which takes seconds of every start: it looks as if not installed.
    hidden = {"mlflow"} - set(sys.modules)
    sys.modules.update(dict.fromkeys(hidden, cast(Any, None)))
    try:
        import deepspeed
        from deepspeed.utils import logger
    finally:
        for name in hidden:
            del sys.modules[name]

    logger.setLevel(logging.WARNING)
    if cpu:
        # Its shared-memory collectives are compiled at the first start, and a killed build leaves a lock that blocks
        # others. Gloo is enough.
        vars(importlib.import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None
    deepspeed.init_distributed(dist_backend=dist.get_backend(), dist_init_required=False, verbose=False)
    return deepspeed


@dataclass(frozen=True)
class GatheredState:
    """One parameter as checkpoints hold it: complete and in fp32, however DeepSpeed divides it."""

    name: str
    weights: Tensor
    moments: dict[str, Tensor]


class DeepSpeedOptimizer:
    """DeepSpeed's optimizer with the interface of ours: `slots` with complete tensors for checkpoints.

    Reading `slots` is a collective: every rank reads them in the same order. A restore fills their tensors, and
    `refresh` writes them back."""

    moment_names = ("exp_avg", "exp_avg_sq")

    def __init__(self, engine: Any, device: torch.device) -> None:
        self.engine = engine
        # ZeRO stage 0 in fp32: PyTorch's own optimizer, nothing is divided.
        self.plain = isinstance(engine.optimizer, torch.optim.Optimizer)
        self.parameters: list[nn.Parameter] = list(engine.module.parameters())
        self.count = torch.zeros((), dtype=torch.float32, device=device)
        self._slots = [
            GatheredState(
                name,
                torch.zeros(_shape(parameter), dtype=torch.float32),
                {moment: torch.zeros(_shape(parameter), dtype=torch.float32) for moment in self.moment_names},
            )
            for name, parameter in engine.module.named_parameters()
        ]
        self._gathered_step: int | None = None

    @property
    def slots(self) -> list[GatheredState]:
        """Gathered into host memory once per step, always into the same tensors."""
        if self._gathered_step != self.engine.global_steps:
            stepped = float(self.count) > 0  # before the first step there are no moments: they are zero
            if stepped:
                self._link_moments()
            for parameter, slot in zip(self.parameters, self._slots, strict=True):
                slot.weights.copy_(self._gather(parameter, "weights"))
                for name in self.moment_names if stepped else ():
                    slot.moments[name].copy_(self._gather(parameter, name))
            self._gathered_step = self.engine.global_steps
        return self._slots

    def _gather(self, parameter: nn.Parameter, name: str) -> Tensor:
        """The complete fp32 weights ("weights") or one moment of a parameter."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        if self.plain:
            tensor = parameter if name == "weights" else self.engine.optimizer.state[parameter][name]
        elif name == "weights":
            tensor = safe_get_full_fp32_param(parameter)
        else:
            tensor = safe_get_full_optimizer_state(parameter, name)
        return cast(Tensor, tensor).detach().reshape(_shape(parameter))

    def refresh(self) -> None:
        """Write what a restore has filled the slots with back into DeepSpeed's parts."""
        from deepspeed.runtime.zero import GatheredParameters
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        device, stepped = self.count.device, float(self.count) > 0
        if stepped:
            self._create_moments()
        for parameter, slot in zip(self.parameters, self._slots, strict=True):
            moments = slot.moments if stepped else {}
            # The weights that the next forward pass reads; under stage 3 each rank keeps its part of them.
            divided = hasattr(parameter, "ds_id")
            with GatheredParameters([parameter], modifier_rank=0, enabled=divided), torch.no_grad():
                if not divided or dist.get_rank() == 0:
                    parameter.data.copy_(slot.weights)
            if self.plain:
                for name, moment in moments.items():
                    self.engine.optimizer.state[parameter][name].copy_(moment)
                continue
            safe_set_full_fp32_param(parameter, slot.weights.to(device))
            for name, moment in moments.items():
                safe_set_full_optimizer_state(parameter, moment.to(device), name)

    def _create_moments(self) -> None:
        """Moments exist only after a first step, so a new process creates them before it can fill them."""
        outer = self.engine.optimizer
        if self.plain:
            inner, partitions = outer, [p for group in outer.param_groups for p in group["params"]]
        else:
            # The fp32 tensors that the inner optimizer updates: one per group (stages 1 and 2) or sub-group (stage 3).
            names = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
            attribute = next((name for name in names if hasattr(outer, name)), None)
            if attribute is None:
                raise ConfigError(
                    "train.deepspeed-version",
                    f"DeepSpeed's {type(outer).__name__} has no fp32 partitions that windlass can read",
                    hint="pip install 'deepspeed>=0.16'",
                )
            inner, partitions = outer.optimizer, list(getattr(outer, attribute))
        for partition in partitions:
            state = inner.state[partition]
            for name in self.moment_names:
                state.setdefault(name, torch.zeros_like(partition, requires_grad=False))
            state["step"] = torch.tensor(float(self.count))
        self._link_moments()

    def _link_moments(self) -> None:
        """Let DeepSpeed find all moments: it looks after the first group's step, when later groups have none."""
        outer = self.engine.optimizer
        if hasattr(outer, "_lazy_init_hp_params_optimizer_state"):
            outer._hp_optimizer_states_linked = False
            outer._lazy_init_hp_params_optimizer_state()

    def adopt(self) -> None:
        """Copy weights that were loaded into the module into DeepSpeed's master copies."""
        from deepspeed.runtime.zero import GatheredParameters

        for parameter, slot in zip(self.parameters, self.slots, strict=True):
            with GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
                slot.weights.copy_(parameter.detach().float().cpu())
        self.refresh()

    def zero_grad(self) -> None:
        self.engine.zero_grad()


def _shape(parameter: nn.Parameter) -> torch.Size:
    return cast(torch.Size, getattr(parameter, "ds_shape", parameter.shape))


class DeepSpeedStepper:
    """One optimizer step by DeepSpeed, with the numbers that our own step returns."""

    pipeline = None

    def __init__(
        self,
        engine: Any,
        optimizer: DeepSpeedOptimizer,
        recipe: Recipe,
        world: World,
        plan: BatchPlan,
        beat: Callable[[str], None],
    ) -> None:
        self.engine, self.optimizer, self.recipe, self.world, self.plan = engine, optimizer, recipe, world, plan
        self.beat, self.guard = beat, Guard(recipe.train, world.device)
        self.targets, self.further = TargetMaker(recipe, world, engine.module.vocab), ()

    def step(self, batch: Batch, lr: float, *, measure: bool = False) -> StepResult:
        assert isinstance(batch, TokenBatch)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        part, layout = self.targets.make(batch, 0), self.plan.layout
        scale = self.targets.scale(batch, part)
        # DeepSpeed averages over ranks and micro-batches; our losses are already divided by the batch's tokens.
        loss_scale = scale * self.world.size * layout.accumulation
        forward, sums = list[tuple[Mark, Mark]](), torch.zeros(2, device=self.world.device)
        norm = None
        for index, inputs in enumerate(part.micro_batches(layout.micro_batch)):
            self.beat("forward")
            began = mark(self.world.cuda)
            out = self.engine(*inputs)
            forward.append((began, mark(self.world.cuda)))
            sums += out.detach().float()
            self.beat("backward")
            self.engine.backward(out[0] * loss_scale)
            if index == layout.accumulation - 1:
                # Loss over all ranks, before the update: a loss that is not finite must not reach the weights.
                self.beat("reduce")
                total = self.world.sum_(sums * scale)
                self._check_finite(float(total[1]), "loss")
                if self.optimizer.plain:  # PyTorch does not report the norm; the gradients are reduced by now
                    gradients = [p.grad for p in self.optimizer.parameters if p.grad is not None]
                    norm = float(torch.stack(torch._foreach_norm(gradients)).norm())
            self.beat("update")
            self.engine.step()
        self.optimizer.count += 1
        norm = float(self.engine.get_global_grad_norm() or 0.0) if norm is None else norm
        self._check_finite(norm, "gradient norm")
        numbers_out = (total[1], torch.as_tensor(norm, device=total.device), total.new_zeros(()), total[0] - total[1])
        return StepResult(torch.stack(numbers_out), lr, forward)

    def _check_finite(self, value: float, name: str) -> None:
        if self.recipe.train.skip_nonfinite and not math.isfinite(value):
            raise DivergedError(
                "train.diverged",
                f"the {name} is not finite, and the deepspeed engine cannot skip a step",
                hint="resume from the newest checkpoint with a lower learning rate, "
                'or use train.engine = "native", which skips such steps',
            )
