"""Fine-tuning on labelled examples with the same loop: its plan, its batches, and validation by scores."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from windlass.config import Recipe
from windlass.config.ramp import BatchPhase
from windlass.config.tune import TuneConfig, lower_is_better
from windlass.data.complete_tune import changed_files
from windlass.data.example_batches import (
    EncodedExamples,
    ExampleOrder,
    empty_targets,
    encoder_of_tokenizer,
    encoder_of_transformers,
    micro_batches,
)
from windlass.data.examples import read_example_sets
from windlass.data.mix import SourcePasses
from windlass.data.tokenizer import load_tokenizer
from windlass.errors import ConfigError, DataError
from windlass.layout.types import IGNORED, Layout
from windlass.models.task_head import TaskHead
from windlass.runs.folder import Run
from windlass.runs.scores import EvalScore, append_scores, wilson_interval
from windlass.train.batches import BatchPlan, ExampleBatch
from windlass.train.label_metrics import label_scores
from windlass.train.mesh import World
from windlass.train.parallelize import ModelParts
from windlass.train.validate import HeldOutLoss, HeldOutSource, Validation, without_dropout

GPU_WIDTH_MULTIPLE = 32


@dataclass(frozen=True)
class ExamplePlan(BatchPlan):
    """Steps of examples: tokens are those of the texts, without padding."""

    order: ExampleOrder

    def step_size(self, step: int, tokens: int) -> tuple[int, int]:
        chosen = self.order.step(step)
        return int(self.order.lengths[chosen].sum()), len(chosen)

    @property
    def total_tokens(self) -> int:
        epochs, further = divmod(self.steps, self.order.steps_per_epoch)
        batches = self.order.epoch(epochs)[:further]
        return epochs * int(self.order.lengths.sum()) + sum(int(self.order.lengths[batch].sum()) for batch in batches)

    def schedule_position(self, step: int, tokens: int) -> tuple[int, int]:
        """By steps: texts of different length must not change the learning rate."""
        return (step + 1) * self.tokens_per_step, self.steps * self.tokens_per_step


class ExampleStream:
    """Examples of a recipe, tokenized; what the loop asks of a stream."""

    store = None
    sources = ("examples",)

    def __init__(self, recipe: Recipe) -> None:
        tune = recipe.tune
        assert tune is not None
        if changed := changed_files(tune):
            raise DataError(
                "data.changed",
                f"examples have changed since the run was created: {', '.join(changed)}",
                hint="restore the files, or train a new run on these",
            )
        self.tune, self.sets, self.seq_len = tune, read_example_sets(tune), recipe.data.seq_len
        encode, self.pad = open_encoder(recipe)
        self.train, self.validation, self.test = (
            EncodedExamples(part, self.sets.labels, tune, encode, pad=self.pad)
            for part in (self.sets.train, self.sets.validation, self.sets.test)
        )
        self.weights = self.train.class_weights()
        self.order = ExampleOrder(self.train.lengths, tune.batch, recipe.seed, tune.group_by_length)
        self.ledger_hash = ",".join(tune.files.values()) or None

    def head(self) -> TaskHead:
        return TaskHead(
            self.tune.task,
            max(1, len(self.sets.labels)),
            pad=self.pad,
            class_weights=None if self.weights is None else tuple(self.weights),
            dropout=self.tune.dropout,
        )

    def check(self, tokens: int) -> None: ...

    def epochs(self, tokens: int) -> list[SourcePasses]:
        return []

    def packing_line(self) -> str:
        cut = self.train.cut + self.validation.cut + self.test.cut
        texts = (
            f"{len(self.train):,} for training, {len(self.validation):,} for validation, {len(self.test):,} for test"
        )
        return f"examples: {texts}; {cut:,} were cut to {self.seq_len:,} tokens"


def open_encoder(recipe: Recipe) -> tuple[Callable[..., Any], int]:
    if recipe.model.family == "hf":
        return encoder_of_transformers(recipe)
    if recipe.data.tokenizer is None:
        raise ConfigError(
            "tune.no-tokenizer",
            "data.tokenizer is not given, and the model has none of its own",
            hint="name the tokenizer that the model was trained with",
        )
    return encoder_of_tokenizer(load_tokenizer(Path(recipe.data.tokenizer)), recipe.data.seq_len)


def example_plan(recipe: Recipe, layout: Layout, order: ExampleOrder) -> ExamplePlan:
    assert recipe.tune is not None
    steps = recipe.train.steps or math.ceil(recipe.tune.epochs * order.steps_per_epoch)
    phase = BatchPhase(0, recipe.tune.batch * recipe.data.seq_len, steps)
    return ExamplePlan(layout, recipe.data.seq_len, (phase,), order)


class ExampleReader:
    """Batches from a step on. Reading is padding of tokens in memory: no thread is needed."""

    wait_seconds = 0.0

    def __init__(self, stream: ExampleStream, plan: ExamplePlan, world: World, step: int) -> None:
        self.stream, self.plan, self.world, self.step = stream, plan, world, step

    def __next__(self) -> ExampleBatch:
        layout, examples = self.plan.layout, self.stream.train
        chosen = self.plan.order.step(self.step)
        self.step += 1
        parts = micro_batches(chosen, layout.micro_batch, layout.accumulation, layout.data, self.world.data_rank)
        rows = [pad(examples, part, self.world, int(chosen[-1]), self.plan.seq_len) for part in parts]
        return ExampleBatch(rows, examples.counted(chosen.tolist(), self.stream.weights))

    def close(self) -> None: ...


def pad(
    examples: EncodedExamples, part: list[int], world: World, spare: int, max_width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """A micro-batch on the device. One without examples computes a short text that does not count: every rank takes
    part in every reduction."""
    # A GPU records its kernels once for each width: there must be few. Tensor-parallel ranks divide the positions.
    multiple = math.lcm(GPU_WIDTH_MULTIPLE if world.cuda else 1, world.layout.tensor)
    batch = examples.pad_rows(
        part or [spare], count=world.layout.micro_batch, width_multiple=multiple, max_width=max_width
    )
    if not part:
        batch.targets[...] = np.nan if batch.targets.dtype.kind == "f" else IGNORED
    tokens, targets, segments = (
        torch.from_numpy(a).to(world.device, non_blocking=True) for a in (batch.tokens, batch.targets, batch.segments)
    )
    return tokens, targets, segments


def longest_batch(stream: ExampleStream, plan: BatchPlan, world: World) -> ExampleBatch:
    """A step of texts of the greatest length, of which none counts."""
    shape, task = (plan.layout.micro_batch, plan.seq_len), stream.tune.task
    targets = torch.from_numpy(empty_targets(task, *shape, len(stream.sets.labels))).to(world.device)
    tokens = torch.zeros(shape, dtype=torch.long, device=world.device)
    return ExampleBatch([(tokens, targets, tokens)] * plan.layout.accumulation, 1.0)


@dataclass(frozen=True)
class ExampleValidation(Validation):
    """`selected` is the score that is compared between passes."""

    selected: str = "loss"

    def compared(self, metric: str) -> float | None:
        value = self.overall.loss if self.selected == "loss" else self.scores[self.selected]
        return value if value is None or lower_is_better(self.selected) else -value


class ExampleValidator:
    """Loss and scores on held-out examples, computed by all ranks together."""

    def __init__(self, stream: ExampleStream, world: World, parts: ModelParts) -> None:
        self.stream, self.world, self.parts = stream, world, parts
        self.held: list[HeldOutSource] = []
        self.selected = stream.tune.selected_metric

    def run(
        self, stopping: Callable[[], object] = lambda: None, examples: EncodedExamples | None = None
    ) -> ExampleValidation | None:
        examples = self.stream.validation if examples is None else examples
        layout, world, stream = self.world.layout, self.world, self.stream
        order = np.argsort(-examples.lengths, kind="stable")
        step = layout.micro_batch * layout.data
        head = stream.head()
        loss, answers = 0.0, dict[int, Any]()
        with torch.no_grad(), without_dropout(self.parts.modules):
            for at in range(0, len(order), step):
                part = micro_batches(order[at : at + step], layout.micro_batch, 1, layout.data, world.data_rank)[0]
                tokens, targets, segments = pad(examples, part, world, int(order[-1]), stream.seq_len)
                logits = self.parts.modules[0](tokens, None, segments).float()
                loss += float(head.sums(logits, targets)[1])
                answers |= dict(zip(part, self._answers(logits, targets), strict=False))
                if stopping():
                    return None
        total = torch.tensor(loss * world.counts_loss, dtype=torch.float64, device=world.device)
        world.sum_(total)
        gathered = [answers]
        if world.size > 1:
            gathered = [{} for _ in range(world.size)]
            dist.all_gather_object(gathered, answers)
        by_example = {index: answer for part_answers in gathered for index, answer in part_answers.items()}
        pairs = [by_example[index] for index in range(len(examples))]
        scores = label_scores(stream.tune.task, [guess for guess, _ in pairs], [truth for _, truth in pairs])
        mean = float(total) / examples.counted(range(len(examples)), stream.weights)
        return ExampleValidation(HeldOutLoss(mean, None), {}, {}, scores, self.selected)

    def _answers(self, logits: Tensor, targets: Tensor) -> list[tuple[Any, Any]]:
        """Prediction and truth of each row."""
        task, labels = self.stream.tune.task, self.stream.sets.labels
        if task == "regress":
            return list(zip(logits.flatten().tolist(), targets.tolist(), strict=True))
        if task == "multi_label":
            return list(zip((logits > 0).long().tolist(), targets.nan_to_num().long().tolist(), strict=True))
        best = logits.argmax(-1)
        if task == "classify":
            return list(zip(best.tolist(), targets.tolist(), strict=True))
        rows = zip(best.tolist(), targets.tolist(), strict=True)
        return [
            ([labels[b] for b, t in zip(guess, truth, strict=True) if t != IGNORED],
             [labels[t] for t in truth if t != IGNORED])
            for guess, truth in rows
        ]  # fmt: skip


def record_test(
    run: Run, validation: ExampleValidation, tune: TuneConfig, *, step: int, tokens: int, count: int
) -> None:
    """Scores of the test examples; of the accuracy of labels also the interval."""
    scores = []
    for name, value in {**validation.scores, "loss": validation.overall.loss}.items():
        is_share = name == "accuracy" and tune.task == "classify" and value is not None
        low, high = wilson_interval(round((value or 0.0) * count), count) if is_share else (None, None)
        detail = {"kind": tune.task, **asdict(validation.overall)}
        place = {"task": Path(tune.test or "").stem, "group": "all", "metric": name}
        scores.append(EvalScore(**place, value=value, low=low, high=high, count=count, detail=detail))
    append_scores(run, scores, step=step, tokens=tokens)
