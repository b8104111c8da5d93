"""The text of a first recipe and data file, each value with its reason. Pure text, no I/O besides `is_text_path`."""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

from windlass.units import parse_tokens, print_tokens

# Compute-optimal by Hoffmann et al. (2022); models that will be used much are trained on far more.
TOKENS_PER_PARAMETER = 20
# The number of nodes is doubled until the run takes no longer than this.
MAX_DAYS = 30.0
TEXT_SUFFIXES = (".jsonl", ".txt", ".parquet", ".gz", ".zst", ".arrow")


@dataclass(frozen=True, kw_only=True)
class StarterRecipe:
    """The values of a first recipe."""

    name: str
    cluster: str
    nodes: int
    devices_per_node: int
    account: str | None
    parameters: int
    model: dict[str, int]
    store: str | None  # folder of the token store; None: synthetic tokens
    tokens: int
    seq_len: int


def default_name(parameters: float, cluster: str) -> str:
    """1.5e9 on lumi-g -> `llm-1p5b-lumi-g`."""
    size = print_tokens(parameters, 1).replace(".", "p")
    return re.sub(r"[^a-z0-9._-]", "-", f"llm-{size}-{cluster}".lower())


def batch_tokens(parameters: float, seq_len: int, devices: int) -> int:
    """About 64Ki tokens below 100M parameters, 0.5Mi up to 1B, 2Mi up to 5B, 4Mi beyond; equal sequences on every
    device."""
    usual = 2**16 if parameters < 1e8 else 2**19 if parameters <= 1.5e9 else 2**21 if parameters <= 5e9 else 2**22
    unit = seq_len * devices
    return max(1, round(usual / unit)) * unit


def warmup_tokens(tokens: int) -> int:
    """A hundredth of the run, 2B at most, in round numbers."""
    return max(1, round_to_two_digits(min(tokens / 100, 2e9)))


def round_to_two_digits(value: float) -> int:
    unit: int = 10 ** max(0, math.floor(math.log10(max(value, 1))) - 1)
    return round(value / unit) * unit


def recipe_text(a: StarterRecipe) -> str:
    """The recipe as a file; comments say where the values come from."""
    account = (
        f"account = {_text(a.account)}\n" if a.account else '# account = "PROJECT"        # SLURM account to charge\n'
    )
    store = (
        f"store        = {_text(a.store)}\n"
        if a.store
        else '# store      = "data/mine"      # written by windlass tokenize; '
        "without it training reads synthetic tokens\n"
    )
    learning_rate = 1e-3 if a.parameters < 5e8 else 6e-4 if a.parameters < 3e9 else 3e-4  # usual for AdamW at this size
    batch = batch_tokens(a.parameters, a.seq_len, a.nodes * a.devices_per_node)
    shape = "".join(f"{key:<8} = {value}\n" for key, value in a.model.items())
    return (
        f"# Written by windlass init. Every key: docs/reference/recipe.md, or `windlass show --schema`.\n"
        f"name    = {_text(a.name)}\n"
        f"cluster = {_text(a.cluster)}\n"
        f"nodes   = {a.nodes}\n"
        f"[model]                         # {print_tokens(a.parameters)} parameters, shaped like Llama 3\n"
        f'family   = "llama"\n{shape}'
        f"[data]\n{store}"
        f"tokens       = {_tokens(a.tokens)}\n"
        f"seq_len      = {a.seq_len}\n"
        f"batch_tokens = {batch}          # {batch // a.seq_len} sequences on {a.nodes * a.devices_per_node} devices\n"
        f"[optim]\n"
        f"lr      = {learning_rate:g}                 # a usual start for this size; sweep it\n"
        f"warmup  = {_tokens(warmup_tokens(a.tokens))}\n"
        f"# no [layout]: `windlass plan` ranks them, train and launch use the best one and print the reason\n"
        f"[save]\n"
        f'every   = "auto"               # from the measured start-up and save time\n'
        f"keep_last = 3\n"
        f"[launch]\n{account}"
    )


def data_text(name: str, source: str, tokenizer: str, store: str) -> str:
    """A data file for texts that are not tokenized yet."""
    return (
        "# Written by windlass init. What each key means: docs/guides/data.md.\n"
        f"output     = {_text(store)}\n"
        f"tokenizer  = {_text(tokenizer)}\n"
        "validation = 0.001             # share of documents held out\n"
        f"[sources.{re.sub(r'[^A-Za-z0-9_-]', '-', name)}]\n"
        f"paths   = [{_text(source)}]\n"
        "# licence, origin, language and consent go into the ledger and the report:\n"
        '# licence = "CC-BY-4.0"\n'
        '# origin  = "publisher, address, date"\n'
        '# language = "nl"\n'
    )


def is_text_path(path: str) -> bool:
    """Whether the path is a file, pattern or folder of texts, not a token store."""
    folder = Path(path)
    if folder.is_file() or any(c in path for c in "*?["):
        return path.endswith(TEXT_SUFFIXES)
    return (
        folder.is_dir()
        and not (folder / "manifest.json").is_file()
        and any(p.suffix in TEXT_SUFFIXES for p in folder.iterdir())
    )


def _tokens(value: int) -> str:
    """`"450B"` where that is exact, else the number itself."""
    short = print_tokens(value, 3)
    return _text(short) if parse_tokens(short) == value else str(value)


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)
