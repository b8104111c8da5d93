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
from windlass.energy.measure import INSIDE, SourceEnergy, reconcile
from windlass.energy.slurm import JobEnergy
from windlass.runs.files import append_line, read_lines
from windlass.runs.folder import Run

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
    coverage: str
    missing: dict[str, str] = field(default_factory=dict)
    startup_joules: float | None = None
    """Of it before each first step: imports, compilation, loading."""

    @property
    def basis(self) -> str:
        return "measured" if self.joules is not None else "modelled" if self.modelled_joules is not None else "none"


@dataclass(frozen=True)
class _Key:
    job: str | None
    node: str
    session: str
    source: str
    scope: str
    method: str


def read_ledger(run: Run) -> Ledger:
    """The energy of a run from its folder alone."""
    return build(read_lines(run.energy_file), run.events())


def recorded_joules(run: Run) -> float | None:
    """What the record knows of all processes so far. After a crash it is more than the checkpoint carried: energy spent is spent."""
    return read_ledger(run).joules


def build(lines: Iterable[dict[str, Any]], events: Iterable[dict[str, Any]] = ()) -> Ledger:
    attempts, first_steps = _attempts(events)
    last, missing, early = _collect(lines, first_steps)
    groups: dict[tuple[str | None, str], list[SourceEnergy]] = defaultdict(list)
    for key, source in last.items():
        groups[key.job, key.node].append(source)
    merged = {place: _merge(sources) for place, sources in groups.items()}
    chosen = _choose(merged)
    measured_nodes, worst = _nodes(last, chosen, attempts)
    expected = max((n for _, n in attempts if n), default=None)
    total = [s for sources in chosen.values() for s in sources]
    return Ledger(
        joules=sum(s.joules for s in total) if total else None,
        modelled_joules=_modelled(merged, chosen),
        sources=_totals(merged, chosen),
        nodes_expected=expected,
        nodes_measured=measured_nodes,
        node_seconds=sum(max((s.seconds for s in sources), default=0.0) for sources in chosen.values()),
        coverage=coverage(total, expected, measured_nodes, worst, bool(merged)),
        missing=missing,
        startup_joules=_startup(early, last, chosen),
    )


def _attempts(events: Iterable[dict[str, Any]]) -> tuple[list[tuple[float, int | None]], list[float]]:
    """When each process group began with how many nodes, and when it did its first step."""
    starts: list[tuple[float, int | None]] = []
    first: list[float] = []
    for event in events:
        at = event.get("time")
        if not isinstance(at, (int, float)):
            continue
        if event.get("event") in ("started", "resumed"):
            nodes = event.get("nodes")
            starts.append((float(at), nodes if isinstance(nodes, int) and nodes > 0 else None))
        elif event.get("event") == "compiled":
            first.append(float(at))
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
            missing.update({str(k): str(v) for k, v in line["missing"].items()})
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
            source.method,
        )
        last[key] = source
        at = line.get("time")
        if isinstance(at, (int, float)):
            begun.setdefault(key, float(at))
            border = next((t for t in first_steps if t >= begun[key]), None)
            if border is not None and at <= border:
                early[key] = source.joules
    return last, missing, early


def _short(node: object) -> str:
    """EAR writes `gcn7` where the host calls itself `gcn7.local`; an address stays whole."""
    name = str(node)
    return name if name.replace(".", "").isdigit() else name.split(".")[0]


def _source(line: dict[str, Any]) -> SourceEnergy | None:
    joules, scope, method = line.get("joules"), line.get("scope"), line.get("method")
    if (
        not isinstance(joules, (int, float))
        or joules < 0
        or scope not in INSIDE
        or method not in ("counter", "power", "modelled")
    ):
        return None
    seconds, resets = line.get("seconds"), line.get("resets")
    return SourceEnergy(
        source=str(line.get("source")), scope=scope, method=method, joules=float(joules),
        seconds=float(seconds) if isinstance(seconds, (int, float)) else 0.0,
        resets=resets if isinstance(resets, int) else 0, note=str(line.get("note") or ""),
    )  # fmt: skip


def _merge(sources: Sequence[SourceEnergy]) -> list[SourceEnergy]:
    """Sessions of one source on one node in one job, added: a restart goes on counting."""
    groups: dict[tuple[str, str, str], list[SourceEnergy]] = defaultdict(list)
    for s in sources:
        groups[s.source, s.scope, s.method].append(s)
    return [
        SourceEnergy(
            source=found[0].source, scope=found[0].scope, method=found[0].method, joules=sum(s.joules for s in found),
            seconds=sum(s.seconds for s in found), resets=sum(s.resets for s in found), note=next((s.note for s in found if s.note), ""),
        )
        for found in groups.values()
    ]  # fmt: skip


def _choose(
    merged: dict[tuple[str | None, str], list[SourceEnergy]],
) -> dict[tuple[str | None, str], list[SourceEnergy]]:
    """Per job: nodes that have a node-level source each, else the whole-job record, else what the nodes have."""
    chosen: dict[tuple[str | None, str], list[SourceEnergy]] = {}
    for job in {job for job, _ in merged}:
        nodes = {place: reconcile(s) for place, s in merged.items() if place[0] == job and place[1] != WHOLE_JOB}
        nodes = {place: found for place, found in nodes.items() if found}
        whole = reconcile(merged.get((job, WHOLE_JOB), []))
        complete = bool(nodes) and all(any(s.scope == "node" for s in found) for found in nodes.values())
        chosen.update({(job, WHOLE_JOB): whole} if whole and not complete else nodes)
    return chosen


def _modelled(
    merged: dict[tuple[str | None, str], list[SourceEnergy]], chosen: dict[tuple[str | None, str], list[SourceEnergy]]
) -> float | None:
    jobs_whole = {job for job, node in chosen if node == WHOLE_JOB}
    found = [
        s.joules
        for place, sources in merged.items()
        if place not in chosen and place[0] not in jobs_whole
        for s in sources
        if s.method == "modelled"
    ]
    return sum(found) if found else None


def _totals(
    merged: dict[tuple[str | None, str], list[SourceEnergy]], chosen: dict[tuple[str | None, str], list[SourceEnergy]]
) -> tuple[SourceTotal, ...]:
    counted = {(place, s.source, s.scope) for place, sources in chosen.items() for s in sources}
    groups: dict[tuple[str, str, str, bool], list[tuple[str, SourceEnergy]]] = defaultdict(list)
    for place, sources in merged.items():
        for s in sources:
            groups[s.source, s.scope, s.method, (place, s.source, s.scope) in counted].append((place[1], s))
    return tuple(
        SourceTotal(
            source=source, scope=scope, method=method, counted=is_counted, joules=sum(s.joules for _, s in found),
            nodes=len({node for node, _ in found}), resets=sum(s.resets for _, s in found), note=next((s.note for _, s in found if s.note), ""),
        )
        for (source, scope, method, is_counted), found in sorted(groups.items(), key=lambda item: (not item[0][3], item[0]))
    )  # fmt: skip


def _nodes(
    last: dict[_Key, SourceEnergy],
    chosen: dict[tuple[str | None, str], list[SourceEnergy]],
    attempts: Sequence[tuple[float, int | None]],
) -> tuple[int, tuple[int, int, int] | None]:
    """Nodes measured at least once, and (attempt, not measured, nodes) of the attempt with the most gaps."""
    places = {place for place in chosen if place[1] != WHOLE_JOB}
    sessions = {(key.session, key.node) for key in last if (key.job, key.node) in places and key.method != "modelled"}
    worst: tuple[int, int, int] | None = None
    for index, (start, nodes) in enumerate(attempts):
        end = attempts[index + 1][0] if index + 1 < len(attempts) else float("inf")
        # A meter starts a moment before the event is written; two minutes are more than any start-up skew between nodes.
        seen = {node for session, node in sessions if start - 120 <= _session_time(session, start) < end - 120}
        if nodes is not None and (worst is None or nodes - len(seen) > worst[1]):
            worst = (index + 1, max(0, nodes - len(seen)), nodes)
    return len({node for _, node in places}), worst


def _session_time(session: str, default: float) -> float:
    head = session.partition("-")[0]
    return int(head) / 1e3 if head.isdigit() else default


def coverage(
    total: Sequence[SourceEnergy],
    expected: int | None,
    measured: int,
    worst: tuple[int, int, int] | None,
    any_line: bool,
) -> str:
    """One sentence on what is and what is not in the figure."""
    if not total:
        return "not measured: no energy record" if not any_line else "not measured on any node; the figure is modelled"
    scopes = {s.scope for s in total}
    if "node" in scopes:
        what = "whole nodes"
    elif "module" in scopes:
        what = "GPU and CPU modules, without memory, network and fans"
    else:
        names = [
            name for scope, name in (("device", "devices"), ("cpu", "CPUs"), ("memory", "memory")) if scope in scopes
        ]
        what = f"{' and '.join(names)} only, not the rest of the node"
    if worst is not None and worst[1] > 0 and measured:
        return f"{what}; not measured on {worst[1]} of {worst[2]} nodes (attempt {worst[0]})"
    return f"{what}, on all {expected} nodes" if expected and expected > 1 else what


def _startup(
    early: dict[_Key, float], last: dict[_Key, SourceEnergy], chosen: dict[tuple[str | None, str], list[SourceEnergy]]
) -> float | None:
    counted = {(place, s.source, s.scope) for place, sources in chosen.items() for s in sources}
    found = [
        joules
        for key, joules in early.items()
        if ((key.job, key.node), key.source, key.scope) in counted and key in last
    ]
    return sum(found) if found else None


# -- records of the site, written into the same file ------------------------------------------------------------------


def record_ear(run: Run, rows: Sequence[EarRow]) -> int:
    """Take EAR's rows into the run's record; taking them twice changes nothing. Returns how many nodes and steps were taken."""
    taken = 0
    for row in rows:
        if row.joules is None:
            continue
        taken += 1
        fields = {
            "time": time.time(),
            "node": row.node,
            "job": row.job,
            "session": f"ear:{row.job}.{row.step}",
            "source": "ear",
            "seconds": row.seconds,
        }
        append_line(run.energy_file, {**fields, "scope": "node", "method": "power", "joules": row.joules})
        inside = {
            "device": sum(row.gpu_joules.values()) if row.gpu_joules else None,
            "cpu": row.cpu_joules,
            "memory": row.memory_joules,
        }
        for scope, joules in inside.items():
            if joules:
                append_line(run.energy_file, {**fields, "scope": scope, "method": "power", "joules": joules})
    return taken


def record_slurm(run: Run, jobs: Sequence[JobEnergy]) -> int:
    """Take sacct's figures into the run's record; taking them twice changes nothing."""
    known = [job for job in jobs if job.joules is not None]
    for job in known:
        append_line(
            run.energy_file,
            {"time": time.time(), "node": WHOLE_JOB, "job": job.job, "session": f"slurm:{job.job}", "source": "slurm", "scope": "node",
             "method": "counter", "joules": job.joules, "seconds": job.seconds * max(1, job.nodes), "note": job.note},
        )  # fmt: skip
    return len(known)
