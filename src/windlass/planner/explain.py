"""Explanation of one layout: valid or not, how far it misses the memory, and its terms against the best layout."""

from dataclasses import dataclass, replace

from windlass.config import LayoutConfig, validate
from windlass.config.load import parse_override
from windlass.errors import ConfigError
from windlass.planner.candidates import LayoutCandidate, candidate_of, enumerate_candidates, problems
from windlass.planner.search import (
    EQUAL,
    Plan,
    Plans,
    compare_with_first,
    estimate_plan,
    rank,
    rank_days,
    term_differences,
)
from windlass.planner.task import PlanTask
from windlass.units import counted, print_bytes

KEYS = (*LayoutConfig.model_fields, "recompute")
POLICIES = ("none", "selective", "full", "budget")
EXAMPLE = 'for example --why "shard=full,micro_batch=8"'


@dataclass(frozen=True, kw_only=True)
class LayoutExplanation:
    asked: str
    candidate: LayoutCandidate
    # illegal, does not fit, or fits.
    verdict: str
    sentences: tuple[str, ...]
    # None if the layout is not valid.
    plan: Plan | None
    # None if nothing fits.
    best: Plan | None


def explain_layout(plans: Plans, question: str) -> LayoutExplanation:
    """Explain `shard=full,micro_batch=8`. Other keys are the recipe's own or their defaults.

    The last sentence says what the planner would choose for the other keys."""
    task, wanted = plans.task, parse_question(question)
    layout = (task.recipe.layout or LayoutConfig()).model_copy(
        update={k: v for k, v in wanted.items() if k != "recompute"}
    )
    candidate = candidate_of(layout, str(wanted.get("recompute", task.recipe.train.recompute)), task)
    best = plans.plans[0] if plans.plans else None
    broken_rules = problems(task, candidate)
    plan = None if broken_rules else estimate_plan(task, candidate)
    if plan is None:
        verdict, sentences = "illegal", [str(rule) for rule in broken_rules]
    elif plan.fits:
        assert best is not None
        verdict, sentences = "fits", _compare(plan, best, plans)
    else:
        verdict, sentences = "does not fit", _too_big(task, plan)
    matches = [
        c
        for c in enumerate_candidates(task)
        if {**c.layout.config().model_dump(), "recompute": c.recompute}.items() >= wanted.items()
    ]
    fitting = [p for p in (estimate_plan(task, c) for c in matches) if p.fits]
    preferred = next(iter(rank(fitting)), None)
    if preferred is not None and preferred.candidate != candidate:
        sentences.append(
            f"with the other values chosen by the planner: {preferred.candidate.describe()} fits in "
            f"{print_bytes(preferred.memory.needed)}, {_speed(preferred)}"
        )
    elif matches and preferred is None:
        sentences.append(f"none of the {len(matches):,} layouts with these values fits")
    return LayoutExplanation(
        asked=question,
        candidate=candidate,
        verdict=verdict,
        sentences=tuple(sentences),
        plan=plan,
        best=best,
    )


def _speed(p: Plan) -> str:
    return f"{p.step.tokens_per_second_per_device:,.0f} tokens/s per device"


def parse_question(question: str) -> dict[str, object]:
    """`"shard=full, micro_batch=8"` -> {"shard": "full", "micro_batch": 8}; keys are those of `[layout]`, and
    recompute."""
    wanted: dict[str, object] = {}
    for override in filter(None, (part.strip() for part in question.replace(";", ",").split(","))):
        key_path, value = parse_override(override)
        key = key_path[-1]
        if key not in KEYS:
            raise ConfigError(
                "planner.why-unknown-key",
                f"--why: unknown key {key!r} in {override!r}",
                hint=f"use one of {', '.join(KEYS)}; {EXAMPLE}",
            )
        wanted[key] = value
    if not wanted:
        raise ConfigError("planner.why-empty", "--why names no layout key", hint=EXAMPLE)
    if wanted.get("recompute", "none") not in POLICIES:
        raise ConfigError(
            "planner.why-unknown-recompute",
            f"--why: recompute={wanted['recompute']!r} is not a policy",
            hint=f"use one of {', '.join(POLICIES)}",
        )
    checked = validate(LayoutConfig, {k: v for k, v in wanted.items() if k != "recompute"}, "--why")
    return {key: value if key == "recompute" else getattr(checked, key) for key, value in wanted.items()}


def _compare(p: Plan, best: Plan, plans: Plans) -> list[str]:
    sentences = [f"it fits: {p.memory_text}, {_speed(p)}"]
    if p.candidate == best.candidate:
        return [*sentences, f"it is ranked first of {plans.fitting:,} layouts that fit: {best.reason}"]
    compared = compare_with_first(p, best, min(map(rank_days, plans.plans)))
    slower = f"it takes {p.days / best.days:.2f} times as long as the first ({best.candidate.describe()})"
    sentences.append(slower if compared.slower > EQUAL else f"compared with the first: {compared.reason}")
    sentences += [
        f"{name}: {own_seconds:.3g} s/step, {best_seconds:.3g} s/step in the first"
        for name, own_seconds, best_seconds in term_differences(p, best)[:3]
        if abs(own_seconds - best_seconds) > 0.002 * best.step.seconds
    ]
    if p.layout.data < best.layout.data:
        replicas = f"{counted(p.layout.data, 'replica')} instead of {best.layout.data:,}"
        in_a_row = f": {p.layout.accumulation} micro-batches in a row instead of {best.layout.accumulation}"
        sentences.append(replicas + (in_a_row if p.layout.accumulation > best.layout.accumulation else ""))
    return sentences


def _too_big(task: PlanTask, p: Plan) -> list[str]:
    """By how much it misses, and the fastest fitting layout that differs in one value."""
    candidate, layout = p.candidate, p.layout
    sequences = layout.micro_batch * layout.accumulation
    changes = {
        f"micro_batch={size}": replace(
            candidate, layout=replace(layout, micro_batch=size, accumulation=sequences // size)
        )
        for size in range(layout.micro_batch - 1, 0, -1)
        if sequences % size == 0
    }
    changes |= {
        f"recompute={policy}": replace(candidate, recompute=policy)
        for policy in ("selective", "full")
        if policy != candidate.recompute
    }
    changes |= {
        f"shard={shard}": replace(candidate, layout=replace(layout, shard=shard, shard_size=layout.replicas))
        for shard in ("zero1", "zero2", "full")
        if shard != layout.shard
    }
    plans = {name: estimate_plan(task, other) for name, other in changes.items() if not problems(task, other)}
    fitting = {name: changed for name, changed in plans.items() if changed.fits}
    change = "no change of a single value makes it fit"
    if fitting:
        name, best = min(fitting.items(), key=lambda item: item[1].days)
        change = f"the smallest change that fits: {name} ({print_bytes(best.memory.needed)}, {_speed(best)})"
    terms = sorted(p.memory_terms.items(), key=lambda item: -item[1])
    return [
        f"it needs {p.memory_text}, {print_bytes(p.memory.needed - p.limit_bytes)} too much; "
        f"the peak is at: {p.memory.moment}",
        *(f"{name}: {print_bytes(size)}" for name, size in terms[:4]),
        change,
    ]
