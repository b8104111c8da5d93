"""What a command says of its own job, and faults of commands that are known before they run."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from windlass.clusters import load_cluster
from windlass.config.sweep import load_sweep
from windlass.errors import ConfigError
from windlass.launch.sweep.command import SrunRequest, check_commands, place_of, refuse_commands, srun_request
from windlass.launch.sweep.points import SweepPoint, make_points

MASKS = load_cluster("lumi-g").binding.masks


def point_of(command: str, **settings) -> SweepPoint:
    return SweepPoint(
        name="p",
        values={},
        settings=settings,
        devices=settings.get("devices"),
        argv_template=tuple(shlex.split(command)),
    )


@pytest.mark.parametrize(
    ("command", "request_"),
    [
        ("python x.py -N 3", None),
        ("srun -N 2 --ntasks-per-node=8 --gpus 16 python x.py -N 9 -t 1", SrunRequest(nodes=2, tasks=8, gpus=16)),
        ("bash -c 'A=1; srun -N2 -p small -A p1 -q high python x.py'", SrunRequest(nodes=2, partition="small", account="p1", qos="high")),
        ("srun --label -t 30 python -N 3", SrunRequest(seconds=1800.0)),
        ("bash -c 'srun --time=1-00:00:00 --gpus $(( 2 * 8 )) --account=$ACCOUNT x'", SrunRequest(seconds=86400.0, gpus=16)),
    ],
)  # fmt: skip
def test_the_options_of_the_commands_own_srun(command, request_):
    assert srun_request(point_of(command)) == request_


def test_nodes_and_devices_come_from_the_values_then_from_srun():
    assert place_of(point_of("srun -N 2 --ntasks-per-node 4 x", num_nodes=3)) == (3, 4)
    assert place_of(point_of("x", nodes=2, num_gpus=8)) == (2, 8)
    assert place_of(point_of("x")) == (1, None)


@pytest.mark.parametrize(("key", "value", "nearest"), [("num_nodes", 0, 1), ("num_gpus", 2.5, 2), ("nodes", -1, 1)])
def test_a_count_that_cannot_be_is_refused_with_the_nearest(key, value, nearest):
    with pytest.raises(ConfigError) as caught:
        place_of(point_of("x", **{key: value}))
    assert caught.value.code == "sweep.invalid-shape" and f"{value:g}" in caught.value.message
    assert str(nearest) in caught.value.hint


def findings_of(folder: Path, command: str, matrix: str = "n = [1, 2]", cluster: str | None = None):
    (folder / "s.toml").write_text(f"name = 's'\ncommand = '''{command}'''\n[matrix]\n{matrix}\n")
    loaded = load_sweep(folder / "s.toml")
    return check_commands(loaded, make_points(loaded), load_cluster(cluster) if cluster else None)


@pytest.mark.parametrize(
    ("masks", "cluster", "parts"),
    [
        ([MASKS[0], MASKS[0], *MASKS[2:]], None, ["line 2", "ranks 0 and 1", "49-55"]),
        (MASKS[:7], None, ["ranks 0 and 7", "7 entries for 8 tasks"]),
        ([*MASKS[:4], "0xff", *MASKS[5:]], "lumi-g", ["rank 4", "reserved cores 0"]),
        ([MASKS[2], MASKS[1], MASKS[0], *MASKS[3:]], "lumi-g", ["rank 0", "NUMA domain 3"]),
    ],
)
def test_a_mask_of_a_sweeps_command_is_checked_once_for_all_points(tmp_path, masks, cluster, parts):
    command = f'bash -c "srun --ntasks-per-node 8 --cpu-bind=mask_cpu:{",".join(masks)} x {{n}}"'
    result = findings_of(tmp_path, command, cluster=cluster)
    assert {f.rule for f in result} == {"masks"} and all(",".join(MASKS) in f.hint for f in result)
    assert any(all(part in f.message for part in parts) for f in result), result
    assert len({f.message for f in result}) == len(result)


def test_correct_masks_pass(tmp_path):
    command = f"srun --ntasks-per-node 8 --cpu-bind=mask_cpu:{','.join(MASKS)} x {{n}}"
    assert findings_of(tmp_path, command) == findings_of(tmp_path, command, cluster="lumi-g") == []


@pytest.mark.parametrize(
    ("command", "rule", "parts", "repair"),
    [
        ("bash -c 'srun --gpus (({n}*2)) x'", "arithmetic", ["line 2", "--gpus (({n}*2))"], "--gpus $(({n}*2))"),
        ("bash -c 'srun --gpus $(( {n} * 2 ) x'", "syntax", ["bash"], "$(( ))"),
        ("bash -c 'srun \"x {n}'", "syntax", ["bash"], "quotes"),
        ("srun -N 3 x {nodes} {n}", "nodes", ["-N 3", "2 nodes"], "-N 2"),
        ("srun -N {nodes} --ntasks-per-node 4 x {n}", "tasks", ["--ntasks-per-node 4", "8 devices"], "--ntasks-per-node 8"),
        ("srun -N {nodes} --gpus 8 x {n}", "gpus", ["--gpus 8", "2 nodes x 8 devices"], "--gpus 16"),
    ],
)  # fmt: skip
def test_a_broken_command_is_refused_with_its_repair(tmp_path, command, rule, parts, repair):
    result = findings_of(tmp_path, command, "n = [1]\nnodes = [2]\ndevices = [8]")
    assert [f.rule for f in result] == [rule], result
    assert all(part in result[0].message for part in parts) and repair in result[0].hint
    with pytest.raises(ConfigError) as caught:
        refuse_commands(result, tmp_path / "s.toml", force=False)
    assert caught.value.code == "sweep.faulty-command" and rule in caught.value.message
    refuse_commands(result, tmp_path / "s.toml", force=True)
