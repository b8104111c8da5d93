"""The `[tune]` table: what a model is fine-tuned for, on which examples."""

import math
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from windlass.config.base import Table
from windlass.config.shell import PathText

# What a model is fine-tuned for, on files of examples. `chat` reads a token store of conversations.
Task = Literal["classify", "multi_label", "regress", "tag", "masked", "chat", "prefer"]
EXAMPLE_TASKS = ("classify", "multi_label", "regress", "tag")
# Scores of held-out examples, which `train/label_metrics.py` computes.
SCORES = {
    "classify": ("accuracy", "macro_f1", "weighted_f1", "micro_f1", "matthews"),
    "multi_label": ("accuracy", "macro_f1", "weighted_f1", "micro_f1"),
    "regress": ("pearson", "spearman", "mse"),
    "tag": ("span_f1", "span_precision", "span_recall", "accuracy"),
}
# What is compared between validations where tune.metric = "auto"; the loss for other tasks.
DEFAULT_METRIC = {"classify": "macro_f1", "multi_label": "macro_f1", "regress": "pearson", "tag": "span_f1"}


class LoraConfig(Table):
    rank: PositiveInt = 16
    """Rank (inner size) of the adapters."""
    alpha: PositiveFloat = 32.0
    """The output of an adapter is multiplied by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of an adapter's inputs that is set to zero in training."""
    targets: list[str] = Field(default_factory=list)
    """Names of the layers that get an adapter (wq, w1, ...; q_proj in a transformers model). If empty: those of
    attention and feed-forward."""


class TuneConfig(Table):
    task: Task
    """classify: choose one of several labels for a text or a pair of texts. multi_label: any number of labels.
    regress: predict a number. tag: one label per word (BIO tags). masked: predict hidden tokens of a token store
    (pre-training of an encoder). chat: predict the tokens of the answers in conversations. prefer: learn which of two
    answers is better (DPO)."""
    train: PathText | None = None
    """File of examples: TSV, CSV or JSON lines with named columns; for tag also CoNLL."""
    validation: PathText | None = None
    """Examples on which `metric` is measured (default: a tenth of the training file)."""
    test: PathText | None = None
    """Test examples, evaluated once after training."""
    text: str = "text"
    """Column that holds the text; for tag, the words."""
    pair: str | None = None
    """Column that holds a second text."""
    label: str = "label"
    """Column that holds the label, the list of labels, the number or the tags. A column named `target` is recognised
    too."""
    labels: list[str] = Field(default_factory=list)
    """All labels, in the order of the model's outputs (default: those of the training file, sorted)."""
    files: dict[str, str] = Field(default_factory=dict)
    """SHA-256 of each file; written when the run is created, so that a resumed run reads the same examples."""
    epochs: PositiveFloat = 3.0
    """Number of passes over the training examples."""
    batch: PositiveInt = 32
    """Number of examples in one step, over all devices."""
    class_weights: Literal["equal", "balanced"] = "equal"
    """balanced: examples of rare labels count more, in inverse proportion to the label's share."""
    metric: str = "auto"
    """Score that is compared between validations: loss; accuracy, macro_f1, weighted_f1, micro_f1; matthews for
    classify; pearson, spearman, mse for regress; span_f1, span_precision, span_recall, accuracy for tag. auto:
    macro_f1 for classify and multi_label, pearson for regress, span_f1 for tag, loss for the others."""
    patience: NonNegativeInt = 0
    """Stop after this many validations without a better `metric`; 0: train to the end. The best weights are tested."""
    frozen: bool = False
    """Train only the new head."""
    dropout: float | None = Field(default=None, ge=0, lt=1)
    """Dropout of a transformers model (default: the value in its config)."""
    group_by_length: bool = True
    """Put texts of similar length into one batch, which needs less padding."""
    mask_share: float = Field(default=0.15, gt=0, lt=1)
    """masked: share of tokens that are hidden."""
    mask_token: NonNegativeInt | None = None
    """masked: id of the token that replaces hidden tokens (default: the tokenizer's [MASK] or <mask>)."""
    special_tokens: list[NonNegativeInt] = Field(default_factory=list)
    """masked: ids of tokens that are never hidden; written when the run is created."""
    beta: PositiveFloat = 0.1
    """prefer: DPO's beta; a larger value keeps the answers closer to those of the starting model."""
    lora: LoraConfig | None = None
    """Train small adapters instead of the weights."""

    @property
    def reads_examples(self) -> bool:
        return self.task in EXAMPLE_TASKS

    @property
    def predicts_text(self) -> bool:
        """The model keeps its own head: it can chat, generate and be evaluated as before."""
        return self.task in ("chat", "prefer")

    @property
    def selected_metric(self) -> str:
        return DEFAULT_METRIC.get(self.task, "loss") if self.metric == "auto" else self.metric


def score_range(metric: str) -> tuple[float, float]:
    """The lowest and highest possible value."""
    if lower_is_better(metric):
        return 0.0, math.inf
    return (-1.0 if metric in ("matthews", "pearson", "spearman") else 0.0), 1.0


def lower_is_better(metric: str) -> bool:
    return metric in ("loss", "mse", "bits_per_byte", "perplexity", "overlap_with_training")
