"""Sizes, token counts, times and energies: parsing what people write, and printing, with the nearest valid count."""

import math
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from windlass.errors import ConfigError

_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12, "P": 10**15}
GIB = 2**30
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_TOKENS = {**{k: v for k, v in _DECIMAL.items() if k not in ("P", "G")}, "G": 10**9, **_BINARY}
_BYTES = {
    "": 1,
    "B": 1,
    **{f"{p}B": m for p, m in _DECIMAL.items() if p not in ("", "B")},
    **{f"{p}B": m for p, m in _BINARY.items()},
    **_BINARY,
}
DAY = 86_400.0  # seconds
_SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": DAY, "w": 604800.0}
_JOULES = {
    "J": 1.0, "kJ": 1e3, "MJ": 1e6, "GJ": 1e9,
    "Wh": 3600.0, "kWh": 3.6e6, "MWh": 3.6e9, "GWh": 3.6e12,
}  # fmt: skip
_NUMBER = re.compile(r"^\s*([+-]?(?:\d[\d_,]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)\s*$")
_CLOCK = re.compile(r"^(?:(\d+)-)?(\d+):(\d\d)(?::(\d\d))?$")


def _amount(value: str | float, units: Mapping[str, float], kind: str, example: str) -> float:
    """A text with a unit, in the base unit; plain numbers pass."""
    if not isinstance(value, str):
        # An integer of hundreds of digits does not fit into a float.
        return float(value) if abs(value) < 1e300 else math.inf
    match = _NUMBER.match(value)
    if match is None:
        raise ConfigError("units.failed", f"{value!r} is not {kind}", hint=f"write it like {example}")
    number, suffix = match.group(1).replace(",", "").replace("_", ""), match.group(2)
    if suffix not in units:
        names = [name for name in units if name]
        listed = ", ".join(get_close_matches(suffix, names, n=3, cutoff=0.3) or names)
        raise ConfigError(
            "units.unknown-unit",
            f"{value!r}: unknown unit {suffix!r} for {kind}",
            hint=f"units here: {listed}; for example {example}",
        )
    return float(number) * units[suffix]


def _whole(amount: float, text: object, kind: str) -> int:
    if not math.isfinite(amount):
        raise ConfigError("units.finite", f"{text!r} is not a finite {kind}")
    if amount < 0:
        raise ConfigError(
            "units.negative-cannot", f"{text!r} is negative; {kind} cannot be", hint="write a number of at least 0"
        )
    if abs(amount - round(amount)) > 1e-6 * max(1.0, amount):
        raise ConfigError("units.whole-number", f"{text!r} is not a whole number of {kind}")
    return round(amount)


def parse_tokens(value: str | float) -> int:
    """`"450B"` -> 450_000_000_000, `"4Mi"` -> 4_194_304; plain numbers pass."""
    return _whole(_amount(value, _TOKENS, "a token count", '"450B" or "4Mi"'), value, "tokens")


def parse_bytes(value: str | float) -> int:
    """`"94 GiB"`, `"64 GB"`, `"512"` -> bytes."""
    size = _amount(value, _BYTES, "a size in bytes", '"94 GiB" or "64 GB"')
    return _whole(float(round(size)) if isinstance(value, str) and math.isfinite(size) else size, value, "bytes")


def parse_seconds(value: str | float) -> float:
    """`"30m"`, `"24h"`, `"2d"`, SLURM's `"2-00:00:00"` and `"1:30:00"` -> seconds."""
    clock = _CLOCK.match(value.strip()) if isinstance(value, str) else None
    if clock:
        days, first, second, third = (int(part or 0) for part in clock.groups())
        if clock[1] is None and clock[4] is None:  # SLURM reads a plain pair as MM:SS, and D-HH:MM
            return float(first * 60 + second)
        return float(days * DAY + first * 3600 + second * 60 + third)
    seconds = _amount(value, _SECONDS, "a duration", '"30m", "24h" or "2-00:00:00"')
    return _not_negative(seconds, "units.duration-s-possible", "a duration", "s")


def parse_joules(value: str | float) -> float:
    """`"14.2 MWh"` -> joules; a bare number is joules."""
    joules = _amount(value, {"": 1.0, **_JOULES}, "an energy", '"14.2 MWh" or "250 J"')
    return _not_negative(joules, "units.energy-j-possible", "an energy", "J")


def _not_negative(amount: float, code: str, noun: str, unit: str) -> float:
    if not math.isfinite(amount) or amount < 0:
        message = f"{noun} of {amount:g} {unit} is not possible"
        raise ConfigError(code, message, hint=f"write {noun} of at least 0")
    return amount


def _trim(value: float, digits: int) -> str:
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _scaled(value: float, steps: list[tuple[float, str]], digits: int, gap: str) -> str:
    size, name = next((step for step in steps if abs(value) >= step[0] * 0.9995), steps[-1])
    return f"{_trim(value / size, digits)}{gap}{name}".rstrip()


def print_tokens(tokens: float | None, digits: int = 2) -> str:
    """450_000_000_000 -> `450B`; None -> `unknown`."""
    if tokens is None:
        return "unknown"
    return _scaled(tokens, [(1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"), (1, "")], digits, "")


def print_quota(value: float | None) -> str:
    """Bytes in decimal units, as sites write their quotas: 2.4 TB."""
    if value is None:
        return "unknown"
    size, unit = next(((value / s, u) for s, u in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")) if value >= s), (value, "B"))
    return f"{size:.3g} {unit}"


def print_bytes(size: float | None, digits: int = 1) -> str:
    """Bytes in binary units: `94 GiB`."""
    if size is None:
        return "not measured"
    return _scaled(size, [(2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")], digits, " ")


def print_rate(tokens_per_second: float | None, unit: str = " tokens/s") -> str:
    """`3,235 tokens/s`, `104.86k tokens/s`."""
    if tokens_per_second is None:
        return "not measured"
    number = print_tokens(tokens_per_second) if tokens_per_second >= 1e5 else f"{tokens_per_second:,.0f}"
    return number + unit


def print_share(share: float | None, unknown: str = "unknown", *, digits: int = 1, signed: bool = False) -> str:
    """0.412 -> `41.2 %`."""
    return unknown if share is None else f"{100 * share:{'+' if signed else ''}.{digits}f} %"


def counted(count: int | None, word: str) -> str:
    """`1 node`, `2 nodes`, `? nodes`."""
    return f"{'?' if count is None else f'{count:,}'} {word}" + ("" if count == 1 else "s")


def print_watts(watts: float | None) -> str:
    """`870 W`, `2.65 kW`."""
    if watts is None:
        return "not measured"
    for scale, unit in ((1e6, "MW"), (1e3, "kW")):
        if watts >= 0.9995 * scale:
            return f"{print_figure(watts / scale)} {unit}"
    return f"{watts:.0f} W"


def print_node_hours(hours: float | None, unit: str = " node-hours") -> str:
    """`1.25 node-hours`, `184,320 node-hours`; None is `unknown`. `unit` is empty in a column of that name."""
    return "unknown" if hours is None else f"{print_figure(hours)}{unit}"


def print_seconds(seconds: float | None) -> str:
    """`3.2 s`, `4 min 12 s`, `5 h 3 min`, `12.3 days`."""
    if seconds is None:
        return "unknown"
    if seconds < 0:
        return f"-{print_seconds(-seconds)}"
    if seconds < 1:
        return f"{_trim(seconds * 1e3, 1)} ms"
    if seconds < 59.95:
        return f"{_trim(seconds, 1)} s"
    if seconds < 3599.5:
        minutes, remaining = divmod(round(seconds), 60)
        return f"{minutes} min {remaining} s" if remaining else f"{minutes} min"
    if seconds < 2 * DAY:
        hours, remaining = divmod(round(seconds / 60), 60)
        return f"{hours} h {remaining} min" if remaining else f"{hours} h"
    return f"{seconds / DAY:,.1f}".removesuffix(".0") + " days"


# Joules from which energies are written in watt-hours, so that a run and its forecast stand in one unit.
WATT_HOURS_FROM = 360.0


def print_joules(joules: float | None, digits: int = 2) -> str:
    """Small energies in joules, the rest in watt-hours: `7.13 mJ`, `250 J`, `0.568 Wh`, `14.2 MWh`; None is `not
    measured`, never 0."""
    if joules is None:
        return "not measured"
    if 0 < abs(joules) < 0.9995:
        return f"{joules * 1e3:.3g} mJ"
    if abs(joules) < WATT_HOURS_FROM:
        return f"{_trim(joules, digits)} J"
    if abs(joules) < 3600 * 0.9995:
        return f"{joules / 3600:.3g} Wh"
    return _scaled(joules / 3600, [(1e9, "GWh"), (1e6, "MWh"), (1e3, "kWh"), (1, "Wh")], digits, " ")


def print_kwh(kwh: float | None, unknown: str = "unknown") -> str:
    """An energy in kWh as `print_joules` writes it: `14.2 MWh`."""
    return unknown if kwh is None else print_joules(kwh * 3.6e6)


def sentence(text: str) -> str:
    """A note as a sentence of a page: with a capital and a full stop."""
    return f"{text[:1].upper()}{text[1:].removesuffix('.')}."


def print_figure(value: float, digits: int = 3) -> str:
    """`digits` significant digits, without an exponent where a person would write the number out: `0.0123`, `14.2`,
    `1,040`."""
    return f"{value:,.0f}" if 10 ** (digits - 1) <= abs(value) < 1e9 else f"{value:,.{digits}g}"


def print_slurm_time(seconds: float) -> str:
    """Seconds -> SLURM's `D-HH:MM:SS`, rounded up to a minute (SLURM counts limits in minutes)."""
    hours, minutes = divmod(math.ceil(seconds / 60), 60)
    return f"{hours // 24}-{hours % 24:02d}:{minutes:02d}:00"


# Control characters, and those that turn the direction of what follows: a terminal obeys the first, a reader is
# misled by the second. Last what stands for the bytes of a file name that is no UTF-8: no file can be written with
# it.
_UNSEEN = dict.fromkeys(
    (*range(32), *range(127, 160), 0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A),
     *range(0xD800, 0xE000)), "\ufffd"
)  # fmt: skip

_ONE_LINE = {**_UNSEEN, **dict.fromkeys((9, 10, 13), " ")}
_MANY_LINES = {**_UNSEEN, 9: "\t", 10: "\n", 13: " "}


def print_text(text: str, *, lines: bool = False) -> str:
    """What came from a file, fit to be shown: no control character gets through, and only with `lines` a new line."""
    if text.isprintable():  # nearly always, and ten times as fast
        return text
    return text.translate(_MANY_LINES if lines else _ONE_LINE)


def divisors(value: int, most: int = 100_000) -> list[int]:
    """The divisors of a number; only up to `most`, because a damaged file may contain any number."""
    return [d for d in range(1, min(value, most) + 1) if value % d == 0]


def nearest(value: int, valid: Iterable[int]) -> str:
    """The nearest valid values below and above, for a message."""
    others = sorted(set(valid))
    below, above = [v for v in others if v < value], [v for v in others if v > value]
    return " or ".join(f"{v:,}" for v in (*below[-1:], *above[:1])) or "none"
