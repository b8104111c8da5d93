"""Code: {"prompt": "def f(x):\\n", "test": "assert f(1) == 2" or ["assert ...", ...]}. pass@k by running the tests.

Files of HumanEval have this form: their `test` defines `check`, which is called with the function `entry_point`.
"""

import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from math import comb

import numpy as np

from windlass.data.tokenizer import Tokenizer
from windlass.errors import ConfigError
from windlass.evaluate.answers import PromptForm, generate_answers
from windlass.evaluate.open_model import OpenModel
from windlass.evaluate.sandbox import SandboxLimits, check_sandbox, run_programs
from windlass.evaluate.scores import ratio_score
from windlass.evaluate.suites import Item, Suite, SuiteOptions, groups, is_text_list, text_list
from windlass.runs.scores import EvalScore, share_score
from windlass.units import parse_bytes

FORM = PromptForm(
    template="{prompt}",
    field="prompt",
    solution=lambda item: item.get("canonical_solution", ""),
    max_tokens=256,
    # What follows a function at the left margin, as in HumanEval.
    stop=("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\nassert ", "\n```"),
    strip=False,
)
FENCE = re.compile(r"^```\w*\n(.*?)(?:^```|\Z)", re.M | re.S)


class Code(Suite):
    kind = "code"
    fields = ("prompt", "test")
    generates = True

    @classmethod
    def problem(cls, item: Item) -> str | None:
        if not isinstance(item["prompt"], str) or not item["prompt"]:
            return "prompt must be a text"
        if not is_text_list(item["test"]):
            return "test must be a text or several"
        try:
            compile(item_tests(item), "<test>", "exec")
        except (SyntaxError, ValueError) as error:
            return f"test is not Python ({error})"
        return None

    @staticmethod
    def check(options: SuiteOptions) -> None:
        if not options.run_code:
            raise ConfigError(
                "evaluate.code-not-run",
                "a code task runs programs that the model writes, which is off by default",
                hint="add --run-code; docs/guides/generation-tasks.md explains how they are isolated",
            )
        if max(options.pass_at) > options.samples or (options.samples > 1 and options.temperature == 0):
            raise ConfigError(
                "evaluate.too-few-samples",
                f"pass@{max(options.pass_at)} needs {max(options.pass_at)} different answers to each item, but the "
                "task file asks for "
                f"{options.samples} with temperature {options.temperature:g}",
                hint='write for example {"task": {"samples": 20, "pass_at": [1, 10], "temperature": 0.8}}',
            )
        parse_bytes(options.memory)
        check_sandbox(weak=options.weak_sandbox)

    @staticmethod
    def solved_text(item: Item) -> str:
        return str(item["prompt"]) + str(item.get("canonical_solution", ""))

    @staticmethod
    def run(
        opened: OpenModel, tokenizer: Tokenizer, task: str, items: Sequence[Item], options: SuiteOptions
    ) -> list[EvalScore]:
        answers = generate_answers(opened, tokenizer, items, options, FORM, options.samples)
        programs = [
            (program_of(item["prompt"], text), item_tests(item))
            for item, texts in zip(items, answers.texts, strict=True)
            for text in texts
        ]
        limits = SandboxLimits(cpu_seconds=options.cpu_seconds, memory_bytes=parse_bytes(options.memory))
        executions = run_programs(programs, limits, weak=options.weak_sandbox, progress=options.progress)
        size = options.samples
        passed = [sum(one.passed for one in executions[i : i + size]) for i in range(0, len(executions), size)]
        scores = []
        for group, inside in groups(items).items():
            reasons = Counter(one.reason for i in inside for one in executions[i * size : (i + 1) * size])
            missing = executions[0].missing
            detail = {"kind": Code.kind, **answers.detail, "reasons": dict(reasons.most_common()), "missing": missing}
            for k in options.pass_at:
                if size == 1:
                    hits = sum(passed[i] for i in inside)
                    scores.append(share_score(task, group, "pass@1", hits, len(inside), detail))
                    continue
                values = np.array([pass_at_k(size, passed[i], k) for i in inside])
                scores.append(ratio_score(task, group, f"pass@{k}", values, np.ones(len(inside)), detail))
        return scores


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Probability that one of k answers drawn from these passes (Chen et al. 2021, unbiased)."""
    return 1.0 - comb(samples - passed, k) / comb(samples, k)


def item_tests(item: Item) -> str:
    tests = "\n".join(text_list(item["test"]))
    return f"{tests}\ncheck({item['entry_point']})" if "entry_point" in item and "def check(" in tests else tests


def program_of(prompt: str, answer: str) -> str:
    """The prompt and its continuation. An answer with a fenced block is that block, after the prompt where that is
    Python by itself: a block may leave out the imports that the prompt gives."""
    fence = FENCE.search(answer)
    if fence is None:
        return prompt + answer
    with suppress(SyntaxError, ValueError):
        compile(prompt, "<prompt>", "exec")
        return f"{prompt}\n\n{fence[1]}"
    return fence[1]
