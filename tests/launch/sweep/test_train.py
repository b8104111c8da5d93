"""A small sweep over recipes with real training processes: a good point, a real out-of-memory error, a failing one; then calibration."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from windlass.cli import build

SWEEP = """
name = "tiny"
devices = 1
time_limit = "2m"
[recipe]
name = "tiny"
[recipe.model]
layers = 2
width = 64
ffn = 128
heads = 4
vocab = 16384
[recipe.data]
seq_len = 64
batch_tokens = 4096
[recipe.train]
steps = 6
precision = "fp32"
loss = "plain"
[recipe.save]
every = 1000
at_end = false
[matrix]
"layout.micro_batch" = [4]
"layout.shard" = ["none"]
[[include]]
"layout.micro_batch" = 64
"layout.shard" = "none"
memory_limit = "700 MiB"
[[include]]
name = "failing"
"layout.micro_batch" = 4
"layout.shard" = "none"
"data.store" = "no/such/store"
devices = 2
"""


@pytest.mark.multi
def test_a_sweep_of_recipes_ends_with_outcomes_measurements_page_and_a_calibrated_planner(tmp_path, monkeypatch):
    (tmp_path / "s.toml").write_text(SWEEP)
    monkeypatch.chdir(tmp_path)
    for name, value in {"OMP_NUM_THREADS": "1", "XDG_CONFIG_HOME": f"{tmp_path}/config", "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)

    def windlass(command: str, *options: str) -> dict:
        done = CliRunner().invoke(build(command), [command, *options, "--json"])
        assert done.exit_code == 0, done.output[-3000:]
        return json.loads(done.stdout)

    output = windlass("sweep", "s.toml", "--pick", "won.toml")
    rows = {r["point"]: r for r in output["rows"]}
    assert output["counts"] == {"ok": 1, "oom": 1, "error": 1}
    good, big, bad = rows["micro_batch-4.shard-none"], rows["micro_batch-64.shard-none"], rows["failing"]
    assert good["tokens_per_second"] > 0 and good["memory_bytes"] > 0 and good["predicted_memory_bytes"] > 0
    assert good["step_spread"] is not None and good["loss"] == pytest.approx(9.7, abs=0.3)
    assert (big["outcome"], big["evidence"]) == ("oom", "record")
    assert (bad["outcome"], bad["evidence"]) == ("error", "record") and "no/such/store" in bad["detail"]
    folder = tmp_path / "runs" / "tiny"
    assert (folder / "report.html").is_file() and (folder / "results.csv").is_file()
    assert "micro_batch = 4" in (tmp_path / "won.toml").read_text()
    commands = [(folder / "points" / name / "logs" / "point.log").read_text().splitlines()[0] for name in rows]
    programs = ["worker", "worker", "supervisor"]  # one process, or a supervisor for the two of the failing point
    assert all(f"-m windlass.train.{p} " in c for p, c in zip(programs, commands, strict=True)), commands
    assert windlass("sweep", "s.toml")["rows"] == output["rows"]  # nothing ran again
    fitted = windlass("plan", "--calibrate", str(folder))
    assert [r["name"] for r in fitted["runs"]] == ["micro_batch-4.shard-none"]
