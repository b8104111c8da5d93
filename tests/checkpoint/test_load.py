"""Loading: the newest complete checkpoint, the one before when it is damaged, at any world size and layout."""

from __future__ import annotations

import hashlib
import json
import re
import shutil

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from windlass.checkpoint import files
from windlass.checkpoint.load import find_latest, load_model_weights, restore, weights_source
from windlass.checkpoint.reader import CheckpointReader
from windlass.checkpoint.save import Saver
from windlass.config.save import SaveConfig
from windlass.errors import CheckpointError


def put(run, step: int, model: torch.nn.Module, **extra) -> None:
    assert (
        Saver(run, SaveConfig(keep_last=9))
        .save(step, {"model": dict(model.state_dict())}, {"tokens": step * 10, **extra}, block=True)
        .ok
    )


def shard(run, step: int):
    return next(run.checkpoint(step).glob("*.distcp"))


def flip(path, at: int = 100) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_nothing_saved_is_none(run) -> None:
    assert find_latest(run) is None


def test_the_newest_is_taken_and_comes_back_bit_for_bit(run, net) -> None:
    model = net(seed=1)
    put(run, 1, net(seed=0))
    put(run, 2, model, data={"position": 7})
    latest = find_latest(run)
    assert (latest.step, latest.tokens, latest.world_size, latest.set_aside) == (2, 20, 1, ())
    extra = restore(latest, state := {"model": dict(net(seed=5).state_dict())})
    assert extra == {"tokens": 20, "data": {"position": 7}}
    assert all(torch.equal(state["model"][k], v) for k, v in model.state_dict().items())


def test_random_numbers_go_on_where_they_were(run, net) -> None:
    model = net()
    torch.manual_seed(3)
    put(run, 1, model)
    expected = torch.rand(5)
    torch.manual_seed(99)
    restore(find_latest(run), {"model": dict(model.state_dict())})
    assert torch.equal(torch.rand(5), expected)


@pytest.mark.parametrize(
    "harm", ["flipped bit", "truncated", "missing shard", "missing metadata", "no manifest", "broken manifest"]
)
def test_a_damaged_one_is_named_and_set_aside_and_the_one_before_is_used(run, net, harm) -> None:
    put(run, 1, net(seed=1))
    put(run, 2, net(seed=2))
    path = shard(run, 2)
    {
        "flipped bit": lambda: flip(path),
        "truncated": lambda: path.write_bytes(path.read_bytes()[:-10]),
        "missing shard": path.unlink,
        "missing metadata": (run.checkpoint(2) / ".metadata").unlink,
        "no manifest": (run.checkpoint(2) / files.MANIFEST).unlink,
        "broken manifest": lambda: (run.checkpoint(2) / files.MANIFEST).write_text("{"),
    }[harm]()
    latest = find_latest(run)
    assert latest.step == 1 and len(latest.set_aside) == 1
    expected = {"flipped bit": "chunk 1 of 1", "truncated": "bytes instead of", "missing shard": "is missing",
             "missing metadata": ".metadata is missing", "no manifest": files.MANIFEST, "broken manifest": files.MANIFEST}[harm]  # fmt: skip
    [event] = [e for e in run.events() if e.event == "damaged"]
    assert expected in event.reason and event.checkpoint == "step-000000002"
    assert (run.checkpoints / "damaged-step-000000002").is_dir() and not run.checkpoint(2).exists()


def test_all_damaged_does_not_begin_again_from_nothing(run, net) -> None:
    for step in (1, 2, 3):
        put(run, step, net())
        flip(shard(run, step))
    for _ in range(2):  # the second start, which finds only what the first set aside, comes to the same end
        with pytest.raises(CheckpointError) as error:
            find_latest(run)
        assert error.value.code == "checkpoint.all-damaged" and re.search(r"\b3\b", error.value.message)
    assert len([e for e in run.events() if e.event == "damaged"]) == 3
    for folder in files.damaged(run):
        shutil.rmtree(folder)
    assert find_latest(run) is None


@pytest.mark.parametrize("seal", [True, False], ids=["sealed", "written before seals"])
def test_any_flipped_bit_of_a_manifest_is_found_or_changes_nothing(run, net, seal) -> None:
    """Every byte in turn, another bit of it each time: the checkpoint is refused as damaged, or reads as it was."""
    put(run, 7, net())
    path = run.checkpoint(7) / files.MANIFEST
    manifest = json.loads(path.read_text())
    if not seal:
        del manifest[files.SEAL]
        path.write_text(json.dumps(manifest))
    whole, judged = path.read_bytes(), {"step", "files", "world_size", "tokens", "metric"}
    for at in range(len(whole)):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << at % 7
        path.write_bytes(flipped)
        try:
            latest = files.complete(run.checkpoint(7), verify=False).manifest
        except CheckpointError:
            continue
        if seal:
            assert {k: latest.get(k) for k in judged} == {k: manifest[k] for k in judged}, flipped[at - 20 : at + 20]


def test_a_folder_under_another_steps_name_is_set_aside(run, net) -> None:
    put(run, 1, net())
    shutil.copytree(run.checkpoint(1), run.checkpoint(900))
    latest = find_latest(run)
    assert latest.step == 1 and "for step 1" in latest.set_aside[0]


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", files.EXTRA, files.MANIFEST])
@pytest.mark.parametrize("harm", ["empty", "cut", "flipped", "missing", "a folder"])
def test_every_kind_of_file_in_every_kind_of_damage(run, net, name, harm) -> None:
    put(run, 1, net(seed=1))
    put(run, 2, net(seed=2))
    path = run.checkpoint(2) / name
    data = path.read_bytes()
    path.unlink()
    if harm == "a folder":
        path.mkdir()
    elif harm != "missing":
        middle = len(data) // 2
        cut = data[:middle]
        path.write_bytes(
            {"empty": b"", "cut": cut, "flipped": cut + bytes([data[middle] ^ 4]) + data[middle + 1 :]}[harm]
        )
    latest = find_latest(run)
    assert latest.step == 1 and name in latest.set_aside[0]
    extra = restore(latest, state := {"model": dict(net(seed=5).state_dict())})
    assert extra["tokens"] == 10 and torch.equal(state["model"]["first.weight"], net(seed=1).first.weight)


def test_files_that_may_not_be_read_are_not_called_damaged(run, net, monkeypatch) -> None:
    put(run, 1, net())
    put(run, 2, net())
    monkeypatch.setattr("windlass.checkpoint.load.os.access", lambda path, mode: "distcp" not in str(path))
    with pytest.raises(CheckpointError) as error:
        find_latest(run)
    assert error.value.code == "checkpoint.permission-denied"
    assert all(text in error.value.message for text in ("1 of 3", "__0_0.distcp"))
    assert run.checkpoint(2).is_dir() and files.damaged(run) == []


def test_a_temporary_folder_of_another_version_is_not_deleted(run, net) -> None:
    put(run, 1, net())
    later = files.temporary(run, 2)
    shutil.copytree(run.checkpoint(1), later)
    manifest = json.loads((later / files.MANIFEST).read_text())
    (later / files.MANIFEST).write_text(json.dumps(files.sealed({**manifest, "format": 99})))
    assert find_latest(run).step == 1 and later.is_dir()


def test_without_verify_only_names_and_sizes_are_looked_at(run, net) -> None:
    put(run, 1, net())
    flip(shard(run, 1))
    assert find_latest(run, verify=False).step == 1


def test_a_save_killed_before_its_rename_is_finished_when_it_is_whole(run, net) -> None:
    put(run, 1, net())
    put(run, 2, net())
    run.checkpoint(2).rename(files.temporary(run, 2))
    assert find_latest(run).step == 2 and files.temporaries(run) == []


def test_a_save_killed_while_writing_is_removed(run, net) -> None:
    put(run, 1, net())
    half = files.temporary(run, 2)
    shutil.copytree(run.checkpoint(1), half)
    (half / files.MANIFEST).unlink()
    assert find_latest(run).step == 1 and not half.exists()
    assert [e.checkpoint for e in run.events() if e.event == "damaged"] == [half.name]


def test_a_deletion_that_was_cut_off_is_finished(run, net) -> None:
    put(run, 1, net())
    (run.checkpoints / ".removing-step-000000000").mkdir()
    find_latest(run)
    assert [p.name for p in run.checkpoints.iterdir()] == ["step-000000001"]


def test_an_unreadable_version_stops_the_run_and_is_left_alone(run, net) -> None:
    put(run, 1, net())
    put(run, 2, net())
    manifest = json.loads((run.checkpoint(2) / files.MANIFEST).read_text())
    later = files.sealed({**manifest, "format": 99, "windlass": "9.0"})
    (run.checkpoint(2) / files.MANIFEST).write_text(json.dumps(later))
    with pytest.raises(files.UnknownFormatError) as error:
        find_latest(run)
    assert error.value.code == "checkpoint.unknown-format"
    assert all(number in error.value.message for number in ("99", "9.0"))
    assert run.checkpoint(2).is_dir()


def test_the_order_is_by_step_and_no_clock_changes_it(run, net) -> None:
    put(run, 2, net())
    put(run, 1, net())  # written later, as after a clock or a copy went wrong
    assert find_latest(run).step == 2
    assert find_latest(run, before=2).step == 1


def test_another_model_is_refused(run, net) -> None:
    put(run, 1, net(width=16))
    with pytest.raises(CheckpointError) as error:
        restore(find_latest(run), {"model": dict(net(width=8).state_dict())})
    assert error.value.code == "checkpoint.model-mismatch"


# -- weights only ---------------------------------------------------------------------------------------------------------


def test_weights_from_a_checkpoint_a_run_and_a_hugging_face_folder(run, net, tmp_path) -> None:
    from safetensors.torch import save_file

    model = net(seed=3)
    put(run, 4, model)
    hf = tmp_path / "hf"
    hf.mkdir()
    (hf / "config.json").write_text("{}")
    save_file(dict(model.state_dict()), hf / "model.safetensors")
    for source in (run.checkpoint(4), run.path, hf):
        other = net(seed=8)
        load_model_weights(source, other)
        assert all(
            torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True)
        )


def test_weights_are_checked_before_a_warm_start_or_an_evaluation(run, net, tmp_path) -> None:
    put(run, 1, net(seed=1))
    put(run, 2, net(seed=2))
    (run.checkpoint(2) / ".metadata").unlink()
    assert weights_source(run.path) == run.checkpoint(1)  # the newest that has all its files
    flip(shard(run, 1))
    with pytest.raises(CheckpointError) as error:
        load_model_weights(run.path, net())
    assert error.value.code == "checkpoint.damaged" and "step-000000001" in error.value.message
    assert run.checkpoint(1).is_dir()  # another run's folder: nothing is renamed in it
    load_model_weights(run.path, net(), verify=False)


def test_a_run_of_damaged_checkpoints_names_them(run, net) -> None:
    for step in (1, 2, 3):
        put(run, step, net(seed=step))
    (run.checkpoint(1) / ".metadata").unlink()
    (run.checkpoint(2) / "manifest.json").write_text("{")
    files.set_aside(run.checkpoint(3), "step-000000003: a flipped bit")
    with pytest.raises(CheckpointError) as error:
        weights_source(run.path)
    assert error.value.code == "checkpoint.all-damaged"
    for part in (
        "3 are",
        "step-000000001: .metadata is missing",
        "step-000000002: has no",
        "step-000000003: a flipped",
    ):
        assert part in error.value.message
    assert run.checkpoint(1).is_dir() and run.checkpoint(2).is_dir()  # nothing is renamed
    for folder in run.checkpoints.iterdir():
        shutil.rmtree(folder)
    with pytest.raises(CheckpointError) as error:
        weights_source(run.path)
    assert error.value.code == "checkpoint.gone" and "step 3" in error.value.message


def test_a_cut_off_safetensors_file_is_named(net, tmp_path) -> None:
    from safetensors.torch import save_file

    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "model.safetensors"
    save_file(dict(net().state_dict()), path)
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(CheckpointError) as error:
        load_model_weights(tmp_path, net())
    assert error.value.code == "checkpoint.weights-damaged" and "model.safetensors" in error.value.message


def test_weights_that_are_not_there(run, tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    expected = {"nowhere": "no-weights", "run": "none-finished", "empty": "no-weights"}
    for name, code in expected.items():
        with pytest.raises(CheckpointError) as error:
            weights_source(tmp_path / name)
        assert error.value.code == f"checkpoint.{code}"


def test_weights_of_another_shape_name_the_first_that_differs(run, net, tmp_path) -> None:
    from safetensors.torch import save_file

    (tmp_path / "config.json").write_text("{}")
    save_file(dict(net(width=8).state_dict()), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        load_model_weights(tmp_path, net())
    assert error.value.code == "checkpoint.model-mismatch"
    assert all(text in error.value.message for text in ("4 ", "first.weight", "(32, 8)", "(64, 16)"))


# -- several processes ------------------------------------------------------------------------------------------------------


def _sharded(net_class, seed: int, layout: str):
    """The model under a layout, with AdamW that has made one step, as a state."""
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(seed)
    model = net_class()
    world = dist.get_world_size()
    if layout == "full":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    elif layout == "hybrid":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")))
    elif layout == "tensor":
        parallelize_module(
            model, init_device_mesh("cpu", (world,)), {"first": ColwiseParallel(), "second": RowwiseParallel()}
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(7)
    model(torch.randn(8, 16)).square().sum().backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def _digest(state) -> str:
    from windlass.checkpoint.stage import leaves

    total = hashlib.sha256()
    for path, leaf in sorted(leaves(state), key=lambda item: str(item[0])):
        whole = leaf.full_tensor() if hasattr(leaf, "full_tensor") else leaf
        total.update(str(path).encode() + whole.detach().contiguous().numpy().tobytes())
    return total.hexdigest()


def _save_under(rank, world, run, net_class, layout) -> str:
    state = _sharded(net_class, 1, layout)
    saver = Saver(run, SaveConfig(), rank=rank, world_size=world)
    saver.save(3, state, {"tokens": 30})
    outcome = saver.finish()
    assert outcome.ok, outcome.error
    return _digest(state)


def _load_under(rank, world, run, net_class, layout) -> str:
    state = _sharded(net_class, 2, layout)
    latest = find_latest(run)
    assert restore(latest, state) == {"tokens": 30} and latest.world_size == 4
    return _digest(state)


@pytest.mark.multi
def test_full_x_4_is_resumed_as_hybrid_tensor_and_single(run, net, spread) -> None:
    net_class = type(net())
    [before, *_] = spread(4, _save_under, run, net_class, "full")
    assert len(list(run.checkpoint(3).glob("*.distcp"))) == 4
    for world, layout in ((4, "hybrid"), (2, "tensor"), (2, "full"), (1, "single")):
        assert set(spread(world, _load_under, run, net_class, layout)) == {before}, layout


@pytest.mark.multi
def test_a_damaged_shard_of_one_rank_is_found_by_all(run, net, spread) -> None:
    net_class = type(net())
    spread(4, _save_under, run, net_class, "full")
    flip(run.checkpoint(3) / "__2_0.distcp")

    def body(rank, world, run):
        try:
            return find_latest(run)
        except CheckpointError as error:
            return error.message

    first, second = spread(2, body, run)
    assert first == second and "__2_0.distcp differs" in first
    [event] = [e for e in run.events() if e.event == "damaged"]
    assert "__2_0.distcp differs" in event.reason


def test_ctrl_c_is_not_called_a_fault_of_the_checkpoint(run, net, monkeypatch) -> None:
    """torch.distributed.checkpoint turns it into an exception of its own."""

    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    put(run, 1, net())
    with monkeypatch.context() as during, pytest.raises(KeyboardInterrupt):
        during.setattr(CheckpointReader, "read_data", stop)
        restore(find_latest(run), {"model": dict(net().state_dict())})
    monkeypatch.setattr(FileSystemWriter, "write_data", stop)
    with pytest.raises(KeyboardInterrupt):
        put(run, 2, net())
    assert find_latest(run).step == 1
