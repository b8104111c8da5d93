"""Fine-tuning of a text classifier: a linear head on the last token's hidden state, trained on texts and labels.

Frozen: only the head learns, and the hidden states are computed once. Full: every weight learns. Several seeds give a
spread. Several processes share each batch and average their gradients: their number changes the speed, not the task.
"""

import csv
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from windlass.convert.source import find_tokenizer
from windlass.data.tokenizer import Tokenizer
from windlass.errors import ConfigError, DataError
from windlass.evaluate.open_model import OpenModel, open_model
from windlass.evaluate.scores import EvalScore, append_scores, wilson_interval
from windlass.evaluate.task_files import read_text_file

LabelledTexts = list[tuple[str, str]]  # each text with its label
TEST_SHARE = 0.2  # of the training texts where there is no test file
# Student's t for the 95 % interval of a mean, by number of seeds; from 11 on 2.2 or less.
STUDENT_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    frozen: bool = False
    epochs: int = 3
    batch: int = 16  # texts of one step over all processes
    lr: float | None = None  # None: 1e-3 for a head alone, 5e-5 for every weight
    length: int = 256  # the first so many tokens of a text are read
    seeds: Sequence[int] = (0,)


@dataclass(frozen=True)
class SeedResult:
    seed: int
    accuracy: float
    macro_f1: float
    correct: int
    count: int
    seconds: float
    texts_per_second: float
    losses: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class FinetuneResult:
    train: str
    labels: list[str]
    processes: int
    scores: list[EvalScore]


def finetune(
    run: Path,
    train: Path,
    test: Path | None,
    options: TuneOptions,
    *,
    place: Any,
    step: int | None = None,
    device: str | None = None,
    save: bool = True,
) -> FinetuneResult:
    """One process's part of a fine-tune; `place` is its rank. Files are read first: a bad one costs no loading."""
    texts, test_texts = read_tsv(train), read_tsv(test) if test is not None else None
    device = device or (f"cuda:{place.local_rank}" if torch.cuda.is_available() else "cpu")
    joined = place.world_size > 1 and not dist.is_initialized()
    if joined:
        os.environ.setdefault("MASTER_ADDR", place.master_addr or "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(place.master_port or 29577))
        if device.startswith("cuda"):
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if device.startswith("cuda") else "gloo", rank=place.rank, world_size=place.world_size
        )
    try:
        opened = open_model(run, step=step, device=device, dtype="fp32")
        unused = [opened]

        def fresh_model() -> OpenModel:
            return unused.pop() if unused else open_model(run, step=step, device=device, dtype="fp32")

        results, labels = classify(fresh_model, find_tokenizer(opened.source), texts, test_texts, options)
        scores = seed_scores(Path(train).stem, results, labels, options)
        if place.rank == 0 and save and opened.source.run is not None:
            append_scores(opened.source.run, scores, step=opened.step, tokens=opened.tokens)
        return FinetuneResult(str(train), labels, place.world_size, scores)
    finally:
        if joined:
            dist.destroy_process_group()


def start_workers(devices: int) -> int:
    """Run this very command once per device; the first exit code that is not 0, or 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sizes = {"WORLD_SIZE": f"{devices}", "LOCAL_WORLD_SIZE": f"{devices}"}
    shared = {**os.environ, **sizes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    command = [sys.executable, "-m", "windlass", *sys.argv[1:]]
    workers = [
        subprocess.Popen(command, env={**shared, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}) for rank in range(devices)
    ]
    try:
        codes = [worker.poll() for worker in workers]
        while None in codes and not any(codes):  # when one fails, the others would wait for it forever
            time.sleep(0.1)
            codes = [worker.poll() for worker in workers]
        return next((code for code in codes if code), 0)
    finally:
        for worker in workers:
            worker.kill()  # does nothing to one that has ended


def read_tsv(path: Path | str) -> LabelledTexts:
    """Two columns named `text` and `label` (or `target`), or the first two of a file without such names."""
    lines = read_text_file(Path(path), "classification set").split("\n")
    rows = [row for row in csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE) if row]
    if not rows:
        raise DataError(
            "evaluate.tsv-empty", f"{path} is empty", hint="one text and its label per line, a tab between them"
        )
    header = [name.strip().lower() for name in rows[0]]
    label_name = next((name for name in ("label", "target") if name in header), None)
    text, label, skip = 0, 1, 0
    if "text" in header and label_name is not None:
        text, label, skip = header.index("text"), header.index(label_name), 1
    bad = [
        str(number)
        for number, row in enumerate(rows[skip:], start=1 + skip)
        if len(row) <= max(text, label) or not row[text].strip() or not row[label].strip()
    ]
    if bad:
        raise DataError(
            "evaluate.tsv-line-incomplete",
            f"{path}: line {', '.join(bad[:5])} lacks a text or a label",
            hint="put a tab between text and label",
        )
    return [(row[text], row[label].strip()) for row in rows[skip:]]


def classify(
    fresh_model: Callable[[], OpenModel],
    tokenizer: Tokenizer,
    train: LabelledTexts,
    test: LabelledTexts | None,
    options: TuneOptions,
) -> tuple[list[SeedResult], list[str]]:
    """One result per seed, and the labels. `fresh_model` opens the model again: a full fine-tune changes it."""
    if test is None:  # the same texts for every seed and every number of processes
        order = np.random.default_rng(0).permutation(len(train))
        cut = max(1, round(len(order) * TEST_SHARE))
        train, test = [train[i] for i in order[cut:]], [train[i] for i in order[:cut]]
    labels = sorted({label for _, label in train})
    if len(labels) < 2:
        raise DataError(
            "evaluate.one-label-only",
            f"all {len(train)} training texts have the label {labels[0]!r}",
            hint="there must be at least two labels",
        )
    if unknown := sorted({label for _, label in test} - set(labels)):
        raise DataError(
            "evaluate.test-labels-unknown",
            f"the test set has labels that no training text has: {', '.join(unknown[:5])}",
            hint="are both files of the same task?",
        )
    _, world = _rank_and_world()
    if options.batch % world:
        raise ConfigError(
            "evaluate.batch-not-divisible",
            f"a batch of {options.batch} does not divide over {world} processes",
            hint=f"choose --batch {math.ceil(options.batch / world) * world}",
        )
    results, opened = [], None
    for seed in options.seeds:
        opened = fresh_model() if opened is None or not options.frozen else opened
        results.append(train_classifier(opened, tokenizer, labels, train, test, options, seed))
    return results, labels


def train_classifier(
    opened: OpenModel,
    tokenizer: Tokenizer,
    labels: list[str],
    train: LabelledTexts,
    test: LabelledTexts,
    options: TuneOptions,
    seed: int,
) -> SeedResult:
    """One seed: a head, perhaps the whole model, AdamW and a learning rate that falls linearly to 0."""
    model, device = opened.model, opened.device
    if model.head is None:
        raise ConfigError(
            "evaluate.finetune-transformers-model",
            "a model of family hf cannot be fine-tuned here",
            hint="use a Llama or RetNet, or transformers' own trainer",
        )
    rank, world = _rank_and_world()
    torch.manual_seed(seed)
    head = nn.Linear(model.width, len(labels)).to(device)
    body = [] if options.frozen else list(model.requires_grad_(True).parameters())
    learned = [*head.parameters(), *body]
    lr = options.lr or (1e-3 if options.frozen else 5e-5)
    # The head starts from nothing and needs larger steps than the model.
    groups = [{"params": head.parameters(), "lr": max(lr, 1e-3)}, *([{"params": body, "lr": lr}] if body else [])]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01)

    def encode(texts: LabelledTexts) -> tuple[list[list[int]], Tensor]:
        length = min(options.length, opened.max_length)
        rows = [tokenizer.encode(text)[:length] or [tokenizer.eos or 0] for text, _ in texts]
        return rows, torch.tensor([labels.index(label) for _, label in texts])

    def hidden(rows: list[list[int]]) -> Tensor:
        """The last token's hidden state of each text."""
        width = max(map(len, rows))
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
        last = torch.tensor([len(row) - 1 for row in rows], device=device)
        return model.body(tokens)[torch.arange(len(rows), device=device), last].float()

    @torch.no_grad()
    def features(rows: list[list[int]]) -> Tensor:
        """Hidden states of all texts; each process computes every world-th of them."""
        states = torch.zeros(len(rows), model.width, device=device)
        mine = range(rank, len(rows), world)
        for start in range(0, len(mine), options.batch):
            part = mine[start : start + options.batch]
            states[list(part)] = hidden([rows[i] for i in part])
        return _summed(states)

    started = time.perf_counter()
    rates = [group["lr"] for group in optimizer.param_groups]
    rows, goals = encode(train)
    frozen_states = features(rows) if options.frozen else None
    random, losses = np.random.default_rng(seed), list[float]()
    steps = options.epochs * math.ceil(len(rows) / options.batch)
    for _ in range(options.epochs):
        order = random.permutation(len(rows)).tolist()
        for batch in (order[start : start + options.batch] for start in range(0, len(order), options.batch)):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * (1 - len(losses) / steps)
            optimizer.zero_grad()
            loss = torch.zeros((), device=device)
            if mine := batch[rank::world]:
                inputs = frozen_states[mine] if frozen_states is not None else hidden([rows[i] for i in mine])
                loss = F.cross_entropy(head(inputs), goals[mine].to(device), reduction="sum") / len(batch)
                loss.backward()
            for parameter in learned if world > 1 else []:
                if parameter.grad is None:  # none of this process's texts touched it
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)
            nn.utils.clip_grad_norm_(learned, 1.0)
            optimizer.step()
            losses.append(float(_summed(loss.detach())))
    seconds = time.perf_counter() - started
    test_rows, truth = encode(test)
    with torch.no_grad():
        guesses = head(features(test_rows)).argmax(-1).cpu()
    right = guesses == truth
    return SeedResult(
        seed=seed,
        accuracy=float(right.float().mean()),
        macro_f1=macro_f1(guesses, truth, len(labels)),
        correct=int(right.sum()),
        count=len(truth),
        seconds=seconds,
        texts_per_second=options.epochs * len(train) / seconds,
        losses=losses,
    )


def _rank_and_world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _summed(value: Tensor) -> Tensor:
    """The sum over all processes."""
    if dist.is_initialized():
        dist.all_reduce(value)
    return value


def macro_f1(guesses: Tensor, truth: Tensor, count: int) -> float:
    """Mean over labels of 2 TP / (2 TP + FP + FN); a label that neither side has counts as 0, as in scikit-learn."""
    confusion = torch.bincount(truth * count + guesses, minlength=count * count).view(count, count).double()
    either = confusion.sum(0) + confusion.sum(1)
    return float((2 * confusion.diag() / either.clamp(min=1)).mean())


def seed_scores(
    task: str, results: Sequence[SeedResult], labels: Sequence[str], options: TuneOptions
) -> list[EvalScore]:
    """Means over seeds; the interval is that of the spread over seeds, or of the test texts of a single seed."""
    detail = {
        "kind": "classification",
        "frozen": options.frozen,
        "labels": len(labels),
        "epochs": options.epochs,
        "processes": _rank_and_world()[1],
        "seeds": [{**asdict(result), "losses": result.losses[-1:]} for result in results],
        "texts_per_second": float(np.mean([result.texts_per_second for result in results])),
    }
    count, scores = results[0].count, []
    for metric in ("accuracy", "macro_f1"):
        values = np.array([getattr(result, metric) for result in results])
        mean = float(values.mean())
        low, high = wilson_interval(results[0].correct, count) if metric == "accuracy" else (None, None)
        if len(values) > 1:
            half = STUDENT_T.get(len(values), 2.2) * float(values.std(ddof=1)) / len(values) ** 0.5
            low, high = max(0.0, mean - half), min(1.0, mean + half)
        scores.append(
            EvalScore(task=task, group="all", metric=metric, value=mean, low=low, high=high, count=count, detail=detail)
        )
    return scores
