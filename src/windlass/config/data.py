"""The `[data]` table: what is read, in which mix and order."""

from typing import Literal

from pydantic import Field, PositiveInt

from windlass.config.base import Table, Tokens


class DataStage(Table):
    """Token position from which this mix applies."""

    start: Tokens = 0
    mix: dict[str, float]


class DataConfig(Table):
    store: str | None = None
    """Folder written by `windlass tokenize` (or a Megatron, OLMo or datatrove store). None: synthetic tokens, for
    benchmarks."""
    tokenizer: str | None = None
    """Tokenizer file or folder (default: the store's)."""
    mix: dict[str, float] = Field(default_factory=dict)
    """Source name -> weight. Empty: every source in proportion to its tokens, times its `epochs` where given."""
    epochs: dict[str, float] = Field(default_factory=dict)
    """Source name -> maximum number of epochs. Without `mix` it is also the weight: 2.0 is read twice as often."""
    max_epochs: float = Field(default=4.0, gt=0)
    """Maximum number of epochs of a source that is not named in `epochs`."""
    stages: list[DataStage] = Field(default_factory=list)
    """Mixes that replace `mix` from a token position on (annealing, continued pre-training)."""
    tokens: Tokens | None = None
    """How many tokens to train on."""
    seq_len: PositiveInt = 2048
    """Tokens of one sequence."""
    batch_tokens: Tokens | None = None
    """Tokens of one optimizer step over all devices."""
    mask_documents: bool = False
    """Attention does not cross document borders inside a packed sequence."""
    pack: Literal["stream"] = "stream"
    """stream: documents are concatenated and cut every seq_len tokens; `mask_documents` keeps attention inside a
    document."""
    validation: str | None = None
    """Split that is held out for validation (default: `validation`, if the store has one)."""
    policy: Literal["any", "lawful"] = "any"
    """lawful refuses a source without licence and origin."""
