"""The files of a package of somebody else that adds one extension of each kind."""

from __future__ import annotations

SPEC = '''
"""Sizes and costs of a gated recurrence with one fixed decay: y_t = rate y_(t-1) + (1 - rate) v_t."""

from dataclasses import dataclass

from pydantic import Field

from windlass.blocks.interface import BlockSpec, Mixing, Product
from windlass.config.base import Table


class TABLE(Table):
    """`[model.recurrence]`"""

    rate: float = Field(default=0.9, gt=0, lt=1)


@dataclass(frozen=True, kw_only=True)
class RecurrenceSpec(BlockSpec):
    width: int
    rate: float

    kind = "recurrence"
    masks_documents = False
    kept_by_selective = False

    def params(self):
        return {"recurrence": 3 * self.width**2}

    def active_params(self):
        return 3 * self.width**2

    def products(self):
        return (
            Product("value", self.width, self.width, "outputs", "input"),
            Product("gate", self.width, self.width, "outputs", "input"),
            Product("output", self.width, self.width, "inputs", "mixed"),
        )

    def mixing_flops(self, seq_len):
        return 2.0 * seq_len * self.width

    def mixing(self, step):
        return Mixing(self.mixing_flops(step.seq_len))

    def kept_bytes(self, step, layout):
        return 3.0 * step.bytes_per_value * self.width / layout.tensor

    def selective_bytes(self, step, layout):
        return 0.0

    def transient_bytes(self, step, layout):
        return 0.0

    def constant_bytes(self, step, layout):
        return 0.0

    def moved_bytes(self, step, layout):
        return 4.0 * step.bytes_per_value * self.width / layout.tensor

    def context_bytes(self, step, layout):
        return None

    def divides(self, axis):
        return {"tensor": (("model.width", self.width),), "pipeline": ()}.get(axis)
'''

MODULE = """
import torch
import torch.nn.functional as F

from windlass.blocks.base import Block
from windlass.blocks.initial_values import residual_filler
from windlass.blocks.linear import Linear, project


class Recurrence(Block):
    def __init__(self, spec):
        super().__init__()
        self.rate, self.table_key = spec.rate, f"recurrence-{spec.rate}"
        self.wv, self.wg = Linear(spec.width, spec.width), Linear(spec.width, spec.width)
        self.wo = Linear(spec.width, spec.width)

    def make_table(self, start, end, device):
        place = torch.arange(start, end, device=device)
        distance = place[:, None] - place
        return (torch.where(distance >= 0, (1 - self.rate) * self.rate ** distance.clamp(min=0), 0.0),)

    def forward(self, x, context):
        v, gate = project(x, (self.wv, self.wg), self.fused)
        (decay,) = context.tables[self.table_key]
        return self.wo(F.silu(gate) * (decay[: x.shape[1], : x.shape[1]].to(v.dtype) @ v))

    def filler(self, name, std, num_layers):
        return residual_filler(name == "wo.weight", std, num_layers)

    def new_state(self, batch, limit):
        return torch.zeros(batch, 1, self.wv.weight.shape[0], device=self.wv.weight.device)

    def decode(self, x, state, places, start, table):
        outputs = []
        for v in self.wv(x).split(1, dim=1):
            state.mul_(self.rate).add_(v, alpha=1 - self.rate)
            outputs.append(state.clone())
        return self.wo(F.silu(self.wg(x)) * torch.cat(outputs, dim=1).to(x.dtype))

    def state_bytes(self, state, position):
        return state.numel() * state.element_size()


BLOCK = Recurrence
"""

PARALLEL = """
from windlass.blocks.divide import divide_columns_then_rows


def parallelize(block, meshes):
    if meshes.tensor is not None:
        divide_columns_then_rows(block, meshes.tensor, ("wv", "wg"), "wo")
"""

PRESETS = '''
from recurrence_block.spec import RecurrenceSpec
from windlass.blocks.attention.spec import AttentionSpec
from windlass.blocks.embedding.spec import EmbeddingSpec, padded_rows
from windlass.blocks.mlp.spec import MlpSpec
from windlass.blocks.norm.spec import NormSpec
from windlass.models.hf_format import ConfigSlot, HFFormat, Preset
from windlass.models.assemble import decoder_spec, layer_spec
from windlass.models.spec import Branch, LayerGroup, LayerSpec, ModelSpec


def sandwich_spec(config):
    """Attention and a plain feed-forward block, each between two norms; the last layer without attention."""
    norm = NormSpec(width=config.width, eps=config.norm_eps)
    attention = AttentionSpec(
        width=config.width, heads=config.heads, kv_heads=config.heads, head_dim=config.width // config.heads
    )
    mlp = MlpSpec(width=config.width, hidden=config.ffn or 4 * config.width, activation="gelu")
    mixing = Branch("attention", attention, norm, "attention_norm", norm, "attention_post_norm")
    feeding = Branch("feed_forward", mlp, norm, "ffn_norm", norm, "ffn_post_norm")
    return ModelSpec(
        embedding=EmbeddingSpec(vocab=config.vocab, rows=padded_rows(config.vocab), width=config.width),
        groups=(LayerGroup(LayerSpec((mixing, feeding)), config.layers - 1), LayerGroup(LayerSpec((feeding,)), 1)),
        norm=norm,
        tied=config.tied,
        init_std=config.init_std,
    )


def recurrent_spec(config):
    table = config.block_table("recurrence")
    mixer = RecurrenceSpec(width=config.width, rate=table.rate)
    return decoder_spec(config, [layer_spec(config, "recurrence", mixer, config.ffn)] * config.layers)


def hf_format(family):
    return HFFormat(
        family=family,
        config={"model_type": family, "model": ConfigSlot("*")},
        model_types=(family,),
        library="windlass",
    )


SANDWICH = Preset(spec=sandwich_spec, hf=hf_format("sandwich"))
RECURRENT = Preset(spec=recurrent_spec, hf=hf_format("recurrent"))
'''

FILES = {
    "recurrence_block/__init__.py": "",
    "recurrence_block/spec.py": SPEC,
    "recurrence_block/module.py": MODULE,
    "recurrence_block/parallel.py": PARALLEL,
    "demo_windlass/__init__.py": "",
    "demo_windlass/presets.py": PRESETS,
    "demo_windlass/spec.py": """
from windlass.train.optimizers.spec import OptimizerSpec

SPEC = OptimizerSpec(moments=("last",), update="demo_windlass.update:SignDescent")
""",
    "demo_windlass/update.py": """
import torch
from windlass.train.optimizers.base import Optimizer

class SignDescent(Optimizer):
    @staticmethod
    def rule(weights, gradient, moments, numbers, decay):
        return weights - numbers[1] * torch.sign(gradient), (gradient,)
""",
    "demo_windlass/steps.py": """
def halves(optim, tokens, total):
    return 1.0 if tokens <= total // 2 else 0.5
""",
    "demo_windlass/objective.py": """
from windlass.blocks.head.loss import next_token_loss

class Doubled:
    def loss_function(self, step):
        return lambda *args, **options: next_token_loss(*args, **options) * 2.0

OBJECTIVE = Doubled()
""",
    "demo_windlass/tracker.py": """
class ListTracker:
    uploads_later = False
    lines, closed = [], False

    def __init__(self, run, recipe, first_step):
        assert recipe.trackers.demo

    def log(self, line, count):
        self.lines.append((count, line["step"], line["lr"], line["loss"]))

    def close(self):
        ListTracker.closed = True
""",
    "demo_windlass/engine.py": """
from windlass.train.engines import native

def assemble(model, recipe, step, world, plan, beat):
    parts, optimizer, stepper = native.assemble(model, recipe, step, world, plan, beat)
    parts.notes.append("engine: demo")
    return parts, optimizer, stepper
""",
    "demo_windlass/sensor.py": """
import time

from windlass.energy.sensors import Sample, Sensor

class ShelfSensor(Sensor):
    name = "demo"

    def read(self):
        return [Sample("shelf", "node", joules=1e6 * time.monotonic())]
""",
    "demo_windlass/suite.py": """
from windlass.evaluate.likelihood import likelihoods, token_pair
from windlass.runs.scores import EvalScore

class Phrases:
    kind = "phrase"
    fields = ("phrase",)

    @staticmethod
    def problem(item):
        return None if isinstance(item["phrase"], str) else "phrase must be a text"

    @staticmethod
    def solved_text(item):
        return item["phrase"]

    @staticmethod
    def run(opened, tokenizer, task, items, options):
        pairs = [token_pair(tokenizer, "", item["phrase"]) for item in items]
        answers = likelihoods(opened, pairs, first=tokenizer.eos)
        mean = sum(-nats for nats, _ in answers) / len(answers)
        return [EvalScore(task=task, group="all", metric="nats", value=mean, count=len(items))]
""",
    "demo_windlass-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: demo-windlass\nVersion: 1.0\n",
    "demo_windlass-1.0.dist-info/entry_points.txt": """
[windlass.blocks]
recurrence = recurrence_block
[windlass.presets]
sandwich = demo_windlass.presets:SANDWICH
recurrent = demo_windlass.presets:RECURRENT
[windlass.optimizers]
demo = demo_windlass.spec:SPEC
[windlass.schedules]
demo = demo_windlass.steps:halves
[windlass.objectives]
demo = demo_windlass.objective:OBJECTIVE
[windlass.trackers]
demo = demo_windlass.tracker:ListTracker
[windlass.engines]
demo = demo_windlass.engine:assemble
[windlass.sensors]
demo = demo_windlass.sensor:ShelfSensor
[windlass.suites]
demo = demo_windlass.suite:Phrases
""",
}
