"""Reading of published rows and the score of the planner on them."""

import csv
import json
import math
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from benchmarks.published.calibrate import measured_runs
from benchmarks.published.rows import Refusal, links_of, read_run
from benchmarks.published.score import predict_row, quantile, read_rows, score_file, score_rows, write_rows

from windlass.clusters import find_device, load_cluster, load_device
from windlass.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "benchmarks" / "published" / "sample_runs.csv"
EXPERTS = SAMPLE.with_name("sample_expert_runs.csv")


@pytest.fixture
def rows():
    return read_rows(SAMPLE)


def test_the_shipped_sample_is_predicted_well():
    summary = score_file(SAMPLE).as_dict()
    assert summary["memory"]["rows"] == summary["memory"]["covered"] == 5
    assert summary["memory"]["median_pct"] < 12 and summary["memory"]["p90_pct"] < 25
    assert summary["throughput"]["rows"] == summary["throughput"]["covered"] == 6
    assert summary["throughput"]["median_pct"] < 12 and summary["throughput"]["p90_pct"] < 25
    assert summary["fit"] == {"oom_rows": 1, "oom_caught": 1, "working_rows": 8, "working_kept": 8}
    assert set(summary["by_source"]) == {"torchtitan", "bigscience", "llm-foundry", "modalities"}
    assert set(summary) == {"memory", "throughput", "fit", "by_source", "all_readings", "refused", "assumed"}
    assert summary["refused"] == {}


def test_models_with_experts_are_scored_by_size_and_precision():
    summary = score_file(EXPERTS).as_dict()
    assert summary["refused"] == {}
    experts = summary["experts"]
    assert list(experts) == ["all", "small", "30B-A3B", "235B-A22B", "DeepSeek-V3"]
    assert experts["all"]["throughput"]["covered"] == 7 and experts["all"]["throughput_narrow"]["covered"] == 2
    assert experts["all"]["throughput"]["median_pct"] < 10 and experts["all"]["throughput"]["p90_pct"] < 25
    assert experts["all"]["memory"]["covered"] == 5 and experts["all"]["memory"]["p90_pct"] < 12
    assert experts["all"]["fit"] == {"oom_rows": 1, "oom_caught": 1, "working_rows": 7, "working_kept": 7}


def test_columns_of_experts_change_the_prediction():
    rows = {row["id"]: row for row in read_rows(EXPERTS)}
    mixed, wide = rows["oel-016"], rows["mbr-025"]
    plain = predict_row(mixed)
    for cells in ({"dispatcher": "deepep"}, {"force_balance": "1"}, {"capacity": "1.0 (pad to capacity)"}):
        assert predict_row({**mixed, **cells}).tokens_per_second_per_device > plain.tokens_per_second_per_device
    assert predict_row({**mixed, "ep": "2"}).memory_gib > plain.memory_gib
    # DeepSeek's queries are compressed where that explains the size: a wide model, not the 16B.
    assert read_run(wide).model.params.total == pytest.approx(1026.4e9, rel=0.001)
    assert read_run(rows["ttn-009"]).model.params.total == pytest.approx(15.706e9, rel=0.001)
    assert read_run(mixed).model.params.active == pytest.approx(2.834e9, rel=0.001)
    # 36 GPUs of a rack of 72 reach each other without the fabric.
    fabric = predict_row({**wide, "interconnect": "NVLink + InfiniBand"})
    assert fabric.tokens_per_second_per_device < 0.7 * predict_row(wide).tokens_per_second_per_device


@pytest.mark.parametrize("column", ["tokens_per_s_per_gpu", "peak_mem_gib", "tflops_per_gpu", "mfu_pct", "source", "source_group", "notes", "id", "date", "outcome"])  # fmt: skip
def test_answers_and_names_are_never_read(rows, column):
    """A prediction is the same whatever the measured columns, the source or its notes say."""
    for row in [*rows, *read_rows(EXPERTS)]:
        plain, changed = predict_row(row), predict_row({**row, column: "999"})
        assert plain.tokens_per_second_per_device == changed.tokens_per_second_per_device
        assert plain.memory_gib == changed.memory_gib and plain.fits == changed.fits


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [("layers", "", "layers not stated"), ("seq_len", "nan", "seq_len not stated"), ("gpus", "many", "gpus 'many' is not a count"),
     ("layers", "3.7", "layers '3.7' is not a count"), ("tp", "8-16", "tp '8-16' is not a count"), ("tp", "3", "tp 3 = 3 does not divide 8 devices"),
     ("arch", "hybrid-ssm-moe", "arch 'hybrid-ssm-moe': layers other than attention are not predicted"),
     ("gpus", "8 nodes", "gpus '8 nodes' is not a count"), ("gpus", "8 nodes x 8", "gpus '8 nodes x 8' is not a count"),
     ("micro_batch", "8-16", "micro_batch '8-16' is not a count"), ("micro_batch", "0.5", "micro_batch '0.5' is not a count"),
     ("grad_accum", "1/2", "grad_accum '1/2' is not a count"), ("kv_heads", "MQA", "kv_heads 'MQA' is not a count"),
     ("ffn", "3.5x", "ffn '3.5x' is not a width"), ("ffn", "2.6875", "ffn '2.6875' is not a width"),
     ("global_batch_tokens", "1024 sequences", "global_batch_tokens '1024 sequences' is not a number of tokens")],
)  # fmt: skip
def test_a_refusal_has_a_reason_and_counts_against_coverage(rows, column, value, reason):
    changed = [{**rows[0], column: value}, rows[1]]
    shown = score_rows(changed)
    assert reason in (shown.predictions[0].refused or "")
    summary = shown.as_dict()["throughput"]
    assert summary["covered"] == 1
    assert isinstance(read_run(changed[0]), Refusal)


def test_memory_is_told_of_a_device_that_nobody_knows(rows):
    row = {**rows[0], "gpu": "Abacus-96GB"}
    expected, shown = predict_row(rows[0]), predict_row(row)
    assert shown.refused == "time: unknown device 'Abacus-96GB'" and shown.tokens_per_second_per_device is None
    assert shown.memory_gib == expected.memory_gib and shown.fits is True
    assert predict_row({**row, "gpu": "Abacus-24GB"}).fits is False
    assert predict_row({**row, "gpu": "Abacus"}).fits is None
    assert score_rows([row]).as_dict()["memory"]["covered"] == 1


BLANKS = ["ffn", "heads", "kv_heads", "vocab", "params_b", "micro_batch", "grad_accum", "shard", "tp", "pp", "cp", "vp", "activation_ckpt",
          "precision", "compile", "flash", "optimizer", "arch", "glu", "tied", "interconnect", "gpus_per_node"]  # fmt: skip


@pytest.mark.parametrize("column", BLANKS)
def test_blank_columns_get_a_default_that_is_named(rows, column):
    for row in rows:
        shown = predict_row({**row, column: ""})
        assert shown.refused is None and shown.tokens_per_second_per_device > 0
    if column in ("heads", "vocab", "ffn", "micro_batch", "tp", "activation_ckpt"):
        assert any(a.startswith(column) for a in predict_row({**rows[0], column: ""}).assumed)


@pytest.mark.parametrize(
    ("column", "value"),
    [("vp", "1 (5)"), ("grad_accum", "64.0"), ("grad_accum", "0"), ("tp", "0"), ("shard", "weird"), ("precision", "tf32/fp32"), ("precision", "int3"),
     ("flash", "flash-attn 3"), ("gpus", "7"), ("tp", "16"), ("micro_batch", "90"), ("heads", "7"), ("seq_len", "1048576"), ("cp", "8"), ("pp", "64")],
)  # fmt: skip
def test_odd_values_are_survived(rows, column, value):
    for row in rows:
        shown = predict_row({**row, column: value})
        assert shown.refused is not None or math.isfinite(shown.tokens_per_second_per_device)


def test_unknown_recompute_does_not_make_a_working_row_fail(rows):
    big = {**rows[0], "micro_batch": "4"}
    assert predict_row(big).fits is False
    assert predict_row({**big, "activation_ckpt": ""}).fits is True


def test_sets_follow_the_definitions(rows):
    row = rows[0]
    assert predict_row(row).in_memory and predict_row(row).in_throughput
    assert not predict_row({**row, "quality": "flagged"}).in_memory
    assert not predict_row({**row, "precision": "fp8"}).in_throughput
    assert not predict_row({**row, "mem_kind": "nvidia-smi (GB, rounded)"}).in_memory
    assert not predict_row({**row, "gpu": "V100-32GB"}).in_throughput
    assert not predict_row({**row, "activation_ckpt": ""}).stated


def test_the_kind_of_reading_decides_what_is_compared(rows):
    allocated, reserved, driver = (
        predict_row({**rows[0], "mem_kind": k}).memory_gib for k in ("allocated", "reserved", "nvidia-smi (GiB)")
    )
    assert allocated < reserved < driver
    assert predict_row({**rows[0], "mem_kind": "nvidia-smi (GB, rounded)"}).memory_gib == pytest.approx(
        driver * 2**30 / 1e9
    )


def test_devices_and_links_by_the_words_of_tables():
    a100 = find_device("A100-80GB")
    for texts, gbs in (("800 Gb/s InfiniBand per node", 100), ("4x NDR200 InfiniBand per node", 100), ("400 Gb/s RDMA per GPU", 400), ("3.2 Tb/s RoCE", 400),
                       ("4 Omni-Path links per node", 50), ("", 200), ("EFA (AWS p5)", 400)):  # fmt: skip
        assert links_of(a100, texts, 8).inter_gbs_per_node == gbs


@pytest.mark.parametrize(
    ("gpu", "cluster"), [("A100-64GB", "leonardo-booster"), ("H100-64GB", "marenostrum5-acc"), ("MI250X", "lumi-g"), ("H100-94GB", "snellius-h100")]
)  # fmt: skip
def test_score_and_plan_read_the_same_device(rows, gpu, cluster):
    case = read_run({**rows[0], "gpu": gpu})
    assert not isinstance(case, Refusal) and case.machine.device == load_device(load_cluster(cluster).device)


@pytest.mark.parametrize(
    ("texts", "per_node", "gbs"),
    [("NVLink 600 GB/s; 4x 200 Gb/s InfiniBand", 8, 100), ("8 x 400 Gbps RoCE", 8, 400), ("25 GB/s per GPU", 4, 100), ("4x HDR", 4, 100), ("100 GbE", 8, 12.5),
     ("Slingshot-11", 8, 100), ("2x dual-port HDR (400 Gb/s) per node", 4, 50), ("NVLink + InfiniBand (DGX Cloud)", 8, 200), ("Omni-Path", 4, 50), ("0 Gb/s", 8, 200)],
)  # fmt: skip
def test_networks_by_the_words_of_tables(texts, per_node, gbs):
    assert links_of(find_device("A100-80GB"), texts, per_node).inter_gbs_per_node == gbs


@pytest.mark.parametrize(
    ("column", "texts", "meant"),
    [("shard", ("fsdp", "FSDP2", "ZeRO-3", "zero stage 3", "full_shard"), "full"), ("shard", ("hsdp", "Hybrid"), "hybrid"), ("shard", ("zero2", "SHARD_GRAD_OP"), "zero2"),
     ("shard", ("zero-1", "distributed optimizer", "ZeRO 1", "dist-optim"), "zero1"), ("shard", ("", "none", "ddp", "FSDP NO_SHARD"), "none"),
     ("shard", ("stage 3", "zero3-offload"), "full"), ("shard", ("FSDP (SHARD_GRAD_OP)",), "zero2")],
)  # fmt: skip
def test_sharding_by_the_words_of_tables(rows, column, texts, meant):
    for text in texts:
        assert read_run({**rows[0], column: text}).layout.shard == meant


@pytest.mark.parametrize(
    ("column", "plain", "others"),
    [("precision", "bf16", ("BF16", "bfloat16", "bf16-mixed", "mixed bf16")), ("precision", "fp8", ("FP8", "float8", "fp8 (bf16 elsewhere)")),
     ("precision", "fp16", ("float16", "half")), ("precision", "bf16_pure", ("bf16-pure", "pure bf16")), ("activation_ckpt", "full", ("yes", "true", "Full (every layer)")),
     ("activation_ckpt", "none", ("no", "false", "0", "no_ac", "not used")), ("activation_ckpt", "selective", ("selective (op)", "sel")), ("seq_len", "8192", ("8k", "8,192", "8192 tokens")),
     ("hidden", "4096", ("4k", "4,096", "4.096e3")), ("glu", "1", ("SwiGLU", "geglu", "gated")), ("glu", "0", ("GELU", "relu")),
     ("flash", "fa2", ("flash-attn 2.3.1", "FlashAttention-2", "flash_attn v2")), ("gpus", "8", ("1x8", "8.0", "2 x 4")),
     ("tied", "1", ("yes", "True")), ("compile", "y", ("yes", "true")), ("flash", "n", ("no", "eager"))],
)  # fmt: skip
def test_other_spellings_mean_the_same(rows, column, plain, others):
    for row in rows[:4]:
        plain_run = read_run({**row, column: plain})
        assert all(read_run({**row, column: text}) == plain_run for text in others)


@pytest.mark.parametrize(
    ("names", "family", "gated"),
    [(("Llama-3", "Yi", "InternLM2", "qwen2.5", "Mistral", "granite", "SmolLM2", "OLMo 2", "phi-3", "Baichuan2"), "llama", True),
     (("GPT-NeoX", "OPT", "pythia", "Falcon", "StarCoder"), "gpt", False)],
)  # fmt: skip
def test_names_of_dense_models_say_whether_they_are_gated(rows, names, family, gated):
    bare = {**rows[0], "params_b": "", "glu": "", "tied": "0"}
    meant = read_run({**bare, "arch": family, "glu": str(int(gated))})
    for name in names:
        run = read_run({**bare, "arch": name})
        assert run.model == meant.model and f"arch={family} (not '{name}')" in run.assumed


def test_heads_wider_than_the_width_divided_by_them(rows):
    """Qwen 3 0.6B: 16 heads of 128 at a width of 1,024."""
    row = {
        **rows[0],
        "layers": "28",
        "hidden": "1024",
        "ffn": "3072",
        "heads": "16",
        "kv_heads": "8",
        "vocab": "151936",
        "tied": "1",
        "params_b": "",
        "head_dim": "128",
    }
    assert read_run(row).model.params.total == 596_049_920 - 28 * 2 * 128  # without the norms of queries and keys
    assert read_run({**row, "head_dim": ""}).model.params.total < 0.9 * 596_049_920


@pytest.mark.parametrize("column", ["micro_batch", "shard", "activation_ckpt", "precision"])
@pytest.mark.parametrize("text", ["\u2014", "n.a.", "\\N", "auto", "not reported"])
def test_words_for_nothing_are_blanks(rows, column, text):
    blank, shown = predict_row({**rows[0], column: ""}), predict_row({**rows[0], column: text})
    assert shown == blank and not shown.stated


@pytest.mark.parametrize(
    ("text", "kind"),
    [("max_memory_reserved", "reserved"), ("Peak reserved", "reserved"), ("torch.cuda.max_memory_allocated", "allocated"), ("Allocated", "allocated")],
)  # fmt: skip
def test_readings_of_the_allocator_by_their_names(rows, text, kind):
    assert predict_row({**rows[0], "mem_kind": text}) == predict_row({**rows[0], "mem_kind": kind})
    assert predict_row({**rows[0], "mem_kind": text}).in_memory


def test_a_share_is_not_a_size(rows):
    assert predict_row({**rows[0], "peak_mem_gib": "65 %"}).measured_gib is None


def test_what_a_row_leaves_out_is_read_from_its_size(rows):
    row = {
        **rows[0],
        "layers": "80",
        "hidden": "8192",
        "ffn": "28672",
        "heads": "64",
        "kv_heads": "8",
        "vocab": "128256",
        "params_b": "70.55",
    }
    full = read_run(row).model
    assert read_run({**row, "kv_heads": ""}).model == full
    assert read_run({**row, "ffn": "", "glu": "1"}).model != full
    stored = [read_run(r).model.params.total for r in (row, {**row, "ffn": ""})]
    assert stored[1] == pytest.approx(stored[0], rel=0.005)


@pytest.mark.parametrize(
    ("texts", "meant"),
    [(("OK", "Works", "1", "no OOM", "fits"), "ok"), (("failed",), "failed"),
     (("OOM", "CUDA out of memory", "torch.OutOfMemoryError", "out_of_memory", "OOM-killed", "CUDA OOM (step 3)", "did not fit", "out of GPU memory"), "oom")],
)  # fmt: skip
def test_outcomes_by_their_words(rows, texts, meant):
    assert {predict_row({**rows[0], "outcome": text}).outcome for text in texts} == {meant}


def test_a_row_without_an_outcome_says_it_with_its_measurements(rows):
    bare = {**rows[0], "outcome": ""}
    assert predict_row(bare).outcome == "ok"
    assert predict_row({**bare, "tokens_per_s_per_gpu": "OOM", "peak_mem_gib": ""}).outcome == "oom"
    unmeasured = predict_row({**bare, "tokens_per_s_per_gpu": "", "peak_mem_gib": "n/a"})
    assert unmeasured.outcome == "unknown" and score_rows([rows[0]]).as_dict()["fit"]["working_rows"] == 1
    assert score_rows([{**bare, "tokens_per_s_per_gpu": "", "peak_mem_gib": ""}]).as_dict()["fit"]["working_rows"] == 0


@pytest.mark.parametrize(
    ("column", "text", "meant"),
    [("peak_mem_gib", "64.42 GB", 59.99), ("peak_mem_gib", "61,440 MiB", 60.0), ("peak_mem_gib", "60 GiB", 60.0), ("peak_mem_gib", "60", 60.0)],
)  # fmt: skip
def test_a_unit_in_a_cell_stands_above_that_of_its_column(rows, column, text, meant):
    assert predict_row({**rows[0], column: text}).measured_gib == pytest.approx(meant, rel=1e-3)


def test_rows_with_blanks_are_outside_the_sets_and_among_all_readings(rows):
    blank = score_rows([{**row, "activation_ckpt": ""} for row in rows]).as_dict()
    full = score_rows(rows).as_dict()
    assert blank["memory"]["rows"] == blank["throughput"]["rows"] == 0
    for kind in ("memory", "throughput"):
        assert (
            blank["all_readings"][kind]["covered"] == full["all_readings"][kind]["covered"] >= full[kind]["covered"] > 0
        )


def test_what_was_not_understood_is_listed(rows):
    shown = score_rows([{**rows[0], "shard": "weird", "precision": "int3", "gpu": "Abacus"}, rows[1]]).as_dict()
    assert shown["refused"] == {"time: unknown device 'Abacus'": 1}
    assert shown["assumed"]["shard=none (not 'weird')"] == 1 and shown["assumed"]["precision=bf16 (not 'int3')"] == 1


def test_a_module_of_two_devices_is_counted_as_two(rows):
    """Sixteen modules of MI250X are 32 devices to PyTorch; the row's tokens/s are those of a module."""
    base = {**rows[0], "tp": "1", "pp": "1", "grad_accum": "", "global_batch_tokens": str(2**22)}
    apart = predict_row({**base, "gpu": "MI250X (1 GCD)", "gpus": "32", "gpus_per_node": "8"})
    module = predict_row({**base, "gpu": "MI250X-128GB", "gpus": "16", "gpus_per_node": "4"})
    assert module.tokens_per_second_per_device == pytest.approx(2 * apart.tokens_per_second_per_device)
    assert module.memory_gib == apart.memory_gib and module.fits == apart.fits


def test_a_size_in_the_name_decides_what_fits(rows):
    held = predict_row({**rows[0], "gpu": "A800-80GB"})
    assert held.fits is True and held.memory_gib > 40
    assert predict_row({**rows[0], "gpu": "A800-40GB"}).fits is False
    assert read_run({**rows[0], "gpu": "GH200 480GB"}).capacity == read_run({**rows[0], "gpu": "GH200"}).capacity


def test_tables_of_other_programs_are_read(tmp_path, rows):
    path = tmp_path / "rows.csv"
    names = list(rows[0])
    lines = [";".join(n.upper() for n in names), *(";".join(f'"{r[n]}"' for n in names) for r in rows), ""]
    path.write_text("\r\n".join(lines), encoding="utf-8-sig")
    assert read_rows(path) == rows
    path.write_text(path.read_text(encoding="utf-8-sig").replace('"59.', '"59,'), encoding="utf-8-sig")
    assert [predict_row(r).measured_gib for r in read_rows(path)] == [predict_row(r).measured_gib for r in rows]
    for delimiter, joint in (("|", "_"), (",", " "), ("\t", "-")):
        header = delimiter.join(f" {n.title().replace('_', joint)} " for n in names)
        path.write_text("\n".join([header, *(delimiter.join(f'"{r[n]}"' for n in names) for r in rows)]))
        assert read_rows(path) == rows


def test_no_row_is_too_odd(rows):
    """Junk in any column ends in a prediction or a refusal, never in an exception or a number that is not one."""
    random = Random(7)
    junk = [
        "",
        "n/a",
        "?",
        "-1",
        "0",
        "1e9",
        "nan",
        "inf",
        "1,024",
        "8k",
        "2x4",
        "~8",
        "True",
        "3.7",
        "9" * 14,
        "1/2",
        "<8",
    ]
    for _ in range(400):
        row = dict(random.choice(rows))
        for column in random.sample(list(row), random.randint(1, 8)):
            row[column] = random.choice(junk) if random.random() < 0.7 else random.choice(rows)[column]
        shown = predict_row({k: v for k, v in row.items() if random.random() < 0.95})
        for value in (shown.memory_gib, shown.tokens_per_second_per_device):
            assert value is None or (math.isfinite(value) and value > 0)
        assert shown.refused or (shown.memory_gib and shown.tokens_per_second_per_device)


def test_quantiles_as_numpy_does():
    numpy = pytest.importorskip("numpy")
    values = sorted([3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0])
    for share in (0.0, 0.5, 0.9, 1.0):
        assert quantile(values, share) == pytest.approx(float(numpy.quantile(values, share)))
    assert quantile([], 0.5) is None


def test_rows_out_has_a_line_per_row(tmp_path, rows):
    write_rows(score_rows(rows), tmp_path / "out.csv")
    with (tmp_path / "out.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["id"] for line in lines] == [row["id"] for row in rows]
    assert (
        float(lines[0]["predicted_memory_gib"]) > 0
        and lines[-1]["fits"] == "no"
        and lines[-1]["memory_error_pct"] == ""
    )


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (None, "published.table-unreadable"),
        ("a,b\n1,2\n", "published.column-missing"),
        ("", "published.column-missing"),
        ("layers,hidden,seq_len,gpu,gpus,tp,TP\n", "published.column-twice"),
    ],
)
def test_bad_files(tmp_path, content, code):
    path = tmp_path / "rows.csv"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError) as error:
        score_file(path)
    assert error.value.code == code


def test_an_empty_table_scores_nothing(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("layers,hidden,seq_len,gpu,gpus\n")
    assert score_file(path).as_dict()["memory"] == {"rows": 0, "covered": 0, "median_pct": None, "p90_pct": None}


def accuracy(*argv):
    """Run benchmarks/planner_accuracy.py as a user does."""
    command = [sys.executable, str(ROOT / "benchmarks" / "planner_accuracy.py"), *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_the_command_prints_and_writes_the_score(tmp_path):
    done = accuracy("--rows", SAMPLE, "--json", "--rows-out", tmp_path / "rows.csv")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(json.dumps(score_file(SAMPLE).as_dict()))
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 10
    table = accuracy("--rows", SAMPLE).stdout
    assert "Predicted vs. measured" in table and "bigscience" in table
    failed = accuracy("--rows", tmp_path / "absent.csv")
    assert failed.returncode == 2 and "absent.csv" in failed.stderr and "Traceback" not in failed.stderr


def test_the_left_out_fits_are_recorded(tmp_path):
    done = accuracy("--rows", SAMPLE, "--leave-out", "--rounds", "1", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "planner_accuracy.json").read_text())
    assert record["rows"] == 9 and record["left_out"]["throughput"]["covered"] == 6
    assert set(record["ranges"]) == set(record["constants"])
    assert "| memory, allocator readings |" in (tmp_path / "planner_accuracy.md").read_text()


def test_measured_runs_have_the_units_of_their_cells(tmp_path, rows):
    base = {
        **rows[0],
        "gpu": "MI250X (1 GCD)",
        "gpus": "16",
        "gpus_per_node": "8",
        "tokens_per_s_per_gpu": "500",
        "tp": "1",
        "pp": "1",
    }
    base |= {"grad_accum": "1", "global_batch_tokens": "", "peak_mem_gib": "50 GB", "mem_kind": "max_memory_allocated"}
    module = {**base, "gpu": "MI250X-128GB", "gpus": "8", "gpus_per_node": "4", "tokens_per_s_per_gpu": "1000"}
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(base))
        writer.writeheader()
        writer.writerows([base, module, {**base, "quality": "flagged"}, {**base, "quality": "flagged_throughput"}])
    runs, skipped = measured_runs(path, "mi250x-gcd")
    seconds = 2 * 8192 * 16 / (500 * 16)  # micro-batches of two sequences
    assert [(run.step_seconds, run.memory_bytes) for run in runs] == [(pytest.approx(seconds), pytest.approx(50e9))] * 2
    assert len(skipped) == 2


def test_a_table_calibrates_a_cluster(tmp_path, monkeypatch):
    """Rows on the cluster's device are fitted; rows without tokens/s or on another device are named."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    columns = "id,layers,hidden,ffn,heads,kv_heads,vocab,seq_len,gpu,gpus,gpus_per_node,micro_batch,grad_accum,shard"
    columns += (
        ",tp,pp,cp,activation_ckpt,precision,compile,flash,arch,glu,tied,tokens_per_s_per_gpu,peak_mem_gib,mem_kind"
    )
    common, ending = "fsdp,1,1,1,none,bf16,y,sdpa,llama,1,0", "16,4096,14336,32,8,128256,8192"
    rows = [
        f"a,22,2048,5632,32,4,32000,4096,H200-141GB,1,1,8,1,{common},65825,58.5,allocated",
        f"b,{ending},H200-141GB,1,1,2,1,{common},19266,101.4,allocated",
        f"c,{ending},H200-141GB,1,1,2,1,{common},,,",
        f"d,{ending},A100-80GB,1,1,2,1,{common},6000,,",
    ]
    table = tmp_path / "runs.csv"
    table.write_text("\n".join([columns, *rows]) + "\n")
    cluster = tmp_path / "settings" / "windlass" / "clusters" / "attic.toml"
    cluster.parent.mkdir(parents=True)
    cluster.write_text('title = "Attic"\ndevice = "h200"\n[node]\ndevices = 1\ncores = 16\n')
    done = accuracy("--rows", table, "--calibrate", "attic", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [run["name"] for run in result["runs"]] == ["a", "b"]
    assert result["skipped"] == ["c: no tokens/s", "d: measured on a100-80, not on h200"]
    assert result["after_median_pct"] < result["before_median_pct"] and result["memory_median_pct"] < 8
    assert "[efficiency]" in cluster.read_text()
