"""Rank and world size come from torchrun's variables, else from srun's, else the process is alone."""

import pytest

from windlass.clusters.scheduler import array_task, job_id, place, port_of, restart_count

STEP = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_NNODES": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "4711",
    "MASTER_ADDR": "nid1",
}


def test_torchrun():
    here = place(
        {
            "RANK": "3",
            "WORLD_SIZE": "8",
            "LOCAL_RANK": "3",
            "LOCAL_WORLD_SIZE": "4",
            "GROUP_RANK": "0",
            "MASTER_ADDR": "a",
            "MASTER_PORT": "1",
        }
    )
    assert (here.rank, here.world_size, here.local_rank, here.nodes, here.source) == (3, 8, 3, 2, "torchrun")


def test_srun():
    here = place(STEP)
    assert (here.rank, here.world_size, here.local_rank, here.local_world_size, here.node_rank, here.nodes) == (
        5,
        8,
        1,
        4,
        1,
        2,
    )
    assert (here.master_addr, here.master_port, here.source) == ("nid1", 24711, "slurm")


def test_alone():
    assert place({}).source == "single"
    assert place({"SLURM_PROCID": "0", "SLURM_JOB_ID": "1"}).source == "single", "a batch script is no rank"


def test_ports_differ_between_jobs_and_stay_legal():
    assert port_of("4711") != port_of("4712")
    assert all(1024 < port_of(str(i)) < 65536 for i in (0, 9999, 10**9, 123456))


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "7"}, "7"),
        ({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}, "7_2"),
    ],
)
def test_job_ids(env, expected):
    assert job_id(env) == expected


def test_restarts_and_arrays():
    assert restart_count({}) == 0
    assert restart_count({"SLURM_RESTART_COUNT": "2"}) == 2
    assert array_task({}) is None
    assert array_task({"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_COUNT": "8"}) == (
        4,
        8,
    )
