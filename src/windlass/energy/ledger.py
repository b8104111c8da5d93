"""The energy of a run from energy.jsonl: per job and node, nested sources reconciled, restarts added, gaps named.

Each line holds the joules of one meter since its process started, so the last line of a session is its total and a torn
line loses only itself. Records of EAR and SLURM are lines of the same file with sessions of their own.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from windlass.energy.measure import COMPLETE_SHARE, SCOPES, Scope, SourceEnergy, reconcile, sum_or_unknown
from windlass.files import read_json_lines
from windlass.runs.events import Compiled, Event, ProcessStart
from windlass.runs.folder import Run
from windlass.units import print_text

# The node of a record that covers all nodes of a job at once (SLURM's).
WHOLE_JOB = "*"
# 0.3 TWh: more than any process uses; such a line is damaged.
MAX_JOULES = 1e15
# Between the clocks of two nodes, and between the starts of their processes.
CLOCK_SKEW_SECONDS = 2.0
# What a figure covers: by its widest scope, or else by the parts of a node that it has.
COVERS_MOST = {"node": "whole nodes", "module": "GPU and CPU modules, without memory, network and fans"}
PART_NAMES = {"device": "devices", "cpu": "CPUs", "memory": "memory"}


@dataclass(frozen=True, kw_only=True)
class SourceTotal:
    source: str
    scope: str
    method: str
    joules: float
    nodes: int
    counted: bool  # part of the total; other sources lie inside a counted one, or are modelled
    resets: int
    note: str


@dataclass(frozen=True, kw_only=True)
class Ledger:
    joules: float | None  # measured, nothing counted twice; None when nothing was measured
    modelled_joules: float | None  # estimate of the power model for nodes where nothing was measured
    sources: tuple[SourceTotal, ...]
    nodes_expected: int | None
    nodes_measured: int  # nodes measured at once, in the job with most of them
    wall_seconds: float  # time that `joules` covers: the longest node of each job, one job after the other
    coverage: str
    missing: dict[str, str] = field(default_factory=dict)
    # Part of `joules` before the first step of each start: imports, compilation, loading.
    startup_joules: float | None = None
    # One update of each counter, over all nodes and restarts; None where a source does not say.
    resolution_joules: float | None = None

    @property
    def basis(self) -> str:
        return "measured" if self.joules is not None else "modelled" if self.modelled_joules is not None else "none"


@dataclass(frozen=True)
class SessionKey:
    """One source of one process (or of one record of the site)."""

    job: str | None
    node: str
    session: str
    source: str
    scope: Scope
    is_modelled: bool

    @property
    def place(self) -> tuple[str | None, str]:
        return self.job, self.node


# (job, node) -> energies.
ByPlace = dict[tuple[str | None, str], list[SourceEnergy]]


def read_ledger(run: Run) -> Ledger:
    return build(read_json_lines(run.energy_file), run.events())


def build(lines: Iterable[dict[str, Any]], events: Iterable[Event] = ()) -> Ledger:
    """`events` give the number of nodes of each start and the time of its first step."""
    timed = [(event.time, event) for event in events if event.time is not None]
    starts = [(at, e.nodes if e.nodes and e.nodes > 0 else None) for at, e in timed if isinstance(e, ProcessStart)]
    first_steps = [at for at, event in timed if isinstance(event, Compiled)]
    # The last line of each session, and its last line before the first step.
    totals: dict[SessionKey, SourceEnergy] = {}
    startup_joules: dict[SessionKey, float] = {}
    missing: dict[str, str] = {}
    begun: dict[SessionKey, float] = {}
    for line in lines:
        if isinstance(line.get("missing"), dict):
            missing |= {print_text(str(k)): print_text(str(v)) for k, v in line["missing"].items()}
        elif (energy := _source_energy(line)) is not None:
            node = str(line.get("node"))
            if not node.replace(".", "").isdigit():  # EAR writes `gcn7` where the host is `gcn7.local`; no address
                node = node.split(".")[0]
            job, is_modelled = line.get("job"), energy.method == "modelled"
            place = (None if job is None else str(job), node)
            key = SessionKey(*place, str(line.get("session")), energy.source, energy.scope, is_modelled)
            totals[key] = energy
            if (at := _number(line.get("time"))) is not None:
                begun.setdefault(key, at)
                first_step = next((t for t in first_steps if t >= begun[key]), None)
                if first_step is not None and at <= first_step:
                    startup_joules[key] = energy.joules
    # Sessions of one source on one node in one job are added: a restart continues the count.
    sessions: dict[tuple[Any, ...], list[SourceEnergy]] = defaultdict(list)
    for key, energy in totals.items():
        sessions[key.place, key.source, key.scope, key.is_modelled].append(energy)
    merged: ByPlace = defaultdict(list)
    for (place, *_), parts in sessions.items():
        merged[place].append(
            replace(
                parts[-1],
                joules=sum(s.joules for s in parts),
                seconds=sum(s.seconds for s in parts),
                resets=sum(s.resets for s in parts),
                note=next((s.note for s in parts if s.note), ""),
                nodes=max(s.nodes for s in parts),
                resolution_joules=sum_or_unknown(s.resolution_joules for s in parts),
            )
        )
    chosen = _choose(merged)
    job_seconds: dict[str | None, float] = defaultdict(float)
    job_nodes: dict[str | None, int] = defaultdict(int)
    for (job, _), sources in chosen.items():
        job_seconds[job] = max(job_seconds[job], *(s.seconds / s.nodes for s in sources))
        job_nodes[job] += max(s.nodes for s in sources)
    counted = {(place, s.source, s.scope) for place, sources in chosen.items() for s in sources}
    whole_jobs = {job for job, node in chosen if node == WHOLE_JOB}
    unmeasured = [s for place, s in merged.items() if place not in chosen and place[0] not in whole_jobs]
    groups: dict[tuple[bool, str, str, str], list[tuple[str, SourceEnergy]]] = defaultdict(list)
    for place, s in ((place, s) for place, sources in merged.items() for s in sources):
        groups[(place, s.source, s.scope) not in counted, s.source, s.scope, s.method].append((place[1], s))
    source_totals = tuple(
        SourceTotal(
            source=source,
            scope=scope,
            method=method,
            counted=not is_uncounted,
            joules=sum(s.joules for _, s in group),
            nodes=sum({node: s.nodes for node, s in group}.values()),
            resets=sum(s.resets for _, s in group),
            note=next((s.note for _, s in group if s.note), ""),
        )
        for (is_uncounted, source, scope, method), group in sorted(groups.items(), key=lambda item: item[0])
    )
    return Ledger(
        joules=sum_or_unknown(s.joules for sources in chosen.values() for s in sources),
        modelled_joules=sum_or_unknown(s.joules for ss in unmeasured for s in ss if s.method == "modelled"),
        sources=source_totals,
        nodes_expected=max((nodes for _, nodes in starts if nodes), default=None),
        nodes_measured=max(job_nodes.values(), default=0),
        wall_seconds=sum(job_seconds.values()),
        coverage=_coverage(totals, chosen, starts),
        missing=missing,
        startup_joules=sum_or_unknown(
            joules for k, joules in startup_joules.items() if (k.place, k.source, k.scope) in counted
        ),
        resolution_joules=sum_or_unknown(s.resolution_joules for sources in chosen.values() for s in sources),
    )


def _source_energy(line: dict[str, Any]) -> SourceEnergy | None:
    """The energy of a line; None for a damaged one, which may hold anything."""
    joules, scope, method = _number(line.get("joules")), line.get("scope"), line.get("method")
    is_valid = scope in list(SCOPES) and method in ("counter", "power", "modelled")
    if joules is None or joules > MAX_JOULES or not is_valid:
        return None
    resets, nodes = line.get("resets"), line.get("nodes")
    return SourceEnergy(
        source=print_text(str(line.get("source"))),
        scope=scope,  # type: ignore[arg-type]
        method=method,  # type: ignore[arg-type]
        joules=joules,
        seconds=_number(line.get("seconds")) or 0.0,
        resets=resets if isinstance(resets, int) else 0,
        note=print_text(str(line.get("note") or "")),
        nodes=nodes if isinstance(nodes, int) and nodes > 0 else 1,
        resolution_joules=_number(line.get("resolution_joules")),
    )


def _number(value: object) -> float | None:
    """A plausible number: JSON allows NaN, infinity and any number of digits."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e300:
        return None
    return float(value)


def _choose(merged: ByPlace) -> ByPlace:
    """The sources that count: per job those of its nodes, unless the record of the whole job covers more.

    It does when it has all nodes that were measured, more of each (or more of them), and was not cut short.
    """
    chosen: ByPlace = {}
    for job in {job for job, _ in merged}:
        places = [place for place in merged if place[0] == job and place[1] != WHOLE_JOB]
        nodes = {place: sources for place in places if (sources := reconcile(merged[place]))}
        whole_job = reconcile(merged.get((job, WHOLE_JOB), []))
        covers_more = bool(whole_job)
        if whole_job and nodes:
            all_complete = all(any(s.scope == "node" for s in sources) for sources in nodes.values())
            more_nodes = whole_job[0].nodes - len(nodes)
            joules = sum(s.joules for sources in nodes.values() for s in sources)
            covers_more = more_nodes >= all_complete and whole_job[0].joules >= COMPLETE_SHARE * joules
        chosen |= {(job, WHOLE_JOB): whole_job} if covers_more else nodes
    return chosen


def meter_started_at(session: str) -> float | None:
    """When the meter of a session started; None for records of the site."""
    milliseconds = session.partition("-")[0]
    return int(milliseconds) / 1e3 if milliseconds.isdigit() else None


def _coverage(
    totals: dict[SessionKey, SourceEnergy], chosen: ByPlace, starts: Sequence[tuple[float, int | None]]
) -> str:
    """One sentence on what the figure covers and what it does not."""
    if not chosen:
        return "not measured on any node; the figure is modelled" if totals else "not measured: no energy record"
    kinds = set()
    for scopes in ({s.scope for s in sources} for sources in chosen.values()):
        parts = " and ".join(name for scope, name in PART_NAMES.items() if scope in scopes)
        parts_only = f"{parts} only, not the rest of the node"
        kinds.add(next((text for scope, text in COVERS_MOST.items() if scope in scopes), parts_only))
    ordered = sorted(kinds, key=len)
    text = ordered[0] if len(ordered) == 1 else "in part " + ", in part ".join(ordered)
    meters: list[list[SessionKey]] = [[] for _ in starts]
    for key in totals:
        at = meter_started_at(key.session)
        if at is not None and starts:
            # A meter starts before its start is recorded, on another node perhaps just after.
            later = (number for number, (start, _) in enumerate(starts) if at <= start + CLOCK_SKEW_SECONDS)
            meters[next(later, -1)].append(key)
    site_records = [key for key in totals if meter_started_at(key.session) is None and key.place in chosen]
    metered_jobs = {key.job for keys in meters for key in keys}
    gaps = [(0, 0, 0)]
    for attempt, ((_, nodes), keys) in enumerate(zip(starts, meters, strict=True), 1):
        jobs = {key.job for key in keys}
        measured = {key.node for key in keys if not key.is_modelled and key.place in chosen}
        # A job without a meter may have been any attempt; of a job with a meter we know which.
        records = [k for k in site_records if k.job in jobs or (not jobs and k.job not in metered_jobs)]
        measured |= {key.node for key in records} - {WHOLE_JOB}
        whole_job_nodes = max((totals[key].nodes for key in records if key.node == WHOLE_JOB), default=0)
        gaps.append(((nodes or 0) - max(len(measured), whole_job_nodes), attempt, nodes or 0))
    gap_nodes, attempt, nodes_of_start = max(gaps, key=lambda gap: gap[0])
    if gap_nodes:
        return f"{text}; not measured on {gap_nodes} of {nodes_of_start} nodes (attempt {attempt})"
    expected = max((nodes for _, nodes in starts if nodes), default=1)
    return f"{text}, on all {expected} nodes" if expected > 1 else text
