"""What does energy.jsonl say of a run? Per job and node, nested sources reconciled, restarts added, gaps named. Pure over lines.

Each line holds a meter's joules since that process started, so the last line of a session is its total and a torn line costs
nothing but itself. Records of EAR and SLURM are lines of the same file with sessions of their own.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from windlass.energy.ear import EarRow
from windlass.energy.measure import INSIDE, SHORT, Scope, SourceEnergy, reconcile, total_resolution
from windlass.energy.slurm import JobEnergy
from windlass.errors import RunError
from windlass.files import append_line, read_json_lines
from windlass.runs.events import Compiled, Event, ProcessStart
from windlass.runs.folder import Run
from windlass.units import print_text

WHOLE_JOB = "*"
"""The node of a record that covers all nodes of a job at once (SLURM's)."""


@dataclass(frozen=True, kw_only=True)
class SourceTotal:
    """One source over the whole run, for the table."""

    source: str
    scope: str
    method: str
    joules: float
    nodes: int
    counted: bool
    """Part of the total; the others lie inside a counted one, or are models."""
    resets: int
    note: str


@dataclass(frozen=True, kw_only=True)
class Ledger:
    joules: float | None
    """Measured, nothing counted twice; None when nothing was measured."""
    modelled_joules: float | None
    """What the power model says of nodes where nothing was measured."""
    sources: tuple[SourceTotal, ...]
    nodes_expected: int | None
    nodes_measured: int
    node_seconds: float
    """Time x nodes that `joules` covers."""
    wall_seconds: float
    """The same without the nodes: the time of each job, one job after the other."""
    coverage: str
    missing: dict[str, str] = field(default_factory=dict)
    startup_joules: float | None = None
    """Of it before each first step: imports, compilation, loading."""
    resolution_joules: float | None = None
    """What one update of each counter is worth, over all nodes and restarts; None where a source does not say."""

    @property
    def basis(self) -> str:
        return "measured" if self.joules is not None else "modelled" if self.modelled_joules is not None else "none"


Place = tuple[str | None, str]
"""(job, node)."""
Chosen = dict[Place, list[SourceEnergy]]


@dataclass(frozen=True)
class _Key:
    job: str | None
    node: str
    session: str
    source: str
    scope: str
    modelled: bool


def read_ledger(run: Run) -> Ledger:
    """The energy of a run from its folder alone."""
    return build(read_json_lines(run.energy_file), run.events())


def recorded_joules(run: Run) -> float | None:
    """What the record knows of all processes so far. After a crash it is more than the checkpoint carried: energy spent is spent."""
    return read_ledger(run).joules


def build(lines: Iterable[dict[str, Any]], events: Iterable[Event] = ()) -> Ledger:
    attempts, first_steps = _attempts(events)
    last, missing, early = _collect(lines, first_steps)
    groups: Chosen = defaultdict(list)
    for key, source in last.items():
        groups[key.job, key.node].append(source)
    merged = {place: _merge(sources) for place, sources in groups.items()}
    chosen = _choose(merged)
    measured_nodes, worst = _most_nodes(chosen), _worst_gap(last, chosen, attempts)
    expected = max((n for _, n in attempts if n), default=None)
    total = [s for sources in chosen.values() for s in sources]
    return Ledger(
        joules=sum(s.joules for s in total) if total else None,
        modelled_joules=_modelled(merged, chosen),
        sources=_totals(merged, chosen),
        nodes_expected=expected,
        nodes_measured=measured_nodes,
        node_seconds=sum(max((s.seconds for s in sources), default=0.0) for sources in chosen.values()),
        wall_seconds=_wall_seconds(chosen),
        coverage=coverage(chosen, expected, measured_nodes, worst, bool(merged)),
        missing=missing,
        startup_joules=_startup(early, last, chosen),
        resolution_joules=total_resolution(total),
    )


def _wall_seconds(chosen: Chosen) -> float:
    """A job lasts as long as its longest node; the nodes of a chain's jobs may differ, and are not there at once."""
    by_job: dict[str | None, float] = defaultdict(float)
    for (job, _), sources in chosen.items():
        longest = max((s.seconds / s.nodes for s in sources), default=0.0)
        by_job[job] = max(by_job[job], longest)
    return sum(by_job.values())


def _most_nodes(chosen: Chosen) -> int:
    """Nodes measured at once, in the job with most of them."""
    by_job: dict[str | None, int] = defaultdict(int)
    for (job, _), sources in chosen.items():
        by_job[job] += max((s.nodes for s in sources), default=0)
    return max(by_job.values(), default=0)


def _attempts(events: Iterable[Event]) -> tuple[list[tuple[float, int | None]], list[float]]:
    """When each process group began with how many nodes, and when it did its first step."""
    starts: list[tuple[float, int | None]] = []
    first: list[float] = []
    for event in events:
        if event.time is not None and isinstance(event, ProcessStart):
            starts.append((event.time, event.nodes if event.nodes and event.nodes > 0 else None))
        elif event.time is not None and isinstance(event, Compiled):
            first.append(event.time)
    return starts, first


def _collect(
    lines: Iterable[dict[str, Any]], first_steps: Sequence[float]
) -> tuple[dict[_Key, SourceEnergy], dict[str, str], dict[_Key, float]]:
    last: dict[_Key, SourceEnergy] = {}
    missing: dict[str, str] = {}
    early: dict[_Key, float] = {}
    begun: dict[_Key, float] = {}
    for line in lines:
        if isinstance(line.get("missing"), dict):
            missing.update({print_text(str(k)): print_text(str(v)) for k, v in line["missing"].items()})
            continue
        source = _source(line)
        if source is None:
            continue
        job = line.get("job")
        key = _Key(
            None if job is None else str(job),
            _short(line.get("node")),
            str(line.get("session")),
            source.source,
            source.scope,
            source.method == "modelled",
        )
        last[key] = source
        at = _number(line.get("time"))
        if at is not None:
            begun.setdefault(key, at)
            border = next((t for t in first_steps if t >= begun[key]), None)
            if border is not None and at <= border:
                early[key] = source.joules
    return last, missing, early


def _short(node: object) -> str:
    """EAR writes `gcn7` where the host calls itself `gcn7.local`; an address stays whole."""
    name = str(node)
    return name if name.replace(".", "").isdigit() else name.split(".")[0]


MOST_JOULES = 1e15
"""0.3 TWh: no process of ours has used that; such a line is damaged."""


def _source(line: dict[str, Any]) -> SourceEnergy | None:
    joules, scope, method = _number(line.get("joules")), line.get("scope"), line.get("method")
    if joules is None or joules > MOST_JOULES:
        return None
    if scope not in list(INSIDE) or method not in ("counter", "power", "modelled"):  # a damaged line may hold anything
        return None
    resets, nodes = line.get("resets"), line.get("nodes")
    return SourceEnergy(
        source=print_text(str(line.get("source"))), scope=scope, method=method, joules=joules, seconds=_number(line.get("seconds")) or 0.0,
        resets=resets if isinstance(resets, int) else 0, note=print_text(str(line.get("note") or "")),
        nodes=nodes if isinstance(nodes, int) and nodes > 0 else 1, resolution_joules=_number(line.get("resolution_joules")),
    )  # fmt: skip


def _number(value: object) -> float | None:
    """A figure that can be one: JSON lets NaN, infinity and any number of digits through."""
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e300
    return float(value) if known else None  # type: ignore[arg-type]


def _merge(sources: Sequence[SourceEnergy]) -> list[SourceEnergy]:
    """Sessions of one source on one node in one job, added: a restart goes on counting."""
    groups: dict[tuple[str, str, bool], list[SourceEnergy]] = defaultdict(list)
    for s in sources:
        groups[s.source, s.scope, s.method == "modelled"].append(s)
    return [
        SourceEnergy(
            source=found[0].source, scope=found[0].scope, method=found[-1].method, joules=sum(s.joules for s in found),
            seconds=sum(s.seconds for s in found), resets=sum(s.resets for s in found), note=next((s.note for s in found if s.note), ""),
            nodes=max(s.nodes for s in found), resolution_joules=total_resolution(found),
        )
        for found in groups.values()
    ]  # fmt: skip


def _choose(merged: Chosen) -> Chosen:
    """Per job: what its nodes have, unless the record of the whole job says more."""
    chosen: Chosen = {}
    for job in {job for job, _ in merged}:
        nodes = {place: reconcile(s) for place, s in merged.items() if place[0] == job and place[1] != WHOLE_JOB}
        nodes = {place: found for place, found in nodes.items() if found}
        whole = reconcile(merged.get((job, WHOLE_JOB), []))
        chosen.update({(job, WHOLE_JOB): whole} if whole and _says_more(whole[0], nodes) else nodes)
    return chosen


def _says_more(whole: SourceEnergy, nodes: Chosen) -> bool:
    """It covers all nodes that were measured and more of each (or more of them), and is not cut short."""
    complete = all(any(s.scope == "node" for s in found) for found in nodes.values())
    if not nodes or whole.nodes < len(nodes) or (complete and whole.nodes <= len(nodes)):
        return not nodes
    return whole.joules >= SHORT * sum(s.joules for found in nodes.values() for s in found)


def _modelled(merged: Chosen, chosen: Chosen) -> float | None:
    jobs_whole = {job for job, node in chosen if node == WHOLE_JOB}
    found = [
        s.joules
        for place, sources in merged.items()
        if place not in chosen and place[0] not in jobs_whole
        for s in sources
        if s.method == "modelled"
    ]
    return sum(found) if found else None


def _totals(merged: Chosen, chosen: Chosen) -> tuple[SourceTotal, ...]:
    counted = {(place, s.source, s.scope) for place, sources in chosen.items() for s in sources}
    groups: dict[tuple[str, str, str, bool], list[tuple[str, SourceEnergy]]] = defaultdict(list)
    for place, sources in merged.items():
        for s in sources:
            groups[s.source, s.scope, s.method, (place, s.source, s.scope) in counted].append((place[1], s))
    return tuple(
        SourceTotal(
            source=source, scope=scope, method=method, counted=is_counted, joules=sum(s.joules for _, s in found),
            nodes=sum({node: s.nodes for node, s in found}.values()), resets=sum(s.resets for _, s in found), note=next((s.note for _, s in found if s.note), ""),
        )
        for (source, scope, method, is_counted), found in sorted(groups.items(), key=lambda item: (not item[0][3], item[0]))
    )  # fmt: skip


_SKEW_SECONDS = 2.0
"""Between the clocks of two nodes and the moments when their processes start."""


def _worst_gap(
    last: dict[_Key, SourceEnergy], chosen: Chosen, attempts: Sequence[tuple[float, int | None]]
) -> tuple[int, int, int] | None:
    """(attempt, not measured, nodes) of the attempt with the most gaps."""
    worst: tuple[int, int, int] | None = None
    starts = [start for start, _ in attempts]
    for index, (_, nodes) in enumerate(attempts):
        if nodes is not None:
            here = [
                k for k in last if (at := _session_time(k.session)) is not None and _attempt_of(at, starts) == index
            ]
            gap = max(0, nodes - _seen(last, chosen, here))
            worst = (index + 1, gap, nodes) if worst is None or gap > worst[1] else worst
    return worst


def _attempt_of(at: float, starts: Sequence[float]) -> int:
    """The attempt whose meter started then. A meter starts before its attempt is written down, on another node perhaps just after."""
    return next((number for number, start in enumerate(starts) if at <= start + _SKEW_SECONDS), len(starts) - 1)


def _seen(last: dict[_Key, SourceEnergy], chosen: Chosen, here: Sequence[_Key]) -> int:
    """Nodes with a measured figure in one attempt: by its meters (`here`), and by the site's records of the same job."""
    jobs = {k.job for k in here}
    metered = {k.job for k in last if _session_time(k.session) is not None}
    nodes = {k.node for k in here if not k.modelled and (k.job, k.node) in chosen}
    whole = 0
    for key, source in last.items():
        # A job that no meter saw may have been any attempt; of one that a meter saw we know which.
        mine = _session_time(key.session) is None and (key.job in jobs or (not jobs and key.job not in metered))
        if mine and (key.job, key.node) in chosen:
            nodes |= {key.node} - {WHOLE_JOB}
            whole = max(whole, source.nodes if key.node == WHOLE_JOB else 0)
    return max(len(nodes), whole)


def _session_time(session: str) -> float | None:
    """When a meter started; None for the records of a site."""
    head = session.partition("-")[0]
    return int(head) / 1e3 if head.isdigit() else None


def coverage(
    chosen: Chosen,
    expected: int | None,
    measured: int,
    worst: tuple[int, int, int] | None,
    any_line: bool,
) -> str:
    """One sentence on what is and what is not in the figure."""
    if not any(chosen.values()):
        return "not measured: no energy record" if not any_line else "not measured on any node; the figure is modelled"
    kinds = sorted({_covered({s.scope for s in sources}) for sources in chosen.values() if sources}, key=len)
    what = kinds[0] if len(kinds) == 1 else "in part " + ", in part ".join(kinds)
    if worst is not None and worst[1] > 0 and measured:
        return f"{what}; not measured on {worst[1]} of {worst[2]} nodes (attempt {worst[0]})"
    return f"{what}, on all {expected} nodes" if expected and expected > 1 else what


def _covered(scopes: set[Scope]) -> str:
    if "node" in scopes:
        return "whole nodes"
    if "module" in scopes:
        return "GPU and CPU modules, without memory, network and fans"
    names = [name for scope, name in (("device", "devices"), ("cpu", "CPUs"), ("memory", "memory")) if scope in scopes]
    return f"{' and '.join(names)} only, not the rest of the node"


def _startup(early: dict[_Key, float], last: dict[_Key, SourceEnergy], chosen: Chosen) -> float | None:
    counted = {(place, s.source, s.scope) for place, sources in chosen.items() for s in sources}
    found = [
        joules
        for key, joules in early.items()
        if ((key.job, key.node), key.source, key.scope) in counted and key in last
    ]
    return sum(found) if found else None


# -- records of the site, written into the same file ------------------------------------------------------------------


def _jobs(run: Run) -> tuple[set[str], bool]:
    """The run's jobs (submitted for it, or its meters ran in them), and whether a meter ran outside any job."""
    submitted = {str(line.get("job") or line.get("job_id") or "") for line in read_json_lines(run.jobs_file)}
    meters = [line for line in read_json_lines(run.energy_file) if _session_time(str(line.get("session"))) is not None]
    inside = {str(line["job"]) for line in meters if line.get("job")}
    return (submitted | inside) - {""}, any(not line.get("job") for line in meters)


def _own(run: Run, jobs: Iterable[str], where: str) -> dict[str, str | None]:
    """Job of the record -> job of the run; others are left out. A run that knows no job takes what it is given."""
    found, (known, outside) = set(jobs), _jobs(run)
    if not known:  # beside meters outside any job, or what both saw would be counted twice
        return {job: None if outside else job for job in found}
    mine: dict[str, str | None] = {job: own for job in found if (own := _known_as(job, known)) is not None}
    if not mine and found:
        raise RunError(
            "energy.jobs-none-them-run",
            f"{where} has jobs {_some(found)}, and none of them is of this run ({_some(known)})",
            hint="EAR names an array's tasks by their own numbers: write the run's job id into the JOBID column",
        )
    return mine


def _known_as(job: str, known: set[str]) -> str | None:
    """sacct writes `77+0` and `77_3` for the parts of a job that was submitted as 77."""
    return next((name for name in (job, job.partition("+")[0], job.partition("_")[0]) if name in known), None)


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:4]) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")


def record_ear(run: Run, rows: Sequence[EarRow], where: str = "the CSV") -> int:
    """Take the rows of this run's jobs into its record; taking them twice changes nothing. Returns how many were taken."""
    known = [row for row in rows if row.joules is not None]
    jobs = _own(run, (row.job for row in known), where)
    mine = [row for row in known if row.job in jobs]
    for row in mine:
        fields = {
            "time": time.time(),
            "node": row.node,
            "job": jobs[row.job],
            "session": f"ear:{row.name}",
            "source": "ear",
            "seconds": row.seconds,
        }
        inside = {
            "node": row.joules,
            "device": sum(row.gpu_joules.values()),
            "cpu": row.cpu_joules,
            "memory": row.memory_joules,
        }
        for scope, joules in inside.items():
            if joules:
                append_line(run.energy_file, {**fields, "scope": scope, "method": "power", "joules": joules})
    return len(mine)


def record_slurm(run: Run, jobs: Sequence[JobEnergy], where: str = "sacct's answer") -> int:
    """Take sacct's figures of this run's jobs into its record; taking them twice changes nothing."""
    known = [job for job in jobs if job.joules is not None]
    names = _own(run, (job.job for job in known), where)
    mine = [job for job in known if job.job in names]
    for job in mine:
        nodes = max(1, job.nodes)
        append_line(
            run.energy_file,
            {"time": time.time(), "node": WHOLE_JOB, "job": names[job.job], "session": f"slurm:{job.job}", "source": "slurm", "scope": "node",
             "method": "counter", "joules": job.joules, "seconds": job.seconds * nodes, "nodes": nodes, "note": job.note},
        )  # fmt: skip
    return len(mine)
