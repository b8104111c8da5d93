"""Conversations per second of instruction tuning: windlass with packed conversations beside TRL's SFTTrainer.

    python benchmarks/chat_tuning.py                  # a small decoder in fp32 on the CPU
    python benchmarks/chat_tuning.py --size 1b        # a 1.1B decoder in bf16, on a GPU

Both train the same shape on the same made-up conversations (log-normal lengths, loss on answers only), with as many
conversations in a step. TRL divides a step of the large model into 16 passes: with 8 it runs out of 140 GB. The Trainer pads to the longest of a batch and groups conversations by length. Times are means
of steps after the first ones, each program in a process of its own, in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
others = [p for p in sys.path if Path(p or ".").resolve() != ROOT / "benchmarks"]
sys.path[:] = [str(ROOT / "src"), str(ROOT), *others]

SIZES: dict[str, dict[str, Any]] = {
    "small": {"layers": 2, "width": 256, "ffn": 688, "heads": 4, "kv_heads": 4, "vocab": 2048, "seq_len": 512,
              "sequences": 4, "micro_batch": 4, "median": 90, "count": 400, "steps": 16, "trl_passes": 1},
    "1b": {"layers": 22, "width": 2048, "ffn": 5632, "heads": 32, "kv_heads": 4, "vocab": 32000, "seq_len": 4096,
           "sequences": 16, "micro_batch": 8, "median": 350, "count": 6_000, "steps": 20, "trl_passes": 16},
}  # fmt: skip
SKIPPED_STEPS = 4
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def prepare(folder: Path, size: dict[str, Any]) -> None:
    """Tokenizer, conversations, token store, recipe and a Hugging Face config of the same shape."""
    from tokenizers import Tokenizer as Library

    from windlass.config import load_recipe
    from windlass.config.sources import DataFile, DataSource
    from windlass.convert.config_json import config_json
    from windlass.data.tokenize import tokenize
    from windlass.data.tokenizer import train_bpe

    dice = random.Random(0)
    words = ["".join(dice.choices("abcdefghijklmnopqrstuvwxyz", k=dice.randint(2, 9))) for _ in range(3000)]

    def text(count: int) -> str:
        return " ".join(dice.choices(words, k=max(1, count)))

    tokenizer = train_bpe([text(60) for _ in range(400)], min(size["vocab"] - 2, 2000), folder / "tokenizer")
    library = Library.from_file(str(tokenizer.path))
    library.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    library.save(str(tokenizer.path))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    with (folder / "chat.jsonl").open("w") as file:
        for _ in range(size["count"]):
            count = min(int(dice.lognormvariate(0, 0.8) * size["median"] / 3), size["seq_len"] // 4)
            talk = [{"role": "user", "content": text(count // 3)}, {"role": "assistant", "content": text(count)}]
            file.write(json.dumps({"messages": talk}) + "\n")
    source = DataSource(paths=[str(folder / "chat.jsonl")], form="chat", max_tokens=size["seq_len"])
    tokenize(
        DataFile(output=str(folder / "store"), tokenizer=str(folder / "tokenizer"), sources={"chat": source}, workers=2)
    )
    shape = "\n".join(f"{key} = {size[key]}" for key in ("layers", "width", "ffn", "heads", "kv_heads", "vocab"))
    precision = "fp32" if size is SIZES["small"] else "bf16"
    (folder / "recipe.toml").write_text(
        f'name = "chat"\n[model]\n{shape}\n[tune]\ntask = "chat"\n[data]\nstore = "{folder / "store"}"\n'
        f'pack = "documents"\nmax_epochs = 100\nseq_len = {size["seq_len"]}\n'
        f"batch_tokens = {size['sequences'] * size['seq_len']}\n[optim]\nlr = 1e-4\n[train]\nsteps = {size['steps']}\n"
        f'precision = "{precision}"\n[layout]\nmicro_batch = {size["micro_batch"]}\n[save]\nat_end = false\n'
        f"every = 1000000\n[energy]\nenabled = false\n"
    )
    recipe = load_recipe(folder / "recipe.toml").recipe
    (folder / "hf").mkdir()
    config = config_json(recipe, "float32" if precision == "fp32" else "bfloat16", size["seq_len"])
    (folder / "hf" / "config.json").write_text(json.dumps(config))


def conversations_per_step(folder: Path) -> float:
    from windlass.config import load_recipe
    from windlass.data.stream import StoreStream, open_stream

    data = load_recipe(folder / "recipe.toml").recipe.data
    stream = open_stream(data, seed=0)
    assert isinstance(stream, StoreStream) and stream.packings is not None and data.batch_tokens is not None
    packing = stream.packings[0]
    return len(packing.lengths) / packing.windows * data.batch_tokens / data.seq_len


def run_windlass(folder: Path, size: dict[str, Any]) -> float:
    """Seconds of a step."""
    run = Path(tempfile.mkdtemp(dir=folder))
    argv = [sys.executable, "-m", "windlass", "train", str(folder / "recipe.toml"), "--run", str(run / "r"), "--quiet"]
    argv += ["save.at_end=false", "save.every=100000"]
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    subprocess.run(argv, check=True, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (run / "r" / "metrics.jsonl").read_text().splitlines()]
    return statistics.mean(line["step_seconds"] for line in lines[SKIPPED_STEPS:])


def run_trl(folder: Path, size: dict[str, Any]) -> float:
    """Seconds of a step, in this process."""
    import datasets
    import torch
    import trl
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    times: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **options: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times.append(time.perf_counter())

    cuda = torch.cuda.is_available()
    batch = round(conversations_per_step(folder))
    accumulate = size["trl_passes"]
    options = trl.SFTConfig(
        output_dir=str(folder / "trl"), use_cpu=not cuda, bf16=cuda, report_to="none", max_steps=size["steps"],
        per_device_train_batch_size=max(1, round(batch / accumulate)), gradient_accumulation_steps=accumulate,
        assistant_only_loss=True, max_length=None, gradient_checkpointing=False, save_strategy="no", logging_steps=1000,
        train_sampling_strategy="group_by_length", disable_tqdm=True, learning_rate=1e-4,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "hf"), dtype=torch.float32)
    rows = [json.loads(line) for line in (folder / "chat.jsonl").read_text().splitlines()]
    rows = [
        row for row in rows if len(tokenizer.apply_chat_template(row["messages"], return_dict=False)) <= size["seq_len"]
    ]
    data = datasets.Dataset.from_list(rows)
    trainer = trl.SFTTrainer(model, options, train_dataset=data, processing_class=tokenizer, callbacks=[Clock()])
    trainer.train()
    # The mean: batches of long and of short conversations take turns. The rounded batch is not quite ours.
    mean = (times[-1] - times[SKIPPED_STEPS - 1]) / (len(times) - SKIPPED_STEPS)
    return mean * batch / (max(1, round(batch / accumulate)) * accumulate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="small")
    parser.add_argument("--rounds", type=int, default=2, help="how often the two take turns")
    parser.add_argument("--trl", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    size = SIZES[arguments.size]
    if arguments.trl is not None:
        print(json.dumps({"step_seconds": run_trl(arguments.trl, size)}))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, size)
        ours, theirs = [], []
        for _ in range(arguments.rounds):
            ours.append(run_windlass(folder, size))
            argv = [sys.executable, __file__, "--size", arguments.size, "--trl", str(folder)]
            out = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout
            theirs.append(json.loads(out.strip().splitlines()[-1])["step_seconds"])
        count = conversations_per_step(folder)
        result = {
            "size": arguments.size,
            "conversations_per_step": count,
            "windlass_per_second": count / min(ours),
            "trl_per_second": count / min(theirs),
            "ratio": min(theirs) / min(ours),
            "step_seconds": {"windlass": ours, "trl": theirs},
        }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
