"""The GPUs of this machine by the driver's files; unknown ones are not guessed."""

from __future__ import annotations

from pathlib import Path

import pytest

from windlass.clusters import here, load_cluster


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A driver with GPUs of these names; the text is that of an H200's file."""
    monkeypatch.setattr(here, "DRIVER", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def make(*names: str) -> None:
        for number, name in enumerate(names):
            folder = tmp_path / f"0000:{number:02x}:00.0"
            folder.mkdir()
            (folder / "information").write_text(
                f"Model: \t\t {name}\nIRQ:   \t\t 33\nGPU UUID: \t GPU-1\nVideo BIOS: \t 96.00\nBus Type: \t PCIe\nDevice Minor: \t {number}\n"
            )

    return make


def test_a_machine_without_the_driver_is_its_cpu(driver) -> None:
    cluster = load_cluster("workstation")
    assert here.with_gpus(cluster) == (cluster, None)


def test_a_known_gpu_takes_the_place_of_the_cpu(driver) -> None:
    driver("NVIDIA H200")
    planned, note = here.with_gpus(load_cluster("workstation"))
    assert (planned.device, planned.node.devices) == ("h200", 1)
    assert "1 x NVIDIA H200" in note


def test_links_between_several_are_assumed_and_said_to_be(driver) -> None:
    driver(*["NVIDIA H200"] * 4)
    planned, note = here.with_gpus(load_cluster("workstation"))
    assert (planned.node.devices, planned.links.intra_gbs, planned.links.fabric) == (4, 20.0, "PCIe, assumed")
    assert "20 GB/s" in (note or "")


@pytest.mark.parametrize(("visible", "devices"), [("", None), ("0", 1), ("2,1", 2), ("GPU-a,GPU-b,GPU-c", 3)])
def test_only_those_that_this_process_may_use(driver, monkeypatch, visible, devices) -> None:
    driver(*["NVIDIA H200"] * 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    planned, _ = here.with_gpus(load_cluster("workstation"))
    assert (planned.device, planned.node.devices) == (("cpu", 2) if devices is None else ("h200", devices))


@pytest.mark.parametrize("names", [("NVIDIA Quadro NVS 295",), ("NVIDIA H200", "NVIDIA A100-SXM4-80GB")])
def test_what_the_planner_does_not_know_is_said(driver, names) -> None:
    driver(*names)
    cluster = load_cluster("workstation")
    planned, note = here.with_gpus(cluster)
    assert planned == cluster
    assert names[0] in note


def test_other_machines_stay_as_their_files_say(driver) -> None:
    driver("NVIDIA H200")
    cluster = load_cluster("lumi-g")
    assert here.with_gpus(cluster) == (cluster, None)
