"""A container image with windlass, built by a CPU job: the definition, its base image, and the job."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

from windlass.clusters import Cluster
from windlass.errors import LaunchError
from windlass.launch.cpu import cpu_job
from windlass.launch.job import BatchJob, JobEnvironment

# Beside the package in a wheel, at the top of a checkout.
_PACKAGE = Path(__file__).resolve().parents[1]
FOLDERS = (_PACKAGE / "containers", _PACKAGE.parents[1] / "containers")
# `%files` of the definitions copies it from the folder in which the job runs.
WHEELHOUSE = "wheelhouse"


@dataclass(frozen=True)
class Definition:
    """What a definition file starts from: its bootstrap agent and the build argument that names the base image."""

    path: Path
    bootstrap: str
    argument: str


def read_definition(name: str | None) -> Definition:
    """A file, or the name of one that comes with windlass."""
    paths = [Path(name), *(folder / name for folder in FOLDERS)] if name else []
    path = next((p for p in paths if p.is_file()), None)
    if path is None:
        shipped = sorted({p.name for folder in FOLDERS for p in folder.glob("*.def")})
        raise LaunchError(
            "launch.definition-missing",
            f"there is no definition file {name}" if name else "the cluster file names no definition",
            hint=f"use --definition FILE; shipped with windlass: {', '.join(shipped) or 'none'}",
        )
    text = path.read_text()
    bootstrap = re.search(r"^Bootstrap:\s*(\S+)", text, re.M)
    argument = re.search(r"^From:.*\{\{\s*(\w+)\s*\}\}", text, re.M)
    if bootstrap is None or argument is None:
        raise LaunchError(
            "launch.definition-invalid",
            f"{path} has no line `Bootstrap:`, or no line `From:` with a build argument",
            hint="write From: {{ FROM }}, so that --base can name the image",
        )
    return Definition(path.resolve(), bootstrap[1], argument[1])


def image_job(
    cluster: Cluster,
    *,
    base: str | None,
    output: Path,
    definition: str | None = None,
    account: str | None = None,
) -> BatchJob:
    """The job that builds `output`; its script and log are in the folder `images` beside it."""
    chosen, container = read_definition(definition or cluster.container.definition), cluster.container
    if base is None:
        base_kind = "an image file" if chosen.bootstrap == "localimage" else "a tag"
        hint = f"images of {cluster.title}: {container.image_hint}" if chosen.bootstrap == "localimage" else ""
        raise LaunchError(
            "launch.image-base-missing",
            f"{chosen.path.name} needs {base_kind} with torch 2.11 or newer to start from",
            hint=f"use --base {chosen.argument}" + (f"; {hint}" if hint else ""),
        )
    runtime = container.runtime if container.runtime in ("singularity", "apptainer") else "apptainer"
    folder = output.absolute().parent / "images"
    argv = (runtime, "build", "--build-arg", f"{chosen.argument}={base}", str(output.absolute()), str(chosen.path))
    # Layers are unpacked there; /tmp of a compute node is often its memory.
    env = {f"{runtime.upper()}_TMPDIR": str(folder), f"{runtime.upper()}_CACHEDIR": str(folder / "cache")}
    job = cpu_job(
        cluster,
        folder,
        "image",
        argv,
        account=account,
        env=env,
        environment=JobEnvironment(kind="module", modules=tuple(container.build_modules)),
    )
    return replace(job, name=f"image-{output.stem}", requeue=False)


def check_image(cluster: Cluster, definition: Definition, *, workdir: Path) -> list[LaunchError]:
    """What would make the build fail on a compute node."""
    problems = []
    if not list((workdir / WHEELHOUSE).glob("windlass-*.whl")):
        problems.append(
            LaunchError(
                "launch.wheelhouse-missing",
                f"{workdir / WHEELHOUSE} holds no wheel of windlass, which the definition copies into the image",
                hint="run scripts/wheelhouse.sh wheelhouse on a machine with internet",
            )
        )
    if definition.bootstrap == "docker" and cluster.network.internet == "no":
        problems.append(
            LaunchError(
                "launch.image-needs-internet",
                f"{definition.path.name} fetches its base image, and compute nodes of {cluster.title} have no internet",
                hint="build it on a machine with internet (--dry-run prints the command) and copy the .sif file, or fetch "
                "the base image there and use --definition lumi-rocm.def --base FILE.sif",
            )
        )
    return problems
