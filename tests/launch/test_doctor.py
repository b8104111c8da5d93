"""The doctor names the slow device, the different node and the harmful variable."""

from __future__ import annotations

import pytest

from windlass.launch import doctor


def records(count: int, per_node: int = 4, **changes):
    rank_records = [
        {
            "rank": rank, "local_rank": rank % per_node, "host": f"n{rank // per_node:02d}", "device": "NVIDIA H100 80GB HBM3", "torch": "2.11.0", "driver": "570", "runtime": "12.8",
            "matmul_tflops": 700.0, "matmul_dtype": "bfloat16", "backend": "nccl", "intra_busbw_gbs": 300.0, "inter_busbw_gbs": 130.0, "clock": 1000.0,
        }
        for rank in range(count)
    ]  # fmt: skip
    for rank, change in changes.items():
        rank_records[int(rank.removeprefix("r"))].update(change)
    return rank_records


def by_level(checks, level):
    return [check for check in checks if check.level == level]


def test_a_healthy_set_of_nodes():
    result = doctor.examine(records(8), 8)
    assert not by_level(result, "warn") and not by_level(result, "fail")
    assert doctor.Diagnosis(tuple(result)).verdict == "fit" and doctor.Diagnosis(tuple(result)).exit_code == 0


def test_the_slow_device_is_named_with_its_share():
    result = by_level(doctor.examine(records(8, r5={"matmul_tflops": 350.0}), 8), "warn")
    assert (
        [c.where for c in result] == ["n01:1"]
        and "50 % of the median" in result[0].text
        and "exclude=n01" in (result[0].hint or "")
    )


def test_a_slow_class_of_devices():
    result = by_level(doctor.examine(records(4, **{f"r{i}": {"matmul_tflops": 300.0} for i in range(4)}), 4), "warn")
    assert len(result) == 1 and "of the" in result[0].text


def test_a_rank_that_left_no_record_makes_it_unfit(tmp_path):
    (tmp_path / "worker-00003.log").write_text("Traceback\nModuleNotFoundError: No module named 'torch'\n")
    result = by_level(doctor.examine(records(3), 4, tmp_path), "fail")
    assert "1 of 4 ranks left no record: 3" in result[0].text and "No module named 'torch'" in result[0].text
    assert doctor.Diagnosis(tuple(result)).exit_code == 6


def test_mixed_devices_versions_slow_links_and_clocks():
    changes = {
        "r7": {"device": "NVIDIA A100", "torch": "2.10.0", "driver": "560"},
        **{f"r{i}": {"clock": 1005.0, "intra_busbw_gbs": 60.0} for i in range(4, 7)},
    }
    changes["r7"] |= {"clock": 1005.0, "intra_busbw_gbs": 60.0}
    result = {(c.topic, c.level) for c in doctor.examine(records(8, **changes), 8)}
    assert {
        ("devices", "fail"),
        ("torch", "fail"),
        ("driver", "warn"),
        ("clocks", "warn"),
        ("all-reduce in a node", "warn"),
    } <= result


@pytest.mark.parametrize("env, part", [
    ({"CUDA_LAUNCH_BLOCKING": "1"}, "CUDA_LAUNCH_BLOCKING=1"),
    ({"NCCL_IB_DISABLE": "1"}, "NCCL_IB_DISABLE=1"),
    ({"SINGULARITY_BIND": "/scratch"}, "/scratch"),
    ({"OMP_NUM_THREADS": "100000"}, "OMP_NUM_THREADS"),
    ({"ROCR_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "0"}, "HIP_VISIBLE_DEVICES"),
])  # fmt: skip
def test_harmful_variables(env, part):
    result = list(doctor.environment("n1", env))
    assert [c.level for c in result] == ["warn"] and part in result[0].text
    assert [c.level for c in doctor.environment("n1", {"CUDA_LAUNCH_BLOCKING": "0"})] == ["ok"]


def test_an_interface_that_does_not_exist():
    result = [c for c in doctor.network("localhost", {"NCCL_SOCKET_IFNAME": "hsn0,hsn1"}) if c.topic == "interface"]
    assert result[0].level == "fail" and "hsn0, hsn1" in result[0].text


def test_disks(tmp_path):
    result = doctor.disk("n1", tmp_path, 1)
    assert result.values["write_mbs"] > 0 and result.values["latency_ms"] >= 0 and not list(tmp_path.iterdir())
    missing = doctor.disk("n1", tmp_path / "no", 1)
    assert missing.level == "fail"


def test_store_and_tokenizer(tmp_path):
    result = {c.topic: c for c in doctor.data_checks(str(tmp_path / "store"), str(tmp_path / "tokenizer.json"))}
    assert result["token store"].level == "fail" and result["tokenizer"].level == "fail"


@pytest.mark.multi
def test_two_workers_here(tmp_path):
    result = doctor.examine(doctor.run_workers(tmp_path, 2), 2, tmp_path)
    topics = {c.topic: c for c in reversed(result)}  # on a busy machine a second line may name the slower process
    assert (
        topics["ranks"].level == "ok"
        and topics["all-reduce in a node"].values["busbw_gbs"] > 0
        and topics["matrix rate"].values["ranks"] == 2
    )
