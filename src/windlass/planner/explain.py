"""Explains one layout: its terms against the best plan's, and the smallest change that would make it fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from windlass.config import LayoutConfig
from windlass.config.load import parse_override
from windlass.errors import ConfigError
from windlass.planner.candidates import LayoutCandidate, candidate_of, enumerate_candidates, problems
from windlass.planner.search import Plan, Plans, estimate_plan
from windlass.planner.task import PlanTask
from windlass.units import GIB

KEYS = (*LayoutConfig.model_fields, "recompute")


@dataclass(frozen=True, kw_only=True)
class Why:
    """The answer to one question about a layout."""

    asked: str
    candidate: LayoutCandidate
    verdict: str
    """illegal, does not fit, or fits."""
    sentences: tuple[str, ...]
    plan: Plan | None
    """None when the layout is illegal."""
    best: Plan | None
    """None when nothing fits."""
    matching: int
    """Layouts of the search that agree with the question."""


def why(plans: Plans, question: str) -> Why:
    """Explain `shard=full,micro_batch=8`. Keys left open are the recipe's own, or the plainest; what freeing them would give is said too."""
    task, wanted = plans.task, parse_question(question)
    candidate = _complete(task, wanted)
    best = plans.plans[0] if plans.plans else None
    violations = problems(task, candidate)
    matches = [c for c in enumerate_candidates(task) if _agrees(c, wanted)]
    freed = _freed(task, matches, candidate)
    if violations:
        return Why(
            asked=question,
            candidate=candidate,
            verdict="illegal",
            sentences=(*map(str, violations), *freed),
            plan=None,
            best=best,
            matching=len(matches),
        )
    judged = estimate_plan(task, candidate)
    sentences = _fitting(judged, best, plans) if judged.fits else _too_big(task, judged)
    verdict = "fits" if judged.fits else "does not fit"
    return Why(
        asked=question,
        candidate=candidate,
        verdict=verdict,
        sentences=(*sentences, *freed),
        plan=judged,
        best=best,
        matching=len(matches),
    )


def parse_question(question: str) -> dict[str, object]:
    """`"shard=full, micro_batch=8"` -> {"shard": "full", "micro_batch": 8}; names are those of `[layout]`, and recompute."""
    wanted: dict[str, object] = {}
    for word in filter(None, (w.strip() for w in question.replace(";", ",").split(","))):
        parts, value = parse_override(word)
        key = parts[-1]
        if key not in KEYS:
            raise ConfigError(
                "planner.why-unknown-key",
                f"--why: unknown key {key!r} in {word!r}",
                hint=f'keys: {", ".join(KEYS)}; for example --why "shard=full,micro_batch=8"',
            )
        wanted[key] = value
    if not wanted:
        raise ConfigError(
            "planner.why-asks-about-layout",
            "--why asks about no layout",
            hint='for example --why "shard=full,micro_batch=8"',
        )
    layout = {key: value for key, value in wanted.items() if key != "recompute"}
    checked = _checked(layout)
    if "recompute" in wanted and wanted["recompute"] not in ("none", "selective", "full", "budget"):
        raise ConfigError(
            "planner.why-recompute-policy",
            f"--why: recompute={wanted['recompute']!r} is not a policy",
            hint="one of: none, selective, full, budget",
        )
    return {
        **{key: getattr(checked, key) for key in layout},
        **({"recompute": wanted["recompute"]} if "recompute" in wanted else {}),
    }


def _checked(layout: dict[str, object]) -> LayoutConfig:
    from windlass.config import validate

    return validate(LayoutConfig, layout, "--why")


def _agrees(candidate: LayoutCandidate, wanted: dict[str, object]) -> bool:
    values = {**candidate.layout.config().model_dump(), "recompute": candidate.recompute}
    return all(values[key] == value for key, value in wanted.items())


def _freed(task: PlanTask, matches: list[LayoutCandidate], asked: LayoutCandidate) -> list[str]:
    """With the values that were not named left to the planner: the fastest layout that agrees with the question."""
    fitting = [p for p in (estimate_plan(task, c) for c in matches) if p.fits]
    if not fitting:
        return [f"whatever the other values, none of {len(matches):,} layouts like it fits"] if matches else []
    best = min(fitting, key=lambda p: p.days)
    if best.candidate == asked:
        return []
    return [
        f"with the other values left to the planner: {best.candidate.describe()} fits in {best.memory.needed / GIB:.1f} GiB, {best.step.tokens_per_second_per_device:,.0f} tokens/s per device"
    ]


def _complete(task: PlanTask, wanted: dict[str, object]) -> LayoutCandidate:
    """A layout outside the search: the recipe's own (or the plainest) with the asked values."""
    base = task.recipe.layout or LayoutConfig()
    layout = base.model_copy(update={key: value for key, value in wanted.items() if key != "recompute"})
    return candidate_of(layout, str(wanted.get("recompute", task.recipe.train.recompute)), task)


def _fitting(p: Plan, best: Plan | None, plans: Plans) -> list[str]:
    assert best is not None
    place = next((i for i, other in enumerate(plans.plans, 1) if other.candidate == p.candidate), None)
    found = [
        f"it fits: {p.memory.needed / GIB:.1f} of {p.limit_bytes / GIB:.1f} GiB, {p.step.tokens_per_second_per_device:,.0f} tokens/s per device"
    ]
    if place == 1:
        return [*found, f"it is ranked first of {plans.fitting:,} layouts that fit: {plans.plans[0].reason}"]
    ratio = p.days / best.days
    found.append(
        f"it takes {ratio:.2f} times as long as the best ({best.candidate.describe()})"
        if ratio > 1.005
        else "it is as fast as the best within the estimate's error"
    )
    found += [
        f"{name}: {mine:.3g} s a step, {theirs:.3g} s in the best"
        for name, mine, theirs in largest_differences(p, best)
    ]
    if p.layout.data < best.layout.data:
        found.append(
            f"{p.layout.data:,} replicas instead of {best.layout.data:,}: what they no longer do side by side is done in turn ({p.layout.accumulation} micro-batches instead of {best.layout.accumulation})"
        )
    return found


def largest_differences(p: Plan, best: Plan, count: int = 3) -> list[tuple[str, float, float]]:
    """The terms of a step in which two plans differ most, as seconds for the same tokens."""
    scale = best.batch_tokens / p.batch_tokens
    pairs = [
        (n, p.step.terms.get(n, 0.0) * scale, best.step.terms.get(n, 0.0)) for n in {*p.step.terms, *best.step.terms}
    ]
    pairs.sort(key=lambda item: -abs(item[1] - item[2]))
    return [item for item in pairs[:count] if abs(item[1] - item[2]) > 0.002 * best.step.seconds]


def _too_big(task: PlanTask, p: Plan) -> list[str]:
    over = (p.memory.needed - p.limit_bytes) / GIB
    terms = sorted(p.memory_terms.items(), key=lambda item: -item[1])
    found = [
        f"it needs {p.memory.needed / GIB:.1f} of {p.limit_bytes / GIB:.1f} GiB, {over:.1f} GiB too much, at the moment of the {p.memory.moment}"
    ]
    found += [f"{name}: {size / GIB:.1f} GiB" for name, size in terms[:4]]
    helpful = _smallest_change(task, p.candidate)
    found.append(f"the smallest change that fits: {helpful}" if helpful else "no change of a single value makes it fit")
    return found


def _smallest_change(task: PlanTask, c: LayoutCandidate) -> str | None:
    """Among layouts that differ in one value, the fastest that fits: `micro_batch=4 (52.1 GiB)`."""
    layout = c.layout
    sequences = layout.micro_batch * layout.accumulation
    changes = [
        (f"micro_batch={m}", replace(c, layout=replace(layout, micro_batch=m, accumulation=sequences // m)))
        for m in range(layout.micro_batch - 1, 0, -1)
        if sequences % m == 0
    ]
    changes += [(f"recompute={r}", replace(c, recompute=r)) for r in ("selective", "full") if r != c.recompute]
    changes += [
        (f"shard={s}", replace(c, layout=replace(layout, shard=s, shard_size=layout.replicas)))
        for s in ("zero1", "zero2", "full")
        if s != layout.shard
    ]
    judged = [(name, estimate_plan(task, other)) for name, other in changes if not problems(task, other)]
    fitting = [(name, p) for name, p in judged if p.fits]
    if not fitting:
        return None
    name, best = min(fitting, key=lambda item: item[1].days)
    return f"{name} ({best.memory.needed / GIB:.1f} GiB, {best.step.tokens_per_second_per_device:,.0f} tokens/s per device)"
