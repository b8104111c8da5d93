"""EAR's CSV, sacct and the ledger that joins them with our own sensors."""

from __future__ import annotations

import json

import pytest

from windlass.energy.ear import BATCH_STEP, parse, read_ear, without_overlap
from windlass.energy.ledger import build, record_ear, record_slurm
from windlass.energy.slurm import read_sacct
from windlass.errors import RunError
from windlass.runs.folder import Run

LEGACY = "NODE_ID;JOB_ID;STEP_ID;USER_ID;TIME;DC-NODE-POWER;PCK-NODE-POWER;DRAM-POWER;GFLOPS\ntcn12;1001;0;u;100.0;300.0;180.0;20.0;5\n"
V4 = (
    "NODENAME;JOBID;STEPID;TIME_SEC;DC_NODE_POWER_W;DRAM_POWER_W;PCK_POWER_W;CPU-GFLOPS;GPU0_POWER_W;GPU0_FREQ_KHZ;GPU0_UTIL_PERC;GPU1_POWER_W\n"
    "gcn1;69478;0;259.0;1937.9;30.0;320.0;1.0;400.0;1980000;97;390.0\n"
)
V52 = (
    "JOBID;STEPID;APPID;USERID;JOBNAME;JOB_START_TIME;EARL_ENABLED;NODENAME;TIME_SEC;CPU_GFLOPS;CPU_UTIL;DC_NODE_POWER_W;NODEMGR_DC_NODE_POWER_W;NODEMGR_TIME_SEC\n"
    "77;0;0;u;train;2024-01-01;1;gcn5;1000;1;50;2800.0;2700.0;1001\n"
    "77;0;0;u;train;2024-01-01;1;gcn6;1000;1;50;2600.0;2500.0;1001\n"
    f"77;{BATCH_STEP};0;u;train;2024-01-01;1;gcn5;1010;1;50;2790.0;2700.0;1001\n"
)


class TestEar:
    def test_v4_by_hand(self):
        row = parse(V4, "f")[0]
        assert row.joules == pytest.approx(259.0 * 1937.9)
        assert row.joules / 3.6e6 == pytest.approx(0.139, abs=0.001)
        assert row.gpu_joules == {"gpu0": pytest.approx(400.0 * 259), "gpu1": pytest.approx(390.0 * 259)}
        assert row.cpu_joules == pytest.approx(320.0 * 259)

    def test_legacy_header(self):
        row = parse(LEGACY, "f")[0]
        assert (row.node, row.job, row.step, row.joules, row.cpu_joules) == ("tcn12", "1001", "0", 30_000.0, 18_000.0)

    def test_v52_takes_node_power_not_the_managers_and_leaves_the_batch_step_out(self):
        rows = without_overlap(parse(V52, "f"))
        assert sum(r.joules for r in rows) == 2_800_000.0 + 2_600_000.0

    def test_a_job_of_only_a_batch_step_keeps_it(self):
        only = "\n".join([V52.splitlines()[0], V52.splitlines()[3]])
        assert [r.step for r in without_overlap(parse(only, "f"))] == [BATCH_STEP]

    @pytest.mark.parametrize(
        ("column", "value", "joules"), [("ENERGY(J)", "7200", 7200.0), ("ENERGY(kWh)", "0.002", 7200.0)]
    )
    def test_energy_column_by_its_own_unit(self, column, value, joules):
        assert parse(f"NODENAME;JOBID;STEPID;TIME_SEC;{column}\nn;1;0;10;{value}\n", "f")[0].joules == pytest.approx(
            joules
        )

    def test_power_times_time_wins_over_a_column_whose_unit_changed(self):
        assert (
            parse("NODENAME;JOBID;STEPID;TIME_SEC;DC_NODE_POWER_W;ENERGY_J\nn;1;0;10;100;1.0\n", "f")[0].joules
            == 1000.0
        )

    def test_a_foreign_file_is_refused_with_what_it_has(self, tmp_path):
        path = tmp_path / "x.csv"
        path.write_text("a,b,c\n1,2,3\n")
        with pytest.raises(RunError, match=r"no column for node, job, seconds .*begins with a,b,c"):
            read_ear(path)
        with pytest.raises(RunError, match="cannot be read"):
            read_ear(tmp_path / "absent.csv")

    def test_blank_power_is_unknown_not_zero(self):
        assert parse("NODENAME;JOBID;STEPID;TIME_SEC;DC_NODE_POWER_W\nn;1;0;10;\n", "f")[0].joules is None


class TestSacct:
    def test_srun_steps_are_added_batch_and_job_rows_are_not(self):
        text = "9|5200|110|2|COMPLETED\n9.batch|1000|110|1|COMPLETED\n9.extern|1100|110|2|COMPLETED\n9.0|2000|50|2|COMPLETED\n9.1|1100|50|2|COMPLETED\n"
        job = read_sacct(text)[0]
        assert (job.joules, job.seconds, job.nodes) == (3100.0, 100.0, 2)

    def test_only_a_batch_step(self):
        job = read_sacct("9|900|60|1|COMPLETED\n9.batch|900|60|1|COMPLETED\n")[0]
        assert job.joules == 900.0 and "first node only" in job.note

    @pytest.mark.parametrize("raw", ["", "0", "18446744073709551614"])
    def test_a_site_without_energy_is_unknown(self, raw):
        job = read_sacct(
            f"JobID|ConsumedEnergyRaw|ElapsedRaw|NNodes|State\n9|{raw}|60|4|COMPLETED\n9.0|{raw}|60|4|COMPLETED\n"
        )[0]
        assert job.joules is None and job.note == "SLURM gathered no energy for it"


def line(
    node: str,
    source: str,
    scope: str,
    joules: float,
    *,
    session: str = "1000-1",
    job: str | None = "9",
    seconds: float = 100.0,
    **more,
):
    return {"time": 1.0, "node": node, "session": session, "job": job, "source": source, "scope": scope, "method": more.pop("method", "counter"),
            "joules": joules, "seconds": seconds, **more}  # fmt: skip


class TestLedger:
    def test_last_line_of_a_session_counts_and_sessions_add(self):
        ledger = build(
            [
                line("a", "nvml", "device", 10),
                line("a", "nvml", "device", 30),
                line("a", "nvml", "device", 5, session="2000-1"),
            ]
        )
        assert ledger.joules == 35

    def test_ear_replaces_the_device_sum_of_its_node_only(self):
        ledger = build([
            line("a", "nvml", "device", 700), line("b", "nvml", "device", 700),
            line("a.cluster.example", "ear", "node", 1000, session="ear:9.0", method="power"),
        ])  # fmt: skip
        assert ledger.joules == 1700
        assert {(s.source, s.counted) for s in ledger.sources} == {("ear", True), ("nvml", True), ("nvml", False)}

    def test_slurms_whole_job_replaces_device_sums(self):
        lines = [
            line("a", "nvml", "device", 700),
            line("b", "nvml", "device", 650),
            line("*", "slurm", "node", 2100, session="slurm:9"),
        ]
        assert build(lines).joules == 2100

    def test_node_counters_of_all_nodes_win_over_slurm(self):
        lines = [line("a", "cray", "node", 1000), line("*", "slurm", "node", 990, session="slurm:9")]
        assert build(lines).joules == 1000

    def test_coverage_names_the_nodes_without_sensor(self):
        events = [{"time": 1000.0, "event": "started", "nodes": 16}]
        lines = [line(f"n{i}", "nvml", "device", 100, session=f"{1_000_000 + i}-1") for i in range(14)]
        ledger = build(lines, events)
        assert ledger.coverage == "devices only, not the rest of the node; not measured on 2 of 16 nodes (attempt 1)"
        assert (ledger.nodes_measured, ledger.nodes_expected) == (14, 16)

    def test_a_gap_in_one_attempt_is_not_hidden_by_another(self):
        events = [{"time": 1000.0, "event": "started", "nodes": 2}, {"time": 9000.0, "event": "resumed", "nodes": 2}]
        lines = [
            line("a", "cray", "node", 1, session="1000000-1"),
            line("b", "cray", "node", 1, session="1000000-1"),
            line("a", "cray", "node", 1, session="9000000-1"),
        ]
        assert build(lines, events).coverage == "whole nodes; not measured on 1 of 2 nodes (attempt 2)"

    def test_modelled_nodes_stand_apart(self):
        ledger = build([line("a", "nvml", "device", 700), line("b", "model", "node", 900, method="modelled")])
        assert (ledger.joules, ledger.modelled_joules, ledger.basis) == (700, 900, "measured")

    def test_nothing_is_none(self):
        ledger = build([])
        assert (ledger.joules, ledger.basis, ledger.coverage) == (None, "none", "not measured: no energy record")

    def test_hostile_lines_are_passed_over(self):
        ledger = build(
            [
                {"joules": "many"},
                {"joules": -5, "scope": "node", "method": "counter"},
                {"missing": 3},
                line("a", "x", "galaxy", 1),
            ]
        )
        assert ledger.joules is None

    def test_startup_energy_is_what_came_before_the_first_step(self):
        events = [{"time": 100.0, "event": "started", "nodes": 1}, {"time": 130.0, "event": "compiled", "seconds": 30}]
        lines = [{**line("a", "nvml", "device", j), "time": t} for t, j in ((100.0, 0), (129.0, 900), (160.0, 2000))]
        assert build(lines, events).startup_joules == 900


def test_records_are_taken_once_however_often_they_are_given(tmp_path):
    run = Run(tmp_path)
    for _ in range(2):
        assert record_ear(run, without_overlap(parse(V52, "f"))) == 2
        assert record_slurm(run, read_sacct("88.0|7000|50|2|COMPLETED\n")) == 1
    ledger = build([json.loads(text) for text in run.energy_file.read_text().splitlines()])
    assert ledger.joules == 5_400_000.0 + 7000.0
