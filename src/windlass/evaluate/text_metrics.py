"""Measures of generated text: ROUGE, BLEU and chrF, exact match and token F1, and the language of a text. No torch."""

import string
import tomllib
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from windlass.errors import ConfigError
from windlass.evaluate.scores import RESAMPLES
from windlass.runs.scores import EvalScore

ROUGE_TYPES = ("rouge1", "rouge2", "rougeL")
# Written without spaces between words: a character counts as a word.
UNSPACED = ("CJK", "HIRAGANA", "KATAKANA", "THAI")


def import_metric(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise ConfigError(
            f"evaluate.{package.replace('_', '-')}-missing",
            f"the scores of this task need the package {package}",
            hint="pip install 'windlass[eval]'",
        ) from None


@cache
def script_of(character: str) -> str | None:
    """LATIN, GREEK, CJK ...; None for what is not a letter."""
    if not unicodedata.category(character).startswith("L"):
        return None
    return unicodedata.name(character, "UNKNOWN").split()[0]


def words_of(text: str) -> list[str]:
    """Words in lower case: letters, marks and digits of any script, a character each where words are not spaced."""
    spaced = "".join(
        f" {c} " if script_of(c) in UNSPACED else c if unicodedata.category(c)[0] in "LMN" else " "
        for c in unicodedata.normalize("NFC", text).lower()
    )
    return spaced.split()


class _Words:
    """rouge_score's own tokenizer drops every letter that is not ASCII. On ASCII text this one gives the same words."""

    tokenize = staticmethod(words_of)


def rouge(texts: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, list[float]]:
    """F-measure x 100 of each text with the best of its references, by ROUGE type."""
    scorer = import_metric("rouge_score.rouge_scorer").RougeScorer(ROUGE_TYPES, tokenizer=_Words())
    scores = [scorer.score_multi(targets, text) for text, targets in zip(texts, references, strict=True)]
    return {name: [100 * score[name].fmeasure for score in scores] for name in ROUGE_TYPES}


def corpus_score(
    task: str,
    group: str,
    metric: str,
    texts: Sequence[str],
    references: Sequence[Sequence[str]],
    detail: Mapping[str, Any],
) -> EvalScore:
    """BLEU or chrF of sacrebleu, with an interval over resampled texts; texts may have several references."""
    metrics = import_metric("sacrebleu.metrics")
    computed = metrics.BLEU(effective_order=False) if metric == "bleu" else metrics.CHRF()
    most = max(map(len, references))
    columns = [[refs[i] if i < len(refs) else None for refs in references] for i in range(most)]
    value = computed.corpus_score(texts, columns).score
    score = EvalScore(task=task, group=group, metric=metric, value=value, count=len(texts), detail=detail)
    if len(texts) < 2:
        return score
    # The counts of one text are computed once; a resample only adds them up.
    counts: Any = np.array(computed._extract_corpus_statistics(texts, columns))
    random = np.random.default_rng(0)
    samples = [random.integers(0, len(texts), len(texts)) for _ in range(RESAMPLES // 4)]
    values = [computed._aggregate_and_compute(counts[sample].tolist()).score for sample in samples]
    low, high = np.quantile(values, (0.025, 0.975)).tolist()
    return replace(score, low=low, high=high)


@cache
def languages() -> dict[str, dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_name("languages.toml").read_text(encoding="utf-8"))


def normalize_answer(text: str, language: str = "en") -> str:
    """As SQuAD: lower case, no punctuation, no articles, single spaces."""
    kept = "".join(c for c in text.lower() if c not in string.punctuation and unicodedata.category(c)[0] != "P")
    articles = languages().get(language, {}).get("articles", "").split()
    return " ".join(word for word in kept.split() if word not in articles)


def exact_match(text: str, answers: Sequence[str], language: str = "en") -> bool:
    return normalize_answer(text, language) in [normalize_answer(answer, language) for answer in answers]


def token_f1(text: str, answers: Sequence[str], language: str = "en") -> float:
    """Overlap of words with the best of the answers."""

    def tokens(words: str) -> Counter[str]:
        spaced = "".join(f" {c} " if script_of(c) in UNSPACED else c for c in normalize_answer(words, language))
        return Counter(spaced.split())

    def f1(ours: Counter[str], theirs: Counter[str]) -> float:
        if not ours or not theirs:
            return float(ours == theirs)
        return 2 * (ours & theirs).total() / (ours.total() + theirs.total())

    return max(f1(tokens(text), tokens(answer)) for answer in answers)


def is_language(text: str, language: str) -> bool:
    """By script, and by frequent words where several languages share the script."""
    scripts = [script for c in text if (script := script_of(c)) is not None]
    rule = languages()[language]
    if not scripts or sum(script in rule["script"] for script in scripts) < 0.8 * len(scripts):
        return False
    if "words" not in rule:
        return True
    counts = Counter(words_of(text))
    hits = {
        name: sum(counts[word] for word in other["words"].split())
        for name, other in languages().items()
        if other["script"] == rule["script"]
    }
    return hits[language] > 0 and hits[language] == max(hits.values())
