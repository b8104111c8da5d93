import json
import math
import tomllib
from dataclasses import replace

import pytest

from windlass.clusters import load_cluster
from windlass.clusters.load import user_folder
from windlass.clusters.model import Efficiency
from windlass.cost.step import DEFAULTS, with_efficiency
from windlass.errors import PlanError, RunError
from windlass.planner.calibrate import calibrate, fit, gather, keep, of_run
from windlass.runs.folder import open_run

TRUE = Efficiency(matmul=0.52, memory=0.6, network=0.5)


@pytest.fixture(autouse=True)
def _own_settings(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))


@pytest.fixture
def measured_run(tmp_path, small):
    """A run folder whose steps take what the model says for a machine with the constants TRUE."""

    def make(name, *, lines=12, noise=0.0, memory=None, world=8, events=True, **tables):
        recipe = small(name=name, **{"layout": {"shard": "full", "micro_batch": 2}, **tables})
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(recipe.model_dump_json())
        if events:
            started = {
                "time": 1.0,
                "event": "started",
                "world_size": world,
                "nodes": world // 4,
                "devices_per_node": 4,
                "device": "NVIDIA H100",
            }
            (folder / "events.jsonl").write_text(json.dumps(started) + "\n")
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 0, "step_seconds": 60.0}) + "\n")
        run = open_run(folder)
        write_steps(folder, [1.0] * lines)
        seconds = of_run(run, load_cluster("snellius-h100")).predicted(with_efficiency(DEFAULTS, TRUE)) * (1 + noise)
        write_steps(folder, [9.0] + [seconds] * lines, memory)
        return folder

    return make


def write_steps(folder, seconds, memory=None):
    lines = [json.dumps({"step": i, "step_seconds": s, "memory_bytes": memory}) for i, s in enumerate(seconds)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def sweep(make, **changes):
    shapes = [(768, 1), (1536, 2), (2304, 4), (3072, 2)]
    for i, (width, micro) in enumerate(shapes):
        heads = width // 64
        make(f"point-{i}", model={"width": width, "ffn": 4 * width, "heads": heads, "kv_heads": heads}, layout={"shard": "full", "micro_batch": micro}, **changes)  # fmt: skip


def test_a_sweep_finds_the_machine_that_made_it(measured_run, tmp_path):
    sweep(measured_run)
    found = calibrate([tmp_path / "runs"])
    assert found.cluster == "snellius-h100" and len(found.runs) == 4
    assert found.efficiency.matmul == pytest.approx(0.52, rel=0.12)
    assert found.before_pct > 15 and found.after_pct < 3 and found.left_out_pct < 8
    stored = tomllib.loads((user_folder() / "snellius-h100.toml").read_text())["efficiency"]
    assert stored["matmul"] == found.efficiency.matmul and stored["fitted_from"].startswith("4 runs")
    assert load_cluster("snellius-h100").efficiency.matmul == found.efficiency.matmul


def test_what_it_says(measured_run, tmp_path):
    sweep(measured_run, memory=5 * 2**30)
    found = calibrate([tmp_path / "runs"], store=False)
    text, value = found.text(), found.json()
    assert "4 measured runs" in text and "before" in text and "point-0" in text and "not stored" in text
    assert (
        value["left_out_median_pct"] == found.left_out_pct and value["file"] is None and value["memory_median_pct"] > 0
    )
    assert not (user_folder() / "snellius-h100.toml").exists()


def test_one_run_has_no_left_out_error(measured_run):
    found = calibrate([measured_run("alone")], store=False)
    assert found.left_out_pct is None and "needs two runs" in found.text()
    assert found.after_pct < found.before_pct and found.memory_pct is None


def test_one_device_says_nothing_about_the_network(measured_run):
    alone = measured_run(
        "single", world=4, layout={"shard": "none", "micro_batch": 1, "tensor": 4}, data={"batch_tokens": 2048 * 64}
    )
    found = calibrate([alone], store=False)
    assert found.efficiency.overlap is None


def test_the_warm_up_is_left_out(measured_run):
    folder = measured_run("warm")
    steps = [60.0, 60.0] + [1.0] * 10
    write_steps(folder, steps)
    assert of_run(open_run(folder), load_cluster("snellius-h100")).step_seconds == 1.0


def test_unusable_runs_are_named_and_left_out(measured_run, tmp_path):
    measured_run("good")
    short = measured_run("short", lines=8)
    write_steps(short, [1.0, 1.0])
    bare = measured_run("bare")
    config = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps({**config, "layout": None}))
    runs, skipped, _ = gather([tmp_path / "runs"], None)
    assert [r.name for r in runs] == ["good"]
    assert any("short has 1 steps" in s for s in skipped) and any("bare has no layout" in s for s in skipped)


def test_nothing_to_calibrate_from(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(PlanError, match="no measured run"):
        calibrate([tmp_path / "empty"])
    with pytest.raises(RunError, match="not a run or sweep folder"):
        calibrate([tmp_path / "missing"])


def test_a_table_of_runs_needs_a_cluster(tmp_path):
    table = tmp_path / "runs.csv"
    table.write_text(
        "id,layers,hidden,ffn,heads,kv_heads,vocab,seq_len,gpu,gpus,gpus_per_node,micro_batch,grad_accum,shard,tp,pp,cp,activation_ckpt,precision,compile,flash,arch,glu,tied,tokens_per_s_per_gpu,peak_mem_gib,mem_kind\n"
        "a,22,2048,5632,32,4,32000,4096,H200-141GB,1,1,8,1,fsdp,1,1,1,none,bf16,y,sdpa,llama,1,0,65825,58.5,allocated\n"
        "b,16,4096,14336,32,8,128256,8192,H200-141GB,1,1,2,1,fsdp,1,1,1,none,bf16,y,sdpa,llama,1,0,19266,101.4,allocated\n"
        "c,16,4096,14336,32,8,128256,8192,H200-141GB,1,1,2,1,fsdp,1,1,1,none,bf16,y,sdpa,llama,1,0,,,\n"
        "d,16,4096,14336,32,8,128256,8192,A100-80GB,1,1,2,1,fsdp,1,1,1,none,bf16,y,sdpa,llama,1,0,6000,,\n"
    )
    mine = user_folder() / "attic.toml"
    mine.parent.mkdir(parents=True)
    mine.write_text('title = "Attic"\ndevice = "h200"\n[node]\ndevices = 1\ncores = 16\n')
    with pytest.raises(PlanError, match="does not say which cluster"):
        calibrate([table])
    found = calibrate([table], cluster="attic", store=False)
    assert len(found.runs) == 2 and found.skipped == ["c: no tokens/s", "d: measured on a100-80, not on h200"]
    assert found.after_pct < found.before_pct and found.memory_pct < 8


def test_a_fit_that_is_worse_is_not_kept(measured_run, monkeypatch):
    monkeypatch.setattr("windlass.planner.calibrate.fit", lambda runs, start, free: replace(start, matmul=0.1))
    found = calibrate([measured_run("odd")])
    assert found.file is None and found.after_pct > found.before_pct
    assert "not stored (the planner's own constants are as good)" in found.text()


def test_keeping_leaves_the_rest_of_the_users_file(tmp_path):
    path = user_folder() / "snellius-h100.toml"
    path.parent.mkdir(parents=True)
    path.write_text('title = "mine"\n\n[efficiency]\nmatmul = 0.1\n\n[grid]\npue = 1.3\n')
    for value in (0.5, 0.6):
        keep("snellius-h100", Efficiency(matmul=value, fitted_from='a "quoted" run'))
    raw = tomllib.loads(path.read_text())
    assert raw == {
        "title": "mine",
        "grid": {"pue": 1.3},
        "efficiency": {"matmul": 0.6, "fitted_from": 'a "quoted" run'},
    }
    assert path.read_text().count("Fitted by") == 1


def test_the_fit_stays_inside_its_limits(measured_run):
    run = of_run(open_run(measured_run("fast", noise=-0.95)), load_cluster("snellius-h100"))
    best = fit([run], with_efficiency(DEFAULTS, Efficiency(matmul=0.7)), ("matmul", "memory"))
    assert best.matmul <= 1.0 and best.memory <= 1.0 and math.isfinite(run.error(best))
