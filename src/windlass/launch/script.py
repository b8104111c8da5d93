"""What text does the scheduler get? One readable batch script from a job and a cluster file. Pure: no files, no clock."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from windlass.clusters.model import Cluster
from windlass.errors import EXIT_RESUMABLE
from windlass.launch.job import Environment, Job
from windlass.units import print_seconds, print_slurm_time

LINK_GO, LINK_STOP, LINK_AGAIN = 0, 10, EXIT_RESUMABLE
"""What `windlass link` says by its exit code: go on; nothing left to do; another link is wanted."""
RANK_GRACE_SECONDS = 120
"""How long the other ranks may live on once the first has ended: long enough to finish a save, short enough not to burn hours."""


def render(job: Job, cluster: Cluster) -> str:
    """The whole script, from `#!` to the exit code."""
    parts = [
        header(job, cluster),
        "\n".join(f"#SBATCH {line}" for line in directives(job, cluster)),
        _preamble(job, cluster),
        "\n".join(_environment(job.environment)),
        "\n".join(_variables(job, cluster)),
        "\n".join(_body(job, cluster)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def header(job: Job, cluster: Cluster) -> str:
    lines = [
        "#!/bin/bash -l",
        f"# {job.kind} job of {job.name} on {cluster.title}; written by windlass, which writes it anew at every launch.",
        *(f"# {line}" for line in job.about),
    ]
    return "\n".join(lines)


# -- directives ---------------------------------------------------------------------------------------------------------


def directives(job: Job, cluster: Cluster) -> list[str]:
    """sbatch options in the site's own way; what the recipe passes through comes last and replaces ours of the same name."""
    options: dict[str, str | bool] = dict(_shape(job, cluster))
    options |= dict(_behaviour(job))
    if cluster.slurm:
        options |= {k: v or True for k, v in cluster.slurm.extra.items()}
    for key, value in job.sbatch.items():
        name = key.lstrip("-").replace("_", "-")
        options[name] = value if isinstance(value, bool) else str(value)
    written = [_directive(name, value) for name, value in options.items() if value is not False]
    return [*written, *job.energy_flags]


def _directive(name: str, value: str | bool) -> str:
    return f"--{name}" if value is True else f"--{name}={value}"


def _shape(job: Job, cluster: Cluster) -> Iterator[tuple[str, str | bool]]:
    slurm = cluster.slurm
    yield "job-name", job.name
    for name, value in (("account", job.account), ("partition", job.partition), ("qos", job.qos)):
        if value:
            yield name, value
    yield "nodes", str(job.nodes)
    yield "ntasks-per-node", str(job.tasks_per_node)
    if job.cpus_per_task:
        yield "cpus-per-task", str(job.cpus_per_task)
    if job.devices_per_node and slurm and slurm.gpu_option == "gpus-per-node":
        yield "gpus-per-node", str(job.devices_per_node)
    elif job.devices_per_node and slurm and slurm.gpu_option == "gres":
        yield "gres", f"gpu:{job.devices_per_node}"
    if job.mem:
        yield "mem", job.mem
    if job.devices_per_node and slurm and slurm.exclusive:
        yield "exclusive", True


def _behaviour(job: Job) -> Iterator[tuple[str, str | bool]]:
    yield "time", print_slurm_time(job.seconds)
    yield "chdir", job.workdir
    yield "output", job.log_pattern
    # A requeued job starts its log file anew by default, which loses the reason of the requeue.
    yield "open-mode", "append"
    yield ("requeue", True) if job.requeue else ("no-requeue", True)
    if job.kind == "train":
        yield "signal", f"USR1@{int(job.lead_seconds)}"
    if job.array:
        yield "array", f"0-{job.array - 1}"


# -- environment --------------------------------------------------------------------------------------------------------


def _preamble(job: Job, cluster: Cluster) -> str:
    lines = [
        "export USER=${USER:-$(id -un)}   # not set where the submitter had none; cache paths and containers need it",
        "# No `set -e`: how a link ended must be written down even when training failed.",
        "set -o pipefail",
        "# Binds and variables of the submitting shell's containers travel with a job and break it: begin without them.",
        'for name in $(compgen -v | grep -E "^(SINGULARITY|APPTAINER|SINGULARITYENV|APPTAINERENV)_"); do unset "$name"; done',
    ]
    if job.account and any("$PROJECT" in s.path for s in cluster.storage.values()):
        lines += [f"export PROJECT=${{PROJECT:-{job.account}}}   # names the project's folders"]
    return "\n".join(lines)


def _environment(env: Environment) -> Iterator[str]:
    if env.modules:
        yield "# Modules"
        yield "module purge"
        yield from (f"module load {name}" for name in env.modules)
    if env.kind == "venv" and env.venv:
        yield "# Python"
        yield f"source {shlex.quote(env.venv + '/bin/activate')}"
    if env.kind == "container" and env.image:
        yield f"# Container ({env.runtime})"
        yield f"image={_double(env.image)}"
        if env.runtime in ("singularity", "apptainer") and env.binds:
            # Set, never inherited: a path that is missing here stops every rank.
            yield f"export {env.runtime.upper()}_BIND={_double(','.join(env.binds))}"


def _variables(job: Job, cluster: Cluster) -> Iterator[str]:
    overridden = set(job.env)
    yield "# Environment: each with its reason"
    if cluster.slurm and cluster.slurm.export_srun_cpus:
        yield _export(
            "SRUN_CPUS_PER_TASK",
            "$SLURM_CPUS_PER_TASK",
            "srun no longer inherits it (SLURM 22.05): one core per task otherwise",
        )
    if job.cpus_per_task and "OMP_NUM_THREADS" not in overridden:
        threads = 1 if job.torchrun else job.cpus_per_task
        yield _export("OMP_NUM_THREADS", str(threads), "ranks of a node must not fight for cores")
    if job.kind in ("train", "doctor", "sweep"):
        for name, var in cluster.env.items():
            if name not in overridden:
                yield _export(name, var.value, var.why)
    if job.environment.kind == "container":
        yield from _container_variables(job.environment, cluster)
    if job.kind in ("train", "sweep"):
        cache = "/tmp/${USER:-windlass}-windlass-$SLURM_JOB_ID"
        for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
            if name not in overridden:
                yield _export(
                    name,
                    f"{cache}/{name.split('_')[0].lower()}",
                    "compiler caches of many ranks lock each other on a shared file system",
                )
    for name, value in job.tracker_env.items():
        if name not in overridden:
            yield _export(name, value, _tracker_reason(name))
    for name, value in job.env.items():
        yield _export(name, value, "from the recipe")


def _tracker_reason(name: str) -> str:
    if name.startswith("WANDB_MODE"):
        return "`windlass sync` sends later, from where there is internet"
    if name in ("WANDB_RUN_ID", "WANDB_RESUME"):
        return "all links of a chain are one tracked run"
    return (
        "tracker files belong to the run folder"
        if name.startswith("WANDB")
        else "nothing is fetched in a job: a hub time-out costs minutes per rank"
    )


def _container_variables(env: Environment, cluster: Cluster) -> Iterator[str]:
    prefix = {"singularity": "SINGULARITYENV_", "apptainer": "APPTAINERENV_"}.get(env.runtime, "")
    for name, var in cluster.container.env.items():
        yield _export(prefix + name, var.value, var.why)


def _export(name: str, value: str, why: str) -> str:
    return f"export {name}={_double(value)}   # {why}"


def _double(value: str) -> str:
    """In double quotes, so that variables of the compute node are filled in; everything else stays as written."""
    if value and all(c.isalnum() or c in "._/:,+-" for c in value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("`", "\\`") + '"'


def _staging(job: Job) -> Iterator[str]:
    if job.staging is None:
        return
    source, target = _double(job.staging.source), _double(job.staging.target)
    yield f"# The token store goes to {job.staging.why}. A finished copy is marked; a store that has changed since is copied again."
    yield f"export store={source} fast={target}"
    fresh = '[ -e "$fast/.staged" ] && [ -z "$(find "$store" -newer "$fast/.staged" -print -quit)" ]'
    copy = f'{{ {fresh}; }} || {{ mkdir -p "$fast" && cp -r "$store/." "$fast/" && touch "$fast/.staged"; }}'
    yield f"{_once_per_node(job)}bash -c {shlex.quote(copy)} || exit 1" if job.staging.per_node else f"{copy} || exit 1"
    yield ""


def _once_per_node(job: Job) -> str:
    return f"srun --nodes={job.nodes} --ntasks={job.nodes} --ntasks-per-node=1 "


def _node_folders(job: Job, cluster: Cluster) -> Iterator[str]:
    """Caches on a node's own /tmp must exist before a library opens them."""
    names = [name for name, var in cluster.env.items() if var.value.startswith("/tmp/") and name not in job.env]
    if names:
        yield "# Folders of this job on every node"
        yield f"{_once_per_node(job)}mkdir -p " + " ".join(f'"${name}"' for name in names)
        yield ""


# -- what runs ----------------------------------------------------------------------------------------------------------


def _body(job: Job, cluster: Cluster) -> Iterator[str]:
    if job.kind == "train":
        yield from _before(job, cluster)
        yield ""
        yield from _staging(job)
        yield from _node_folders(job, cluster)
        yield from _rendezvous(job, cluster)
        yield ""
        yield from _start(job, cluster)
        yield ""
        yield from _after(job, cluster)
    elif job.kind == "doctor":
        yield from _rendezvous(job, cluster)
        yield from _start(job, cluster)
        yield "exit $code"
    else:
        if job.kind == "sweep":
            yield from _node_folders(job, cluster)
        if job.kind == "sweep" and job.nodes > 1:
            yield from _rendezvous(job, cluster)
        yield f"exec {inside(job, cluster, job.command)}"


def _before(job: Job, cluster: Cluster) -> Iterator[str]:
    yield "# Is there anything left to do? This reads the run folder only and answers within seconds."
    yield inside(job, cluster, ("windlass", "link", "before", job.run_dir))
    yield "answer=$?"
    yield f'if [ "$answer" -eq {LINK_STOP} ]; then exit 0; fi'
    yield 'if [ "$answer" -ne 0 ]; then exit "$answer"; fi'


def _rendezvous(job: Job, cluster: Cluster) -> Iterator[str]:
    yield "# Where the ranks meet: the first node, and a port from the job id so that two jobs never share one."
    first = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)'
    suffix = cluster.network.master_suffix
    note = f"   # the trailing {suffix} is its name on the fast network" if suffix else ""
    yield f"export MASTER_ADDR={first}{suffix}{note}"
    yield "export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))"
    yield "# When this job ends. SLURM before 23.02 does not say, so ask once; training saves in time by it."
    yield 'if [ -z "${SLURM_JOB_END_TIME:-}" ]; then'
    yield '    SLURM_JOB_END_TIME=$(date -d "$(squeue -h -j "$SLURM_JOB_ID" -o %e)" +%s 2>/dev/null) && export SLURM_JOB_END_TIME'
    yield "fi"


def _start(job: Job, cluster: Cluster) -> Iterator[str]:
    if job.kind == "train":
        yield f"# SLURM sends SIGUSR1 to every rank {print_seconds(job.lead_seconds)} before the end ({job.lead_why}): the ranks save and stop with code 75."
        yield "# The trap only notes a SIGTERM, so that this shell lives to write down how the link ended."
        yield "ended_by="
        yield "trap 'ended_by=TERM' TERM"
    command = job.command
    if job.torchrun:
        command = _torchrun(job)
    yield " \\\n    ".join([*srun_words(job, cluster), inside(job, cluster, command)])
    yield "code=$?"


def _torchrun(job: Job) -> tuple[str, ...]:
    """torchrun's agent would die of the SIGUSR1 that SLURM sends to every process; its workers set their own handler."""
    rest = job.command[1:]  # torchrun starts the module, not the `windlass` script
    return (
        "bash", "-c", "trap '' USR1; exec \"$@\"", "windlass",
        "torchrun", "--nnodes=$SLURM_NNODES", f"--nproc-per-node={job.devices_per_node}",
        "--rdzv-backend=c10d", "--rdzv-id=$SLURM_JOB_ID", "--rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT", "-m", "--", "windlass", *rest,
    )  # fmt: skip


def srun_words(job: Job, cluster: Cluster) -> list[str]:
    """How this machine's ranks are started: binding, and the site's own options."""
    words = ["srun", f"--wait={RANK_GRACE_SECONDS}"]
    extra = list(cluster.slurm.srun_extra) if cluster.slurm else []
    if job.torchrun:
        extra = [w for w in extra if not w.startswith("--cpu-bind")]
        words.append("--cpu-bind=none")
    elif cluster.binding.kind == "mask" and job.tasks_per_node == len(cluster.binding.masks):
        words.append("--cpu-bind=mask_cpu:" + ",".join(cluster.binding.masks))
    elif cluster.binding.kind != "none" and not any(w.startswith("--cpu-bind") for w in extra):
        words.append("--cpu-bind=cores")
    return words + extra


def _after(job: Job, cluster: Cluster) -> Iterator[str]:
    yield "# Write down how the link ended. srun can say 0 after a node failure, so the run folder decides, not its code."
    yield inside(
        job, cluster, ("windlass", "link", "after", job.run_dir, "--code", "$code", "--by", "${ended_by:-none}")
    )
    yield "answer=$?"
    if job.chain == "self":
        yield f'if [ "$answer" -eq {LINK_AGAIN} ]; then'
        yield "    # The next link. This job's own SLURM_* variables would shape it, so it is submitted without them."
        yield "    for attempt in 1 2 3; do"
        yield f'        next=$(unset "${{!SLURM_@}}" "${{!SRUN_@}}"; {_resubmit(job)}) && break'
        yield "        sleep 20   # the controller may be away for a moment"
        yield "    done"
        yield f"    {inside(job, cluster, ('windlass', 'link', 'next', job.run_dir, '--job', '$next'))}"
        yield "fi"
    elif job.requeue and job.chain == "none":
        yield "# Stopped early after a good save (signal, pre-emption): SLURM requeues only what it ended itself, so ask."
        yield f'if [ "$answer" -eq {LINK_AGAIN} ] && [ "$code" -eq {EXIT_RESUMABLE} ]; then scontrol requeue "$SLURM_JOB_ID"; fi'
    yield 'exit "$code"'


def _resubmit(job: Job) -> str:
    return f"cd {shlex.quote(job.workdir)} && sbatch --parsable {shlex.quote(job.job_file)}"


def inside(job: Job, cluster: Cluster, command: tuple[str, ...]) -> str:
    """The command as the shell writes it, wrapped by the container when there is one."""
    env, words = job.environment, " ".join(_word(w) for w in command)
    if env.kind != "container" or env.image is None:
        return words
    if env.runtime == "charliecloud":
        return f"{_charliecloud(env, cluster, job.workdir)} -- {words}"
    flags = f" {env.gpu_flag}" if env.gpu_flag else ""
    return f'{env.runtime} exec{flags} --pwd {_word(job.workdir)} "$image" {words}'


def _charliecloud(env: Environment, cluster: Cluster, workdir: str) -> str:
    binds = " ".join(f"--bind={_word(b)}" for b in env.binds)
    sets = " ".join(f"--set-env={_word(f'{k}={v.value}')}" for k, v in cluster.container.env.items())
    return " ".join(word for word in ("ch-run", binds, sets, f"--cd={_word(workdir)}", '"$image"') if word)


def _word(word: str) -> str:
    """A shell word: quoted, but a variable of the job (`$code`) stays one; `$@` belongs to an inner shell."""
    return _double(word) if "$" in word and "$@" not in word else shlex.quote(word)
