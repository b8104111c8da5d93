"""Summarisation: {"document": "...", "summary": "..." or ["...", "..."]}. ROUGE F-measure and chrF, 0 to 100."""

from collections.abc import Sequence

import numpy as np

from windlass.data.tokenizer import Tokenizer
from windlass.evaluate.answers import PromptForm, generate_answers
from windlass.evaluate.open_model import OpenModel
from windlass.evaluate.scores import ratio_score
from windlass.evaluate.suites import Item, Suite, SuiteOptions, groups, is_text_list, text_list
from windlass.evaluate.text_metrics import corpus_score, rouge
from windlass.runs.scores import EvalScore

FORM = PromptForm(
    template="{document}\n\nSummary:",
    field="document",
    solution=lambda item: " " + text_list(item["summary"])[0],
    max_tokens=128,
    stop=("\n\n",),
)


class Summarisation(Suite):
    kind = "summarisation"
    fields = ("document", "summary")
    generates = True

    @classmethod
    def problem(cls, item: Item) -> str | None:
        if not isinstance(item["document"], str) or not item["document"]:
            return "document must be a text"
        return None if is_text_list(item["summary"]) else "summary must be a text or several"

    @staticmethod
    def solved_text(item: Item) -> str:
        return f"{item['document']}\n{text_list(item['summary'])[0]}"

    @staticmethod
    def run(
        opened: OpenModel, tokenizer: Tokenizer, task: str, items: Sequence[Item], options: SuiteOptions
    ) -> list[EvalScore]:
        answers = generate_answers(opened, tokenizer, items, options, FORM)
        texts = [text for (text,) in answers.texts]
        references = [text_list(item["summary"]) for item in items]
        detail = {"kind": Summarisation.kind, **answers.detail}
        scores, values = [], rouge(texts, references)
        for group, inside in groups(items).items():
            for metric, per_item in values.items():
                chosen = np.array([per_item[i] for i in inside])
                scores.append(ratio_score(task, group, metric, chosen, np.ones(len(inside)), detail))
            chosen_references = [references[i] for i in inside]
            scores.append(corpus_score(task, group, "chrf", [texts[i] for i in inside], chosen_references, detail))
        return scores
