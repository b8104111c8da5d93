"""What does EleutherAI's lm-evaluation-harness say of the native model? An adapter: no export, no transformers, no network with local tasks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from windlass.data.tokenizer import Tokenizer
from windlass.errors import ConfigError, DataError
from windlass.evaluate.generate import Sampling, generate, stops_at, up_to
from windlass.evaluate.likelihood import likelihoods, pair
from windlass.evaluate.opened import Opened
from windlass.evaluate.record import Score
from windlass.evaluate.tasks import prompt_room


def _package() -> Any:
    try:
        import lm_eval
        import lm_eval.api.model
        import lm_eval.tasks
    except ImportError:
        raise ConfigError(
            "evaluate.harness-needs-package-lm",
            "the harness needs the package lm-eval",
            hint="pip install 'windlass[eval]'",
        ) from None
    return lm_eval


def adapter(opened: Opened, words: Tokenizer, *, batch: int | None = None) -> Any:
    """An `lm_eval` model around ours."""
    lm_eval = _package()

    class Native(lm_eval.api.model.LM):
        tokenizer_name = str(words.path)

        def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            return likelihoods(
                opened, [pair(words, *request.args) for request in requests], first=words.eos, batch=batch
            )

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            return [rolling(opened, words, request.args[0]) for request in requests]

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            return [until(opened, words, *request.args) for request in requests]

    return Native()


def rolling(opened: Opened, words: Tokenizer, text: str) -> float:
    """Log-probability of a whole text, in windows of the model's length; every token is scored once."""
    ids, length = words.encode(text), opened.recipe.data.seq_len
    if not ids:
        return 0.0
    if words.eos is None:
        raise DataError(
            "evaluate.text-without-context-needs",
            "a text without context needs an end-of-document token to begin with",
            hint="the tokenizer names none",
        )
    whole = [words.eos, *ids]
    # The last window reaches back for context, as the harness's own windows do.
    parts = []
    for start in range(0, len(ids), length):
        stop = min(len(ids), start + length)
        parts.append((whole[max(0, stop - length) : start + 1], ids[start:stop]))
    return sum(nats for nats, _ in likelihoods(opened, parts, first=words.eos))


def until(opened: Opened, words: Tokenizer, context: str, how: dict[str, Any]) -> str:
    """Greedy (or sampled) text up to one of the stop texts."""
    stops = how.get("until") or []
    stops = [stops] if isinstance(stops, str) else list(stops)
    count = int(how.get("max_gen_toks") or how.get("max_new_tokens") or 256)
    warm = float(how.get("temperature") or 0.0) if how.get("do_sample") else 0.0
    made = generate(
        opened.model, words.encode(context)[-prompt_room(opened, count) :], Sampling(tokens=count, temperature=warm, top_p=float(how.get("top_p") or 1.0)), eos=words.eos,
        stop=stops_at(stops, words.decode),
    )  # fmt: skip
    return up_to(words.decode(made.ids), stops)


def run_harness(
    opened: Opened, words: Tokenizer, tasks: Sequence[str], *, folder: Path | None = None, shots: int | None = None, limit: int | None = None,
    batch: int | None = None,
) -> list[Score]:  # fmt: skip
    """Scores of harness tasks; with `folder`, its YAML files are the tasks, and nothing else is looked at."""
    lm_eval = _package()
    if folder is not None and not folder.is_dir():
        raise ConfigError(
            "evaluate.folder-harness-tasks",
            f"there is no folder {folder} with harness tasks",
            hint="it holds one YAML file per task",
        )
    manager = lm_eval.tasks.TaskManager(include_path=str(folder) if folder else None, include_defaults=folder is None)
    unknown = [name for name in tasks if name not in manager.all_tasks]
    if unknown:
        known = ", ".join(sorted(manager.all_tasks)[:8])
        raise ConfigError(
            "evaluate.harness-knows-task",
            f"the harness knows no task {', '.join(unknown)}",
            hint=f"it knows {known}" if known else "the folder holds no task",
        )
    found = lm_eval.simple_evaluate(
        model=adapter(opened, words, batch=batch), tasks=list(tasks), num_fewshot=shots, limit=limit, task_manager=manager, bootstrap_iters=1000,
        log_samples=False,
    )  # fmt: skip
    return [score for name, values in found["results"].items() for score in scores_of(name, values, found)]


def scores_of(name: str, values: dict[str, Any], found: dict[str, Any]) -> list[Score]:
    """The harness writes "acc,none" and "acc_stderr,none"."""
    made = []
    count = int(((found.get("n-samples") or {}).get(name) or {}).get("effective") or 0)
    for key, value in values.items():
        metric, _, kind = key.partition(",")
        if not isinstance(value, (int, float)) or isinstance(value, bool) or metric.endswith("_stderr") or not kind:
            continue
        error = values.get(f"{metric}_stderr,{kind}")
        half = 1.96 * error if isinstance(error, (int, float)) else None
        made.append(
            Score(
                task=name, group="all", metric=metric if kind == "none" else f"{metric} ({kind})", value=float(value),
                low=None if half is None else value - half, high=None if half is None else value + half, count=count,
                detail={"kind": "lm-evaluation-harness", "shots": (found.get("n-shot") or {}).get(name), "version": (found.get("versions") or {}).get(name)},
            )
        )  # fmt: skip
    return made
