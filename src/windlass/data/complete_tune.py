"""What a `[tune]` table leaves open, from the files that it names: labels, hashes, steps, tokens, the mask token."""

import hashlib
import math
from pathlib import Path

from windlass.config import LayoutConfig, Recipe
from windlass.config.tune import SCORES, TuneConfig
from windlass.data.examples import read_example_sets
from windlass.data.store import Store, open_store
from windlass.data.stream import StoreStream, open_stream
from windlass.data.tokenizer import load_tokenizer
from windlass.errors import ConfigError, DataError
from windlass.layout.types import AXES

# Texts of a forward pass where the recipe does not say it. More passes in a step write all gradients more often.
MICRO_BATCH = 32
# Tokens of BERT's and RoBERTa's tokenizers.
MASK_NAMES = ("[MASK]", "<mask>")
SPECIAL_NAMES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "<s>", "</s>", "<pad>", "<unk>")


def complete_tune(recipe: Recipe, devices: int = 1) -> Recipe:
    """The recipe of a run on so many devices; a recipe without `[tune]` is returned as it is."""
    tune = recipe.tune
    if tune is None:
        return recipe
    if tune.reads_examples:
        return with_examples(recipe, tune, devices)
    if tune.task == "masked":
        return recipe.model_copy(update={"tune": with_mask_token(recipe, tune)})
    if tune.task in ("chat", "prefer"):
        file = Path(recipe.data.store or "")
        check_form(recipe, open_store(file) if recipe.data.store and file.is_dir() else None)
    if recipe.data.tokens or recipe.train.steps:
        return recipe
    stream = open_stream(recipe.data, seed=recipe.seed, vocab=recipe.model.vocab)
    windows = int(stream.mixture.windows.sum()) if isinstance(stream, StoreStream) else 0
    tokens = max(1, math.ceil(tune.epochs * windows)) * recipe.data.seq_len
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"tokens": tokens})})


def with_examples(recipe: Recipe, tune: TuneConfig, devices: int) -> Recipe:
    supported = ("tensor",) if recipe.model.family != "hf" else ()
    if divided := [
        axis for axis in AXES if recipe.layout and getattr(recipe.layout, axis) > 1 and axis not in supported
    ]:
        raise ConfigError(
            "tune.axis-unsupported",
            f"layout.{divided[0]} ({getattr(recipe.layout, divided[0])}): task {tune.task!r} of a "
            f"{recipe.model.family} model is not divided along this axis",
            hint=f'set layout.{divided[0]} = 1; layout.shard = "full" divides the weights',
        )
    replicas = devices // (recipe.layout.tensor if recipe.layout else 1)
    per_replica, remainder = divmod(tune.batch, max(1, replicas))
    if remainder:
        raise ConfigError(
            "tune.batch-not-divisible",
            f"tune.batch ({tune.batch}) does not divide over {replicas} replicas on {devices} devices",
            hint=f"use {(per_replica + 1) * replicas}, the next larger batch that does",
        )
    layout = recipe.layout or LayoutConfig(micro_batch=math.gcd(per_replica, MICRO_BATCH))
    if tune.selected_metric not in ("loss", *SCORES[tune.task]):
        raise ConfigError(
            "tune.metric-unknown",
            f"tune.metric = {tune.selected_metric!r} is not a score of task {tune.task}",
            hint=f"use one of loss, {', '.join(SCORES[tune.task])}",
        )
    sets = read_example_sets(tune)
    files = {file: file_hash(file) for file in (tune.train, tune.validation, tune.test) if file is not None}
    steps = math.ceil(len(sets.train) / tune.batch)
    every = recipe.train.eval_every or steps
    best = {"keep_best": max(1, recipe.save.keep_best), "metric": f"val_{tune.selected_metric}"}
    train = {"steps": recipe.train.steps or math.ceil(tune.epochs * steps), "eval_every": every}
    return recipe.model_copy(
        update={
            "layout": layout,
            "tune": tune.model_copy(update={"labels": sets.labels, "files": files}),
            "train": recipe.train.model_copy(update=train),
            # The best weights are those that the test examples see.
            "save": recipe.save.model_copy(update=best),
            "data": recipe.data.model_copy(update={"batch_tokens": tune.batch * recipe.data.seq_len}),
        }
    )


def check_form(recipe: Recipe, store: Store | None) -> None:
    """Refuse a token store of another form than the task learns from. None: it is not written yet; training judges it
    when it starts."""
    data, forms = recipe.data, {} if store is None else {name: store.form(name) for name in store.sources}
    if recipe.task == "chat":
        # Learning the answers of a preference pair would learn the rejected one, too.
        trained = [name for name in forms if not data.mix or data.mix.get(name)]
        if pairs := [name for name in trained if forms[name] == "pairs"]:
            raise DataError(
                "tune.pairs-as-chat",
                f"{', '.join(pairs)} of {data.store} are preference pairs, whose rejected answers must not be learned",
                hint='set tune.task = "prefer", or tokenize conversations (form = "chat")',
            )
    if recipe.task != "prefer":
        return
    if data.pack != "documents":
        raise ConfigError(
            "tune.pairs-not-packed",
            f'[tune] task = "prefer" needs both answers of a pair in one sequence, but data.pack = "{data.pack}"',
            hint='set data.pack = "documents"',
        )
    if (others := [name for name, form in forms.items() if form != "pairs"]) or data.store is None:
        raise DataError(
            "tune.no-pairs",
            f"{', '.join(others)} of {data.store} are not preference pairs" if others else "data.store is not set",
            hint='tokenize them with form = "pairs"; a store for task = "prefer" holds nothing else',
        )


def with_mask_token(recipe: Recipe, tune: TuneConfig) -> TuneConfig:
    """With the ids of the mask token and of special tokens, from the tokenizer of the recipe or of its store."""
    data = recipe.data
    file = data.tokenizer or (open_store(Path(data.store)).tokenizer_file if data.store else None)
    ids: dict[str, int] = {}
    if file is not None:
        tokenizer = load_tokenizer(Path(file))
        for name in (*MASK_NAMES, *SPECIAL_NAMES):
            numbers = tokenizer.encode(name, specials=True)
            if len(numbers) == 1 and tokenizer.decode(numbers).strip() == name:
                ids[name] = numbers[0]
        ids |= {} if tokenizer.eos is None else {"end": tokenizer.eos}
    mask = next((ids[name] for name in MASK_NAMES if name in ids), None)
    mask = mask if tune.mask_token is None else tune.mask_token
    if mask is None:
        raise ConfigError(
            "tune.no-mask-token",
            f"{file or 'the recipe'} has no mask token ({' or '.join(MASK_NAMES)})",
            hint="name a tokenizer that has one, or give the id of an unused token as tune.mask_token",
        )
    special = sorted({mask, *tune.special_tokens, *ids.values()})
    return tune.model_copy(update={"mask_token": mask, "special_tokens": special})


def changed_files(tune: TuneConfig) -> list[str]:
    """Files that are not those with which the run was created."""
    return [file for file, digest in tune.files.items() if not Path(file).is_file() or file_hash(file) != digest]


def file_hash(file: str) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()
