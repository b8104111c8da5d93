"""RetNet beside a Llama of equal size, on the same tokens: loss, throughput, memory, and decoding at 1k to 64k tokens of context.

    python benchmarks/retnet_vs_llama.py                          # on a GPU; under three minutes; writes benchmarks/results/
    python benchmarks/retnet_vs_llama.py --text some.txt          # train on this text instead of Python's own library
    python benchmarks/retnet_vs_llama.py --tiny                   # small shapes, also on a CPU: does it run at all?

Both models train by the same short loop (bf16 compute, fp32 weights, AdamW, torch.compile per block on a GPU) on the same batches.
Decoding: a prompt of N tokens is taken, then tokens are made one at a time; the time is the median per token, the memory the
state that the decoder carries and the allocator's peak. The context is made of training tokens: what is measured is cost, not quality.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# In place of this folder, whose files have names of the standard library.
sys.path[0] = str(ROOT / "src")

VOCAB = 32_000
MODELS = {
    # The published "medium" shape with an untied vocabulary; the Llama has the same width and depth and as many parameters.
    "retnet": {
        "family": "retnet",
        "layers": 16,
        "width": 1024,
        "ffn": 1728,
        "value_width": 1728,
        "heads": 4,
        "chunk": 256,
    },
    "llama": {"family": "llama", "layers": 16, "width": 1024, "ffn": 2776, "heads": 16, "kv_heads": 16},
}
TINY = {
    "retnet": {"family": "retnet", "layers": 2, "width": 64, "ffn": 104, "value_width": 104, "heads": 2, "chunk": 16},
    "llama": {"family": "llama", "layers": 2, "width": 64, "ffn": 168, "heads": 4, "kv_heads": 4},
}


def main() -> None:
    asked = arguments()
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokens, vocab = corpus(asked)
    found: dict[str, Any] = {
        "about": about(device, asked),
        "tokens": len(tokens),
        "vocab": vocab,
        "train": {},
        "decode": {},
    }
    for name, shape in (TINY if asked.tiny else MODELS).items():
        print(f"{name}: training {asked.steps} steps of {asked.batch} x {asked.seq}", flush=True)
        model, found["train"][name] = train(shape, vocab, tokens, asked, device)
        print(f"{name}: decoding at {', '.join(map(str, asked.contexts))} tokens of context", flush=True)
        found["decode"][name] = [decode(model, tokens, context, asked.answers, device) for context in asked.contexts]
        del model
        if device.type == "cuda":
            torch.cuda.empty_cache()
    write(found, asked.out)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="small shapes and few steps")
    parser.add_argument("--text", type=Path, help="a text file to train on")
    parser.add_argument("--steps", type=int, help="training steps (150; 6 with --tiny)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    asked = parser.parse_args()
    asked.steps = asked.steps or (6 if asked.tiny else 150)
    asked.seq, asked.batch = (64, 4) if asked.tiny else (2048, 16)
    asked.contexts = (64, 128, 256) if asked.tiny else (1024, 4096, 16_384, 65_536)
    asked.answers = 5 if asked.tiny else 40
    asked.vocab = 512 if asked.tiny else VOCAB
    return asked


def corpus(asked: argparse.Namespace) -> tuple[Any, int]:
    """Token ids of the text, by a tokenizer trained on it."""
    import numpy as np

    from windlass.data.corpus import gather
    from windlass.data.tokenizer import train_bpe

    with tempfile.TemporaryDirectory() as folder:
        if asked.text is not None:
            texts = asked.text.read_text(encoding="utf-8", errors="replace").split("\n\n")
        else:
            files = gather(Path(folder) / "raw", 300_000 if asked.tiny else 16_000_000).values()
            texts = [
                json.loads(line)["text"]
                for file in files
                for line in file.file.read_text(encoding="utf-8").splitlines()
            ]
        words = train_bpe(texts[:400] if asked.tiny else texts[::4], asked.vocab, Path(folder) / "tokenizer")
        ids = [token for text in texts for token in (*words.encode(text), words.eos)]
    return np.array(ids, dtype=np.int64), words.vocab_size


def train(
    shape: dict[str, Any], vocab: int, tokens: Any, asked: argparse.Namespace, device: Any
) -> tuple[Any, dict[str, Any]]:
    """Both models see the same batches in the same order."""
    import numpy as np
    import torch

    from windlass.config import ModelConfig
    from windlass.models import build

    model = build(ModelConfig(vocab=vocab, **shape), seq_len=asked.seq).to(device)
    model.init_weights(0)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        for block in model.layers.values():
            block.compile()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=device.type == "cuda"
    )
    random, losses, seconds = np.random.default_rng(0), [], []
    for step in range(asked.steps):
        began = time.perf_counter()
        rate = 6e-4 * min(1.0, (step + 1) / 20) * (0.55 + 0.45 * np.cos(np.pi * step / asked.steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = random.integers(0, len(tokens) - asked.seq - 1, asked.batch)
        batch = torch.from_numpy(np.stack([tokens[s : s + asked.seq + 1] for s in starts])).to(device)
        losses.append(one_step(model, optimizer, batch, device))
        seconds.append(time.perf_counter() - began)
    steady = seconds[len(seconds) // 4 :]
    return model, {
        "parameters": sum(p.numel() for p in model.parameters()), "losses": losses, "final_loss": statistics.mean(losses[-max(1, len(losses) // 20) :]),
        "tokens_per_second": asked.batch * asked.seq / statistics.median(steady), "first_step_seconds": seconds[0],
        "memory_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
    }  # fmt: skip


def one_step(model: Any, optimizer: Any, batch: Any, device: Any) -> float:
    import torch

    with torch.autocast(device.type, dtype=torch.bfloat16):
        sums = model(batch[:, :-1], batch[:, 1:])
    count = batch.shape[0] * (batch.shape[1] - 1)
    (sums[0] / count).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(sums[1].detach()) / count


def decode(model: Any, tokens: Any, context: int, answers: int, device: Any) -> dict[str, Any]:
    """Take `context` tokens, then make `answers` one at a time, in bf16 on a GPU."""
    import torch

    from windlass.evaluate.decode import decoder

    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = model.to(kind)
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if device.type == "cuda" else None
    prompt = torch.from_numpy(tokens[torch.arange(context).numpy() % len(tokens)])[None].to(device)
    state = decoder(model, limit=context + answers)
    began = time.perf_counter()
    logits = state.feed(prompt)
    wait()
    taken, times = time.perf_counter() - began, []
    for _ in range(answers):
        token = logits.argmax(-1, keepdim=True)
        begin = time.perf_counter()
        logits = state.feed(token)
        wait()
        times.append(time.perf_counter() - begin)
    return {
        "context": context, "prompt_seconds": taken, "token_seconds": statistics.median(times), "tokens_per_second": 1 / statistics.median(times),
        "state_bytes": state.state_bytes(), "peak_bytes": torch.cuda.max_memory_allocated() - before if before is not None else None,
    }  # fmt: skip


def about(device: Any, asked: argparse.Namespace) -> dict[str, Any]:
    import torch

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "command": f"python benchmarks/retnet_vs_llama.py{' --tiny' if asked.tiny else ''}", "commit": commit or None, "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine(),
        "sequence": asked.seq, "batch": asked.batch, "steps": asked.steps, "tiny": asked.tiny,
    }  # fmt: skip


def write(found: dict[str, Any], out: Path) -> None:
    from windlass.runs.files import write_json, write_whole

    name = "retnet_vs_llama-tiny" if found["about"]["tiny"] else "retnet_vs_llama"
    write_json(out / f"{name}.json", found)
    write_whole(out / f"{name}.md", markdown(found))
    write_whole(out / f"{name}.html", picture(found))
    print(markdown(found))


def markdown(found: dict[str, Any]) -> str:
    about = found["about"]
    lines = [
        "# RetNet beside a Llama of equal size", "",
        f"`{about['command']}` on {about['device']}, torch {about['torch']}, commit {about['commit'] or 'unknown'}; "
        f"{about['steps']} steps of {about['batch']} x {about['sequence']} tokens, the same for both.", "",
        "| model | parameters | final loss | tokens/s | memory |", "|---|---:|---:|---:|---:|",
    ]  # fmt: skip
    for name, row in found["train"].items():
        lines.append(
            f"| {name} | {row['parameters'] / 1e6:.1f} M | {row['final_loss']:.3f} | {row['tokens_per_second']:,.0f} | {size(row['memory_bytes'])} |"
        )
    lines += [
        "",
        "Decoding, one sequence:",
        "",
        "| model | context | tokens/s | ms per token | state | peak beside the weights | prompt |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, rows in found["decode"].items():
        for row in rows:
            lines.append(
                f"| {name} | {row['context']:,} | {row['tokens_per_second']:,.1f} | {1000 * row['token_seconds']:.2f} | {size(row['state_bytes'])} "
                f"| {size(row['peak_bytes'])} | {row['prompt_seconds']:.2f} s |"
            )
    return "\n".join(lines) + "\n"


def size(count: int | None) -> str:
    from windlass.units import print_bytes

    return "not measured" if count is None else print_bytes(count)


def picture(found: dict[str, Any]) -> str:
    from windlass.figures import Chart, Section, Series
    from windlass.figures.page import page

    def chart(title: str, y_title: str, rows: dict[str, Any], x: Any, y: Any, **more: Any) -> Chart:
        series = tuple(Series(name=name, x=tuple(x(row)), y=tuple(y(row))) for name, row in rows.items())
        return Chart(title=title, series=series, y_title=y_title, **more)

    def contexts(rows: list[dict[str, Any]]) -> list[int]:
        return [row["context"] for row in rows]

    charts = (
        chart("Training loss", "nats per token", found["train"], lambda r: range(1, len(r["losses"]) + 1), lambda r: r["losses"], x_title="step"),
        chart("Time per decoded token", "ms", found["decode"], contexts, lambda r: [1000 * v["token_seconds"] for v in r], x_title="context", log_x=True, from_zero=True),
        chart("State carried from token to token", "MiB", found["decode"], contexts, lambda r: [v["state_bytes"] / 2**20 for v in r], x_title="context", log_x=True, from_zero=True),
    )  # fmt: skip
    return page("RetNet beside Llama", [Section("", charts)], subtitle=str(found["about"]["device"]))


if __name__ == "__main__":
    main()
