"""The Polish hackathon's DVC matrix, as its talk prints it: what is wrong with it, its points, its jobs, and DVC itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from windlass.cli.sweep import sweep
from windlass.errors import ConfigError, LaunchError
from windlass.launch.script import render
from windlass.launch.sweep.command import check_commands
from windlass.launch.sweep.dvc import read_dvc
from windlass.launch.sweep.expect import expect_all
from windlass.launch.sweep.folder import SweepFolder, SweepRun
from windlass.launch.sweep.pack import prepare_packs
from windlass.launch.sweep.points import make_points

pytest.importorskip("yaml")
FORMS = Path(__file__).parent / "hackathon"
SCRIPT = Path("experiments/scripts/evaluate_lightning_classification.py")
SHAPES = [(1, 1), (1, 2), (1, 4), (1, 8), (2, 8)]
TWICE, LUMI = "0xfe000000000000,0xfe000000000000", "0xfe000000000000,0xfe00000000000000"
SRUN = '#!/bin/bash\nwhile [ $# -gt 0 ] && [ "$1" != singularity ]; do shift; done\nexec "$@"\n'
SINGULARITY = """#!/bin/bash
while [ "$1" != -B ]; do shift; done   # -B FOLDER:/myrun IMAGE COMMAND
source=${2%%:*}; shift 3
exec "${@//\\/myrun/$source}"
"""


def corrected(form: str) -> str:
    """With the repairs that windlass names, and no other change."""
    text = (FORMS / f"{form}.yaml").read_text().replace(TWICE, LUMI).replace("--gpus ((", "--gpus $((")
    head, cmd = text.split("cmd: >-\n")
    return head + "cmd: >-\n" + "".join(f"      {line.strip()}\n" for line in cmd.splitlines())


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """The team's folder, with programs in place of srun and singularity."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SBATCH_ACCOUNT", raising=False)
    SCRIPT.parent.mkdir(parents=True)
    shutil.copy(FORMS / "evaluate.py", SCRIPT)
    Path("setup_envs.sh").touch()
    programs = {"srun": SRUN, "singularity": SINGULARITY, "python": f'#!/bin/bash\nexec {sys.executable} "$@"\n'}
    Path("bin").mkdir()
    for name, text in programs.items():
        Path("bin", name).write_text(text)
        Path("bin", name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("WITH_CONDA", ":")
    monkeypatch.setenv("SINGULARITY_BIND", "/leaked")
    return tmp_path


def sweep_of(text: str, file: str = "dvc.yaml") -> SweepRun:
    Path(file).write_text(text)
    loaded = read_dvc(Path(file))
    points = make_points(loaded)
    expected = expect_all(loaded.sweep, points)[0]
    return SweepRun(loaded=loaded, folder=SweepFolder(Path("runs/x")), points=points, expected=expected)


def outputs(folder: Path) -> dict[str, dict[str, str]]:
    return {str(p.parent.relative_to(folder)): json.loads(p.read_text()) for p in folder.rglob("rank-0.json")}


@pytest.mark.parametrize(
    ("form", "rules"),
    [("flat", {"masks": "line 16"}), ("indented", {"lines": "line 19", "arithmetic": "line 25", "masks": "line 16"})],
)
def test_the_printed_forms_are_reported_with_line_and_repair(form, rules):
    work = sweep_of((FORMS / f"{form}.yaml").read_text())
    result = {f.rule: f for f in check_commands(work.loaded, work.points, None)}
    assert {rule: f.message.split(":")[0] for rule, f in result.items()} == rules
    assert "ranks 0 and 1 share cores 49-55" in result["masks"].message and LUMI in result["masks"].hint
    if form == "indented":
        assert result["arithmetic"].hint.startswith("write --gpus $((${item.device_cfg.num_gpus}*")
        assert "`-t 24:00:00` and 16 more" in result["lines"].message


def test_a_faulty_file_does_not_run_but_its_dry_run_shows_it(here, capsys):
    shutil.copy(FORMS / "flat.yaml", "dvc.yaml")
    with pytest.raises(ConfigError) as caught:
        sweep(Path("dvc.yaml"))
    assert caught.value.code == "sweep.faulty-command" and "masks: line 16" in caught.value.message
    assert not Path("runs").exists()
    sweep(Path("dvc.yaml"), dry_run=True, as_json=True)
    assert [f["rule"] for f in json.loads(capsys.readouterr().out)["faults"]] == ["masks"]


def test_both_corrected_forms_are_the_same_five_points():
    flat, indented = (sweep_of(corrected(form), f"{form}.yaml") for form in ("flat", "indented"))
    for work in (flat, indented):
        assert check_commands(work.loaded, work.points, None) == []
        assert [(p.settings["nodes"], p.devices) for p in work.points] == SHAPES
    same = [p.shown_command().replace("benchmark/amd_", "benchmark/amd/") for p in indented.points]
    assert same == [
        p.shown_command().replace(" * ", "*").replace("$(( ", "$((").replace(" ))", "))") for p in flat.points
    ]


def test_the_corrected_file_runs_here(here):
    Path("dvc.yaml").write_text(corrected("flat"))
    sweep(Path("dvc.yaml"))
    result = outputs(here / "data/benchmark/amd")
    assert sorted((int(o["num_nodes"]), int(o["devices"])) for o in result.values()) == SHAPES
    assert {(o["ds"], o["embedding_path"], o["bind"]) for o in result.values()} == {("polemo2", "allegro__herbert-base-cased", "")}  # fmt: skip


def test_jobs_are_grouped_by_node_count_with_the_commands_own_account_queue_and_time(here):
    one, two = prepare_packs(work := sweep_of(corrected("flat")), work.points, cluster="lumi-g")
    # 24 h each: two points fill the 2 days of standard-g
    assert [(p.nodes, p.devices, len(p.points)) for p in one.packs + two.packs] == [(1, 8, 2), (1, 8, 2), (2, 8, 1)]
    assert not [f for f in one.findings + two.findings if f.level == "refuse"]
    for array, time in ((one, "2-00:00:00"), (two, "1-00:01:00")):
        script = render(array.job, array.machine)
        for part in ("--account=project_465000858", "--partition=standard-g", f"--time={time}", "--gpus-per-node=8"):
            assert f"#SBATCH {part}\n" in script
        assert array.step == [] and array.container == [], "the command calls srun and singularity itself"


@pytest.mark.parametrize(
    ("old", "new", "rule", "parts"),
    [
        ('{"num_nodes": 2, "num_gpus": 8}', '{"num_nodes": 2, "num_gpus": 9}', "devices", ["9", "8"]),
        ('{"num_nodes": 2, "num_gpus": 8}', '{"num_nodes": 1025, "num_gpus": 8}', "nodes", ["1025", "1024"]),
        ("-t 24:00:00", "-t 72:00:00", "wall_time", ["3 d", "2 d"]),
        ("--partition=standard-g", "--partition=standard", "partition", ["standard"]),
        ("--account=project_465000858", "", "account", ["project_<number>"]),
    ],
)  # fmt: skip
def test_one_broken_value_is_refused_with_the_sites_limit(here, old, new, rule, parts):
    work = sweep_of(corrected("flat").replace(old, new))
    findings = [f for array in prepare_packs(work, work.points, cluster="lumi-g") for f in array.findings]
    result = {f.rule: f for f in findings if f.level == "refuse"}
    assert rule in result, findings
    assert all(part in result[rule].message for part in parts) and result[rule].source and result[rule].hint


def test_the_account_comes_from_the_command_line_the_command_the_environment_or_the_cluster_file(here, monkeypatch):
    from windlass.config.sweep import with_launch

    def account(work: SweepRun, *overrides: str) -> str | None:
        work = SweepRun(loaded=with_launch(work.loaded, overrides), folder=work.folder, points=work.points, expected=work.expected)  # fmt: skip
        return prepare_packs(work, work.points, cluster="lumi-g")[0].job.account

    work = sweep_of(corrected("flat"))
    assert account(work, "launch.account=mine") == "mine" and account(work) == "project_465000858"
    work = sweep_of(corrected("flat").replace("--account=project_465000858", ""))
    assert account(work) is None
    own = here / "config/windlass/clusters"
    own.mkdir(parents=True)
    (own / "lumi-g.toml").write_text('[slurm]\naccount = "from_file"\n')
    monkeypatch.setenv("XDG_CONFIG_HOME", str(here / "config"))
    assert account(work) == "from_file"
    monkeypatch.setenv("SBATCH_ACCOUNT", "from_shell")
    assert account(work) == "from_shell"
    with pytest.raises(ConfigError) as caught:
        with_launch(work.loaded, ["matrix.n=3"])
    assert caught.value.code == "sweep.override-not-launch"


def test_a_command_without_srun_runs_in_the_named_container(here):
    from windlass.config.sweep import with_launch

    text = "stages: {a: {matrix: {c: [{num_nodes: 1, num_gpus: 8}, {num_nodes: 2, num_gpus: 8}]}, cmd: 'echo ${item.c.num_nodes}'}}"  # fmt: skip
    work = sweep_of(text)
    overrides = ["launch.container=/project/x.sif", "launch.account=p1"]
    work = SweepRun(loaded=with_launch(work.loaded, overrides), folder=work.folder, points=work.points, expected=work.expected)  # fmt: skip
    for array in prepare_packs(work, work.points, cluster="lumi-g"):
        shell = array.container[2]
        assert array.container[:2] == ["bash", "-c"] and "image=/project/x.sif" in shell
        assert "export SINGULARITY_BIND=" in shell and shell.endswith(
            """bash -c '$WITH_CONDA; exec "$@"' windlass  "$@\""""
        )
        assert array.step[0] == "srun" and "windlass sweep" in render(array.job, array.machine).splitlines()[-1]
        assert "singularity" not in render(array.job, array.machine).splitlines()[-1], "srun is called outside"
    around = sweep_of(corrected("flat"))
    around = SweepRun(loaded=with_launch(around.loaded, overrides), folder=around.folder, points=around.points, expected=around.expected)  # fmt: skip
    with pytest.raises(LaunchError) as caught:
        prepare_packs(around, around.points, cluster="lumi-g")
    assert caught.value.code == "sweep.container-around-srun"


def test_a_dry_run_shows_every_script_and_writes_nothing(here, capsys):
    Path("dvc.yaml").write_text(corrected("flat"))
    sweep(Path("dvc.yaml"), slurm=True, dry_run=True, cluster="lumi-g")
    shown = capsys.readouterr().out
    assert shown.count("#!/bin/bash -l") == 2 and "--nodes=2" in shown
    sweep(Path("dvc.yaml"), slurm=True, dry_run=True, cluster="lumi-g", as_json=True)
    jobs = json.loads(capsys.readouterr().out)["jobs"]
    assert [[len(p["points"]) for p in job["packs"]] for job in jobs] == [[2, 2], [1]]
    assert not Path("runs").exists()


def dvc_program() -> str:
    program = shutil.which("dvc", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None and os.environ.get("CI") == "true":
        pytest.fail("dvc is not installed: pip install -e '.[dev]'")
    if program is None:
        pytest.skip("dvc is not installed here")
    return program


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_dvc_itself_runs_the_same_points_and_refuses_the_indented_form(here, monkeypatch):
    """Every option of every point, as the program received it, from DVC and from windlass."""
    program = dvc_program()
    monkeypatch.setenv("HOME", str(here / "home"))
    monkeypatch.setenv("DVC_NO_ANALYTICS", "1")
    monkeypatch.setenv("SHELL", "/bin/bash")

    def dvc(*argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([program, *argv], capture_output=True, text=True)

    assert dvc("init", "--no-scm", "-q").returncode == 0
    Path("dvc.yaml").write_text(corrected("flat"))
    done = dvc("repro")
    assert done.returncode == 0, done.stdout + done.stderr
    theirs = outputs(here / "data/benchmark/amd")
    shutil.rmtree(here / "data")
    sweep(Path("dvc.yaml"))
    assert len(theirs) == 5 and outputs(here / "data/benchmark/amd") == theirs
    Path("dvc.yaml").write_text((FORMS / "indented.yaml").read_text())
    done = dvc("repro")
    assert done.returncode != 0 and "-t 24:00:00" in done.stdout + done.stderr
