"""EleutherAI's lm-evaluation-harness on the native model: no export, no transformers, no network with local tasks."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from windlass.data.chat import load_chat_template
from windlass.data.tokenizer import Tokenizer
from windlass.errors import ConfigError
from windlass.evaluate.answers import NativeEngine
from windlass.evaluate.generate import Sampling, prompt_room, text_before
from windlass.evaluate.likelihood import end_token, likelihoods, token_pair
from windlass.evaluate.open_model import OpenModel
from windlass.runs.scores import EvalScore


def run_harness(
    opened: OpenModel,
    tokenizer: Tokenizer,
    tasks: Sequence[str],
    *,
    folder: Path | None = None,
    shots: int | None = None,
    limit: int | None = None,
    batch: int | None = None,
    chat: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[list[EvalScore]]:
    """Scores of each harness task in turn; with `folder`, the tasks are its YAML files only."""
    try:
        import datasets
        import lm_eval
        import lm_eval.api.model
        import lm_eval.tasks
    except ImportError:
        raise ConfigError(
            "evaluate.harness-missing",
            "the harness needs the package lm-eval",
            hint="pip install 'windlass[eval]'",
        ) from None
    if int(datasets.__version__.partition(".")[0]) < 4:
        raise ConfigError(
            "evaluate.dataset-scripts",
            f"datasets {datasets.__version__} runs the Python scripts of data sets that a task names",
            hint="pip install 'datasets>=4', which reads data files only",
        )
    if folder is not None and not folder.is_dir():
        raise ConfigError(
            "evaluate.harness-folder-missing",
            f"there is no folder {folder} with harness tasks",
            hint="give the folder that has one YAML file per task",
        )
    manager = lm_eval.tasks.TaskManager(include_path=str(folder) if folder else None, include_defaults=folder is None)
    if unknown := [name for name in tasks if name not in manager.all_tasks]:
        available = ", ".join(sorted(manager.all_tasks)[:8])
        raise ConfigError(
            "evaluate.harness-task-unknown",
            f"the harness has no task {', '.join(unknown)}",
            hint=f"use one of {available}" if available else "the folder contains no task",
        )

    template = load_chat_template(tokenizer) if chat else None

    class NativeModel(lm_eval.api.model.LM):  # type: ignore[misc]
        tokenizer_name = str(tokenizer.path)

        def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            pairs = [token_pair(tokenizer, *request.args, specials=chat) for request in requests]
            return likelihoods(opened, pairs, first=tokenizer.eos, batch=batch, progress=progress)

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            return [rolling_likelihood(opened, tokenizer, request.args[0]) for request in requests]

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            pairs = [request.args for request in requests]
            return generate_until(opened, tokenizer, pairs, batch=batch, specials=chat, progress=progress)

        def apply_chat_template(
            self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True, **_: Any
        ) -> str:
            assert template is not None
            return template.render(chat_history, add_generation_prompt=add_generation_prompt)

        def chat_template(self, chat_template: bool | str = False) -> str | None:
            return template.source if template is not None else None

    model = NativeModel()
    for name in tasks:  # one by one: stopping in the next one loses nothing
        results = lm_eval.simple_evaluate(
            model=model,
            tasks=[name],
            num_fewshot=shots,
            limit=limit,
            task_manager=manager,
            bootstrap_iters=1000,
            log_samples=False,
            apply_chat_template=chat,
        )
        yield [score for part in results["results"] for score in harness_scores(part, results)]


def rolling_likelihood(opened: OpenModel, tokenizer: Tokenizer, text: str) -> float:
    """Log-probability of a text in windows of the model's length; every token is scored once."""
    ids, length = tokenizer.encode(text), opened.max_length
    if not ids:
        return 0.0
    tokens = [end_token(tokenizer.eos), *ids]
    # The last window reaches back for context, as the harness's own windows do.
    windows = [
        (tokens[max(0, min(len(ids), start + length) - length) : start + 1], ids[start : start + length])
        for start in range(0, len(ids), length)
    ]
    return sum(nats for nats, _ in likelihoods(opened, windows, first=tokenizer.eos))


def generate_until(
    opened: OpenModel,
    tokenizer: Tokenizer,
    requests: Sequence[tuple[str, dict[str, Any]]],
    *,
    batch: int | None = None,
    specials: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[str]:
    """Greedy (or sampled) text up to one of the stop strings of each request; those with equal settings together.

    `specials`: the contexts are rendered chat templates.
    """
    engine, texts, done = NativeEngine(opened, tokenizer, batch), [""] * len(requests), 0
    chat_end = load_chat_template(tokenizer).end_token if specials else None
    ends = [end for end in {tokenizer.eos, chat_end} if end is not None]
    settings = [json.dumps(request, sort_keys=True, default=str) for _, request in requests]
    for setting in dict.fromkeys(settings):
        numbers = [number for number, other in enumerate(settings) if other == setting]
        request = requests[numbers[0]][1]
        stops = request.get("until") or []
        stops = [stops] if isinstance(stops, str) else list(stops)
        count = int(request.get("max_gen_toks") or request.get("max_new_tokens") or 256)
        sampling = Sampling(
            tokens=count,
            temperature=float(request.get("temperature") or 0.0) if request.get("do_sample") else 0.0,
            top_p=float(request.get("top_p") or 1.0),
        )
        room = prompt_room(opened, count)
        prompts = [tokenizer.encode(requests[number][0], specials=specials)[-room:] for number in numbers]
        answers = engine.complete(
            prompts,
            [replace(sampling, seed=number) for number in numbers],
            ends=ends,
            stops=stops,
            progress=lambda part, _, before=done: progress(before + part, len(requests)),  # type: ignore[misc]
        )
        for number, ids in zip(numbers, answers, strict=True):
            texts[number] = text_before(tokenizer.decode(ids), stops)
        done += len(numbers)
    return texts


def harness_scores(task: str, results: dict[str, Any]) -> list[EvalScore]:
    """The harness writes "acc,none" and "acc_stderr,none"; the part after the comma is a filter."""
    values, scores = results["results"][task], []
    samples, shots, version = ((results.get(name) or {}).get(task) for name in ("n-samples", "n-shot", "versions"))
    detail = {"kind": "lm-evaluation-harness", "shots": shots, "version": version}
    for key, value in values.items():
        metric, _, filter_name = key.partition(",")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or metric.endswith("_stderr") or not filter_name:
            continue
        error = values.get(f"{metric}_stderr,{filter_name}")
        half = 1.96 * error if isinstance(error, int | float) else None
        scores.append(
            EvalScore(
                task=task,
                group="all",
                metric=metric if filter_name == "none" else f"{metric} ({filter_name})",
                value=float(value),
                low=None if half is None else value - half,
                high=None if half is None else value + half,
                count=int((samples or {}).get("effective") or 0),
                detail=detail,
            )
        )
    return scores
