"""The container definitions: their parts, the job that builds them, and their steps executed in a Debian image."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from windlass.clusters import load_cluster
from windlass.errors import LaunchError
from windlass.launch.image import check_image, image_job, read_definition
from windlass.launch.script import render

TOP = Path(__file__).parents[2]
DEFINITIONS = sorted((TOP / "containers").glob("*.def"))


def sections(path: Path) -> dict[str, tuple[str, str]]:
    """Section -> its interpreter and its text, as Apptainer reads them: `-c SHELL`, else the first line, else sh."""
    parts = re.split(r"^%(\w+)(?: -c (\S+))?\n", path.read_text(), flags=re.M)
    result = {}
    for name, shell, body in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        text = "\n".join(line.removeprefix("    ") for line in body.splitlines())
        result[name] = (shell or (text.split("\n")[0][2:] if text.startswith("#!") else "/bin/sh"), text)
    return result


@pytest.mark.parametrize("path", DEFINITIONS, ids=lambda p: p.stem)
def test_the_definition_has_its_parts(path):
    parts = sections(path)
    assert list(parts) == ["files", "post", "environment", "runscript", "test", "labels", "help"]
    assert "--no-index" in parts["post"][1], "nothing may be downloaded while the image is built"
    for name in ("post", "runscript", "test", "environment"):
        shell, text = parts[name]
        assert subprocess.run([shell, "-n"], input=text, text=True).returncode == 0


def test_the_dockerfile_has_the_steps_of_the_definition():
    parts, docker = sections(TOP / "containers" / "nvidia-ngc.def"), (TOP / "containers" / "Dockerfile").read_text()
    steps = {
        name: [line for line in parts[name][1].splitlines() if line.strip() and not line.startswith("#")]
        for name in ("post", "test")
    }
    blocks = re.findall(r"^RUN <<'\w+'\n(.*?)^\w+$", docker, re.M | re.S)
    assert [[line.strip() for line in block.splitlines()] for block in blocks] == [steps["post"], steps["test"]]
    exports = [line.removeprefix("export ") for line in parts["environment"][1].splitlines() if line]
    assert re.findall(r"^ENV (.*)$", docker, re.M) == exports


def test_the_two_definitions_start_from_the_sites_and_nvidias_image():
    lumi, nvidia = read_definition("lumi-rocm.def"), read_definition("nvidia-ngc.def")
    assert (lumi.bootstrap, lumi.argument) == ("localimage", "FROM")
    assert (nvidia.bootstrap, nvidia.argument) == ("docker", "TAG")
    assert "nvcr.io/nvidia/pytorch:{{ TAG }}" in nvidia.path.read_text()


def test_the_job_that_builds_an_image_on_lumi(tmp_path):
    cluster = load_cluster("lumi-g")
    job = image_job(cluster, base="/appl/base.sif", output=tmp_path / "w.sif", account="project_1")
    text = render(job, cluster)
    assert "#SBATCH --partition=small" in text and "gpus" not in text
    assert text.index("module load CrayEnv") < text.index("module load PRoot") < text.index("singularity build")
    assert f"--build-arg FROM=/appl/base.sif {tmp_path}/w.sif {TOP}/containers/lumi-rocm.def" in text
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""


def test_what_a_build_lacks(tmp_path):
    leonardo, lumi = load_cluster("leonardo-booster"), load_cluster("lumi-g")
    codes = [p.code for p in check_image(leonardo, read_definition("nvidia-ngc.def"), workdir=tmp_path)]
    assert codes == ["launch.wheelhouse-missing", "launch.image-needs-internet"]
    (tmp_path / "wheelhouse").mkdir()
    (tmp_path / "wheelhouse" / "windlass-1.whl").touch()
    assert check_image(lumi, read_definition("lumi-rocm.def"), workdir=tmp_path) == []
    for code, options in (
        ("launch.image-base-missing", {"base": None}),
        ("launch.definition-missing", {"base": "x", "definition": "none.def"}),
    ):
        with pytest.raises(LaunchError) as caught:
            image_job(lumi, output=tmp_path / "w.sif", **options)
        assert caught.value.code == code and ("laifs" in caught.value.hint or "lumi-rocm.def" in caught.value.hint)


def test_the_command_prints_the_script(tmp_path, monkeypatch, capsys):
    from windlass.cli.image import image

    monkeypatch.chdir(tmp_path)
    image(cluster="snellius-h100", base="26.05-py3", dry_run=True, as_json=True)
    value = json.loads(capsys.readouterr().out)
    assert "apptainer build --build-arg TAG=26.05-py3" in value["script"]
    assert [p["code"] for p in value["problems"]] == ["launch.wheelhouse-missing"]


# -- executed -----------------------------------------------------------------------------------------------------------


def requirements(name: str, extras: set[str]) -> set[str]:
    """What a package needs, and what that needs, without torch."""
    names, found = [(name, extras)], set()
    while names:
        name, extras = names.pop()
        for text in metadata.requires(name) or ():
            need = Requirement(text)
            wanted = need.marker is None or any(need.marker.evaluate({"extra": e}) for e in (extras or {""}))
            if wanted and need.name not in {"torch", *found}:
                found.add(need.name)
                names.append((need.name, need.extras))
    return found


@pytest.fixture(scope="module")
def debian(tmp_path_factory):
    """A Debian image with Python, made from packages, and a wheel of windlass.

    What windlass needs is copied from this environment: that a complete wheelhouse installs without an index is another
    test's.
    """
    tools = [shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin") for tool in ("debootstrap", "ch-run")]
    if not all(tools) or os.geteuid() != 0 or sys.version_info[:2] != (3, 11):
        pytest.skip("debootstrap and ch-run are not both installed here, or this is not root with Debian's Python 3.11")
    folder = tmp_path_factory.mktemp("debian")
    make = [tools[0], "--variant=minbase", "--include=python3,python3-pip", "bookworm", str(folder / "root")]
    made = subprocess.run(make, capture_output=True, text=True)
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr
    (folder / "root/usr/lib/python3.11/EXTERNALLY-MANAGED").unlink()  # sites' images let pip install
    packages = folder / "root/usr/local/lib/python3.11/dist-packages"
    for name in requirements("windlass", {"", "train", "data"}):
        distribution = metadata.distribution(name)
        for file in distribution.files or ():
            source = Path(distribution.locate_file(file))
            if ".." not in file.parts and source.suffix != ".pyc" and source.is_file():
                (packages / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, packages / file)
    wheel = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(folder / "wheelhouse"),
        str(TOP),
    ]
    built = subprocess.run(wheel, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", DEFINITIONS, ids=lambda p: p.stem)
def test_the_steps_of_a_definition_run_in_an_image(path, debian, tmp_path):
    """%files, %post and %test in order. A stand-in has torch's name and version: the site's image brings the real one."""
    root, parts = tmp_path / "root", sections(path)
    subprocess.run(["cp", "-a", str(debian / "root"), str(root)], check=True)
    packages = root / "usr/local/lib/python3.11/dist-packages"
    for name, text in (
        ("torch/__init__.py", '__version__ = "2.11.0"\n'),
        ("torch-2.11.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 2.11.0\n"),
    ):
        (packages / name).parent.mkdir(parents=True)
        (packages / name).write_text(text)
    shutil.copytree(debian / "wheelhouse", root / "opt/wheelhouse")
    (root / "opt/activate").write_text("touch /opt/activated\n")

    def step(name: str) -> subprocess.CompletedProcess[str]:
        shell, text = parts[name]
        (root / f"opt/{name}.sh").write_text(text)
        own = {"lumi-rocm": "WITH_CONDA=source /opt/activate", "nvidia-ngc": "PIP_CONSTRAINT=/etc/pip/constraint.txt"}
        variables = [own[path.stem], "HOME=/root", "PATH=/usr/local/bin:/usr/bin:/bin"]
        options = ["-w", "--uid=0", "--gid=0", "--unset-env=PIP_*", *(f"--set-env={v}" for v in variables)]
        argv = ["ch-run", *options, str(root), "--", shell, f"/opt/{name}.sh"]
        return subprocess.run(argv, env={**os.environ, "USER": "root"}, capture_output=True, text=True)

    built = step("post")
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr
    assert not (root / "opt/wheelhouse").exists() and (root / "usr/local/bin/windlass").is_file()
    tested = step("test")
    assert tested.returncode == 0, tested.stderr
    assert "torch 2.11.0" in tested.stdout
    assert (root / "opt/activated").exists() == (path.stem == "lumi-rocm")
    (packages / "torch/__init__.py").write_text('__version__ = "2.10.1"\n')
    assert step("test").returncode == 1  # %test finds a torch that is too old
