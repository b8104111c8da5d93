"""Translation: {"source": "...", "reference": "..."}. BLEU and chrF of sacrebleu on the first generated line."""

from collections.abc import Mapping, Sequence
from typing import Any

from windlass.data.tokenizer import Tokenizer
from windlass.evaluate.answers import PromptForm, generate_answers
from windlass.evaluate.open_model import OpenModel
from windlass.evaluate.suites import Item, Suite, SuiteOptions, groups
from windlass.evaluate.text_metrics import corpus_score
from windlass.runs.scores import EvalScore

FORM = PromptForm(
    template="{source}\n", field="source", solution=lambda item: item["reference"], max_tokens=64, stop=("\n",)
)


class Translation(Suite):
    kind = "translation"
    fields = ("source", "reference")
    generates = True

    @staticmethod
    def solved_text(item: Item) -> str:
        return f"{item['source']}\n{item['reference']}"

    @staticmethod
    def run(
        opened: OpenModel, tokenizer: Tokenizer, task: str, items: Sequence[Item], options: SuiteOptions
    ) -> list[EvalScore]:
        answers = generate_answers(opened, tokenizer, items, options, FORM)
        lines = [next(iter(text.splitlines()), "").strip() for (text,) in answers.texts]
        return translation_scores(task, items, lines, answers.detail)


def translation_scores(
    task: str, items: Sequence[Item], translations: Sequence[str], detail: Mapping[str, Any]
) -> list[EvalScore]:
    """BLEU and chrF with intervals over resampled sentences."""
    detail = {"kind": Translation.kind, **detail}
    return [
        corpus_score(
            task, group, metric, [translations[i] for i in inside], [[items[i]["reference"]] for i in inside], detail
        )
        for group, inside in groups(items).items()
        for metric in ("bleu", "chrf")
    ]
