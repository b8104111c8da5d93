"""Which partition takes CPU work, by the time it needs and the limits of the cluster file."""

from __future__ import annotations

from pathlib import Path

import pytest

from windlass.clusters import load_cluster
from windlass.launch.cpu import CpuWork, cpu_job

HOUR = 3600.0


def job(cluster: str, work: CpuWork | None):
    return cpu_job(load_cluster(cluster), Path("/project/x"), "command", ["true"], account="a", work=work)


@pytest.mark.parametrize(
    "work, partition, cores, hours",
    [
        (None, "lrd_all_serial", 4, 4),  # unknown: the file's choice, as long as it allows
        (CpuWork(core_seconds=4 * HOUR), "lrd_all_serial", 4, 4),  # an hour on four cores
        (CpuWork(core_seconds=8 * 16 * HOUR), "dcgp_usr_prod", 8, 24),  # 32 h on four cores, 16 h on eight
        (CpuWork(core_seconds=8 * 16 * HOUR, tasks=4), "dcgp_usr_prod", 8, 8),  # tasks help only where cores are free
        (CpuWork(seconds=5 * HOUR), "dcgp_usr_prod", 8, 10),  # more cores do not help a copy
    ],
)
def test_the_first_partition_that_holds_the_work(work, partition, cores, hours):
    chosen = job("leonardo-booster", work)
    assert (chosen.partition, chosen.cpus_per_task, chosen.seconds) == (partition, cores, hours * HOUR)


def test_the_reason_has_the_numbers():
    text = job("leonardo-booster", CpuWork(core_seconds=8 * 16 * HOUR)).about[-1]
    assert "dcgp_usr_prod/normal: 16 h of at most 24 h" in text and "lrd_all_serial: 32 h of at most 4 h" in text


def test_work_that_no_partition_holds_gets_the_longest_and_advice():
    chosen = job("leonardo-booster", CpuWork(core_seconds=8 * 960 * HOUR))
    assert (chosen.partition, chosen.qos, chosen.seconds) == ("dcgp_usr_prod", "dcgp_qos_lprod", 96 * HOUR)
    assert "--array 10" in chosen.about[-1]  # 960 h on eight cores, ten tasks of 96 h


def test_a_cluster_without_a_cpu_partition_uses_its_default():
    assert job("juwels-booster", CpuWork(seconds=HOUR)).partition == "booster"
