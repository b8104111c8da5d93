"""Where does the text come from, and on what terms? The ledger of a store, its policy, and the summary of training content."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from windlass.errors import DataError


class Provenance(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def licence(self) -> str | None: ...
    @property
    def origin(self) -> str | None: ...


def refuse_unlawful(sources: Iterable[Provenance], where: str) -> None:
    """policy = "lawful": every source has a licence and an origin, or the message lists what is missing."""
    gaps = {s.name: [key for key in ("licence", "origin") if not getattr(s, key)] for s in sources}
    lines = [f"{name}: {' and '.join(missing)} missing" for name, missing in gaps.items() if missing]
    if lines:
        raise DataError(
            f'{where}: policy = "lawful" refuses {len(lines)} of {len(gaps)} sources:\n  ' + "\n  ".join(lines),
            hint="write licence and origin into the source's table of the data file, or leave the source out",
        )
