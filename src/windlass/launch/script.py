"""The batch script of a job as text. Pure: no files, no clock."""

import math
import signal
from collections.abc import Iterator
from dataclasses import replace

from windlass.clusters.model import Cluster
from windlass.config.shell import quote
from windlass.errors import EXIT_RESUMABLE
from windlass.launch.job import BatchJob, JobEnvironment, folder_mark
from windlass.units import print_seconds, print_slurm_time

# Exit codes of `windlass link`: start the ranks; nothing left to do; another job is needed.
LINK_GO, LINK_STOP, LINK_AGAIN = 0, 10, EXIT_RESUMABLE
# Exit code of srun when the warning signal ends a rank that has no handler yet.
KILLED_BY_WARNING = 128 + signal.SIGUSR1
# How long the other ranks may live once the first has ended: time to finish a save, but not to waste hours.
RANK_GRACE_SECONDS = 120
# Maximum rounds of a local self-chain; the run is finished long before.
LOCAL_SELF_CHAIN_LIMIT = 1000

PREAMBLE = """\
export USER=${USER:-$(id -un)}   # it may be missing in the job; cache paths and containers need it
# No `set -e`: the end of the job must be recorded even if training failed.
set -o pipefail
# Container settings of the submitting shell would be passed on and break the job: remove them.
for name in $(compgen -v | grep -E "^(SINGULARITY|APPTAINER|SINGULARITYENV|APPTAINERENV)_"); do unset "$name"; done"""

QUESTION = "# Is there work left? This only reads the run folder and takes seconds."

BEFORE = f"""\
answer=$?
if [ "$answer" -eq {LINK_STOP} ]; then exit 0; fi
if [ "$answer" -ne 0 ]; then exit "$answer"; fi"""

RENDEZVOUS = """\
# Address for the ranks: the first node, and a port from the job id, so that two jobs never share one.
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)%s
export MASTER_PORT=$((20000 + SLURM_JOB_ID %% 10000))
# When this job ends, so that training saves in time. SLURM before 23.02 does not set it: ask once.
if [ -z "${SLURM_JOB_END_TIME:-}" ]; then
    SLURM_JOB_END_TIME=$(date -d "$(squeue -h -j "$SLURM_JOB_ID" -o %%e)" +%%s 2>/dev/null) && export SLURM_JOB_END_TIME
fi"""

SIGNALS = """\
# SLURM sends SIGUSR1 to every rank {lead} before the end ({reason}): the ranks save and stop with code {code}.
# The trap only notes a SIGTERM, so that this shell stays alive to record how the job ended.
ended_by=
trap 'ended_by=TERM' TERM"""

NODE_STAGING = """\
# The token store goes to {reason}. A finished copy is marked; a store that has changed since is copied again.
export store={source} fast={target}
{copy} || exit 1"""

# A copy of terabytes must not keep the devices of all nodes waiting: a CPU job before this one made it.
SHARED_STAGING = """\
# The token store is on {reason}: `windlass stage` copied it there in a CPU job before this one.
fast={target}
if [ ! -e "$fast/.staged" ]; then
    echo "windlass: no complete token store in $fast: launch the run again, which copies it" >&2
    exit 1
fi"""

AFTER = """\
# Record how the job ended. srun can return 0 after a node failure, so the run folder decides, not the exit code."""

NEXT_LINK = """\
if [ "$answer" -eq {again} ]; then
    # The next job of the chain, submitted without this job's SLURM_* variables, which would change it.
    mark={mark}:after-$SLURM_JOB_ID
    for attempt in 1 2 3; do
        next=$(unset "${{!SLURM_@}}" "${{!SRUN_@}}"; cd {workdir} &&
            sbatch --parsable --comment={comment}"$mark" {script}) && break
        sleep 20   # the controller may be unavailable for a moment, or its answer was lost after it queued the job
        next=$(squeue -h --me -t all -o "%i %k" | sed -n "s/^\\([0-9]*\\) .*$mark\\$/\\1/p" | head -n1)
        if [ -n "$next" ]; then break; fi
    done
    {link_next}
fi"""

REQUEUE = f"""\
# Stopped early by a signal (pre-emption, wall time), after a save or before a rank listened to it: SLURM requeues only
# what it ended itself, so ask.
if [ "$answer" -eq {LINK_AGAIN} ] && [[ "$code" -eq {EXIT_RESUMABLE} || "$code" -eq {KILLED_BY_WARNING} ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi"""

LOCAL = """\
cd {workdir} || exit 1
for link in $(seq {rounds}); do
    {before}
    answer=$?
    if [ "$answer" -eq {stop} ]; then exit 0; fi
    if [ "$answer" -ne 0 ]; then exit "$answer"; fi
    {limit}{train}
    code=$?
    {after}
    [ $? -eq {again} ] || break
done
exit "$code\""""


def render(job: BatchJob, cluster: Cluster) -> str:
    preamble = PREAMBLE
    if job.account and any("$PROJECT" in s.path for s in cluster.storage.values()):
        preamble += f"\nexport PROJECT=${{PROJECT:-{quote(job.account)}}}   # names the project's folders"
    paragraphs = [
        _header(job, cluster),
        "\n".join(f"#SBATCH {quote(line)}" for line in directives(job, cluster)),
        preamble,
        "\n".join(_environment(job.environment)),
        "\n".join(_variables(job, cluster)),
        *_body(job, cluster),
    ]
    return "\n\n".join(part for part in paragraphs if part) + "\n"


def render_local(job: BatchJob, cluster: Cluster) -> str:
    """The same steps without a scheduler: the jobs of a chain follow each other in one process."""
    limit = f"timeout --signal=USR1 --kill-after={int(job.lead_seconds)} "
    limit = "" if math.isinf(job.seconds) else f"{limit}{int(job.seconds - job.lead_seconds)} "
    loop = LOCAL.format(
        workdir=quote(job.workdir),
        rounds=job.links if job.chain != "self" else LOCAL_SELF_CHAIN_LIMIT,
        before=_link(job, cluster, "before"),
        limit=limit,
        train=inside(job, cluster, ("windlass", "resume", job.run_dir, "--devices", str(job.devices_per_node))),
        after=_link(job, cluster, "after", "--code", "$code"),
        stop=LINK_STOP,
        again=LINK_AGAIN,
    )
    head = [_header(job, cluster), "set -o pipefail"]
    return "\n".join([*head, *_environment(job.environment), *_variables(job, cluster), loop]) + "\n"


def _header(job: BatchJob, cluster: Cluster) -> str:
    return "\n".join(
        [
            "#!/bin/bash -l",
            _comment(
                f"{job.kind} job of {job.name} on {cluster.title}; written by windlass, which rewrites it at every launch."
            ),
            *map(_comment, job.about),
        ]
    )


def _comment(text: str) -> str:
    return "# " + "".join(character if character.isprintable() else " " for character in text)


def directives(job: BatchJob, cluster: Cluster) -> list[str]:
    """sbatch options in the site's own way, each once: the recipe's value replaces the cluster file's and ours."""
    slurm, gpus = cluster.slurm, job.devices_per_node if cluster.slurm else 0
    options: dict[str, str | int | bool | None] = {
        "job-name": job.name,
        "account": job.account,
        "partition": job.partition,
        "qos": job.qos,
        "nodes": job.nodes,
        "ntasks-per-node": job.tasks_per_node,
        "cpus-per-task": job.cpus_per_task,
        "gpus-per-node": gpus if slurm and slurm.gpu_option == "gpus-per-node" else None,
        "gres": f"gpu:{gpus}" if gpus and slurm and slurm.gpu_option == "gres" else None,
        "mem": job.mem,
        "exclusive": bool(gpus and slurm and slurm.exclusive),
        "time": print_slurm_time(job.seconds),
        "chdir": job.workdir,
        "output": job.log_pattern,
        "open-mode": "append",  # a requeued job would overwrite its log, which loses the reason of the requeue
        "requeue" if job.requeue else "no-requeue": True,
        "signal": f"USR1@{int(job.lead_seconds)}" if job.kind == "train" else None,
        "array": f"0-{job.array - 1}" if job.array else None,
    }
    options = {name: value for name, value in options.items() if value not in (None, "", 0)}
    if slurm:
        options |= {_option(name): value or True for name, value in slurm.extra.items()}
    for key, value in job.sbatch.items():
        name = _option(key)
        options.pop({"requeue": "no-requeue", "no-requeue": "requeue"}.get(name, ""), None)
        options[name] = value if isinstance(value, bool) else str(value)
    for flag in job.energy_flags:
        name, _, text = flag.partition("=")
        options.setdefault(_option(name), text or True)
    return [f"--{n}" if value is True else f"--{n}={value}" for n, value in options.items() if value is not False]


def _option(name: str) -> str:
    """Recipes and cluster files may write `ear_policy`, `ear-policy` or `--ear-policy`."""
    return name.lstrip("-").replace("_", "-")


def _environment(env: JobEnvironment) -> Iterator[str]:
    if env.modules:
        yield from ("# Modules", "module purge", *(f"module load {quote(name)}" for name in env.modules))
    if env.venv:
        yield from ("# Python", f"source {quote(env.venv + '/bin/activate', expand=True)}")
    if env.kind == "container" and env.image:
        yield from (f"# Container ({env.runtime})", f"image={quote(env.image, expand=True)}")
        if env.runtime in ("singularity", "apptainer") and env.binds:
            # Set, never inherited: a path that is missing here stops every rank.
            yield f"export {env.runtime.upper()}_BIND={quote(','.join(env.binds), expand=True)}"


def _variables(job: BatchJob, cluster: Cluster) -> Iterator[str]:
    """`export NAME=value   # reason`; what the recipe sets comes last and wins."""
    yield "# Environment variables, each with its reason"
    if cluster.slurm and cluster.slurm.export_srun_cpus:
        yield _export(
            "SRUN_CPUS_PER_TASK",
            "$SLURM_CPUS_PER_TASK",
            "srun no longer inherits it (SLURM 22.05): one core per task otherwise",
        )
    rows: list[tuple[str, str, str]] = []
    if job.cpus_per_task:
        threads = 1 if job.torchrun else job.cpus_per_task
        rows.append(("OMP_NUM_THREADS", str(threads), "ranks of a node must not compete for cores"))
    if job.kind in ("train", "doctor", "sweep"):
        rows += [(name, var.value, var.why) for name, var in cluster.env.items()]
    rows += _container_rows(job.environment, cluster)
    # Compiler caches are not set here: a job chain must find its compiled kernels again, so `train.parallelize`
    # keeps them in the user's cache folder. A folder of this job would be empty in the next one.
    reasons = {
        "WANDB_MODE": "`windlass sync` uploads later, from a machine with internet",
        "WANDB_DIR": "tracker files belong to the run folder",
    }
    offline = "nothing is fetched in a job: a hub time-out costs minutes per rank"
    rows += [(name, value, reasons.get(name, offline)) for name, value in job.tracker_env.items()]
    yield from (_export(*row) for row in rows if row[0] not in job.env)
    origin = "not the memory or home folder of a node" if job.kind == "image" else "from the recipe"
    yield from (_export(name, value, origin) for name, value in job.env.items())


def _container_rows(env: JobEnvironment, cluster: Cluster) -> list[tuple[str, str, str]]:
    prefix = {"singularity": "SINGULARITYENV_", "apptainer": "APPTAINERENV_"}.get(env.runtime, "")
    variables = cluster.container.env.items() if env.kind == "container" else ()
    return [(prefix + name, var.value, var.why) for name, var in variables]


def _export(name: str, value: str, why: str) -> str:
    return f"export {name}={quote(value, expand=True)}   {_comment(why)}"


def _body(job: BatchJob, cluster: Cluster) -> list[str]:
    command = f"exec {inside(job, cluster, job.command)}"
    if job.kind == "doctor":
        return [f"{_rendezvous(cluster)}\n{_start(job, cluster)}\nexit $code"]
    if job.kind == "sweep":
        return [_node_folders(job, cluster), f"{_rendezvous(cluster)}\n{command}" if job.nodes > 1 else command]
    if job.kind != "train":
        return [command]
    staging, follow_up = "", []
    if job.staging is not None and not job.staging.per_node:
        staging = SHARED_STAGING.format(reason=job.staging.reason, target=quote(job.staging.target, expand=True))
    elif job.staging is not None:
        fresh = '[ -e "$fast/.staged" ] && [ -z "$(find "$store" -newer "$fast/.staged" -print -quit)" ]'
        copy = f'{{ {fresh}; }} || {{ mkdir -p "$fast" && cp -r "$store/." "$fast/" && touch "$fast/.staged"; }}'
        staging = NODE_STAGING.format(
            reason=job.staging.reason,
            source=quote(job.staging.source, expand=True),
            target=quote(job.staging.target, expand=True),
            copy=f"{_once_per_node(job)}bash -c {quote(copy)}",
        )
    if job.chain == "self":
        workdir, script = quote(job.workdir), quote(job.job_file)
        link_next = _link(job, cluster, "next", "--job", "$next")
        comment = quote(f"{job.sbatch['comment']} ") if job.sbatch.get("comment") else ""
        names = {"mark": folder_mark(job.run_dir), "comment": comment, "link_next": link_next}
        follow_up = [NEXT_LINK.format(again=LINK_AGAIN, workdir=workdir, script=script, **names)]
    elif job.requeue and job.chain == "none":
        follow_up = [REQUEUE]
    signals = SIGNALS.format(lead=print_seconds(job.lead_seconds), reason=job.lead_reason, code=EXIT_RESUMABLE)
    after = _link(job, cluster, "after", "--code", "$code", "--by", "${ended_by:-none}")
    return [
        f"{QUESTION}\n{_link(job, cluster, 'before')}\n{BEFORE}",
        staging,
        _node_folders(job, cluster),
        _rendezvous(cluster),
        f"{signals}\n{_start(job, cluster)}",
        "\n".join([f"{AFTER}\n{after}\nanswer=$?", *follow_up, 'exit "$code"']),
    ]


def _link(job: BatchJob, cluster: Cluster, action: str, *options: str) -> str:
    return inside(job, cluster, ("windlass", "link", action, job.run_dir, *options))


def _node_folders(job: BatchJob, cluster: Cluster) -> str:
    """Caches on a node's own /tmp must exist before a library opens them.

    They hold compiled kernels and their names can be guessed: `install` gives them mode 700, which fails for a folder
    that another user made first.
    """
    names = [name for name, var in cluster.env.items() if var.value.startswith("/tmp/") and name not in job.env]
    folders = " ".join(f'"${name}"' for name in names)
    return (
        f"# Folders of this job on every node\n{_once_per_node(job)}install -d -m 700 {folders} || exit 1"
        if names
        else ""
    )


def _once_per_node(job: BatchJob) -> str:
    return f"srun --nodes={job.nodes} --ntasks={job.nodes} --ntasks-per-node=1 "


def _rendezvous(cluster: Cluster) -> str:
    suffix = cluster.network.master_suffix
    return RENDEZVOUS % (f"{suffix}   # the trailing {suffix} is its name on the fast network" if suffix else "")


def _start(job: BatchJob, cluster: Cluster) -> str:
    command = job.command
    if job.torchrun:
        command = (
            # torchrun's agent would die of the SIGUSR1 that SLURM sends to every process; its workers handle it.
            *("bash", "-c", "trap '' USR1; exec \"$@\"", "windlass"),
            *("torchrun", "--nnodes=$SLURM_NNODES", f"--nproc-per-node={job.devices_per_node}", "--rdzv-backend=c10d"),
            *("--rdzv-id=$SLURM_JOB_ID", "--rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT", "-m", "--"),
            *job.command[2:],  # the module that `python -m` would start
        )
    return " \\\n    ".join([*map(quote, srun_argv(job, cluster)), inside(job, cluster, command)]) + "\ncode=$?"


def srun_argv(job: BatchJob, cluster: Cluster) -> list[str]:
    argv = ["srun", f"--wait={RANK_GRACE_SECONDS}"]
    extra = list(cluster.slurm.srun_extra) if cluster.slurm else []
    if job.torchrun:
        extra = [option for option in extra if not option.startswith("--cpu-bind")]
        argv.append("--cpu-bind=none")
    elif cluster.binding.kind == "mask" and job.tasks_per_node == len(cluster.binding.masks):
        argv.append("--cpu-bind=mask_cpu:" + ",".join(cluster.binding.masks))
    elif cluster.binding.kind != "none" and not any(option.startswith("--cpu-bind") for option in extra):
        argv.append("--cpu-bind=cores")
    return argv + extra


def inside(job: BatchJob, cluster: Cluster, command: tuple[str, ...]) -> str:
    """The command as the shell writes it, wrapped by the container when there is one."""
    env, line = job.environment, " ".join(quote(argument, expand=True) for argument in command)
    if env.kind != "container" or env.image is None:
        return line
    if activate := cluster.container.activate:  # a variable of the image itself, so the image's shell expands it
        line = f"bash -c '${activate}; exec \"$@\"' windlass {line}"
    if env.runtime != "charliecloud":
        flags = [quote(flag) for flag in env.gpu_flag.split()]
        return " ".join([env.runtime, "exec", *flags, "--pwd", quote(job.workdir), '"$image"', line])
    binds = [f"--bind={quote(bind, expand=True)}" for bind in env.binds]
    variables = [
        f"--set-env={quote(f'{name}={var.value}', expand=True)}" for name, var in cluster.container.env.items()
    ]
    return " ".join(["ch-run", *binds, *variables, f"--cd={quote(job.workdir)}", '"$image"', "--", line])


def container_argv(job: BatchJob, cluster: Cluster, env: JobEnvironment) -> list[str]:
    """In front of a command: runs it in this container. The job itself, which may call srun, stays outside."""
    lines = [*_environment(replace(env, modules=())), *(_export(*row) for row in _container_rows(env, cluster))]
    call = inside(replace(job, environment=env), cluster, ())
    return ["bash", "-c", "\n".join([*lines, f'exec {call} "$@"']), "windlass"]
