"""Question answering: {"question": "...", "answers": "..." or ["...", "..."], "context": "..." if there is one}.

Exact match and token F1 with the best of the accepted answers, normalised as in SQuAD; `language` chooses the articles.
"""

from collections.abc import Sequence

import numpy as np

from windlass.data.tokenizer import Tokenizer
from windlass.evaluate.answers import PromptForm, generate_answers
from windlass.evaluate.open_model import OpenModel
from windlass.evaluate.scores import ratio_score
from windlass.evaluate.suites import Item, Suite, SuiteOptions, groups, is_text_list, text_list
from windlass.evaluate.text_metrics import exact_match, token_f1
from windlass.runs.scores import EvalScore, share_score

FORM = PromptForm(
    template="{context}\n\nQuestion: {question}\nAnswer:",
    field="question",
    solution=lambda item: " " + text_list(item["answers"])[0],
    max_tokens=32,
    stop=("\n",),
)


class QuestionAnswering(Suite):
    kind = "question answering"
    fields = ("question", "answers")
    generates = True

    @classmethod
    def problem(cls, item: Item) -> str | None:
        if not all(isinstance(text, str) and text for text in (item["question"], item.get("context", "none"))):
            return "question and context must be texts"
        return None if is_text_list(item["answers"]) else "answers must be a text or several"

    @staticmethod
    def solved_text(item: Item) -> str:
        return f"{item.get('context', '')}\n{item['question']} {text_list(item['answers'])[0]}".lstrip("\n")

    @staticmethod
    def run(
        opened: OpenModel, tokenizer: Tokenizer, task: str, items: Sequence[Item], options: SuiteOptions
    ) -> list[EvalScore]:
        answers = generate_answers(opened, tokenizer, items, options, FORM)
        cases = [
            (text, text_list(item["answers"]), item.get("language", "en"))
            for (text,), item in zip(answers.texts, items, strict=True)
        ]
        right = [exact_match(*case) for case in cases]
        overlaps = np.array([token_f1(*case) for case in cases])
        detail = {"kind": QuestionAnswering.kind, **answers.detail}
        scores = []
        for group, inside in groups(items).items():
            hits = sum(right[i] for i in inside)
            scores.append(share_score(task, group, "exact_match", hits, len(inside), detail))
            scores.append(ratio_score(task, group, "f1", overlaps[inside], np.ones(len(inside)), detail))
        return scores
