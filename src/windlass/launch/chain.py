"""Should this link of a job chain run, and is another wanted? Decided from the run folder alone, within a second.

`jobs.jsonl` holds what launch and the links wrote, one record a line:
  submitted   job, link, kind, nodes, seconds, cluster, account, ...     by `windlass launch`
  began       job, restart, step, saves (so far)                         by a link's first command
  ended       job, restart, step, code, by                               by its last one; missing when the link was cut off
  settled     job, state, elapsed_seconds, nodes, energy_joules          by `windlass jobs`, once the scheduler knows the end
  cancelled   job                                                        by `windlass cancel`
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from windlass.files import append_line, read_json, read_json_lines
from windlass.runs import Run
from windlass.runs.events import Finished, GaveUp, ProcessStart, Saved
from windlass.runs.faults import INCURABLE

PATIENCE = 2
"""Links without a new checkpoint after which a chain stops."""


@dataclass(frozen=True)
class Link:
    """One start of one job: from its `began` record to its `ended` one, if it has one."""

    job: str | None
    restart: int
    began_at: float
    began_step: int | None
    began_saves: int | None = None
    """Checkpoints written before it; steps alone do not tell, for a rollback and a damaged checkpoint lower them."""
    ended_at: float | None = None
    code: int | None = None
    """None: cut off without a word (wall time, node failure, kill)."""


@dataclass(frozen=True)
class Verdict:
    """`go`: start the ranks. `finished` or `hopeless`: end at once."""

    answer: str
    reason: str


def records(run: Run) -> list[dict[str, Any]]:
    return list(read_json_lines(run.jobs_file))


def links(lines: Iterable[Mapping[str, Any]]) -> list[Link]:
    """The starts so far, oldest first."""
    found: list[Link] = []
    for line in lines:
        if line.get("record") == "began":
            found.append(
                Link(
                    line.get("job"),
                    int(line.get("restart") or 0),
                    float(line.get("time") or 0),
                    line.get("step"),
                    line.get("saves"),
                )
            )
        elif line.get("record") == "ended":
            key = (line.get("job"), int(line.get("restart") or 0))
            for index in reversed(range(len(found))):
                old = found[index]
                if (old.job, old.restart) == key and old.ended_at is None:
                    found[index] = replace(old, ended_at=float(line.get("time") or 0), code=line.get("code"))
                    break
    return found


def newest_step(run: Run) -> int | None:
    """The step of the newest complete checkpoint, from the `saved` events; None before the first."""
    return max((e.step for e in run.events(Saved) if e.step is not None), default=None)


def count_saves(run: Run) -> int:
    return sum(1 for _ in run.events(Saved))


def finished(run: Run) -> bool:
    """The last step of the recipe as it now stands was done; a recipe that was given more tokens goes on."""
    last: Finished | None = None
    for event in run.events():
        if isinstance(event, ProcessStart):
            last = None
        elif isinstance(event, Finished):
            last = event
    return last is not None and not _wants_more(run, last)


def _wants_more(run: Run, event: Finished) -> bool:
    config = read_json(run.config_file) or {}
    steps, tokens = (config.get("train") or {}).get("steps"), (config.get("data") or {}).get("tokens")
    if isinstance(steps, int) and event.step is not None:
        return steps > event.step
    batch = (config.get("data") or {}).get("batch_tokens") or 0
    if isinstance(tokens, int) and event.tokens is not None:
        return bool(tokens - event.tokens >= max(1, batch))
    return False


def judge(run: Run) -> Verdict:
    """Finished, hopeless, or worth another link? The same question before a link and after it."""
    if finished(run):
        return Verdict("finished", "the run is finished")
    lines = records(run)
    past = links(lines)
    stop = hopeless(run, past, newest_step(run), since=_last_launch(lines))
    return (
        Verdict("hopeless", stop) if stop else Verdict("go", f"step {newest_step(run) or 0} is the newest checkpoint")
    )


def _last_launch(lines: Iterable[Mapping[str, Any]]) -> float:
    """A person who launches again has seen the failure: links before the newest submission by hand do not count."""
    return max(
        (float(r.get("time") or 0) for r in lines if r.get("record") == "submitted" and r.get("link", 1) == 1),
        default=0.0,
    )


def hopeless(run: Run, past: list[Link], step_now: int | None, *, since: float = 0.0) -> str | None:
    """Why no further link should start, or None."""
    past = [link for link in past if link.began_at >= since]
    if not past:
        return None
    last = past[-1]
    code = failure_code(run, last)
    saves_now = count_saves(run)
    if code in INCURABLE and not _got_on(last, step_now, saves_now):
        return f"link {last.job or 'before'} ended with code {code}: {INCURABLE[code]}{_first_error(run, last)}"
    idle = [link for link in past if not _got_on(link, step_now, saves_now)]
    if len(idle) >= PATIENCE and idle[-PATIENCE:] == past[-PATIENCE:]:
        ids = " and ".join(str(link.job) for link in idle[-PATIENCE:])
        codes = ", ".join(
            "cut off" if (c := failure_code(run, link)) is None else f"code {c}" for link in idle[-PATIENCE:]
        )
        return (
            f"links {ids} ended ({codes}) without a checkpoint newer than step {step_now or 0}{_first_error(run, last)}"
        )
    return None


def _got_on(link: Link, step_now: int | None, saves_now: int) -> bool:
    """Has there been a new checkpoint since the link began? Records of older versions tell it by the step."""
    if link.began_saves is not None:
        return saves_now > link.began_saves
    return (step_now or 0) > (link.began_step or 0)


def failure_code(run: Run, link: Link) -> int | None:
    """The failing rank's own exit code where it left a record: srun reports the highest code, often only 137 or 143."""
    for fault in run.faults():
        if fault.time >= link.began_at and fault.exit_code is not None:
            return fault.exit_code
    return link.code


def _first_error(run: Run, link: Link) -> str:
    first = min((f for f in run.faults() if f.time >= link.began_at), key=lambda f: f.time, default=None)
    lines = first.error.strip().splitlines() if first else []
    return f" (rank {first.rank}: {lines[0]})" if first and lines else ""


# -- what a link does -----------------------------------------------------------------------------------------------------


def before(run: Run, job: str | None, restart: int, host: str) -> Verdict:
    """Judge, and write down that the link began when it goes on."""
    verdict = judge(run)
    if verdict.answer == "go":
        append_line(
            run.jobs_file,
            {
                "record": "began",
                "time": time.time(),
                "job": job,
                "restart": restart,
                "step": newest_step(run),
                "saves": count_saves(run),
                "host": host,
            },
        )
    elif verdict.answer == "hopeless":
        _give_up(run, verdict.reason)
    return verdict


def after(run: Run, job: str | None, restart: int, code: int, by: str | None) -> Verdict:
    """Write down how the link ended, then judge whether another is wanted."""
    line = {
        "record": "ended",
        "time": time.time(),
        "job": job,
        "restart": restart,
        "step": newest_step(run),
        "code": code,
        "by": by,
    }
    append_line(run.jobs_file, line)
    verdict = judge(run)
    if verdict.answer == "hopeless":
        _give_up(run, verdict.reason)
    return verdict


def _give_up(run: Run, reason: str) -> None:
    """Once per reason: every remaining link of a pre-submitted chain comes to the same end."""
    reasons = [e.reason for e in run.events(GaveUp)]
    if reasons[-1:] != [reason]:
        run.record(GaveUp(reason=reason))


def follow(run: Run, me: str | None, job: str | None) -> None:
    """A self-chain's next link: the same request as this one's, under a new id."""
    mine: dict[str, Any] = next(
        (r for r in reversed(records(run)) if r.get("record") == "submitted" and r.get("job") == me), {}
    )
    number = job.strip().split(";")[0] if job else ""
    if not number.isdigit():
        _give_up(run, f"link {me} could not submit the next one")
        return
    append_line(
        run.jobs_file,
        {**mine, "record": "submitted", "time": time.time(), "job": number, "link": int(mine.get("link") or 1) + 1},
    )
