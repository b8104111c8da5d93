"""RetNet beside a Llama of equal size, on the same tokens: loss, throughput, memory, decoding at 1k to 64k tokens of context.

    python benchmarks/retnet_vs_llama.py --store STORE            # on a GPU; about two and a half minutes
    python benchmarks/retnet_vs_llama.py                          # the same on Python's own library, tokenized first
    python benchmarks/retnet_vs_llama.py --small                  # small shapes, on a CPU in half a minute
    python benchmarks/retnet_vs_llama.py --decode-only --store STORE   # only decoding; half a minute
    python benchmarks/retnet_vs_llama.py --render                 # table and figures again, from the JSON that is there

The RetNet is that of recipes/retnet_300m_lumi.toml; the Llama has its width, depth, vocabulary and, within half a percent, its
number of parameters. Both train by `windlass train`'s own loop on the same sequences in the same order. Then `windlass eval`'s code
scores the held-out part, beside the forward pass of the training code, and `windlass generate`'s code takes a prompt of N tokens
and makes one token at a time. The prompt is made of training text: what is measured there is cost, not quality. Results are
written after every stage.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# In place of this folder, whose files have names of the standard library.
sys.path[:1] = [str(ROOT / "src"), str(ROOT)]

RECIPE = ROOT / "recipes" / "retnet_300m_lumi.toml"
# 4 x 1024^2 of attention and 3 x 1024 x 3392 of feed-forward: 14.6 M parameters a layer, where the RetNet has 14.7 M.
LLAMA = {"family": "llama", "layers": 16, "width": 1024, "ffn": 3392, "heads": 16, "kv_heads": 16}
TINY = {
    "retnet": {"family": "retnet", "layers": 2, "width": 64, "ffn": 128, "value_width": 128, "heads": 2},
    "llama": {"family": "llama", "layers": 2, "width": 64, "ffn": 208, "heads": 4, "kv_heads": 4},
}
BEGAN = time.perf_counter()


def main() -> None:
    asked = arguments()
    if asked.render:
        found = json.loads((asked.out / f"{asked.name}.json").read_text(encoding="utf-8"))
        render(found, asked)
        return
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory(prefix="windlass-retnet-") as folder:
        store = asked.store or prepare(asked, Path(folder))
        if asked.decode_only:
            render(decode_only(asked, store, device), asked)
            return
        found: dict[str, Any] = {"about": about(device, asked), "train": {}, "evaluate": {}, "decode": {}}
        for name, shape in shapes(asked).items():
            one(name, shape, store, Path(folder) / name, found, asked, device)
    render(found, asked)


def one(
    name: str, shape: dict[str, Any], store: Path, folder: Path, found: dict[str, Any], asked: argparse.Namespace, device: Any
) -> None:  # fmt: skip
    """Train, evaluate and decode one model; `found` is written after each."""
    import torch

    torch._dynamo.reset()  # the blocks of all models share one function, and its number of compiled forms is limited
    job, found["train"][name] = train(name, shape, store, folder, asked)
    keep(found, asked, f"{name}: trained {asked.steps} steps", found["train"][name])
    opened, found["evaluate"][name] = evaluate(job, store, device, passes=1 if asked.tiny else 4)
    keep(found, asked, f"{name}: evaluated", found["evaluate"][name])
    del job
    gc.collect()
    found["decode"][name] = []
    for context in asked.contexts:
        found["decode"][name].append(decode(opened.model, store, context, asked.answers, device))
        keep(found, asked, f"{name}: decoded", found["decode"][name][-1])
    del opened
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def keep(found: dict[str, Any], asked: argparse.Namespace, what: str, row: dict[str, Any]) -> None:
    from windlass.files import write_json

    write_json(asked.out / f"{asked.name}.json", found)
    plain = {key: value for key, value in row.items() if not isinstance(value, (list, dict))}
    print(f"{time.perf_counter() - BEGAN:6.1f} s  {what}: {json.dumps(plain)}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", "--tiny", dest="tiny", action="store_true", help="small shapes and few steps")
    parser.add_argument("--store", type=Path, help="a token store with a validation split")
    parser.add_argument("--steps", type=int, help="training steps (150; 20 with --small)")
    parser.add_argument("--decode-only", action="store_true", help="measure decoding again, and keep the rest")
    parser.add_argument("--render", action="store_true", help="only write table and figures, from the results")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    asked = parser.parse_args()
    asked.source = ROOT / "benchmarks" / "results"
    asked.name = "retnet_vs_llama-tiny" if asked.tiny else "retnet_vs_llama"
    asked.steps = asked.steps or (20 if asked.tiny else 150)
    asked.seq, asked.batch = (64, 4) if asked.tiny else (2048, 16)
    asked.contexts = (64, 128, 256) if asked.tiny else (1024, 4096, 16_384, 65_536)
    asked.answers = 5 if asked.tiny else 64
    return asked


def shapes(asked: argparse.Namespace) -> dict[str, dict[str, Any]]:
    from windlass.config import load_recipe

    if asked.tiny:
        return TINY
    model = load_recipe(RECIPE).recipe.model.model_dump(exclude={"vocab", "assumed"}, exclude_unset=True)
    return {"retnet": model, "llama": LLAMA}


def prepare(asked: argparse.Namespace, folder: Path) -> Path:
    """A token store of Python's own library, by a tokenizer trained on it."""
    from windlass.data.corpus import data_file, gather
    from windlass.data.tokenize import tokenize
    from windlass.data.tokenizer import train_bpe

    files = gather(folder / "raw", 150_000 if asked.tiny else 24_000_000)
    texts = [json.loads(line)["text"] for file in files.values() for line in file.file.read_text("utf-8").splitlines()]
    words = train_bpe(texts[::4], 512 if asked.tiny else 32_000, folder / "tokenizer")
    tokenize(data_file(files, tokenizer=words.path, output=folder / "store", validation=0.06))
    return folder / "store"


# -- stages ---------------------------------------------------------------------------------------------------------------


def recipe_of(name: str, shape: dict[str, Any], store: Path, asked: argparse.Namespace) -> Any:
    from windlass.config import Recipe
    from windlass.data.store import open_store

    tokens = asked.seq * asked.batch
    return Recipe.model_validate({
        "name": name, "model": {**shape, "vocab": open_store(store).vocab_size},
        "data": {"store": str(store), "seq_len": asked.seq, "batch_tokens": tokens},
        "optim": {"lr": 3e-3, "warmup": 2 * tokens} if asked.tiny else {"lr": 6e-4, "warmup": 20 * tokens},
        "train": {"steps": asked.steps, "eval_every": max(2, asked.steps // 3), "eval_tokens": 8 * tokens},
        "layout": {"micro_batch": asked.batch}, "save": {"at_end": False, "every": 10**9, "keep_best": 0, "asynchronous": False},
    })  # fmt: skip


def train(
    name: str, shape: dict[str, Any], store: Path, folder: Path, asked: argparse.Namespace
) -> tuple[Any, dict[str, Any]]:
    """By the loop of `windlass train`; what it wrote into its run folder is what is reported."""
    import torch
    from benchmarks.one_process import open_training

    from windlass.blocks.attention.kernels import attention_kernel
    from windlass.runs.events import Evaluated
    from windlass.runs.folder import Run
    from windlass.train import loop
    from windlass.train.checkpointing import Checkpointing
    from windlass.train.metrics import Recorder
    from windlass.train.signals import StopFlag

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    run = Run(folder)
    run.checkpoints.mkdir(parents=True)
    recipe, recorder = recipe_of(name, shape, store, asked), Recorder()
    job = open_training(recipe, folder, print)
    checkpoints = Checkpointing(job, recorder, StopFlag(run, recipe.save, rank=0, world_size=1))
    loop.announce(job, checkpoints, None, 0.0)
    with attention_kernel(recipe.train.attention, job.world.device):
        recorder.on_start(job)
        loop.run_steps(job, checkpoints, [recorder])
    lines = [m.as_dict() for m in run.metrics_lines()]
    return job, {
        "parameters": sum(p.numel() for p in job.parts.modules[0].parameters()), "losses": [line["loss"] for line in lines],
        "final_loss": statistics.mean(line["loss"] for line in lines[-max(1, len(lines) // 20) :]),
        "validation": [{"step": e.step, "loss": e.val_loss} for e in run.events(Evaluated)],
        "validation_loss": checkpoints.validation.overall.loss if checkpoints.validation else None, **steady(lines),
        "memory_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
    }  # fmt: skip


def steady(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians after the first quarter, whose steps compile and warm up."""
    late = lines[len(lines) // 4 :]

    def middle(key: str) -> float | None:
        known = [line[key] for line in late if line.get(key) is not None]
        return statistics.median(known) if known else None

    begin, end = late[0], late[-1]
    joules = None
    if begin.get("energy_joules") is not None and end.get("energy_joules") is not None and len(late) > 1:
        joules = (end["energy_joules"] - begin["energy_joules"]) / (end["tokens"] - begin["tokens"])
    return {
        "tokens_per_second": middle("tokens_per_second"), "step_seconds": middle("step_seconds"), "joules_per_token": joules,
        "first_step_seconds": lines[0].get("step_seconds"),
    }  # fmt: skip


def evaluate(job: Any, store: Path, device: Any, *, passes: int = 4) -> tuple[Any, dict[str, Any]]:
    """`windlass eval` on the held-out part, and the rate of the training code's forward pass beside it."""
    import torch

    from windlass.convert.source import ModelSource
    from windlass.data.store import open_store
    from windlass.data.tokenizer import load_tokenizer
    from windlass.evaluate import perplexity
    from windlass.evaluate.open_model import OpenModel
    from windlass.models.build import build_model

    forward = forward_rate(job)
    torch._dynamo.reset()
    held = open_store(store)
    words = load_tokenizer(held.tokenizer_file, eos=held.eos)
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device("meta"):
        model = build_model(job.recipe.model, seq_len=job.recipe.data.seq_len)
    model = model.to(kind).to_empty(device=device)
    model.load_state_dict({k: v.detach().to(kind) for k, v in job.parts.modules[0].state_dict().items()})
    model.prepare(device)
    source = ModelSource(job.run, job.recipe, store)
    opened = OpenModel(model.eval().requires_grad_(False), source, job.step, job.tokens, device, kind)
    evaluations = [
        perplexity.evaluate_text(opened, held, words, batch=job.plan.layout.micro_batch, compiles=device.type == "cuda")
        for _ in range(passes)
    ]
    rate = max(done.tokens_per_second or 0.0 for done in evaluations)
    scores = {f"{s.group}: {s.metric}": [s.value, s.low, s.high] for s in evaluations[0].scores}
    return opened, {
        "eval_tokens_per_second": rate,
        "forward_tokens_per_second": forward,
        "share": rate / forward,
        "tokens": evaluations[0].tokens,
        "scores": scores,
    }


def forward_rate(job: Any, passes: int = 8) -> float:
    """Tokens per second of the compiled training model without gradients, as validation in the loop runs it; the best of some passes."""
    import torch

    from windlass.blocks.attention.kernels import attention_kernel

    wait = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    tokens, seconds = job.plan.layout.micro_batch * job.recipe.data.seq_len, []
    with torch.no_grad(), attention_kernel(job.recipe.train.attention, job.world.device):
        for _ in range(2 + passes):
            wait()
            began = time.perf_counter()
            job.validator._batch(job.validator.held[0].indexes[: job.validator._batch_size])
            wait()
            seconds.append(time.perf_counter() - began)
    return float(tokens / min(seconds[2:]))


def decode(model: Any, store: Path, context: int, answers: int, device: Any) -> dict[str, Any]:
    """Take `context` tokens, then make `answers` one at a time: kernel by kernel, and as `windlass generate` does, from a recorded graph."""
    import torch

    from windlass.data.store import open_store
    from windlass.evaluate.generate import Sampling, generate

    opened = open_store(store)
    tokens = opened.tokens(next(iter(opened.sources)), "train")
    prompt = [int(token) for token in tokens[:context]]
    prompt = (prompt * (context // len(prompt) + 1))[:context]
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if device.type == "cuda" else None
    how = Sampling(tokens=answers, temperature=0.0, ignore_eos=True)
    made = [
        generate(model, prompt, how, eos=opened.eos, replays=False) for _ in range(3)
    ]  # the first one meets kernels that were never run
    best = min(made[1:], key=lambda one: one.seconds)
    peak = torch.cuda.max_memory_allocated() - before if before is not None else None
    replayed = None
    if device.type == "cuda":
        again = [generate(model, prompt, how, eos=opened.eos, replays=True) for _ in range(2)]
        # A recorded graph serves one decoder: its recording is part of the first token, so the time is the difference of two lengths.
        longer = generate(
            model, prompt, Sampling(tokens=5 * answers, temperature=0.0, ignore_eos=True), eos=opened.eos, replays=True
        )
        replayed = (longer.seconds - min(one.seconds for one in again)) / (len(longer.ids) - len(again[0].ids))
    return {
        "context": context, "prompt_seconds": best.prompt_seconds, "token_seconds": best.seconds / (len(best.ids) - 1),
        "tokens_per_second": best.tokens_per_second, "state_bytes": best.state_bytes, "peak_bytes": peak,
        "replayed_token_seconds": replayed, "replayed_equal": None if replayed is None else again[0].ids == best.ids,
    }  # fmt: skip


def decode_only(asked: argparse.Namespace, store: Path, device: Any) -> dict[str, Any]:
    """Decoding again, of models with random weights (its cost is the same), put into the results that are there."""
    import torch

    from windlass.models.build import build_model

    found: dict[str, Any] = json.loads((asked.source / f"{asked.name}.json").read_text(encoding="utf-8"))
    found["decode"], found["decode_about"] = {}, about(device, asked)
    for name, shape in shapes(asked).items():
        recipe = recipe_of(name, shape, store, asked)
        with torch.device("meta"):
            model = build_model(recipe.model, seq_len=asked.seq)
        model = model.to(torch.bfloat16 if device.type == "cuda" else torch.float32).to_empty(device=device)
        model.init_weights(0)
        model.prepare(device)
        model.eval().requires_grad_(False)
        found["decode"][name] = []
        for context in asked.contexts:
            found["decode"][name].append(decode(model, store, context, asked.answers, device))
            keep(found, asked, f"{name}: decoded", found["decode"][name][-1])
    return found


def about(device: Any, asked: argparse.Namespace) -> dict[str, Any]:
    import torch

    from windlass.runs.manifest import commit

    return {
        "store": None if asked.store is None else asked.store.name, "torch": torch.__version__, "python": platform.python_version(),
        "commit": os.environ.get("WINDLASS_COMMIT") or commit(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine(),
        "sequence": asked.seq, "batch": asked.batch, "steps": asked.steps, "tiny": asked.tiny,
        "time": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }  # fmt: skip


# -- tables and figures ---------------------------------------------------------------------------------------------------


PAGE = ROOT / "docs" / "guides" / "retnet-vs-llama.md"
MARKS = ("<!-- measured: begin -->", "<!-- measured: end -->")


def render(found: dict[str, Any], asked: argparse.Namespace) -> None:
    from windlass.files import write_atomic

    print(markdown(found), flush=True)
    write_atomic(asked.out / f"{asked.name}.md", markdown(found))
    if asked.render and not asked.tiny:  # figures need packages that a GPU node may lack
        from windlass.figures import save_picture

        for name, chart in charts(found).items():
            save_picture(chart, ROOT / "docs" / "pictures" / f"retnet-{name}.svg")
        write_atomic(PAGE, page_with(PAGE.read_text(encoding="utf-8"), found))


def page_with(text: str, found: dict[str, Any]) -> str:
    """The guide with its tables made anew; the words around them are written by hand."""
    before, _, rest = text.partition(MARKS[0])
    tables = markdown(found).split("\n", 2)[2].strip()
    return f"{before}{MARKS[0]}\n{tables}\n{MARKS[1]}{rest.partition(MARKS[1])[2]}"


def markdown(found: dict[str, Any]) -> str:
    about = found["about"]
    lines = [
        "# RetNet compared with a Llama of equal size", "",
        f"`python benchmarks/retnet_vs_llama.py{' --small' if about['tiny'] else ''}` on {about['device']}, torch {about['torch']}, commit {about['commit'] or 'unknown'}; "
        f"{about['steps']} steps of {about['batch']} x {about['sequence']} tokens, the same for both.", "",
        *trained(found), "", *evaluated(found), "", *decoded(found),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def trained(found: dict[str, Any]) -> list[str]:
    lines = [
        "| model | parameters | training loss | validation loss | tokens/s | mJ/token | memory |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, row in found["train"].items():
        joules = row["joules_per_token"]
        energy = "not measured" if joules is None else f"{1000 * joules:.2f}"
        held = "not measured" if row["validation_loss"] is None else f"{row['validation_loss']:.3f}"
        lines.append(
            f"| {name} | {row['parameters'] / 1e6:.1f} M | {row['final_loss']:.3f} | {held} | {row['tokens_per_second']:,.0f} "
            f"| {energy} | {size(row['memory_bytes'])} |"
        )
    return lines


def evaluated(found: dict[str, Any]) -> list[str]:
    """Bits per byte by group, and the speed of evaluation."""
    groups = [key for row in found["evaluate"].values() for key in row["scores"] if key.endswith("bits_per_byte")]
    groups = list(dict.fromkeys(key for key in groups if not key.startswith("length")))
    lines = [
        f"| model | {' | '.join(key.removesuffix(': bits_per_byte') for key in groups)} | eval tokens/s | of the forward pass |",
        f"|---|{'---:|' * (len(groups) + 2)}",
    ]
    for name, row in found["evaluate"].items():
        bits = [f"{row['scores'][key][0]:.3f}" if key in row["scores"] else "" for key in groups]
        lines.append(f"| {name} | {' | '.join(bits)} | {row['eval_tokens_per_second']:,.0f} | {row['share']:.0%} |")
    return ["Held-out text, bits per byte:", "", *lines]


def decoded(found: dict[str, Any]) -> list[str]:
    lines = [
        "Decoding, one sequence:",
        "",
        "| model | context | ms per token | as a recorded graph | state | peak without the weights | prompt |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {name} | {row['context']:,} | {milliseconds(row['token_seconds'])} | {milliseconds(row.get('replayed_token_seconds'))} "
        f"| {size(row['state_bytes'])} | {size(row['peak_bytes'])} | {row['prompt_seconds']:.2f} s |"
        for name, rows in found["decode"].items()
        for row in rows
    ]
    return lines


def milliseconds(seconds: float | None) -> str:
    return "not measured" if seconds is None else f"{1000 * seconds:.2f}"


def size(count: int | None) -> str:
    from windlass.units import print_bytes

    return "not measured" if count is None else print_bytes(count)


def charts(found: dict[str, Any]) -> dict[str, Any]:
    from windlass.figures import Chart, line

    def over_context(title: str, unit: str, value: Any) -> Chart:
        series = [
            line(name, [row["context"] for row in rows], [value(row) for row in rows])
            for name, rows in found["decode"].items()
        ]
        return Chart(
            title=title, series=tuple(series), x_title="tokens of context", y_title=unit, log_x=True, from_zero=True
        )

    losses = [line(name, list(range(1, len(row["losses"]) + 1)), row["losses"]) for name, row in found["train"].items()]
    return {
        "loss": Chart(title="Training loss", series=tuple(losses), x_title="step", y_title="nats per token"),
        "time": over_context("Time per decoded token", "ms", lambda row: 1000 * row["token_seconds"]),
        "memory": over_context("Carried from token to token", "MiB", lambda row: row["state_bytes"] / 2**20),
    }


if __name__ == "__main__":
    main()
