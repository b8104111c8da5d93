"""Whether the next job of a chain should run, decided from the run folder alone, within a second.

`jobs.jsonl` holds what launch and the jobs wrote, one record a line:
  submitting  mark, link, kind, nodes, seconds, cluster, account, ...    by `windlass launch`, before it calls sbatch
  submitted   the same and job; adopted: its id came from the queue      by `windlass launch`, or whoever adopts the job
  refused     mark, reason                                               by `windlass launch`
  began       job, restart, step, saves (so far)                         by a job's first command
  ended       job, restart, step, code, by                               by its last one; missing after a cut
  settled     job, state, elapsed_seconds, nodes, energy_joules          by `windlass jobs`, once the end is known
  cancelled   job                                                        by `windlass cancel`
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from windlass.clusters.scheduler import job_shape
from windlass.errors import WindlassError
from windlass.files import append_line, read_json, read_json_lines
from windlass.launch.start import bind_start
from windlass.models.hf_format import value_at
from windlass.runs import Run
from windlass.runs.events import Finished, GaveUp, ProcessStart, Saved, known_float, known_int
from windlass.runs.faults import INCURABLE, FaultRecord

# Starts without a new checkpoint after which a chain stops.
MAX_IDLE_STARTS = 2


@dataclass(frozen=True)
class JobStart:
    """One start of one job: from its `began` record to its `ended` one, if it has one."""

    job: str | None
    restart: int
    began_at: float
    began_step: int | None
    began_saves: int | None = None  # checkpoints before it; a rollback lowers the step, so the step alone is not enough
    ended_at: float | None = None
    code: int | None = None  # None: cut off without a record (wall time, node failure, kill)

    def saved_since(self, step_now: int | None, saves_now: int) -> bool:
        """Is there a new checkpoint since it began? Records of older versions have the step only."""
        by_step = (step_now or 0) > (self.began_step or 0)
        return by_step if self.began_saves is None else saves_now > self.began_saves


@dataclass(frozen=True)
class ChainVerdict:
    """`go`: start the ranks. `finished` or `hopeless`: end at once."""

    answer: str
    reason: str


# How the values of a record are read; one that cannot be right is None (unknown).
_CONVERTERS: dict[str, Callable[[object], object]] = {
    **dict.fromkeys(("restart", "step", "saves", "code", "nodes", "link", "links", "exit_code"), known_int),
    **dict.fromkeys(("time", "seconds", "units_per_node_hour", "elapsed_seconds", "limit_seconds"), known_float),
    **dict.fromkeys(("started_at", "ended_at", "energy_joules"), known_float),
    **dict.fromkeys(("job", "state", "reason"), lambda value: None if value is None else str(value)),
}


def records(run: Run) -> list[dict[str, Any]]:
    return [
        {key: _CONVERTERS[key](value) if key in _CONVERTERS else value for key, value in line.items()}
        for line in read_json_lines(run.jobs_file)
    ]


def job_starts(lines: Iterable[Mapping[str, Any]]) -> list[JobStart]:
    """The starts so far, oldest first."""
    starts: list[JobStart] = []
    for line in lines:
        key, moment = (line.get("job"), int(line.get("restart") or 0)), float(line.get("time") or 0)
        if line.get("record") == "began":
            starts.append(JobStart(*key, moment, line.get("step"), line.get("saves")))
        elif line.get("record") == "ended":
            for index in reversed(range(len(starts))):
                if (starts[index].job, starts[index].restart) == key and starts[index].ended_at is None:
                    starts[index] = replace(starts[index], ended_at=moment, code=line.get("code"))
                    break
    return starts


def saved_steps(run: Run) -> list[int | None]:
    """The step of every complete checkpoint, in the order of their saves."""
    return [event.step for event in run.events(Saved)]


def newest_step(run: Run) -> int | None:
    """The highest step that was saved; None before the first save."""
    return max((step for step in saved_steps(run) if step is not None), default=None)


def finished(run: Run) -> bool:
    """The last step of the recipe as it is now was done; a recipe that was given more tokens is not finished."""
    ends = [event for event in run.events() if isinstance(event, (ProcessStart, Finished))]
    last = ends[-1] if ends else None
    if not isinstance(last, Finished):
        return False
    config = read_json(run.config_file)
    if config is None:  # damaged: the next start reports it; until then the run counts as not finished
        return False
    keys = ("train.steps", "data.tokens", "data.batch_tokens")
    steps, tokens, batch_tokens = (known_int(value_at(config, key)) for key in keys)
    if steps is not None and last.step is not None:
        return steps <= last.step
    if tokens is not None and last.tokens is not None:
        ramp = value_at(config, "data.batch_ramp")
        ramp = (
            [known_int(pair[-1]) for pair in ramp if isinstance(pair, list) and pair] if isinstance(ramp, list) else []
        )
        return tokens - last.tokens < max(1, *(size or 0 for size in (batch_tokens, *ramp)))
    return True


def judge(run: Run) -> ChainVerdict:
    """Finished, hopeless, or worth another job? The same question before a job and after it."""
    if finished(run):
        return ChainVerdict("finished", "the run is finished")
    lines, step_now, saves_now = records(run), newest_step(run), len(saved_steps(run))
    # A user who launches again has seen the failure: starts before the newest manual submission do not count.
    by_hand = [r for r in lines if r.get("record") == "submitted" and r.get("link", 1) == 1]
    since = max((float(r.get("time") or 0) for r in by_hand), default=0.0)
    recent = [start for start in job_starts(lines) if start.began_at >= since][-MAX_IDLE_STARTS:]
    saved = [start.saved_since(step_now, saves_now) for start in recent]
    codes = [failure_code(run, start) for start in recent]
    code = codes[-1] if codes else None
    if code in INCURABLE and not saved[-1]:
        reason = f"job {recent[-1].job or 'before'} ended with code {code}: {INCURABLE[code]}"
    elif len(recent) == MAX_IDLE_STARTS and not any(saved):
        ends = ", ".join("cut off" if code is None else f"code {code}" for code in codes)
        jobs = " and ".join(str(start.job) for start in recent)
        reason = f"jobs {jobs} ended ({ends}) without a checkpoint newer than step {step_now or 0}"
    else:
        return ChainVerdict("go", f"step {step_now or 0} is the newest checkpoint")
    first = next(iter(_fresh_faults(run, recent[-1])), None)
    error = first.error.strip().splitlines() if first else []
    return ChainVerdict("hopeless", reason + (f" (rank {first.rank}: {error[0]})" if first and error else ""))


def _fresh_faults(run: Run, start: JobStart) -> list[FaultRecord]:
    """Its causes first: a rank that only lost another one may have written earlier by its own clock."""
    faults = [fault for fault in run.faults() if fault.time >= start.began_at]
    return sorted(faults, key=lambda fault: (not fault.is_cause, fault.time))


def failure_code(run: Run, start: JobStart) -> int | None:
    """The failing rank's own exit code where it left a record: srun reports the highest code, often only 137 or 143."""
    codes = (fault.exit_code for fault in _fresh_faults(run, start) if fault.exit_code is not None)
    return next(codes, start.code)


def before(run: Run, job: str | None, restart: int, host: str) -> ChainVerdict:
    """Decide whether a job has work. If it does, write the start that its workers wait for, and record that the job
    began.

    `job` and `restart` are read from the same variables in the workers. Scripts are also submitted by hand, by the job
    before (which records it a moment later) and as arrays, so the newest request of the run counts where none has this
    id, and SLURM's own numbers come before it. The local loop has no SLURM: its `windlass resume` binds its own start.
    So does `srun windlass train` in scripts of version 0.1, under another name.
    """
    verdict = judge(run)
    kinds = ("submitted", "submitting")  # the job may begin before its id is recorded
    requests = [r for r in records(run) if r.get("record") in kinds and r.get("executor") == "slurm"]
    if verdict.answer == "go" and job is not None and requests and not job.startswith("local-"):
        request = next((r for r in reversed(requests) if r.get("job") == job.partition("_")[0]), requests[-1])
        nodes, tasks_per_node = job_shape()
        per_node = int(request["devices_per_node"])
        if request.get("tasks_per_node") == per_node:  # not under torchrun, whose one task starts all workers
            per_node = tasks_per_node or per_node
        devices = (nodes or int(request["nodes"])) * per_node
        try:
            bind_start(run, devices=devices, devices_per_node=per_node, job=job, restart=restart)
        except WindlassError as error:  # the next jobs of the chain would be refused in the same way
            verdict = ChainVerdict("hopeless", f"{error.message} ({error.hint})" if error.hint else error.message)
    if verdict.answer == "go":
        began = {"job": job, "restart": restart, "host": host, "step": newest_step(run), "saves": len(saved_steps(run))}
        append_line(run.jobs_file, {"record": "began", "time": time.time(), **began})
    elif verdict.answer == "hopeless":
        _give_up(run, verdict.reason)
    return verdict


def after(run: Run, job: str | None, restart: int, code: int, by: str | None) -> ChainVerdict:
    """Record how the job ended, then judge whether another is needed."""
    end = {"job": job, "restart": restart, "step": newest_step(run), "code": code, "by": by}
    append_line(run.jobs_file, {"record": "ended", "time": time.time(), **end})
    verdict = judge(run)
    if verdict.answer == "hopeless":
        _give_up(run, verdict.reason)
    return verdict


def _give_up(run: Run, reason: str) -> None:
    """Record it once per reason: every remaining job of a pre-submitted chain reaches the same verdict."""
    if [event.reason for event in run.events(GaveUp)][-1:] != [reason]:
        run.record(GaveUp(reason=reason))


def record_next(run: Run, me: str | None, next_job: str | None) -> None:
    """A self-chain's next job: the same request as this one's, under a new id."""
    number = next_job.strip().split(";")[0] if next_job else ""
    if not number.isdigit():
        _give_up(run, f"job {me} could not submit the next one")
        return
    mine = [r for r in records(run) if r.get("record") == "submitted" and r.get("job") == me]
    request = mine[-1] if mine else {}
    new = {"time": time.time(), "job": number, "link": int(request.get("link") or 1) + 1}
    append_line(run.jobs_file, {**request, "record": "submitted", **new})
