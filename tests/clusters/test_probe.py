"""The probe finds where a cluster file is out of date, with recorded answers of the scheduler's commands."""

from __future__ import annotations

import pytest

from windlass.clusters import load_cluster, probe
from windlass.errors import LaunchError

ANSWERS = {
    "sinfo": "boost_usr_prod|1-00:00:00|3456|gpu:a100:4(S:0-1)|32|494000|up\nlrd_all_serial|4:00:00|2|(null)|32|494000|up\nnew_queue|12:00:00|10|gpu:4|32|494000|up\n",
    "scontrol -o show partition": "PartitionName=boost_usr_prod MaxNodes=UNLIMITED State=UP\nPartitionName=lrd_all_serial MaxNodes=1 State=UP\n",
    "scontrol show config": "JobRequeue              = 0\nMaxArraySize            = 1001\nSLURM_VERSION           = 23.11.10\n",
    "sacctmgr qos": "normal|1-00:00:00||\nboost_qos_dbg|00:30:00|node=2|\nboost_qos_bprod|1-00:00:00||\nboost_qos_lprod|4-00:00:00||\n",
    "sacctmgr assoc": "EUHPC_A01||normal\n",
}


def ask(argv):
    if argv[0] == "sacctmgr":
        return ANSWERS["sacctmgr qos" if argv[3] == "qos" else "sacctmgr assoc"]
    return ANSWERS["sinfo"] if argv[0] == "sinfo" else ANSWERS[" ".join(argv)]


def test_differences_by_hand():
    differences = {d.key: d for d in probe.probe(load_cluster("leonardo-booster"), ask).differences}
    assert differences["partition boost_usr_prod qos normal max_time"].verdict == "same"
    assert differences["partition boost_usr_prod qos boost_qos_dbg max_time"].machine == "30 min"
    # lprod may run four days, but the partition ends at one: the shorter limit holds, and the file says otherwise.
    assert differences["partition boost_usr_prod qos boost_qos_lprod max_time"].verdict == "differs"
    assert differences["partition new_queue"].verdict == "not in the file"
    assert differences["nodes"].verdict == "same" and differences["node.devices"].verdict == "same"
    assert differences["slurm.max_array"].machine == "1000" and differences["your accounts"].machine == "EUHPC_A01"


@pytest.mark.parametrize(
    "text, count",
    [("gpu:4", 4), ("gpu:mi250:8", 8), ("gpu:a100:4(S:0-1),tmpfs:1", 4), ("(null)", None), ("gpu:h100:2,gpu:mig:1", 3)],
)
def test_gres(text, count):
    assert probe.gres_devices(text) == count


def test_a_machine_without_accounting():
    result = probe.probe(load_cluster("leonardo-booster"), lambda argv: None if argv[0] == "sacctmgr" else ask(argv))
    assert (
        result.raw["qos"] is None
        and any(d.key == "nodes" for d in result.differences)
        and result.as_dict()["cluster"] == "leonardo-booster"
    )


def test_no_slurm_here_and_an_unknown_host(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(LaunchError) as error:
        probe.probe(load_cluster("leonardo-booster"))
    assert error.value.code == "clusters.no-slurm"
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    monkeypatch.setattr("socket.getfqdn", lambda: "elsewhere.example.org")
    with pytest.raises(LaunchError) as error:
        probe.recognise()
    assert error.value.code == "clusters.unknown-host" and "elsewhere.example.org" in error.value.message
