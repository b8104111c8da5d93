"""Every file that windlass reads, damaged: an error with a code or a plausible value, never a traceback or infinity."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from pydantic import BaseModel
from tests.data.conftest import make_text
from tests.fuzz import damage
from tests.profile.conftest import TraceBuilder
from tests.report.sample_run import make_run
from tests.small_recipe import recipe_tables

from windlass.errors import WindlassError
from windlass.files import write_json
from windlass.runs.folder import Run

EXAMPLES, SLOW_EXAMPLES = 15, 20_000


@dataclass(frozen=True)
class Reader:
    """A file of the sample project, and the functions of the commands that read it."""

    file: str
    read: Callable[[Path], Any]


# -- what commands do with a file ------------------------------------------------------------------------------------


def read_recipe(project: Path) -> Any:
    from windlass.config import load_recipe
    from windlass.models.presets import model_spec

    loaded = load_recipe(project / "recipe.toml", ["train.log_every=2"])
    return loaded.recipe, model_spec(loaded.recipe.model).params


def read_sweep(project: Path) -> Any:
    from windlass.config.sweep import load_sweep
    from windlass.launch.sweep.points import make_points

    loaded = load_sweep(project / "sweep.toml")
    # Not the axes: `--clip inf` is a fair argument of a command, and a recipe with it is refused as any other.
    return loaded.sweep.skip_oom, loaded.sweep.startup, [point.command(project) for point in make_points(loaded)]


def read_dvc(project: Path) -> Any:
    from windlass.launch.sweep.dvc import read_dvc
    from windlass.launch.sweep.points import make_points

    loaded = read_dvc(project / "dvc.yaml")
    return loaded.sweep.skip_oom, [point.command(project) for point in make_points(loaded)]


def read_data_file(project: Path) -> Any:
    from windlass.config.sources import load_data_file

    return load_data_file(project / "data.toml")


def read_cluster(project: Path) -> Any:
    from windlass.clusters.load import load_cluster

    return load_cluster("fuzzed")


def read_run(project: Path) -> Any:
    """Report, watch, energy, the start page, and what a resume reads before it starts."""
    from windlass.cli.start import scan_folder
    from windlass.energy.ledger import read_ledger
    from windlass.launch.chain import finished, judge
    from windlass.launch.ledger import entries, totals
    from windlass.report.collect import collect
    from windlass.runs.history import read_history
    from windlass.runs.measured import columns_of
    from windlass.runs.metrics import last_of_each_step
    from windlass.runs.starts import last_start

    run = Run(project / "runs" / "sample")
    summary = collect(run)
    described = [event.describe() for event in summary.events]
    history = read_history(run.events(), columns_of(run.metrics_lines()))
    lines = last_of_each_step(run.metrics_lines())
    values = [summary.as_dict(), described, history, lines, run.last_metrics(), run.faults(), read_ledger(run)]
    return *values, finished(run), judge(run), last_start(run), totals(entries(run, {}), "run"), scan_folder(project)


def read_config(project: Path) -> Any:
    run = Run(project / "runs" / "sample")
    read_run(project)
    return run.layout_from(), run.recipe()


def read_start(project: Path) -> Any:
    from windlass.runs.starts import last_start, read_start

    run = Run(project / "runs" / "sample")
    last_start(run)
    return read_start(run, "4711.0")


def read_checkpoint(project: Path) -> Any:
    from windlass.checkpoint.files import complete, list_saved
    from windlass.checkpoint.load import read_extra

    run = Run(project / "runs" / "sample")
    saved = [(s.step, s.tokens, s.bytes, s.metric, s.world_size, s.save_seconds) for s in list_saved(run)]
    return saved, complete(run.checkpoint(5)).manifest, read_extra(run.checkpoint(5))


def read_extra(project: Path) -> Any:
    from windlass.checkpoint.load import read_extra
    from windlass.convert.config_json import positions_of

    run = Run(project / "runs" / "sample")
    return read_extra(run.checkpoint(5)), positions_of(run.recipe(), run.checkpoint(5))


def read_store(project: Path) -> Any:
    from windlass.config import DataConfig
    from windlass.data.store import open_store, summary
    from windlass.data.stream import open_stream

    store = open_store(project / "store")
    sources = list(store.sources.values())
    stream = open_stream(DataConfig(store=str(project / "store"), seq_len=16), seed=0, vocab=600)
    tokens, documents = stream.sequences([0, 1]), stream.document_ids([0, 1])
    assert tokens.min() >= 0 and tokens.max() < 600 and documents.min() >= 0
    spans = [span for source in store.sources for span in store.tokens(source).documents()]
    assert all(0 <= start <= stop for start, stop in spans)
    return sources, summary(store), store.verify(), store.vocab_size, store.eos


def read_trace(project: Path, name: str = "trace.json") -> Any:
    from windlass.profile.job_profile import profile_traces

    return profile_traces([project / name]).to_json()


def read_hf_config(project: Path) -> Any:
    from windlass.config import ModelConfig
    from windlass.convert.config_json import is_hf_folder, recipe_of_folder
    from windlass.models.presets import model_spec

    folder = project / "hf"
    foreign = model_spec(ModelConfig(family="hf", config=str(folder)))
    if is_hf_folder(folder):
        recipe = recipe_of_folder(folder)
        return recipe, model_spec(recipe.model).params, foreign.params
    return foreign.params


def read_tokenizer(project: Path) -> Any:
    from windlass.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(project / "tokenizer" / "tokenizer.json")
    glanced = load_tokenizer(project / "tokenizer" / "tokenizer.json", glance=True)
    ids = tokenizer.encode("water en wind")
    assert all(0 <= number < tokenizer.vocab_size for number in ids)
    return tokenizer.vocab_size, tokenizer.eos, glanced.vocab_size


RUN = "runs/sample/"
READERS = [
    Reader("recipe.toml", read_recipe),
    Reader("sweep.toml", read_sweep),
    Reader("data.toml", read_data_file),
    Reader("config/windlass/clusters/fuzzed.toml", read_cluster),
    Reader("dvc.yaml", read_dvc),
    Reader(RUN + "manifest.json", read_run),
    Reader(RUN + "events.jsonl", read_run),
    Reader(RUN + "metrics.jsonl", read_run),
    Reader(RUN + "energy.jsonl", read_run),
    Reader(RUN + "eval.jsonl", read_run),
    Reader(RUN + "jobs.jsonl", read_run),
    Reader(RUN + "plan.json", read_run),
    Reader(RUN + "ranks/error-00001.json", read_run),
    Reader(RUN + "config.json", read_config),
    Reader(RUN + "starts/4711.0.json", read_start),
    Reader(RUN + "checkpoints/step-000000005/manifest.json", read_checkpoint),
    Reader(RUN + "checkpoints/step-000000005/extra.json", read_extra),
    Reader("store/manifest.json", read_store),
    Reader("store/checksums.json", read_store),
    Reader("store/web-train-00000.idx", read_store),
    Reader("store/web-train-00000.bin", read_store),
    Reader("trace.json", read_trace),
    Reader("trace.json.gz", lambda project: read_trace(project, "trace.json.gz")),
    Reader("hf/config.json", read_hf_config),
    Reader("tokenizer/tokenizer.json", read_tokenizer),
]


# -- the sample project ----------------------------------------------------------------------------------------------

SWEEP = (
    'name = "s"\nskip_oom = 0.9\n'
    + recipe_tables()
    + '[set]\n"optim.lr" = 0.001\n[matrix]\n"layout.micro_batch" = [1, 2]\n"train.precision" = ["bf16", "fp32"]\n'
)
DATA = 'output = "store"\ntokenizer = "tokenizer"\nvalidation = 0.1\nworkers = 1\nchunk = "1 MiB"\n[sources.web]\npaths = ["texts"]\n'
DVC = """stages:
  train:
    matrix:
      lr: [0.001, 1e-4]
      size: [small, large]
    cmd: python train.py --lr ${item.lr} --size ${item.size} --epochs ${epochs}
    vars:
      - epochs: 3
"""
HF = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 600, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "tie_word_embeddings": False,
}  # fmt: skip


def write_small_run(folder: Path) -> None:
    from windlass.checkpoint import files
    from windlass.config import LayoutConfig
    from windlass.layout.resolve import complete_layout, job_size, resolve_step
    from windlass.models.presets import model_spec
    from windlass.runs.starts import Start, write_start

    run = Run(make_run(folder, steps=8, crash_at=6, resume_from=5))
    recipe = run.recipe()
    size = job_size(recipe, 8, 4)
    layout = complete_layout(recipe.layout or LayoutConfig(), size)
    step = resolve_step(recipe, model_spec(recipe.model), layout, gpu=True, recompute="none")
    write_start(run, Start(job="4711", layout=layout, step=step, device="cuda", devices=8, devices_per_node=4))
    score = {"task": "perplexity", "group": "all", "metric": "perplexity", "value": 12.5, "low": 11.0, "high": 14.0}
    run.eval_file.write_text(json.dumps({"time": 1_790_000_500.0, "step": 8, "tokens": 1_048_576, **score}) + "\n")
    write_json(run.error_file(1), {"rank": 1, "kind": "oom", "error": "out of memory", "exit_code": 12, "time": 1.0})
    write_json(run.plan_file, {"tokens_per_second": 1000.0, "memory_bytes": 6e10, "step_seconds": 1.2, "mfu": 0.4})
    job = {"job": "4711", "restart": 0, "executor": "slurm"}
    jobs = [
        {"record": "submitted", **job, "time": 1_789_999_000.0, "kind": "train", "nodes": 2, "seconds": 3600, "link": 1,
         "links": 2, "cluster": "snellius-h100", "account": "a", "units_per_node_hour": 768.0, "unit": "SBU"},
        {"record": "began", **job, "time": 1_790_000_000.0, "step": 0, "saves": 0},
        {"record": "ended", **job, "time": 1_790_000_100.0, "step": 5, "code": 1, "by": "after"},
        {"record": "settled", "job": "4711", "time": 1_790_000_200.0, "state": "FAILED", "nodes": 2, "elapsed_seconds": 100.0},
    ]  # fmt: skip
    run.jobs_file.write_text("".join(json.dumps(line) + "\n" for line in jobs))
    saved = run.checkpoint(5)
    saved.mkdir(exist_ok=True)
    (saved / "__0_0.distcp").write_bytes(bytes(1000))
    write_json(saved / files.EXTRA, {"extra": {"step": 5, "positions": 1024}, "rng": [{"cpu": [1, 2]}]})
    manifest = {"format": files.FORMAT, "algorithm": files.ALGORITHM, "step": 5, "tokens": 655_360, "metric": 2.5}
    manifest |= {"world_size": 8, "write_seconds": 3.4, "stall_seconds": 0.2, "windlass": "0.2.0"}
    listed = files.describe(saved, ["__0_0.distcp", files.EXTRA])
    write_json(saved / files.MANIFEST, files.sealed({**manifest, "files": listed}))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from windlass.clusters.load import SHIPPED
    from windlass.config.sources import DataFile, DataSource
    from windlass.data.tokenize import tokenize
    from windlass.data.tokenizer import train_bpe

    folder = tmp_path_factory.mktemp("project")
    texts = [make_text(number) for number in range(200)]
    train_bpe(texts, 600, folder / "tokenizer")
    (folder / "texts").mkdir()
    (folder / "texts" / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:40]))
    web = DataSource(paths=[str(folder / "texts")], licence="CC0", origin="here")
    keys = {"output": str(folder / "store"), "tokenizer": str(folder / "tokenizer"), "workers": 1}
    tokenize(DataFile(sources={"web": web}, engine="tokenizers", **keys))
    write_small_run(folder / "runs" / "sample")
    (folder / "recipe.toml").write_text(recipe_tables().replace("[recipe]\n", "").replace("[recipe.", "["))
    for name, content in (("sweep.toml", SWEEP), ("data.toml", DATA), ("dvc.yaml", DVC)):
        (folder / name).write_text(content)
    write_json(folder / "hf" / "config.json", HF)
    clusters = folder / "config" / "windlass" / "clusters"
    clusters.mkdir(parents=True)
    shutil.copy(SHIPPED / "snellius-h100.toml", clusters / "fuzzed.toml")
    trace = TraceBuilder()
    trace.meta["distributedInfo"] = {"backend": "nccl", "rank": 0, "world_size": 1}
    for number, at in ((5, 1000.0), (6, 1100.0)):
        trace.step(number, at, at + 100)
        operator = trace.op("aten::mm", at, at + 30)
        trace.launch("sm80_xmma_gemm_bf16", at + 2, at + 10, at + 50, external=operator)
        trace.launch("ncclDevKernel_AllReduce_Sum_f32", at + 10, at + 40, at + 80, external=999, stream=20)
    trace.write(folder / "trace.json")
    trace.write(folder / "trace.json.gz")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        yield folder


# -- the test --------------------------------------------------------------------------------------------------------


def assert_finite(value: Any, where: str = "") -> None:
    """No infinity and no NaN anywhere inside; NaN in an array of metrics is unknown."""
    if isinstance(value, float):
        assert math.isfinite(value), f"{where} is {value}"
    elif isinstance(value, BaseModel):
        assert_finite(value.model_dump(), where)
    elif is_dataclass(value) and not isinstance(value, type):
        for item in fields(value):
            assert_finite(getattr(value, item.name), f"{where}.{item.name}")
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            assert_finite(inner, f"{where}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            assert_finite(inner, f"{where}[{index}]")


def check_reader(reader: Reader, project: Path, examples: int) -> None:
    file = project / reader.file
    original = file.read_bytes()
    assert_finite(reader.read(project))  # the sample itself is valid

    # Shrinking a failure of a slow reader takes minutes; the steps of the damage are short enough to read.
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(damage.damages)
    def check(steps: list[tuple[str, int, bytes]]) -> None:
        file.write_bytes(damage.apply(original, steps))
        try:
            assert_finite(reader.read(project))
        except WindlassError as error:
            assert "." in error.code and error.message

    try:
        check()
    finally:
        file.write_bytes(original)


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.file)
def test_a_damaged_file_is_an_error_with_a_code_or_a_plausible_value(reader: Reader, project: Path) -> None:
    check_reader(reader, project, EXAMPLES)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.file)
def test_twenty_thousand_damaged_files(reader: Reader, project: Path) -> None:
    check_reader(reader, project, -(-SLOW_EXAMPLES // len(READERS)))
