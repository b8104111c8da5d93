"""How do we talk to SLURM? Five commands, their text in and out, and their errors with a hint. Needs no accounting database."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from windlass.clusters.scheduler import without_scheduler
from windlass.errors import LaunchError, WindlassError
from windlass.launch.executor import ENDED, LIVE, State
from windlass.units import parse_seconds

TIMEOUT_SECONDS = 60.0
SQUEUE = "%i|%F|%T|%r|%D|%M|%l|%S|%e|%N|%u"
SACCT = "JobID,State,ExitCode,ElapsedRaw,NNodes,Start,End,TimelimitRaw,NodeList,User,ConsumedEnergyRaw"

HINTS = (
    ("invalid partition", "`sinfo -s` lists the partitions; set launch.partition, or correct the cluster file (`windlass clusters NAME --probe`)"),
    ("Invalid account", "set launch.account to one of yours: `sacctmgr show assoc user=$USER format=account,partition,qos`"),
    ("Invalid qos", "set launch.qos to one of yours: `sacctmgr show assoc user=$USER format=account,qos`"),
    ("AssocMaxSubmitJobLimit", "either no account was given (set launch.account) or you have too many jobs in the queue"),
    ("QOSMaxSubmitJobPerUserLimit", "this QOS takes no more jobs of yours now: use a shorter --chain"),
    ("Requested node configuration is not available", "no node has that many devices, cores or that much memory; compare with `windlass clusters NAME --probe`"),
    ("Memory specification can not be satisfied", "ask for less memory, or leave launch.sbatch.mem out"),
    ("Requested time limit is invalid", "shorten launch.time to the partition's limit"),
    ("Unable to contact slurm controller", "the controller is away; running jobs go on. Try again in some minutes"),
    ("Access/permission denied", "the job belongs to somebody else"),
    ("Job dependency problem", "the job it should wait for is unknown to SLURM"),
    ("Unable to open file", "the script must lie on a file system that this node sees"),
    ("Batch job submission failed", "what sbatch says above is the site's own message; --dry-run shows the script"),
)  # fmt: skip


def available() -> bool:
    return shutil.which("sbatch") is not None


class Slurm:
    """The scheduler of this site, by its own commands."""

    name = "slurm"

    def __init__(self, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self.timeout_seconds = timeout_seconds

    def submit(self, script: Path, *, run_dir: Path, after: str | None = None, options: Sequence[str] = ()) -> str:
        words = ["sbatch", "--parsable", *options]
        if after:
            # Without the second option a link whose condition can never be met stays in the queue for ever.
            words += [f"--dependency={after}", "--kill-on-invalid-dep=yes"]
        return read_job_id(self.call([*words, str(script)]))

    def test(self, script: Path, options: Sequence[str] = ()) -> str:
        """What SLURM says to the script without queueing it: when it would start. Raises when it would be refused."""
        return self.call(["sbatch", "--test-only", *options, str(script)], both=True).strip()

    def states(self, jobs: Sequence[str]) -> Mapping[str, State]:
        """squeue first, then the accounting database for what squeue has forgotten."""
        if not jobs:
            return {}
        found = dict(self._squeue(jobs))
        missing = [job for job in jobs if job not in found]
        unsure = [job for job, state in found.items() if state.over and state.exit_code is None]
        known = self._sacct([*missing, *unsure])
        found |= {job: state for job, state in known.items() if job in missing or state.over}
        codes = self.exit_codes([job for job in unsure if found[job].exit_code is None])
        return found | {job: replace(found[job], exit_code=code) for job, code in codes.items()}

    def _squeue(self, jobs: Sequence[str]) -> Mapping[str, State]:
        words = ["squeue", "-h", "-t", "all", "-r", "-j", ",".join(jobs), "-o", SQUEUE]
        try:
            return read_squeue(self.call(words), jobs)
        except LaunchError as error:
            if "Invalid job id" in error.message:  # squeue has forgotten it, or never knew it
                return {} if len(jobs) == 1 else {k: v for job in jobs for k, v in self._squeue([job]).items()}
            raise

    def _sacct(self, jobs: Sequence[str]) -> Mapping[str, State]:
        if not jobs or shutil.which("sacct") is None:
            return {}
        try:
            return read_sacct(self.call(["sacct", "-n", "-P", "-X", "-j", ",".join(jobs), "-o", SACCT]), jobs)
        except LaunchError:  # accounting is off here; others know the end
            return {}

    def cancel(self, jobs: Sequence[str]) -> None:
        if jobs:
            self.call(["scancel", *jobs])

    def exit_codes(self, jobs: Sequence[str]) -> dict[str, int]:
        """From scontrol, which knows them for some minutes after the end also without accounting."""
        found = {}
        for job in jobs:
            try:
                text = self.call(["scontrol", "show", "job", job])
            except LaunchError:
                continue
            if codes := re.findall(r"\bExitCode=(\d+):", text):  # one for each task of an array
                found[job] = max(int(code) for code in codes)
        return found

    def call(self, words: Sequence[str], *, both: bool = False) -> str:
        """Run one SLURM command; its own error text becomes ours, with a hint."""
        if shutil.which(words[0]) is None:
            raise LaunchError(
                "launch.slurm-machine-path",
                f"there is no SLURM on this machine ({words[0]} is not on the PATH)",
                hint='log in to the cluster, or run here: --local, or cluster = "workstation" in the recipe',
            )
        try:
            done = subprocess.run(
                words, capture_output=True, text=True, timeout=self.timeout_seconds, env=without_scheduler(os.environ)
            )
        except subprocess.TimeoutExpired:
            raise LaunchError(
                "launch.did-answer-within-s",
                f"{words[0]} did not answer within {self.timeout_seconds:.0f} s",
                hint="the controller is busy or away: try again",
            ) from None
        if done.returncode:
            raise refusal(words[0], done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}")
        return done.stdout + (done.stderr if both else "")


def refusal(command: str, said: str) -> LaunchError:
    """The scheduler's own words, with our hint where we know one."""
    hint = next((hint for part, hint in HINTS if part.lower() in said.lower()), None)
    return LaunchError("launch.said", f"{command} said: {said}", hint=hint)


def read_job_id(text: str) -> str:
    """`123` or `123;cluster` as --parsable prints it; some sites print a banner around it."""
    for line in reversed(text.strip().splitlines()):
        if match := re.fullmatch(r"(\d+)(?:;[\w.-]+)?", line.strip()):
            return match.group(1)
        if match := re.search(r"Submitted batch job (\d+)", line):
            return match.group(1)
    raise LaunchError(
        "launch.sbatch-answered-without-job",
        f"sbatch answered without a job id: {text.strip()!r}",
        hint="`squeue --me` shows whether the job is there",
    )


def read_squeue(text: str, jobs: Sequence[str]) -> dict[str, State]:
    """Lines in the format SQUEUE; the tasks of an array are joined under the array's id."""
    rows: dict[str, list[State]] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) != SQUEUE.count("|") + 1:
            continue
        job, array, state, reason, nodes, used, limit, start, end, where, user = cells
        one = State(
            job=job, state=state, reason=None if reason in ("None", "") else reason, nodes=_int(nodes), node_list=where or None,
            elapsed_seconds=_seconds(used), limit_seconds=_seconds(limit), started_at=_moment(start),
            ended_at=_moment(end) if state in ENDED else None, user=user or None, evidence="squeue",
        )  # fmt: skip
        for key in {job, array} & set(jobs):
            rows.setdefault(key, []).append(one)
    return {job: join(job, states) for job, states in rows.items()}


def read_sacct(text: str, jobs: Sequence[str]) -> dict[str, State]:
    """Lines in the format SACCT, newest run of a requeued job last."""
    rows: dict[str, dict[str, State]] = {}
    for line in text.splitlines():
        cells = line.split("|")
        if len(cells) != SACCT.count(",") + 1:
            continue
        job, state, code, used, nodes, start, end, limit, where, user, joules = cells
        minutes = _int(limit)
        one = State(
            job=job, state=state.split()[0] if state else "UNKNOWN", nodes=_int(nodes), node_list=where or None,
            elapsed_seconds=_float(used), limit_seconds=None if minutes is None else 60.0 * minutes, started_at=_moment(start),
            ended_at=_moment(end), exit_code=_int(code.split(":")[0]), user=user or None, evidence="sacct",
            energy_joules=_float(joules) or None,  # 0 and blank both mean that nothing was measured
        )  # fmt: skip
        for key in {job, job.split("_")[0]} & set(jobs):
            rows.setdefault(key, {})[job] = one
    return {job: join(job, list(states.values())) for job, states in rows.items()}


def join(job: str, states: Sequence[State]) -> State:
    """One state for an array: what is still to come, else the worst end."""
    if len(states) == 1:
        only = states[0]
        return only if only.job == job else State(**{**vars(only), "job": job})
    order = [*LIVE, "PENDING", "CONFIGURING", *(s for s in ENDED if s != "COMPLETED"), "COMPLETED"]
    worst = min(states, key=lambda s: order.index(s.state) if s.state in order else 0)
    done = sum(s.state == "COMPLETED" for s in states)
    starts, ends = [s.started_at for s in states if s.started_at], [s.ended_at for s in states if s.ended_at]
    over = all(s.over for s in states)
    return State(
        job=job, state=worst.state, reason=f"{done} of {len(states)} tasks completed" + (f"; {worst.reason}" if worst.reason else ""),
        nodes=worst.nodes, elapsed_seconds=sum(s.elapsed_seconds or 0.0 for s in states), limit_seconds=worst.limit_seconds,
        started_at=min(starts, default=None), ended_at=max(ends, default=None) if over else None,
        exit_code=max((s.exit_code for s in states if s.exit_code is not None), default=None), user=worst.user, evidence=worst.evidence,
    )  # fmt: skip


def from_log(job: str, text: str) -> State | None:
    """What SLURM itself wrote into the job's log at its end: the last resort when nobody else remembers."""
    marks: Iterable[tuple[str, str]] = (
        ("DUE TO TIME LIMIT", "TIMEOUT"), ("DUE TO NODE FAILURE", "NODE_FAIL"), ("DUE TO PREEMPTION", "PREEMPTED"),
        ("oom-kill event", "OUT_OF_MEMORY"), ("oom_kill event", "OUT_OF_MEMORY"), ("CANCELLED AT", "CANCELLED"),
    )  # fmt: skip
    found = [(text.rfind(mark), state) for mark, state in marks if mark in text]
    return State(job=job, state=max(found)[1], evidence="log") if found else None


def _int(text: str) -> int | None:
    return int(text) if text.strip().isdigit() else None


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _seconds(text: str) -> float | None:
    """SLURM's D-HH:MM:SS; UNLIMITED and INVALID are None."""
    try:
        return parse_seconds(text)
    except WindlassError:
        return None


def _moment(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def wait(slurm: Slurm, job: str, seconds: float, poll_seconds: float = 1.0) -> State | None:
    """Until the job is over or the time is up; `sbatch --wait` polls ever more slowly, so we ask ourselves."""
    deadline = time.monotonic() + seconds
    while True:
        state = slurm.states([job]).get(job)
        if state is not None and (state.over or state.never):
            return state
        if time.monotonic() > deadline:
            return state
        time.sleep(poll_seconds)
