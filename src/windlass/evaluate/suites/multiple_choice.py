"""Multiple choice: {"context": "...", "choices": ["...", "..."], "answer": 0}. The most likely choice is the answer."""

from collections.abc import Sequence

import numpy as np

from windlass.data.tokenizer import Tokenizer
from windlass.evaluate.open_model import OpenModel
from windlass.evaluate.suites import Item, Suite, SuiteOptions, groups
from windlass.evaluate.suites.cloze import score_answers
from windlass.runs.scores import EvalScore, share_score


class MultipleChoice(Suite):
    kind = "multiple choice"
    fields = ("context", "choices", "answer")

    @classmethod
    def problem(cls, item: Item) -> str | None:
        choices, answer = item["choices"], item["answer"]
        if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(c, str) and c for c in choices):
            return "choices must be two or more texts"
        if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
            return f"answer {answer!r} is not the number of one of {len(choices)} choices"
        return None

    @staticmethod
    def solved_text(item: Item) -> str:
        return str(item["context"] + item["choices"][item["answer"]])

    @staticmethod
    def run(
        opened: OpenModel, tokenizer: Tokenizer, task: str, items: Sequence[Item], options: SuiteOptions
    ) -> list[EvalScore]:
        """Accuracy by log-probability, and by log-probability per byte of the choice."""
        questions = [(number, choice) for number, item in enumerate(items) for choice in item["choices"]]
        answers, cut = score_answers(opened, tokenizer, items, questions, MultipleChoice.solved_text, options)
        nats = np.array([answer[0] for answer in answers])
        sizes = np.array([len(choice.encode()) for _, choice in questions])
        ends = np.cumsum([len(item["choices"]) for item in items])[:-1]
        right = {
            metric: [
                int(part.argmax()) == item["answer"] for part, item in zip(np.split(costs, ends), items, strict=True)
            ]
            for metric, costs in {"accuracy": nats, "accuracy_per_byte": nats / sizes}.items()
        }
        detail = {"kind": MultipleChoice.kind, "shots": options.shots, "cut": cut}
        return [
            share_score(task, group, metric, sum(hits[i] for i in inside), len(inside), detail)
            for group, inside in groups(items).items()
            for metric, hits in right.items()
        ]
