"""The file of a start: read back as written; a damaged one is refused, and a resume goes by the others."""

import json

import pytest

from windlass.errors import RunError
from windlass.layout.types import Layout, StepSpec
from windlass.runs.folder import Run
from windlass.runs.starts import Start, last_start, read_start, write_start


def start(job: str, created_at: float) -> Start:
    layout = Layout(data=2, micro_batch=2)
    step = StepSpec(seq_len=16)
    return Start(job=job, layout=layout, step=step, device="cpu", devices=2, devices_per_node=2, created_at=created_at)


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [
        (None, "created_at", "yesterday"),
        (None, "layout", None),
        (None, "devices", 4),
        ("layout", "tensor", -3),
        ("layout", "shard", "fulll"),
        ("layout", "micro_batch", 0),
        ("step", "seq_len", "many"),
    ],
)
def test_a_damaged_start_is_refused_and_the_one_before_is_the_last(tmp_path, table, key, value):
    run = Run(tmp_path)
    for number in (1, 2):
        write_start(run, start(f"{number}", float(number)))
    assert last_start(run) == start("2", 2.0) == read_start(run, "2.0")
    path = run.starts / "2.0.json"
    damaged = json.loads(path.read_text())
    (damaged[table] if table else damaged)[key] = value
    path.write_text(json.dumps(damaged))
    with pytest.raises(RunError) as caught:
        read_start(run, "2.0")
    assert caught.value.code == "runs.start-damaged"
    assert last_start(run) == start("1", 1.0)
