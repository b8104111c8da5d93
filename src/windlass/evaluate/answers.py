"""Answers of a model to the items of a task: prompts, engines that generate in batches, and stop strings."""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from windlass.convert.source import ProgressCallback
from windlass.data.chat import ChatTemplate, load_chat_template
from windlass.data.tokenizer import Tokenizer
from windlass.errors import ConfigError
from windlass.evaluate.generate import Sampling, generate_batch, prompt_room, stop_condition, text_before
from windlass.evaluate.open_model import OpenModel
from windlass.evaluate.suites import Item, SuiteOptions, TextEngine, solved_numbers


@dataclass(frozen=True, kw_only=True)
class PromptForm:
    """How a suite asks, unless the task file or the command says otherwise."""

    template: str
    field: str  # field that every template must have
    solution: Callable[[Item], str]  # what follows the prompt in a solved example
    max_tokens: int
    stop: tuple[str, ...] = ()  # not in a chat, where a token ends the answer
    strip: bool = True  # white space around the answer is ignored


@dataclass(frozen=True)
class Answers:
    texts: list[list[str]]  # samples of each item
    detail: dict[str, Any]  # for the scores


class NativeEngine:
    """Our decoder; on a GPU it replays the recorded kernels of a token."""

    def __init__(self, opened: OpenModel, tokenizer: Tokenizer, batch: int | None = None) -> None:
        self.opened, self.tokenizer, self.batch = opened, tokenizer, batch

    def complete(
        self,
        prompts: Sequence[list[int]],
        samplings: Sequence[Sampling],
        *,
        ends: Sequence[int],
        stops: Sequence[str],
        strip: bool = False,
        progress: ProgressCallback = lambda done, total: None,
    ) -> list[list[int]]:
        answers: list[list[int]] = [[] for _ in prompts]
        stop = stop_condition(stops, self.tokenizer.decode, strip=strip)
        # Long prompts first: memory runs out at once or never, and the rows of a batch have similar lengths.
        order, done = sorted(range(len(prompts)), key=lambda i: -len(prompts[i])), 0
        while done < len(order):
            longest, tokens = len(prompts[order[done]]), samplings[0].tokens
            size = self.batch or max(1, self.opened.batch_tokens // (longest + tokens))
            chosen = order[done : done + size]
            # Rows take the part that only longer prompts have token by token: no more steps than the answer itself.
            chosen = [i for i in chosen if longest - len(prompts[i]) <= max(32, tokens)]
            rows = generate_batch(
                self.opened.model, [prompts[i] for i in chosen], [samplings[i] for i in chosen], ends=ends, stop=stop
            )
            for number, row in zip(chosen, rows, strict=True):
                answers[number] = row.ids
            done += len(chosen)
            progress(done, len(order))
        return answers


class VllmEngine:
    """vLLM on an exported folder; it plans its own batches."""

    REQUESTS = 1024  # between two reports of progress

    def __init__(self, opened: OpenModel) -> None:
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout is for tables and --json
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        try:
            import vllm
        except ImportError:
            raise ConfigError(
                "evaluate.vllm-missing",
                "--engine vllm needs the package vllm, which is not installed",
                hint="pip install vllm, or omit --engine: windlass's own decoder also generates in batches",
            ) from None
        if opened.source.run is not None:
            raise ConfigError(
                "evaluate.vllm-needs-export",
                f"vLLM reads Hugging Face folders, and {opened.source.run.path} is a run folder",
                hint=f"windlass export {opened.source.run.argument} --to DIR, then windlass eval DIR --engine vllm",
            )
        self.vllm: Any = vllm
        options: dict[str, Any] = {
            "dtype": str(opened.dtype).removeprefix("torch."),
            "max_model_len": opened.max_length,
        }
        if opened.device.type == "cpu":  # vLLM wants 92 % of the memory, and refuses to start where others use more
            options["gpu_memory_utilization"] = os.sysconf("SC_AVPHYS_PAGES") / os.sysconf("SC_PHYS_PAGES") / 2
        try:
            self.model = vllm.LLM(model=str(opened.source.folder), **options)
        except Exception as error:  # its own, of many kinds
            raise ConfigError(
                "evaluate.vllm-failed",
                f"vLLM {vllm.__version__} did not start: {str(error).splitlines()[0]}",
                hint="its log above names the cause; omit --engine: windlass's own decoder also generates in batches",
            ) from error

    def complete(
        self,
        prompts: Sequence[list[int]],
        samplings: Sequence[Sampling],
        *,
        ends: Sequence[int],
        stops: Sequence[str],
        strip: bool = False,
        progress: ProgressCallback = lambda done, total: None,
    ) -> list[list[int]]:
        answers: list[list[int]] = []
        # vLLM would also stop in white space at the beginning: those strings only cut the finished text.
        used = [stop for stop in stops if stop.strip() or (stop and not strip)]
        for start in range(0, len(prompts), self.REQUESTS):
            params = [
                self.vllm.SamplingParams(
                    temperature=one.temperature,
                    top_p=one.top_p,
                    top_k=one.top_k or -1,
                    max_tokens=one.tokens,
                    seed=one.seed,
                    stop=used,
                    stop_token_ids=list(ends),
                )
                for one in samplings[start : start + self.REQUESTS]
            ]
            part = [{"prompt_token_ids": list(prompt)} for prompt in prompts[start : start + self.REQUESTS]]
            for output in self.model.generate(part, params, use_tqdm=False):
                ids = list(output.outputs[0].token_ids)
                answers.append(ids[:-1] if ids and ids[-1] in ends else ids)
            progress(len(answers), len(prompts))
        return answers


def fill(template: str, item: Item) -> str:
    """The template with the item's texts in it. A field that the item lacks is empty, without blank lines before."""
    names = re.findall(r"\{(\w+)\}", template)
    text = re.sub(r"\{(\w+)\}", lambda match: str(item.get(match[1], "")), template)
    return text if all(name in item for name in names) else text.lstrip("\n")


def generate_answers(
    opened: OpenModel,
    tokenizer: Tokenizer,
    items: Sequence[Item],
    options: SuiteOptions,
    form: PromptForm,
    samples: int = 1,
) -> Answers:
    template = form.template if options.template is None else options.template
    if f"{{{form.field}}}" not in template:
        raise ConfigError(
            "evaluate.template-without-source",
            f"the template {template!r} has no {{{form.field}}}",
            hint=f"write for example {form.template!r}",
        )
    if options.shots and (unsolved := [n for n, item in enumerate(items, start=1) if not form.solution(item)]):
        raise ConfigError(
            "evaluate.example-unsolved",
            f"{len(unsolved)} of {len(items)} items have no solution to show as an example, the first is number "
            f"{unsolved[0]}",
            hint="use --shots 0, or give every item of a code task a canonical_solution and of instructions an answer",
        )
    chat = load_chat_template(tokenizer) if options.chat else None
    max_tokens = options.max_tokens or form.max_tokens
    stops = list(options.stop if options.stop is not None else () if chat else form.stop)
    room, cut = prompt_room(opened, max_tokens), 0
    prompts = []
    for number in range(len(items)):
        ids = prompt_ids(tokenizer, chat, items, number, options, form, template)
        cut += len(ids) > room
        prompts.append(ids[-room:])
    ends = {tokenizer.eos, chat.end_token if chat else None} - {None}
    first = Sampling(tokens=max_tokens, temperature=options.temperature, top_p=options.top_p)
    # A seed of its own for each sample, whatever batch it is in.
    samplings = [replace(first, seed=options.seed + i) for i in range(len(items) * samples)]
    repeated = [prompt for prompt in prompts for _ in range(samples)]
    engine: TextEngine = options.engine or NativeEngine(opened, tokenizer, options.batch)
    generated = engine.complete(
        repeated,
        samplings,
        ends=[end for end in ends if end is not None],
        stops=stops,
        strip=form.strip,
        progress=options.progress,
    )
    texts = []
    for prompt, ids in zip(repeated, generated, strict=True):
        # After the end of the prompt: some tokenizers drop a space at the beginning of a text.
        before = tokenizer.decode(prompt[-8:])
        text = tokenizer.decode([*prompt[-8:], *ids])
        text = text[len(before) :] if text.startswith(before) else tokenizer.decode(ids)
        texts.append(text_before(text.lstrip(), stops).strip() if form.strip else text_before(text, stops))
    detail: dict[str, Any] = {"shots": options.shots, "cut": cut, "max_tokens": max_tokens, "chat": options.chat}
    if options.temperature:
        detail |= {"samples": samples, "temperature": options.temperature}
    by_item = [texts[i : i + samples] for i in range(0, len(texts), samples)]
    options.keep_answers(
        [
            {"item": number, "prompt": tokenizer.decode(prompt), "answers": group}
            for number, (prompt, group) in enumerate(zip(prompts, by_item, strict=True), start=1)
        ]
    )
    return Answers(by_item, detail)


def prompt_ids(
    tokenizer: Tokenizer,
    chat: ChatTemplate | None,
    items: Sequence[Item],
    number: int,
    options: SuiteOptions,
    form: PromptForm,
    template: str,
) -> list[int]:
    """Solved examples and the question: a text, or turns of a conversation."""
    examples = [items[i] for i in solved_numbers(len(items), number, options.shots)]
    if chat is None:
        text = "".join(fill(template, item) + form.solution(item) + "\n\n" for item in examples)
        return tokenizer.encode(text + fill(template, items[number]))
    messages = [{"role": "system", "content": options.system}] if options.system else []
    for item in examples:
        messages.append({"role": "user", "content": fill(template, item).strip()})
        messages.append({"role": "assistant", "content": form.solution(item).strip()})
    messages.append({"role": "user", "content": fill(template, items[number]).strip()})
    return chat.encode(messages, add_generation_prompt=True)
