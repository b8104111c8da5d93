"""`windlass checkpoints`: the state of every folder; reading changes nothing."""

from __future__ import annotations

import json

import pytest
import typer

from windlass.checkpoint import files
from windlass.checkpoint.inventory import inventory, resumes_from
from windlass.config import load_recipe
from windlass.config.save import SaveConfig
from windlass.files import write_json
from windlass.runs import create_run


def put(run, step: int, metric: float | None = None, **more) -> None:
    folder = run.checkpoint(step)
    folder.mkdir()
    (folder / "__0_0.distcp").write_bytes(b"weights" * 10)
    listed = files.describe(folder, ["__0_0.distcp"])
    manifest = {"format": 1, "step": step, "tokens": step * 10, "metric": metric, "metric_name": "val_loss", "world_size": 2, "files": listed, **more}  # fmt: skip
    write_json(folder / files.MANIFEST, files.sealed(manifest))


def spoil(run, step: int) -> None:
    path = run.checkpoint(step) / "__0_0.distcp"
    path.write_bytes(b"Weights" + path.read_bytes()[7:])


@pytest.fixture
def full(run):
    for step, metric in ((1, 2.0), (2, 1.5), (3, None), (4, 1.7), (5, None)):
        put(run, step, metric)
    spoil(run, 5)
    files.temporary(run, 6).mkdir()
    files.set_aside(run.checkpoint(1), "step-000000001: rolled back")
    return run


def test_every_folder_in_its_state(full) -> None:
    before = sorted(p.name for p in full.checkpoints.iterdir())
    rules = SaveConfig(keep_last=1, keep_best=1)
    entries = inventory(full, rules)
    assert [(e.step, e.state) for e in entries] == [
        (2, "complete"), (3, "complete"), (4, "complete"), (5, "complete"), (6, "unfinished"), (1, "set aside"),
    ]  # fmt: skip
    assert [e.kept_by for e in entries[:4]] == [("number 1 by val_loss (1.5000)",), (), (), ("one of the last 1",)]
    assert entries[5].problem == "step-000000001: rolled back" and resumes_from(entries) == 5
    calls = []
    checked = inventory(full, rules, verify=True, progress=lambda done, total: calls.append((done, total)))
    assert [e.state for e in checked[:4]] == ["verified"] * 3 + ["damaged"] and calls[-1] == (4, 4)
    assert checked[3].problem.startswith("__0_0.distcp") and "chunk 1 of 1" in checked[3].problem
    assert resumes_from(checked) == 4
    assert sorted(p.name for p in full.checkpoints.iterdir()) == before


def test_a_newer_format_stops_a_resume_and_says_so(full) -> None:
    put(full, 9, format=99)
    entries = inventory(full, SaveConfig())
    assert next(e for e in entries if e.step == 9).state == "unknown format" and resumes_from(entries) is None


def test_the_command(tmp_path, capsys) -> None:
    from windlass.cli.checkpoints import checkpoints

    recipe = tmp_path / "r.toml"
    recipe.write_text(
        'name = "r"\n[model]\nlayers = 1\nwidth = 32\nffn = 48\nheads = 2\nvocab = 100\n[data]\ntokens = "1M"\nseq_len = 16\n'
    )
    run = create_run(tmp_path / "a [odd] name", load_recipe(recipe))
    checkpoints(run.path)
    assert "has no checkpoints yet" in capsys.readouterr().out
    put(run, 1, 2.5)
    checkpoints(run.path, as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert (document["resumes_from"], document["rules"]["keep_last"]) == (1, 3)
    assert document["bytes"] == document["checkpoints"][0]["bytes"] > 70
    spoil(run, 1)
    with pytest.raises(typer.Exit) as left:
        checkpoints(run.path, verify=True)
    assert left.value.exit_code == 7
    out = capsys.readouterr().out
    assert "damaged" in out and "No checkpoint can be resumed" in out
