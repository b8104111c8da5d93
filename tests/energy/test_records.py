"""EAR's CSV, sacct and the ledger that joins them with our own sensors."""

from __future__ import annotations

import json

import pytest

from windlass.energy import ledger as ledgers
from windlass.energy.site_records import (
    BATCH_STEP,
    parse_ear,
    read_ear,
    read_sacct,
    record_ear,
    record_slurm,
    without_overlap,
)
from windlass.errors import RunError
from windlass.runs.events import parse_event
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
        row = parse_ear(V4, "f")[0]
        assert row.joules == pytest.approx(259.0 * 1937.9)
        assert row.joules / 3.6e6 == pytest.approx(0.139, abs=0.001)
        assert row.gpu_joules == {"gpu0": pytest.approx(400.0 * 259), "gpu1": pytest.approx(390.0 * 259)}
        assert row.cpu_joules == pytest.approx(320.0 * 259)

    def test_legacy_header(self):
        row = parse_ear(LEGACY, "f")[0]
        assert (row.node, row.job, row.step, row.joules, row.cpu_joules) == ("tcn12", "1001", "0", 30_000.0, 18_000.0)

    def test_v52_takes_node_power_not_the_managers_and_leaves_the_batch_step_out(self):
        rows = without_overlap(parse_ear(V52, "f"))
        assert sum(r.joules for r in rows) == 2_800_000.0 + 2_600_000.0

    def test_a_job_of_only_a_batch_step_keeps_it(self):
        only = "\n".join([V52.splitlines()[0], V52.splitlines()[3]])
        assert [r.step for r in without_overlap(parse_ear(only, "f"))] == [BATCH_STEP]

    @pytest.mark.parametrize(
        ("column", "value", "joules"), [("ENERGY(J)", "7200", 7200.0), ("ENERGY(kWh)", "0.002", 7200.0)]
    )
    def test_energy_column_by_its_own_unit(self, column, value, joules):
        assert parse_ear(f"NODENAME;JOBID;STEPID;TIME_SEC;{column}\nn;1;0;10;{value}\n", "f")[
            0
        ].joules == pytest.approx(joules)

    def test_power_times_time_wins_over_a_column_whose_unit_changed(self):
        assert (
            parse_ear("NODENAME;JOBID;STEPID;TIME_SEC;DC_NODE_POWER_W;ENERGY_J\nn;1;0;10;100;1.0\n", "f")[0].joules
            == 1000.0
        )

    def test_a_foreign_file_is_refused_with_what_it_has(self, tmp_path):
        path = tmp_path / "x.csv"
        path.write_text("a,b,c\n1,2,3\n")
        with pytest.raises(RunError) as error:
            read_ear(path)
        assert error.value.code == "energy.not-an-ear-file"
        assert "node, job, seconds" in error.value.message and "a,b,c" in error.value.message
        with pytest.raises(RunError) as error:
            read_ear(tmp_path / "absent.csv")
        assert error.value.code == "energy.file-unreadable"

    @pytest.mark.parametrize("cells", ["10;", "10;0.000000", "0;0", "0;300"])
    def test_blank_or_zero_is_unknown_not_zero(self, cells):
        assert parse_ear(f"NODENAME;JOBID;STEPID;TIME_SEC;DC_NODE_POWER_W\nn;1;0;{cells}\n", "f")[0].joules is None

    def test_a_program_without_ears_library_has_the_node_managers_figures(self):
        """EAR 5.2 and later write 0 into the library's columns for such a program (EARL_ENABLED 0): Python under srun is one."""
        head = "JOBID;STEPID;EARL_ENABLED;NODENAME;TIME_SEC;DC_NODE_POWER_W;DRAM_POWER_W;PCK_POWER_W;NODEMGR_DC_NODE_POWER_W;NODEMGR_DRAM_POWER_W;NODEMGR_PCK_POWER_W;NODEMGR_TIME_SEC"
        row = parse_ear(f"{head}\n77;0;0;gcn5;0.000000;0.000000;0.000000;0.000000;2700.0;40.0;310.0;1001\n", "f")[0]
        assert (row.joules, row.seconds) == (2700.0 * 1001, 1001.0)
        assert (row.cpu_joules, row.memory_joules) == (310.0 * 1001, 40.0 * 1001)

    def test_programs_side_by_side_on_a_node_count_its_power_once(self):
        """Four ranks are four programs to EAR, each with the whole node's power; one that ran before them is added."""
        head = "NODENAME;JOBID;STEPID;APPID;START_TIME;END_TIME;TIME_SEC;DC_NODE_POWER_W"
        ranks = [f"n;9;0;{100 + i};2000;3000;{1000 - i};2000" for i in range(4)]
        rows = without_overlap(parse_ear("\n".join([head, "n;9;0;99;1000;1900;900;500", *ranks]), "f"))
        assert [(r.app, r.joules) for r in rows] == [("99", 450_000.0), ("100", 2_000_000.0)]
        assert len({r.name for r in rows}) == 2

    def test_a_real_job_of_batch_short_and_long_step(self):
        """As eacct writes it (a CPU node, v5 header): 0.031 kWh; the absent GPUs' zeros are no measurement."""
        head = "NODENAME;JOBID;STEPID;APPID;POLICY;START_TIME;END_TIME;TIME_SEC;DC_NODE_POWER_W;DRAM_POWER_W;PCK_POWER_W;GPU0_POWER_W;GPU1_POWER_W"
        rows = without_overlap(parse_ear(
            f"{head}\nn2;253;{BATCH_STEP};0; ;1754636620;1754636947;327.0;337.767578;0.0;106.9;0.0;0.0\n"
            "n2;253;1;3574071;monitoring;1754636623;1754636946;322.834564;340.891113;0.0;308.5;0.0;0.0\n"
            "n2;253;0;0; ;1754636622;1754636623;1.0;50.0;0.0;41.4;0.0;0.0\n", "f"))  # fmt: skip
        assert sum(r.joules for r in rows) / 3.6e6 == pytest.approx((322.834564 * 340.891113 + 50) / 3.6e6)


class TestSacct:
    def test_srun_steps_are_added_batch_and_job_rows_are_not(self):
        text = "9|5200|110|2|COMPLETED\n9.batch|1000|110|1|COMPLETED\n9.extern|1100|110|2|COMPLETED\n9.0|2000|50|2|COMPLETED\n9.1|1100|50|2|COMPLETED\n"
        job = read_sacct(text)[0]
        assert (job.joules, job.seconds, job.nodes) == (3100.0, 100.0, 2)

    def test_only_a_batch_step(self):
        job = read_sacct("9|900|60|1|COMPLETED\n9.batch|900|60|1|COMPLETED\n")[0]
        assert job.joules == 900.0 and "first node only" in job.note

    def test_a_pretty_figure_with_a_suffix_is_read_and_called_rounded(self):
        text = "JobID|JobName|ConsumedEnergy|NNodes|State\n9||0|2|COMPLETED\n9.0|train|51.96M|2|COMPLETED\n"
        job = read_sacct(text)[0]
        assert (job.joules, job.nodes) == (51.96e6, 2)
        assert job.note.startswith("sum of the srun steps") and "ConsumedEnergyRaw" in job.note

    def test_columns_are_found_by_their_names(self):
        text = "State|NNodes|ConsumedEnergyRaw|JobIDRaw|ElapsedRaw|\nCOMPLETED|4|8000|12.0|60|\n"
        assert [(j.job, j.joules, j.seconds, j.nodes) for j in read_sacct(text)] == [("12", 8000.0, 60.0, 4)]

    def test_a_batch_only_record_covers_one_node_of_four(self):
        text = "9|900|60|4|COMPLETED\n9.batch|900|60|1|COMPLETED\n9.0|0|60|4|COMPLETED\n"
        assert (read_sacct(text)[0].joules, read_sacct(text)[0].nodes) == (900.0, 1)

    def test_a_job_that_still_runs_has_no_figure_yet(self):
        job = read_sacct("9||60|2|RUNNING\n9.0|5000|50|2|COMPLETED\n9.1|0|10|2|RUNNING\n")[0]
        assert job.joules is None and job.note.startswith("still running")

    def test_a_requeued_job_is_the_sum_of_its_lives(self):
        """`sacct --duplicates` lists both; steps side by side do not stretch the job's time."""
        text = "9|0|100|2|NODE_FAIL\n9.0|3000|100|2|NODE_FAIL\n9|0|200|2|COMPLETED\n9.0|7000|200|2|COMPLETED\n9.1|10|200|1|COMPLETED\n"
        assert (read_sacct(text)[0].joules, read_sacct(text)[0].seconds) == (10_010.0, 300.0)

    def test_a_table_for_people_is_refused_with_the_command(self):
        with pytest.raises(RunError) as error:
            read_sacct("JobID        ConsumedEnergy\n------------ --------------\n9.0  51.96M\n")
        assert error.value.code == "energy.not-sacct-output" and "--parsable2" in error.value.hint

    @pytest.mark.parametrize("raw", ["", "0", "18446744073709551614"])
    def test_a_site_without_energy_is_unknown(self, raw):
        job = read_sacct(
            f"JobID|ConsumedEnergyRaw|ElapsedRaw|NNodes|State\n9|{raw}|60|4|COMPLETED\n9.0|{raw}|60|4|COMPLETED\n"
        )[0]
        assert job.joules is None and job.note


def build(lines, events=()):
    return ledgers.build(lines, [parse_event(event) for event in events])


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
            line("*", "slurm", "node", 2100, session="slurm:9", nodes=2),
        ]
        assert build(lines).joules == 2100

    def test_a_batch_steps_figure_is_of_one_node_and_does_not_hide_the_others(self):
        """Its record covers the first node only: four nodes of devices say more than one whole node."""
        lines = [line(f"n{i}", "nvml", "device", 700) for i in range(4)]
        assert build([*lines, line("*", "slurm", "node", 1000, session="slurm:9", nodes=1)]).joules == 2800

    def test_a_record_of_more_nodes_than_the_meters_saw_counts(self):
        lines = [line("a", "cray", "node", 1000), line("*", "slurm", "node", 2100, session="slurm:9", nodes=2)]
        assert build(lines).joules == 2100

    def test_a_record_that_was_cut_short_does_not_hide_what_the_devices_used(self):
        lines = [line("a", "nvml", "device", 1000), line("*", "slurm", "node", 300, session="slurm:9", nodes=1)]
        assert build(lines).joules == 1000

    def test_mean_power_of_a_chain_on_other_nodes_is_that_of_one_job(self):
        """Two jobs of two nodes, 100 s each, 100 W a node: 200 W, though four nodes are named."""
        lines = [line(n, "cray", "node", 1e4, job=j) for j, names in (("1", "ab"), ("2", "cd")) for n in names]
        ledger = build(lines)
        assert (ledger.joules / ledger.wall_seconds, ledger.nodes_measured) == (200.0, 2)

    def test_mean_power_of_a_whole_jobs_record_is_of_all_its_nodes(self):
        ledger = build([line("*", "slurm", "node", 4e4, session="slurm:9", seconds=400.0, nodes=4)])
        assert (ledger.joules / ledger.wall_seconds, ledger.nodes_measured) == (400.0, 4)

    def test_a_sites_record_fills_the_gap_of_its_own_attempt_only(self):
        """Two jobs, no sensor on any node; EAR has the first. That says nothing of the second."""
        events = [{"time": 1000.0, "event": "started", "nodes": 1}, {"time": 9000.0, "event": "resumed", "nodes": 1}]
        model = {"source": "model", "scope": "node", "joules": 5, "method": "modelled"}
        meters = [line("a", session=f"{t}000-1", job=j, **model) for t, j in ((1000, "1"), (9000, "2"))]
        ear = {"source": "ear", "scope": "node", "method": "power"}
        first = line("a", joules=10, session="ear:1.0", job="1", **ear)
        assert build([*meters, first], events).coverage == "whole nodes; not measured on 1 of 1 nodes (attempt 2)"
        second = line("*", "slurm", "node", 10, session="slurm:2", job="2", nodes=1)
        assert build([*meters, first, second], events).coverage == "whole nodes"

    def test_whole_nodes_in_one_job_say_nothing_of_the_devices_in_another(self):
        ledger = build([line("a", "cray", "node", 10, job="1"), line("a", "nvml", "device", 10, job="2")])
        assert ledger.coverage == "in part whole nodes, in part devices only, not the rest of the node"

    def test_resolutions_of_all_counters_add_and_one_unknown_makes_it_unknown(self):
        lines = [line(n, "nvml", "device", 700, resolution_joules=7.0) for n in "ab"]
        assert build(lines).resolution_joules == 14.0
        assert build([*lines, line("c", "nvml", "device", 700)]).resolution_joules is None

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

    @pytest.mark.parametrize("seconds", [44, 20, 3])
    def test_short_attempts_keep_their_own_meters(self, seconds):
        """A meter starts before its attempt is written down: while torch is imported and a model built."""
        events = [
            {"time": 1000.0, "event": "started", "nodes": 1},
            {"time": 1015.0 + seconds, "event": "resumed", "nodes": 1},
        ]
        meters = [line("a", "nvml", "device", 10, session=f"{at}000-1") for at in (985, 1000 + seconds)]
        assert build(meters, events).coverage == "devices only, not the rest of the node"
        assert build(meters[:1], events).coverage.endswith("not measured on 1 of 1 nodes (attempt 2)")
        assert build(meters[1:], events).coverage.endswith("not measured on 1 of 1 nodes (attempt 1)")

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
                line("a", "nvml", "device", float("nan")),
                line("b", "nvml", "device", float("inf")),
                line("c", "nvml", "device", 1e30),
                line("d", "nvml", "device", True),
            ]
        )
        assert ledger.joules is None
        assert build([line("a", "nvml", "device", 5.0, seconds=float("nan"))]).wall_seconds == 0.0

    def test_startup_energy_is_what_came_before_the_first_step(self):
        events = [{"time": 100.0, "event": "started", "nodes": 1}, {"time": 130.0, "event": "compiled", "seconds": 30}]
        lines = [{**line("a", "nvml", "device", j), "time": t} for t, j in ((100.0, 0), (129.0, 900), (160.0, 2000))]
        assert build(lines, events).startup_joules == 900


class TestWhoseRecordIsIt:
    """`eacct` and `sacct` list all jobs of a user: another run's energy must not become ours."""

    @pytest.fixture
    def run(self, tmp_path) -> Run:
        (tmp_path / "jobs.jsonl").write_text('{"record": "submitted", "job": "77"}\n')
        return Run(tmp_path)

    def test_rows_of_other_jobs_are_left_out(self, run):
        other = V52.splitlines()[1].replace("77;", "78;", 1)
        assert record_ear(run, parse_ear(V52 + other + "\n", "f")[:2]) == 2
        assert record_slurm(run, read_sacct("77.0|7000|50|2|COMPLETED\n78.0|9000|50|2|COMPLETED\n")) == 1
        assert "78" not in {json.loads(text)["job"] for text in run.energy_file.read_text().splitlines()}

    def test_the_parts_of_a_job_of_several_parts_are_ours(self, run):
        text = "77+0.0|7000|50|2|COMPLETED\n77+1.0|500|50|1|COMPLETED\n"
        assert record_slurm(run, read_sacct(text)) == 2
        ledger = build([json.loads(line) for line in run.energy_file.read_text().splitlines()])
        assert (ledger.joules, {s.source for s in ledger.sources}) == (7500.0, {"slurm"})

    def test_a_file_without_any_of_our_jobs_is_refused(self, run):
        with pytest.raises(RunError) as error:
            record_ear(run, parse_ear(LEGACY, "f"), "file.csv")
        assert error.value.code == "energy.no-job-of-this-run"
        assert all(text in error.value.message for text in ("file.csv", "1001", "(77)"))

    def test_beside_meters_outside_any_job_nothing_is_added_twice(self, tmp_path):
        run = Run(tmp_path)
        run.energy_file.write_text(
            json.dumps(line("gcn1", "nvml", "device", 300_000.0, job=None, seconds=259.0)) + "\n"
        )
        record_ear(run, parse_ear(V4, "f"))
        ledger = build([json.loads(text) for text in run.energy_file.read_text().splitlines()])
        assert ledger.joules == pytest.approx(259.0 * 1937.9)


def test_records_are_taken_once_however_often_they_are_given(tmp_path):
    run = Run(tmp_path)
    for _ in range(2):
        assert record_ear(run, without_overlap(parse_ear(V52, "f"))) == 2
        assert record_slurm(run, read_sacct("88.0|7000|50|2|COMPLETED\n")) == 1
    ledger = build([json.loads(text) for text in run.energy_file.read_text().splitlines()])
    assert ledger.joules == 5_400_000.0 + 7000.0
