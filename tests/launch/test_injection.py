"""Hostile values in every key, override and command-line value: rendered scripts are executed, and none of them acts.

A command `canary` is on the PATH of the scripts; it leaves a file. Everything else on that PATH does nothing.
"""

from __future__ import annotations

import copy
import subprocess
import tomllib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from windlass.clusters.load import SHIPPED
from windlass.clusters.model import Cluster
from windlass.config import Recipe, load, validate
from windlass.errors import ConfigError, LaunchError
from windlass.launch import array, cpu, doctor, submit
from windlass.launch.job import train_job
from windlass.launch.script import render, render_local
from windlass.launch.sweep import pack

CLUSTERS = {
    name: tomllib.loads((SHIPPED / f"{name}.toml").read_text()) | {"name": name}
    for name in ("snellius-h100", "lumi-g", "leonardo-booster", "juwels-booster")
}
REAL = ("bash", "id", "grep", "head", "date", "timeout", "cat", "env")
STUBS = {
    "srun": 'while [ "${1#-}" != "$1" ]; do shift; done; exec "$@"',
    "singularity": 'shift; while [ "${1#-}" != "$1" ]; do [ "$1" = --pwd ] && shift; shift; done; shift; exec "$@"',
    "ch-run": 'while [ "$1" != -- ]; do shift; done; shift; exec "$@"',
    "windlass": '[ "$2" = after ] && exit 75; exit 0',
    "torchrun": "exit 75",
    "scontrol": "echo node1",
    "sbatch": "echo 7",
    "seq": "echo 1",  # one round of the local loop
    **dict.fromkeys(("squeue", "module", "python", "mkdir", "cp", "touch", "find", "sleep", "awk"), "exit 0"),
}
STUBS["apptainer"] = STUBS["singularity"]
ATTACKS = (
    "$(canary)", "`canary`", ";canary;", "|canary", "&canary&", "&&canary", "\ncanary\n", "\rcanary", "\n#\ncanary #",
    "a[$(canary)]", "${x:-$(canary)}", "${x:-`canary`}", "$((a[$(canary)]))", "<(canary)", ">(canary)", "$'\\ncanary'",
    "';canary;'", '";canary;"', "');canary;('", '$(canary)"$(canary)', "}\ncanary\n{", "x\u2028canary", "\x0bcanary",
    "\x00canary", "-exec canary ;", "--prolog canary", "canary", "$HOME$(canary)", "${HOME}`canary`", "$IFS;canary",
)  # fmt: skip
AROUND = ("", "a", "/x/", "'", '"', "\\", "$", "${", "}", " ", "--x=", "#", "(", ")", "$HOME", "~", "%j", "0x")
NAMES = (
    "NAME", "BASH_ENV", "ENV", "SLURM_JOB_ID", "SLURM_NNODES", "IFS", "PS4", "image", "code", "PROJECT", "output",
    "export", "wrap", "comment", "tmp", "MASTER_ADDR",
)  # fmt: skip
IN_SCRIPTS = (
    "account", "partition", "qos", "venv", "container", "binds", "modules", "env", "sbatch", "runtime", "starter",
)  # fmt: skip
COMMAND_LINE = ("run_dir", "workdir", "account", "partition", "argument")
KINDS = ("train", "local", "stage", "command", "array", "merge", "doctor", "sweep")


def text_keys(model: type[BaseModel], prefix: str = "") -> list[tuple[str, str]]:
    """(dotted key, shape) of every key."""
    keys = []
    for name, field in model.model_fields.items():
        types = [t for t in (field.annotation, *getattr(field.annotation, "__args__", ())) if isinstance(t, type)]
        table = next((t for t in types if issubclass(t, BaseModel)), None)
        kind = str(field.annotation)
        if table is not None and "dict[" not in kind and "list[" not in kind:
            keys += text_keys(table, f"{prefix}{name}.")
        else:
            keys.append((f"{prefix}{name}", "variables" if "EnvVar" in kind else "dict" if "dict[" in kind else "list" if "list[" in kind else "text"))  # fmt: skip
    return keys


RECIPE_KEYS, CLUSTER_KEYS = text_keys(Recipe), text_keys(Cluster)
PREFERRED = [(key, shape) for key, shape in RECIPE_KEYS if key.removeprefix("launch.") in IN_SCRIPTS] + [
    ("data.store", "text")
]
PREFERRED_CLUSTER = [
    (key, shape)
    for key, shape in CLUSTER_KEYS
    if key.startswith(("slurm.", "container.", "env", "modules", "storage", "network.", "binding.", "energy.", "title"))
]
hostile = st.builds(
    lambda a, b, c: a + b + c, st.sampled_from(AROUND), st.sampled_from(ATTACKS), st.sampled_from(AROUND)
)
# Free text, which is quoted and not refused, is drawn most often: only what is rendered can be executed.
OPEN = [
    ("recipe", ("notes", "text")),
    ("recipe", ("launch.env", "dict")),
    ("recipe", ("launch.sbatch", "dict")),
    ("recipe", ("launch.binds", "list")),
    ("recipe", ("launch.container", "text")),
    ("recipe", ("data.store", "text")),
    ("cluster", ("env", "variables")),
    ("cluster", ("container.env", "variables")),
    ("cluster", ("container.binds", "list")),
    ("cluster", ("slurm.extra", "dict")),
    ("cluster", ("slurm.srun_extra", "list")),
    ("cluster", ("energy.ear_flags", "list")),
    ("cluster", ("storage", "dict")),
    ("cluster", ("title", "text")),
    ("command line", ("argument", "text")),
    ("command line", ("run_dir", "text")),
    ("command line", ("workdir", "text")),
]
every = st.one_of(
    st.tuples(st.just("recipe"), st.sampled_from(RECIPE_KEYS)),
    st.tuples(st.just("cluster"), st.sampled_from(CLUSTER_KEYS)),
    st.tuples(st.just("command line"), st.tuples(st.sampled_from(COMMAND_LINE), st.just("text"))),
)
closed = st.sampled_from([*(("recipe", key) for key in PREFERRED), *(("cluster", key) for key in PREFERRED_CLUSTER)])
free = st.sampled_from(OPEN)
changes = st.tuples(
    st.one_of(free, free, free, closed, every),
    hostile,
    st.sampled_from(NAMES),
    st.sampled_from((False, False, False, True)),
)
cases = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(KINDS),
        "cluster": st.sampled_from(sorted(CLUSTERS)),
        "changes": st.one_of(st.tuples(changes), st.tuples(changes), st.tuples(changes, changes)),
        "launch": st.fixed_dictionaries(
            {
                "environment": st.sampled_from(["auto", "module", "venv", "container"]),
                "starter": st.sampled_from(["srun", "torchrun"]),
                "chain": st.sampled_from([0, 3, "self"]),
                "stage_data": st.sampled_from([None, True, False]),
                "runtime": st.sampled_from([None, "apptainer", "charliecloud"]),
            }
        ),
    }
)


class Laboratory:
    def __init__(self, folder: Path) -> None:
        self.folder, self.bin, self.canary = folder, folder / "bin", folder / "CANARY"
        self.bin.mkdir()
        for name in REAL:
            path = next(p for p in (Path("/usr/bin", name), Path("/bin", name)) if p.exists())
            (self.bin / name).symlink_to(path)
        for name, text in {**STUBS, "canary": f': > "{self.canary}"'}.items():
            (self.bin / name).write_text(f"#!/bin/sh\n{text}\n")
            (self.bin / name).chmod(0o755)
        (folder / "venv" / "bin").mkdir(parents=True)
        (folder / "venv" / "bin" / "activate").write_text("")
        self.counts = Counter()

    def scripts(self, case: dict) -> list[str]:
        """What launch would write; a refusal is a WindlassError."""
        recipe = {
            "name": "x",
            "model": {"layers": 2, "width": 64, "ffn": 128, "heads": 2, "vocab": 512},
            "data": {"store": f"{self.folder}/store", "tokens": 1000},
            "launch": {"account": "p1", "venv": f"{self.folder}/venv", "container": "/x.sif", **case["launch"]},
            "trackers": {"wandb": True},
        }
        cluster, line = copy.deepcopy(CLUSTERS[case["cluster"]]), dict.fromkeys(COMMAND_LINE)
        for (target, (key, shape)), text, name, in_key in case["changes"]:
            text = text.replace("CANARY", str(self.canary))
            value = {
                "text": text,
                "list": [text],
                "dict": {text: "1"} if in_key else {name: text},
                "variables": {text: {"value": "1", "why": "x"}} if in_key else {name: {"value": text, "why": text}},
            }[shape]
            if key == "storage":
                value = {"x": {"path": text, "use_for": "a" if in_key else text, "fast": True}}
            if target == "command line":
                line[key] = text
            elif target == "recipe" and shape == "text":
                load.apply_override(recipe, *load.parse_override(f"{key}={text}"))
            else:
                load.apply_override(recipe if target == "recipe" else cluster, key.split("."), value)
        machine = validate(Cluster, cluster, "cluster")
        loaded = validate(Recipe, recipe | {"cluster": case["cluster"]}, "recipe")
        run_dir = line["run_dir"] or f"{self.folder}/run"
        workdir = line["workdir"] or str(self.folder)
        job = train_job(loaded, machine, run_dir, workdir=workdir, about=[loaded.notes])
        account, argument = line["account"] or loaded.launch.account, line["argument"] or "plain"
        if case["kind"] == "train":
            return [render(job, machine)]
        if case["kind"] == "local":
            return [render_local(job, machine)]
        if case["kind"] == "stage":
            stage = submit.stage_job(job, loaded, machine, 10**9)
            return [] if stage is None else [render(stage, machine)]
        if case["kind"] == "command":
            return [
                render(cpu.cpu_job(machine, Path(run_dir), "command", ["windlass", argument], account=account), machine)
            ]
        if case["kind"] in ("array", "merge"):
            scripts = array.tokenize_scripts(Path(argument), 2, cluster=machine, account=account, env=loaded.launch.env)
            return [scripts[case["kind"]]]
        if case["kind"] == "doctor":
            partition = line["partition"]
            return [render(doctor.doctor_job(machine, 2, Path(run_dir), [argument], account=account, partition=partition), machine)]  # fmt: skip
        sweep_run = SimpleNamespace(
            folder=SimpleNamespace(path=Path(run_dir)),
            sweep=SimpleNamespace(name="x"),
            loaded=SimpleNamespace(path=Path(argument)),
        )
        point, packs = SimpleNamespace(recipe=loaded), [pack.SweepPack(("a",), 1, 4, 60.0)]
        return [render(pack._pack_job(sweep_run, point, packs, machine, "pack", ["--stage", argument]), machine)]

    def attack(self, case: dict) -> None:
        try:
            scripts = self.scripts(case)
        except (ConfigError, LaunchError) as error:
            assert error.code and not {"\r", "\x0b", "\x00"} & set(error.message)
            self.counts["refused"] += 1
            return
        for script in scripts:
            file, folders = self.folder / "job.sh", dict.fromkeys(("FAST", "WORK", "TMPDIR", "HOME"), str(self.folder))
            file.write_text(script)
            job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1", "SLURM_NNODES": "1", "USER": "ann"}
            subprocess.run(
                ["bash", str(file)],
                env={"PATH": str(self.bin), **folders, **job},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=60,
            )
            self.counts["executed"] += 1
            assert not self.canary.exists(), script


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory):
    laboratory = Laboratory(tmp_path_factory.mktemp("injection"))
    with pytest.MonkeyPatch.context() as patch:
        for module in (cpu, doctor, pack):  # the environment of this test has a real `windlass`
            patch.setattr(module, "active_venv", lambda: f"{laboratory.folder}/venv")
        yield laboratory


def run_attacks(laboratory: Laboratory, examples: int, derandomize: bool) -> Counter:
    laboratory.counts.clear()

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=derandomize,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases)
    def attack(case: dict) -> None:
        laboratory.canary.unlink(missing_ok=True)
        laboratory.attack(case)

    attack()
    return laboratory.counts


def test_the_laboratory_notices_an_injection(laboratory):
    env = {"PATH": str(laboratory.bin)}
    subprocess.run(["bash", "-c", "x=$(canary)"], env=env, check=True)
    assert laboratory.canary.exists()
    laboratory.canary.unlink()


def test_no_hostile_value_is_executed(laboratory):
    counts = run_attacks(laboratory, 200, derandomize=True)
    assert counts["executed"] >= 40 and counts["refused"] >= 40, counts


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_hostile_value_is_executed_in_ten_thousand_recipes(laboratory):
    counts = run_attacks(laboratory, 10_500, derandomize=False)
    print(f"{sum(counts.values())} recipes: {dict(counts)}")
    assert sum(counts.values()) >= 10_000
