"""Cloze: {"context": "...", "answer": "..."}. The answer counts as right when greedy decoding gives it."""

from collections.abc import Callable, Sequence

import numpy as np

from windlass.data.tokenizer import Tokenizer
from windlass.evaluate.likelihood import likelihoods, token_pair
from windlass.evaluate.open_model import OpenModel
from windlass.evaluate.scores import ratio_score
from windlass.evaluate.suites import Item, Suite, SuiteOptions, groups, solved_examples
from windlass.runs.scores import EvalScore, share_score


class Cloze(Suite):
    kind = "cloze"
    fields = ("context", "answer")

    @staticmethod
    def solved_text(item: Item) -> str:
        return str(item["context"] + item["answer"])

    @staticmethod
    def run(
        opened: OpenModel, tokenizer: Tokenizer, task: str, items: Sequence[Item], options: SuiteOptions
    ) -> list[EvalScore]:
        """Accuracy, and bits per byte of the answers."""
        questions = [(number, item["answer"]) for number, item in enumerate(items)]
        answers, cut = score_answers(opened, tokenizer, items, questions, Cloze.solved_text, options)
        detail = {"kind": Cloze.kind, "shots": options.shots, "cut": cut}
        bits = np.array([-nats / np.log(2) for nats, _ in answers])
        sizes = np.array([len(item["answer"].encode()) for item in items], dtype=np.float64)
        numbers = groups(items).items()
        hits = [(group, sum(answers[i][1] for i in inside), len(inside)) for group, inside in numbers]
        return [
            *(share_score(task, group, "accuracy", right, count, detail) for group, right, count in hits),
            *(ratio_score(task, group, "bits_per_byte", bits[i], sizes[i], detail) for group, i in numbers),
        ]


def score_answers(
    opened: OpenModel,
    tokenizer: Tokenizer,
    items: Sequence[Item],
    questions: Sequence[tuple[int, str]],
    solved: Callable[[Item], str],
    options: SuiteOptions,
) -> tuple[list[tuple[float, bool]], int]:
    """Likelihood of each (item number, answer) after its context, and how many prompts lost their beginning."""
    prompts = [
        solved_examples(items, number, options.shots, solved) + item["context"] for number, item in enumerate(items)
    ]
    pairs = [token_pair(tokenizer, prompts[number], answer) for number, answer in questions]
    cut = sum(len(context) + len(following) > opened.max_length + 1 for context, following in pairs)
    return likelihoods(opened, pairs, first=tokenizer.eos, batch=options.batch, progress=options.progress), cut
