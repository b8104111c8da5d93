"""How far is a chain, and when may it be done? From the ledger's entries and the newest metrics; no scheduler is asked."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from windlass.launch.chain import finished, judge
from windlass.launch.ledger import Entry
from windlass.runs import Run
from windlass.units import print_seconds, print_tokens


@dataclass(frozen=True, kw_only=True)
class Outlook:
    node_hours_used: float
    node_hours_left: float
    """What the waiting and running links may still use at most."""
    tokens: int | None
    tokens_target: int | None
    remaining_seconds: float | None
    """Of training, at the newest speed; the time in the queue comes on top."""
    estimated_end: float | None
    links_needed: int | None
    verdict: str
    reason: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        done = f"{print_tokens(self.tokens)} of {print_tokens(self.tokens_target)} tokens"
        rows = [
            f"node-hours: {self.node_hours_used:.2f} used, {self.node_hours_left:.2f} still reserved by waiting and running links; {done}"
        ]
        if self.verdict != "go":
            return [*rows, f"the chain is over: {self.reason}"]
        if self.estimated_end is not None:
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.estimated_end))
            more = f", about {self.links_needed} more links" if self.links_needed else ""
            rows.append(
                f"estimated end: {when} ({print_seconds(self.remaining_seconds)} of training{more}), if no link waits in the queue"
            )
        else:
            rows.append("estimated end: unknown until the first steps are logged")
        return rows


def outlook(run: Run, entries: Sequence[Entry]) -> Outlook:
    last = run.last_metrics()
    target, speed = tokens_target(run), last.tokens_per_second
    tokens = last.tokens
    remaining = None
    if finished(run):
        remaining = 0.0
    elif target is not None and tokens is not None and speed:
        remaining = max(0.0, (target - tokens) / speed)
    verdict = judge(run)
    limit = next((e.limit_seconds for e in reversed(entries) if e.limit_seconds), None)
    return Outlook(
        node_hours_used=sum(e.node_hours or 0.0 for e in entries), node_hours_left=sum(_left(e) for e in entries), tokens=tokens, tokens_target=target,
        remaining_seconds=remaining, estimated_end=None if remaining is None else time.time() + remaining,
        links_needed=None if remaining is None or not limit else int(remaining // limit), verdict=verdict.answer, reason=verdict.reason,
    )  # fmt: skip


def _left(entry: Entry) -> float:
    if entry.state.over or entry.limit_seconds is None or entry.nodes is None:
        return 0.0
    return max(0.0, entry.limit_seconds * entry.nodes / 3600 - (entry.node_hours or 0.0))


def tokens_target(run: Run) -> int | None:
    """Tokens of the whole run, where the recipe says so."""
    recipe = run.recipe()
    if recipe.train.steps is not None:
        return None if recipe.data.batch_tokens is None else recipe.train.steps * recipe.data.batch_tokens
    return recipe.data.tokens
