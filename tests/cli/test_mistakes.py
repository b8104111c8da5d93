"""Typical mistakes: each ends with its exit code, its error code and a message that names the fix, and leaves no run.

All commands run in this process, through the entry point of the shell."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from windlass import cli
from windlass.config import load_recipe
from windlass.files import write_json
from windlass.runs.events import Started
from windlass.runs.folder import create_run

GPTNL = Path(__file__).parents[2] / "recipes" / "gptnl_8b_snellius.toml"
CPU = """name = "tiny"
[model]
layers = 1
width = 32
ffn = 64
heads = 2
vocab = 128
[data]
seq_len = 16
batch_tokens = 64
[train]
steps = 2
precision = "fp32"
[layout]
micro_batch = 2
"""
LONG = "a" * 200
CHECKS = "launch.checks-failed"
USAGE = "cli.usage"  # the argument parser's own errors

# Command, exit code, error code, what the message or hint must name, and the command with that fix, which must succeed.
MISTAKES = [
    ("plan gpt8.toml", 2, "config.file-missing", ["gpt.toml"], "plan gpt.toml --top 1"),
    ("plan .", 2, "config.not-a-file", ["file"], None),
    ("plan bad.toml", 2, "config.syntax", ["line 1", "quoted"], None),
    ("plan", 2, "cli.argument-missing", ["windlass plan recipes/"], None),
    ("plann gpt.toml", 2, USAGE, ["'plan'"], None),
    ("plan gpt.toml --clustr lumi-g", 2, USAGE, ["--cluster"], None),
    ("plan gpt.toml --gpus 8", 2, USAGE, ["--nodes"], None),
    ("plan gpt.toml layout.micro_batch", 2, "config.override-invalid", ["layout.micro_batch=4"], None),
    ("plan gpt.toml data.batch_token=5Mi", 2, "config.invalid", ["batch_tokens"], "show gpt.toml data.batch_tokens=5Mi"),
    ("plan gpt.toml micro_batch=2", 2, "config.invalid", ["layout.micro_batch"], "show gpt.toml layout.micro_batch=2"),
    ("plan gpt.toml optim.lr=fast", 2, "config.invalid", ["optim.lr", "number"], "show gpt.toml optim.lr=3e-4"),
    ("plan gpt.toml data.tokens=450X", 2, "config.invalid", ['"450B"'], "show gpt.toml data.tokens=450B"),
    ("plan gpt.toml launch.time=2 fortnights", 2, "config.invalid", ["launch.time", "h"], "show gpt.toml launch.time=2d"),
    ("plan gpt.toml nodes=-3", 2, "config.invalid", ["nodes", "greater than 0"], None),
    ("plan gpt.toml model.family=lama", 2, "config.invalid", ["llama"], "show gpt.toml model.family=llama"),
    ("plan gpt.toml model.heads=31", 2, "config.invalid", ["16 or 32"], "show gpt.toml model.heads=32"),
    ("plan gpt.toml layout.shard=ful", 2, "config.invalid", ["'full'"], "show gpt.toml layout.shard=full"),
    ("plan gpt.toml optim.name=adam", 2, "config.invalid", ["adamw"], "show gpt.toml optim.name=adamw"),
    ("plan gpt.toml name=a/b", 2, "config.invalid", ["a-b"], "show gpt.toml name=a-b"),
    (f"plan gpt.toml name={LONG}", 2, "config.invalid", ["at most 120"], None),
    ("plan gpt.toml data.batch_tokens=1000", 2, "config.invalid", ["8,192"], None),
    ("plan gpt.toml layout.tensor=3", 2, "layout.tensor-not-divisible", ["2 or 4"], "plan gpt.toml layout.tensor=2 --top 1"),
    (
        "plan gpt.toml data.batch_tokens=4Mi train.engine=deepspeed", 3, "layout.batch-not-divisible", ["--adjust"],
        "plan gpt.toml data.batch_tokens=4Mi train.engine=deepspeed --adjust --top 1",
    ),
    ("plan gpt.toml --cluster snelius", 2, "clusters.unknown-cluster", ["snellius-h100"], None),
    ("plan gpt.toml cluster=xyz", 2, "clusters.unknown-cluster", ["workstation", "lumi-g"], None),
    ("clusters lumii", 2, "clusters.unknown-cluster", ["lumi-g"], "clusters lumi-g"),
    ("plan gpt.toml --nodes 500", 2, "planner.too-many-nodes", ["88"], None),
    ("plan gpt.toml --why shards=full", 2, "planner.why-unknown-key", ["shard,"], "plan gpt.toml --why shard=full"),
    ("plan gpt.toml --nodes 1 model.layers=320", 3, "planner.nothing-fits", ["nodes="], None),
    ("budget --cluster snellius-h100", 2, "planner.budget-without-limit", ["--days"], None),
    (
        "budget --cluster snellius-h100 --days 30 --mfu 0.4 --devices 6", 2, "cli.partial-node", ["4 or 8"],
        "budget --cluster snellius-h100 --days 30 --mfu 0.4 --devices 8",
    ),
    ("budget --cluster snellius-h100 --days 30 --mfu 40", 2, "planner.mfu-out-of-range", ["0.3 to 0.5"], None),
    ("train cpu.toml data.store=/nowhere", 5, "data.store-missing", ["windlass tokenize", "data.store"], None),
    ("train cpu.toml data.store=data/europa", 5, "data.store-missing", ["data/europe"], None),
    ("train cpu.toml data.store=file.txt", 5, "data.store-missing", ["windlass tokenize"], None),
    ("train cpu.toml data.store=", 2, "config.invalid", ["remove the key"], None),
    ("train cpu.toml data.store=data/europe", 5, "data.vocabulary-too-small", ["model.vocab", "512"], None),
    ("train cpu.toml --devices 0", 2, USAGE, ["--devices", "1"], None),
    ("train cpu.toml --devices 3 --run runs/new", 2, "layout.batch-not-divisible", ["2 devices"], None),
    ("train cpu.toml --run file.txt", 4, "runs.folder-not-empty", ["--run"], None),
    ("train cpu.toml --run data", 4, "runs.folder-not-empty", ["--run"], None),
    ("train cpu.toml --run /proc/windlass", 4, "runs.folder-not-writable", ["--run"], None),
    ("train cpu.toml model.width=64", 4, "runs.recipe-changed", ["model.width", "save.load=runs/tiny"], None),
    ("resume tinny", 4, "runs.not-a-run-folder", ["did you mean tiny?", "ls runs"], None),
    ("report data", 4, "runs.not-a-run-folder", ["ls runs", "windlass dash"], None),
    ("jobs tiny", 4, "launch.no-jobs", ["windlass launch"], None),
    ("checkpoints tiny --verfy", 2, USAGE, ["--verify"], None),
    ("watch tiny.toml", 4, "runs.not-a-run-folder", ["did you mean tiny?", "the only run"], None),
    ("data .", 5, "data.store-missing", ["windlass tokenize"], None),
    ("submit -- evall tiny", 2, "cli.unknown-command", ["did you mean eval?"], None),
    ("tokenize gpt.toml", 2, "config.other-kind", ["windlass tokenize takes data files"], None),
    ("profile nope.json", 9, "profile.path-missing", ["run folder"], None),
    ("launch gpt.toml --dry-run launch.time=9d", 6, CHECKS, ["launch.time", "5 days"], "launch gpt.toml --dry-run launch.time=5d"),
    ("launch gpt.toml --dry-run launch.partition=gpu", 6, CHECKS, ["gpu_h100"], "launch gpt.toml --dry-run launch.partition=gpu_h100"),
    ("launch gpt.toml --dry-run layout.micro_batch=8", 6, CHECKS, ["zero1, tensor 2"], None),
    ("launch gpt.toml --dry-run launch.budget_node_hours=100", 6, CHECKS, ["windlass budget"], None),
    ("launch cpu.toml --dry-run data.store=/nowhere --run runs/new", 6, CHECKS, ["windlass tokenize"], "launch cpu.toml --dry-run --run runs/new"),
    ("launch cpu.toml --dry-run model.width=64", 4, "runs.recipe-changed", ["model.width"], "launch cpu.toml --dry-run train.steps=3"),
    ("submit --dry-run --cluster snelius -- eval tiny", 2, "clusters.unknown-cluster", ["snellius-h100"], "submit --dry-run --cluster snellius-h100 -- eval tiny"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two recipes, a token store of 512 tokens, a run with a checkpoint, and files that are none of these."""
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "gpt.toml").write_text(GPTNL.read_text())
    (folder / "cpu.toml").write_text(CPU)
    (folder / "bad.toml").write_text("name = gpt\n")
    (folder / "file.txt").write_text("hello")
    shards = {"train": [{"file": "web.bin", "tokens": 512, "documents": 1}]}
    counts = {"tokens": 512, "documents": 1, "documents_in": 1, "bytes": 9, "rejected": {}, "filtered": {}}
    tokenizer = {"file": "tokenizer.json", "hash": "x", "vocab_size": 512, "eos": 0}
    manifest = {"kind": "windlass-store", "dtype": "<u2", "max_token": 511, "ledger_hash": "x", "tokens": 512}
    sources = {"web": {**counts, "shards": shards}}
    (folder / "data" / "europe").mkdir(parents=True)
    write_json(
        folder / "data" / "europe" / "manifest.json",
        {**manifest, "documents": 1, "tokenizer": tokenizer, "sources": sources},
    )
    run = create_run(folder / "runs" / "tiny", load_recipe(folder / "cpu.toml"))
    run.record(Started(world_size=1, nodes=1))
    run.checkpoint(3).mkdir()
    write_json(run.checkpoint(3) / "checkpoint.json", {"step": 3})
    return folder


@pytest.fixture
def windlass(folder, monkeypatch, capsys):
    """(exit code, error code, printed text) of a command in the folder."""
    monkeypatch.chdir(folder)
    failures = []
    describe = cli.describe_failure
    monkeypatch.setattr(cli, "describe_failure", lambda error: failures.append(describe(error)) or failures[-1])

    def run(command):
        monkeypatch.setattr(sys, "argv", ["windlass", *shlex.split(command)])
        exit_code = 0
        try:
            cli.main()
        except SystemExit as stop:
            exit_code = int(stop.code or 0)
        out, err = capsys.readouterr()
        run.stdout = out
        return exit_code, failures[-1].code if failures else None, err if exit_code else out

    return run


@pytest.mark.parametrize(("command", "exit_code", "code", "names", "fixed"), MISTAKES, ids=lambda value: None)
def test_a_mistake_names_its_fix(windlass, folder, command, exit_code, code, names, fixed):
    quoted = command.replace("2 fortnights", "'2 fortnights'")
    files = sorted(folder.rglob("*"))
    ended, error, text = windlass(quoted)
    assert (ended, error) == (exit_code, code), text
    assert "Traceback" not in text and "bug in windlass" not in text
    assert not [name for name in names if name not in text], text
    assert text.startswith("error: ")
    assert sorted(folder.rglob("*")) == files
    if fixed is not None:
        ended, _, text = windlass(fixed)
        assert ended == 0, text
        assert sorted(folder.rglob("*")) == files


@pytest.mark.parametrize(
    ("command", "exit_code", "code"),
    [
        ("plan gpt8.toml", 2, "config.file-missing"),
        ("plan gpt.toml --clustr lumi-g", 2, USAGE),
        ("budget", 2, USAGE),
        ("jobs tiny", 4, "launch.no-jobs"),
        ("profile nope.json", 9, "profile.path-missing"),
    ],
)
def test_with_json_a_failure_is_one_json_document(windlass, command, exit_code, code):
    assert windlass(f"{command} --json")[0] == exit_code
    document = json.loads(windlass.stdout)
    assert set(document) == {"error"} and document["error"]["message"]
    assert (document["error"]["code"], document["error"]["exit_code"]) == (code, exit_code)


def test_ctrl_c_is_said(windlass, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("windlass.config.load_recipe", interrupted)
    assert windlass("show cpu.toml")[:2] == (130, "cli.interrupted")


def test_a_damaged_store_as_json_is_one_document(windlass):
    assert windlass("data data/europe --verify --json")[0] == 5
    assert json.loads(windlass.stdout)["whole"] is False


@pytest.mark.slow  # imports torch
def test_a_missing_checkpoint_names_those_there_are(windlass):
    ended, code, text = windlass("export tiny --to out --step 7")
    assert (ended, code) == (7, "convert.step-missing") and "available steps" in text


def test_the_table_has_forty_mistakes_and_ten_fixes_that_work():
    assert len(MISTAKES) >= 40 and len({row[0] for row in MISTAKES}) == len(MISTAKES)
    assert sum(row[-1] is not None for row in MISTAKES) >= 10


def test_a_dry_run_as_json_says_why_it_would_be_refused(windlass, capsys, monkeypatch):
    shown = []
    monkeypatch.setattr("windlass.cli.launch.print_json", shown.append)
    assert windlass("launch gpt.toml --dry-run --json launch.time=9d")[:2] == (6, CHECKS)
    assert shown[0]["would_submit"] is False and shown[0]["refused_by"] == CHECKS
    assert windlass("launch gpt.toml --dry-run --json launch.time=9d --force")[0] == 0
    assert json.dumps(shown[1]["would_submit"]) == "true" and shown[1]["refused_by"] is None
