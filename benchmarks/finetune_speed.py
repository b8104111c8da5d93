"""Samples per second of fine-tuning: windlass and transformers' Trainer on the same examples, model, batch and precision.

python benchmarks/finetune_speed.py --shape base --device cuda --precision bf16
python benchmarks/finetune_speed.py --shape mini --device cpu --examples 512

Both pad each micro-batch to its longest text and group texts of similar length; weights are random, because speed does
not depend on them. The first steps of each are left out. One process each, one after the other, best of --repeat.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPES = {"mini": (4, 256, 4), "small": (4, 512, 8), "base": (12, 768, 12)}  # layers, width, heads
VOCAB, SKIPPED = 30_522, 5
WORDS = [f"w{number}" for number in range(2000)]


def write_parts(folder: Path, shape: str, examples: int, length: int) -> None:
    """An encoder with random weights, a tokenizer with one token per word, and texts of 8 to `length` words."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(special + WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        model_max_length=512,
    ).save_pretrained(folder / "model")  # fmt: skip
    layers, width, heads = SHAPES[shape]
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
    )
    transformers.BertModel(config).save_pretrained(folder / "model")
    dice = random.Random(0)
    lines = [f"{' '.join(dice.choices(WORDS, k=min(length - 2, int(dice.lognormvariate(4, 0.7)) + 8)))}\t{dice.choice('ab')}\n"
             for _ in range(examples)]  # fmt: skip
    (folder / "train.tsv").write_text("text\tlabel\n" + "".join(lines))
    (folder / "valid.tsv").write_text("text\tlabel\n" + lines[0] + lines[1])


def ours(folder: Path, options: argparse.Namespace) -> float:
    recipe = {
        "name": "speed",
        "model": {"family": "hf", "config": str(folder / "model")},
        "tune": {"task": "classify", "train": str(folder / "train.tsv"), "validation": str(folder / "valid.tsv"),
                 "batch": options.batch, "epochs": 1, "labels": ["a", "b"]},
        "data": {"seq_len": options.length},
        "optim": {"lr": 5e-5, "schedule": "linear", "weight_decay": 0.01, "beta2": 0.999},
        "train": {"precision": options.precision, "eval_every": 10**9, "compile": options.compile},
        "layout": {"micro_batch": options.batch},
        "save": {"load": str(folder / "model"), "at_end": False},
        "energy": {"enabled": False},
    }  # fmt: skip
    from windlass.config.toml_text import to_toml
    from windlass.files import read_json_lines

    (folder / "speed.toml").write_text(to_toml(recipe, ""))
    argv = [sys.executable, "-m", "windlass", "train", str(folder / "speed.toml"), "--run", str(folder / "run")]
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    times = [line["step_seconds"] for line in read_json_lines(folder / "run" / "metrics.jsonl")][SKIPPED:]
    return options.batch * len(times) / sum(times)


def theirs(folder: Path, options: argparse.Namespace) -> float:
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=2)
    lines = [line.split("\t") for line in (folder / "train.tsv").read_text().splitlines()[1:]]
    rows = [
        {**tokenizer(text, truncation=True, max_length=options.length), "labels": "ab".index(label)}
        for text, label in lines
    ]
    marks: list[float] = []

    class Clock(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if torch.cuda.is_available() and not marks:
                torch.cuda.synchronize()
            marks.append(time.perf_counter())

    keywords: dict[str, Any] = {"use_cpu": options.device == "cpu", "bf16": options.precision == "bf16"}
    names = transformers.TrainingArguments.__dataclass_fields__
    keywords |= (
        {"group_by_length": True} if "group_by_length" in names else {"train_sampling_strategy": "group_by_length"}
    )
    arguments = transformers.TrainingArguments(
        str(folder / "theirs"), per_device_train_batch_size=options.batch, num_train_epochs=1, learning_rate=5e-5,
        weight_decay=0.01, report_to=[], save_strategy="no", disable_tqdm=True, logging_steps=10**9,
        torch_compile=options.trainer_compile, **keywords,
    )  # fmt: skip
    collator = transformers.DataCollatorWithPadding(tokenizer)
    transformers.Trainer(
        model=model, args=arguments, train_dataset=rows, data_collator=collator, callbacks=[Clock()]
    ).train()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    steps = len(marks) - 1 - SKIPPED
    return options.batch * steps / (time.perf_counter() - marks[SKIPPED]) if steps > 0 else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="mini")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--examples", type=int, default=1024)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=None, help="ours; default: as windlass decides"
    )
    parser.add_argument("--trainer-compile", action="store_true", help="torch.compile in the Trainer too")
    parser.add_argument("--only", choices=("ours", "theirs"))
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.only:
        print(json.dumps((ours if options.only == "ours" else theirs)(options.folder, options)))
        return
    speeds: dict[str, list[float]] = {"ours": [], "theirs": []}
    with tempfile.TemporaryDirectory() as name:
        write_parts(Path(name), options.shape, options.examples, options.length)
        for number in range(options.repeat):
            for side in ("ours", "theirs") if number % 2 == 0 else ("theirs", "ours"):
                subprocess.run(["rm", "-rf", f"{name}/run"], check=True)
                argv = [sys.executable, __file__, *sys.argv[1:], "--only", side, "--folder", name]
                printed = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout
                speeds[side].append(float(json.loads(printed.splitlines()[-1])))
    best = {side: max(values) for side, values in speeds.items()}
    row = {
        **vars(options),
        **best,
        "ratio": best["ours"] / best["theirs"],
        "median": {s: statistics.median(v) for s, v in speeds.items()},
    }
    print(json.dumps({key: value for key, value in row.items() if key not in ("only", "folder")}))


if __name__ == "__main__":
    main()
