"""SLURM by its five commands: arguments, output, and errors with a hint. Needs no accounting database."""

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from windlass.clusters.scheduler import without_scheduler
from windlass.errors import LaunchError, WindlassError
from windlass.launch.executor import ENDED, RUNNING, UNKNOWN, JobState
from windlass.units import parse_seconds

T = TypeVar("T")
TIMEOUT_SECONDS = 60.0
# The cells of a line and how each command calls them.
SQUEUE = {
    "job": "%i", "array": "%F", "state": "%T", "reason": "%r", "nodes": "%D", "used": "%M", "limit": "%l",
    "start": "%S", "end": "%e", "node_list": "%N", "user": "%u",
}  # fmt: skip
SACCT = {
    "job": "JobID", "state": "State", "code": "ExitCode", "used": "ElapsedRaw", "nodes": "NNodes", "start": "Start",
    "end": "End", "limit": "TimelimitRaw", "node_list": "NodeList", "user": "User", "joules": "ConsumedEnergyRaw",
}  # fmt: skip
# Part of a SLURM message -> what to do about it.
HINTS = (
    (
        "invalid partition",
        "`sinfo -s` lists the partitions; set launch.partition, or correct the cluster file "
        "(`windlass clusters NAME --probe`)",
    ),
    (
        "Invalid account",
        "set launch.account to one of yours: `sacctmgr show assoc user=$USER format=account,partition,qos`",
    ),
    ("Invalid qos", "set launch.qos to one of yours: `sacctmgr show assoc user=$USER format=account,qos`"),
    (
        "AssocMaxSubmitJobLimit",
        "either no account was given (set launch.account) or you have too many jobs in the queue",
    ),
    ("QOSMaxSubmitJobPerUserLimit", "this QOS takes no more of your jobs now: use a shorter --chain"),
    (
        "Requested node configuration is not available",
        "no node has that many devices, cores or that much memory; compare with `windlass clusters NAME --probe`",
    ),
    ("Memory specification can not be satisfied", "ask for less memory, or remove launch.sbatch.mem"),
    ("Requested time limit is invalid", "shorten launch.time to the partition's limit"),
    ("Unable to contact slurm controller", "the controller does not answer; running jobs continue. Try again later"),
    ("Access/permission denied", "the job belongs to another user"),
    ("Job dependency problem", "SLURM does not know the job to wait for"),
    ("Unable to open file", "the script must be on a file system that this node can read"),
    (
        "establish a configuration source",
        "SLURM's commands are installed here without a configuration: use a login node, or set SLURM_CONF",
    ),
    ("Batch job submission failed", "the message above is sbatch's own; --dry-run shows the script"),
)
# Parts of messages after which the same call may work, and after which a job may be queued although sbatch failed.
TRANSIENT = (
    "timed out", "unable to contact slurm controller", "communication connection failure", "connection refused",
    "zero bytes were transmitted", "resource temporarily unavailable", "in standby mode", "not responding",
)  # fmt: skip
RETRY_PAUSES_SECONDS = (5.0, 15.0, 30.0)
# What SLURM writes into a job's log at its end -> the job's state.
LOG_MARKS = (
    ("DUE TO TIME LIMIT", "TIMEOUT"), ("DUE TO NODE FAILURE", "NODE_FAIL"), ("DUE TO PREEMPTION", "PREEMPTED"),
    ("oom-kill event", "OUT_OF_MEMORY"), ("oom_kill event", "OUT_OF_MEMORY"), ("CANCELLED AT", "CANCELLED"),
)  # fmt: skip


def slurm_available() -> bool:
    return shutil.which("sbatch") is not None


class SlurmScheduler:
    name = "slurm"

    def __init__(self, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self.timeout_seconds = timeout_seconds

    def submit(self, script: Path, *, run_dir: Path, after: str | None = None, comment: str | None = None) -> str:
        # Without the second option a job whose condition can never be met stays in the queue forever.
        argv = ["sbatch", "--parsable", *([f"--dependency={after}", "--kill-on-invalid-dep=yes"] if after else [])]
        if comment is None:
            return read_job_id(self.call([*argv, str(script)]))
        argv, mark, lost = [*argv, f"--comment={comment}", str(script)], comment.split()[-1], None
        for pause_seconds in (0.0, *RETRY_PAUSES_SECONDS):
            time.sleep(pause_seconds)
            try:
                queued: Mapping[str, str] = self.marked(mark) if lost else {}
                if not queued:
                    queued = {read_job_id(self.call(argv)): mark}
                    if lost:  # what was sent before may arrive late
                        queued = {**self.marked(mark), **queued}
                first, *others = sorted(queued, key=int)
                self.cancel(others)
                return first
            except LaunchError as error:
                if not is_transient(error):
                    # Refused; or queued, and something else went wrong after it.
                    with contextlib.suppress(LaunchError):
                        if queued := self.marked(mark):
                            return min(queued, key=int)
                    raise
                lost = error
        raise LaunchError(
            "launch.submission-unknown",
            f"sbatch was called {1 + len(RETRY_PAUSES_SECONDS)} times; the last answer: {lost.message if lost else ''}",
            hint="the job may be queued. `windlass jobs RUN` shows it as soon as the controller answers, and a new "
            "launch looks for it first",
        )

    def marked(self, mark: str) -> Mapping[str, str]:
        """From the comments of our jobs; squeue keeps a job for some minutes after its end (MinJobAge)."""
        lines = self.call(["squeue", "-h", "--me", "-t", "all", "-o", "%F|%k"]).splitlines()
        cells = [line.partition("|") for line in lines]
        marks = {job.strip(): comment.split()[-1] for job, _, comment in cells if comment.strip()}
        return {job: text for job, text in marks.items() if f"{text}:".startswith(f"{mark}:")}

    def test(self, script: Path) -> str:
        """SLURM's answer to the script without queueing it: when it would start. Raises when SLURM would refuse it."""
        argv = ["sbatch", "--test-only", str(script)]
        for pause_seconds in RETRY_PAUSES_SECONDS:
            try:
                return self.call(argv, with_stderr=True).strip()
            except LaunchError as error:
                if not is_transient(error):
                    raise
            time.sleep(pause_seconds)
        return self.call(argv, with_stderr=True).strip()

    def states(self, jobs: Sequence[str]) -> Mapping[str, JobState]:
        """squeue first, then the accounting database for what squeue has forgotten."""
        if not jobs:
            return {}
        states = self._squeue(jobs)
        missing = [job for job in jobs if job not in states]
        no_code = [job for job, state in states.items() if state.over and state.exit_code is None]
        asked = [*missing, *no_code]
        if asked and shutil.which("sacct"):
            with contextlib.suppress(LaunchError):  # accounting is off here
                lines = self.call(["sacct", "-n", "-P", "-X", "-j", ",".join(asked), "-o", ",".join(SACCT.values())])
                ended = read_states(lines, asked, "sacct")
                states |= {job: state for job, state in ended.items() if job in missing or state.over}
        for job in (job for job in no_code if states[job].exit_code is None):
            with contextlib.suppress(LaunchError):  # scontrol forgets a job some minutes after its end
                codes = re.findall(r"\bExitCode=(\d+):", self.call(["scontrol", "show", "job", job]))
                states[job] = replace(states[job], exit_code=max(map(int, codes), default=None))
        return states

    def _squeue(self, jobs: Sequence[str]) -> dict[str, JobState]:
        try:
            argv = ["squeue", "-h", "-t", "all", "-r", "-j", ",".join(jobs), "-o", "|".join(SQUEUE.values())]
            return read_states(self.call(argv), jobs, "squeue")
        except LaunchError as error:
            if "Invalid job id" not in error.message:
                raise
            # One of them is forgotten, or was never known: ask for each alone.
            return {} if len(jobs) == 1 else {k: v for job in jobs for k, v in self._squeue([job]).items()}

    def cancel(self, jobs: Sequence[str]) -> None:
        if jobs:
            self.call(["scancel", *jobs])

    def wait(self, job: str, seconds: float, poll_seconds: float = 1.0) -> JobState | None:
        """Until the job is over or the time is up; `sbatch --wait` polls more and more slowly, so we poll ourselves."""
        deadline = time.monotonic() + seconds
        while True:
            state = self.states([job]).get(job)
            if (state is not None and (state.over or state.never_starts)) or time.monotonic() > deadline:
                return state
            time.sleep(poll_seconds)

    def call(self, argv: Sequence[str], *, with_stderr: bool = False) -> str:
        """Run one SLURM command; its own error text becomes ours, with a hint."""
        if shutil.which(argv[0]) is None:
            raise LaunchError(
                "launch.slurm-not-available",
                f"there is no SLURM on this machine ({argv[0]} is not on the PATH)",
                hint='log in to the cluster, or run here: --local, or cluster = "workstation" in the recipe',
            )
        try:
            done = subprocess.run(
                argv, capture_output=True, text=True, timeout=self.timeout_seconds, env=without_scheduler(os.environ)
            )
        except subprocess.TimeoutExpired:
            raise LaunchError(
                "launch.slurm-timeout",
                f"{argv[0]} did not answer within {self.timeout_seconds:.0f} s",
                hint="the controller is busy or unavailable: try again",
            ) from None
        if done.returncode:
            raise slurm_error(argv[0], done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}")
        return done.stdout + (done.stderr if with_stderr else "")


def is_transient(error: LaunchError) -> bool:
    """The controller did not answer, or its answer did not arrive: the same call may work a little later."""
    if error.code in ("launch.slurm-timeout", "launch.no-job-id"):
        return True
    return error.code == "launch.slurm-error" and any(part in error.message.lower() for part in TRANSIENT)


def slurm_error(command: str, message: str) -> LaunchError:
    """The scheduler's own message, with our hint where there is one."""
    hint = next((hint for part, hint in HINTS if part.lower() in message.lower()), None)
    return LaunchError("launch.slurm-error", f"{command}: {message}", hint=hint)


def read_job_id(text: str) -> str:
    """`123` or `123;cluster` as --parsable prints it; some sites print a banner around it."""
    for line in reversed(text.strip().splitlines()):
        if match := re.fullmatch(r"(\d+)(?:;[\w.-]+)?", line.strip()) or re.search(r"Submitted batch job (\d+)", line):
            return match.group(1)
    raise LaunchError(
        "launch.no-job-id",
        f"sbatch answered without a job id: {text.strip()!r}",
        hint="`squeue --me` shows whether the job was queued",
    )


def read_states(text: str, jobs: Sequence[str], evidence: str) -> dict[str, JobState]:
    """Lines of squeue or sacct, the newest run of a requeued job last; an array's tasks are joined under its id."""
    columns, rows = SQUEUE if evidence == "squeue" else SACCT, dict[str, dict[str, JobState]]()
    seconds, minutes = ("", "") if evidence == "squeue" else ("s", "m")  # sacct prints bare numbers
    for cells in ([cell.strip() for cell in line.split("|")] for line in text.splitlines()):
        if len(cells) != len(columns):
            continue
        row = defaultdict(str, zip(columns, cells, strict=True))
        state = JobState(
            job=row["job"],
            state=row["state"].split()[0] if row["state"] else UNKNOWN,
            reason=None if row["reason"] in ("None", "") else row["reason"],
            nodes=_parse(int, row["nodes"]),
            node_list=row["node_list"] or None,
            elapsed_seconds=_parse(parse_seconds, row["used"] + seconds),
            limit_seconds=_parse(parse_seconds, row["limit"] + minutes),
            started_at=_parse(_timestamp, row["start"]),
            ended_at=_parse(_timestamp, row["end"]) if evidence == "sacct" or row["state"] in ENDED else None,
            exit_code=_parse(int, row["code"].split(":")[0]),
            user=row["user"] or None,
            evidence=evidence,
            energy_joules=_parse(float, row["joules"]) or None,  # 0 and blank both mean that nothing was measured
        )
        for key in {state.job, row["array"] or state.job.split("_")[0]} & set(jobs):
            rows.setdefault(key, {})[state.job] = state
    return {job: join_tasks(job, list(states.values())) for job, states in rows.items()}


def join_tasks(job: str, states: Sequence[JobState]) -> JobState:
    """One state for an array: what is still to come, else the worst end."""
    if len(states) == 1:
        return replace(states[0], job=job)
    order = [*RUNNING, "PENDING", "CONFIGURING", *(s for s in ENDED if s != "COMPLETED"), "COMPLETED"]
    worst = min(states, key=lambda s: order.index(s.state) if s.state in order else 0)
    completed = sum(s.state == "COMPLETED" for s in states)
    return JobState(
        job=job,
        state=worst.state,
        reason=f"{completed} of {len(states)} tasks completed" + (f"; {worst.reason}" if worst.reason else ""),
        nodes=worst.nodes,
        elapsed_seconds=sum(s.elapsed_seconds or 0.0 for s in states),
        limit_seconds=worst.limit_seconds,
        started_at=min((s.started_at for s in states if s.started_at), default=None),
        ended_at=max((s.ended_at for s in states if s.ended_at), default=None) if worst.over else None,
        exit_code=max((s.exit_code for s in states if s.exit_code is not None), default=None),
        user=worst.user,
        evidence=worst.evidence,
    )


def state_from_log(job: str, text: str) -> JobState | None:
    """From what SLURM wrote into the job's log at its end: the last resort when no other source has the job."""
    marks = [(text.rfind(mark), state) for mark, state in LOG_MARKS if mark in text]
    return JobState(job=job, state=max(marks)[1], evidence="log") if marks else None


def _parse(parser: Callable[[str], T], text: str) -> T | None:
    """None for `N/A`, `Unknown`, `UNLIMITED` and blanks."""
    try:
        return parser(text)
    except (ValueError, WindlassError):
        return None


def _timestamp(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
