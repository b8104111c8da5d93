"""Measures of generated text against the libraries and values worked by hand."""

from __future__ import annotations

import re
import string
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.errors import ConfigError
from windlass.evaluate.text_metrics import (
    corpus_score,
    exact_match,
    is_language,
    languages,
    normalize_answer,
    rouge,
    token_f1,
    words_of,
)

ASCII = st.text(st.sampled_from(string.ascii_letters + string.digits + " .,!'-a\n"), max_size=60)


@settings(deadline=None, max_examples=40)
@given(ASCII, st.lists(ASCII, min_size=1, max_size=3))
def test_rouge_is_that_of_the_library(text: str, references: list[str]) -> None:
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rouge1", "rouge2", "rougeL"])
    expected = scorer.score_multi(references, text)
    values = rouge([text], [references])
    assert values == {name: [pytest.approx(100 * score.fmeasure)] for name, score in expected.items()}


def test_rouge_counts_letters_of_every_script() -> None:
    # 3 of 4 words and 2 of 3 pairs are the same: the library alone sees no word in the second text.
    for text, reference in (("żółty ślad łódź płynie", "żółty ślad łódź stoi"), ("один два три п", "один два три ч")):
        values = rouge([text], [[reference]])
        assert values["rouge1"] == [pytest.approx(75)] and values["rouge2"] == [pytest.approx(200 / 3)]
    assert words_of("Don't 東京は2 naïve") == ["don", "t", "東", "京", "は", "2", "naïve"]


def test_several_references_of_chrf() -> None:
    sacrebleu = pytest.importorskip("sacrebleu")
    texts = ["the ship sails", "a winch turns", "wind"]
    references = [["the ship sails out", "a ship sails"], ["the winch turns"], ["wind", "gale", "storm"]]
    columns = [[r[i] if i < len(r) else None for r in references] for i in range(3)]
    score = corpus_score("t", "all", "chrf", texts, references, {})
    assert score.value == pytest.approx(sacrebleu.corpus_chrf(texts, columns).score)
    assert (score.low or 101) < score.value < (score.high or 0)
    only_first = corpus_score("t", "all", "chrf", texts, [r[:1] for r in references], {})
    assert (only_first.value or 0) < (score.value or 0)
    assert corpus_score("t", "all", "bleu", texts[:1], references[:1], {}).low is None


def squad_normalize(text: str) -> str:
    """As the evaluation script of SQuAD 1.1 does it."""
    text = "".join(c for c in text.lower() if c not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


@settings(deadline=None, max_examples=60)
@given(ASCII, ASCII)
def test_answers_are_compared_as_in_squad(text: str, answer: str) -> None:
    ours, theirs = squad_normalize(text).split(), squad_normalize(answer).split()
    assert normalize_answer(text) == " ".join(ours)
    assert exact_match(text, [answer]) == (ours == theirs)
    same = (Counter(ours) & Counter(theirs)).total()
    expected = 0.0 if same == 0 else 2 * same / (len(ours) + len(theirs))
    if ours or theirs:  # SQuAD has no empty answers
        assert token_f1(text, [answer]) == pytest.approx(expected)


def test_answers_by_hand() -> None:
    assert exact_match("The Eiffel Tower.", ["big ben", "eiffel tower"])
    assert token_f1("the big Eiffel tower", ["Eiffel Tower", "x"]) == pytest.approx(2 * 2 / (3 + 2))
    assert exact_match("de haven", ["haven"], "nl") and not exact_match("de haven", ["haven"], "en")
    assert exact_match("„Łódź”", ["łódź"], "pl")
    assert token_f1("東京都", ["東京"], "ja") == pytest.approx(2 * 2 / (3 + 2))
    assert token_f1("", ["x"]) == 0.0


SENTENCES = {
    "en": "The ship sails out of the harbour and the men turn the winch with great power.",
    "nl": "Het schip vaart uit de haven en de mannen draaien de lier met grote kracht.",
    "de": "Das Schiff fährt aus dem Hafen und die Männer drehen die Winde mit großer Kraft.",
    "fr": "Le navire sort du port et les hommes tournent le treuil avec une grande force.",
    "it": "La nave esce dal porto e gli uomini girano il verricello con una grande forza.",
    "es": "El barco sale del puerto y los hombres giran el cabrestante con una gran fuerza.",
    "pl": "Statek wypływa z portu, a mężczyźni kręcą kołowrotem, który jest na pokładzie, i nie przestają.",
    "fi": "Laiva lähtee satamasta ja miehet kääntävät vinssiä, joka on kannella, mutta se ei pysähdy.",
    "sv": "Skeppet lämnar hamnen och männen vrider vinschen som är på däck, men den stannar inte.",
    "uk": "Корабель виходить з гавані, і чоловіки крутять лебідку, що є на палубі, але він не зупиняється.",
    "ru": "Корабль выходит из гавани, и мужчины крутят лебёдку, что стоит на палубе, но он не стоит.",
    "el": "Το πλοίο φεύγει από το λιμάνι.",
    "zh": "船离开港口。",
}


def test_languages_are_told_apart() -> None:
    for name, sentence in SENTENCES.items():
        assert [other for other in SENTENCES if is_language(sentence, other)] == [name]
    assert not is_language("12345", "en") and not is_language("", "en")
    assert not is_language("xyzzy plugh", "en")  # no word of the language
    assert all(rule.keys() <= {"script", "words", "articles"} for rule in languages().values())


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    with pytest.raises(ConfigError) as error:
        rouge(["a"], [["a"]])
    assert error.value.code == "evaluate.rouge-score-missing"
    with pytest.raises(ConfigError) as error:
        corpus_score("t", "all", "bleu", ["a"], [["a"]], {})
    assert error.value.code == "evaluate.sacrebleu-missing"
