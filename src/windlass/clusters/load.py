"""Which machines do we know? The files shipped with windlass, overlaid with the user's own."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from windlass.clusters.model import Cluster, Device
from windlass.config.load import read_toml, validate
from windlass.errors import ConfigError

SHIPPED = Path(__file__).parent / "data"


def user_folder() -> Path:
    """Where a user adds a machine or overrides a value with one TOML file."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "windlass" / "clusters"


def cluster_names() -> list[str]:
    found = {p.stem for p in _files(SHIPPED)} | {p.stem for p in _files(user_folder())}
    return sorted(found - {"devices"})


def _meant(name: str) -> str:
    """People say LUMI, leonardo or mn5; where no name is near, all of them."""
    names = cluster_names()
    low = name.lower().replace("mn5", "marenostrum5")
    near = [n for n in names if low and (low in n or n in low)] or get_close_matches(low, names, n=3, cutoff=0.5)
    known = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names)};"
    return f"{known} add your own as {user_folder()}/{name}.toml"


def load_cluster(name: str) -> Cluster:
    """The shipped file with the user's file of the same name laid over it, checked."""
    shipped, mine = SHIPPED / f"{name}.toml", user_folder() / f"{name}.toml"
    if not shipped.is_file() and not mine.is_file():
        raise ConfigError("clusters.unknown-cluster", f"unknown cluster {name!r}", hint=_meant(name))
    raw: dict[str, Any] = tomllib.loads(shipped.read_text()) if shipped.is_file() else {}
    if mine.is_file():
        raw = _overlay(raw, read_toml(mine)[0])
    raw.setdefault("name", name)
    cluster = validate(Cluster, raw, str(mine if mine.is_file() else shipped))
    from windlass.clusters.lint import lint

    problems = lint(cluster)
    if problems:
        raise ConfigError(
            "clusters.cluster",
            f"cluster {name}: " + "; ".join(problems),
            hint="two ranks on one core run at half speed without a message: correct the file",
        )
    load_device(cluster.device)
    return cluster


@cache
def _devices(stamp: tuple[float, ...]) -> dict[str, Device]:
    raw = tomllib.loads((SHIPPED / "devices.toml").read_text())
    mine = user_folder() / "devices.toml"
    if mine.is_file():
        raw = _overlay(raw, read_toml(mine)[0])
    return {name: validate(Device, {"name": name, **value}, f"devices.toml: {name}") for name, value in raw.items()}


def devices() -> dict[str, Device]:
    """Every known device by name."""
    mine = user_folder() / "devices.toml"
    return _devices(tuple(p.stat().st_mtime for p in (SHIPPED / "devices.toml", mine) if p.is_file()))


def load_device(name: str) -> Device:
    known = devices()
    if name not in known:
        near = get_close_matches(name, known, n=3, cutoff=0.3) or sorted(known)
        raise ConfigError(
            "clusters.unknown-device",
            f"unknown device {name!r}",
            hint=f"known: {', '.join(near)}; add yours to {user_folder()}/devices.toml",
        )
    return known[name]


def device_by_driver_name(reported: str) -> Device | None:
    """The device whose pattern matches what the driver says ("NVIDIA H200"), or None: no guess, hence no wrong MFU."""
    low = reported.lower()
    # Not followed by a digit: "nvidia a10" is not the beginning of "NVIDIA A100".
    matches = [
        (len(p), d) for d in devices().values() for p in d.name_patterns if re.search(re.escape(p) + r"(?!\d)", low)
    ]
    return max(matches, key=lambda m: m[0])[1] if matches else None


def find_device(text: str) -> Device | None:
    """The device that a table of runs means: "H100-80GB", "8x A100 (SXM4, 40G)" or a driver's name; the longest alias decides.

    Unlike `device_by_driver_name` this takes a bare "A100" for its commonest part: the reader of a table has no driver to ask."""
    if (exact := text.strip().lower()) in devices():
        return devices()[exact]
    words = _words(text)
    matches = [
        (len(alias), -order, device)
        for order, device in enumerate(devices().values())
        for alias in device.aliases
        if all(_occurs(word, words) for word in alias.split())
    ]
    return max(matches, key=lambda m: m[:2])[2] if matches else device_by_driver_name(text)


def _words(text: str) -> str:
    """Lower case, words by single spaces, memory as "80gb", without a count in front ("8xA100")."""
    low = re.sub(r"(?<=[a-z0-9])[-_](16|24|32|40|48|64|80|94|96)\b(?![-_.]?\s*g)", r" \1gb", text.lower())  # "A100-40"
    low = re.sub(r"[^a-z0-9.]+", " ", low)
    low = re.sub(r"\b\d+\s*x\s*(?=[a-z])", "", low)
    return re.sub(r"\b(\d+)\s*g(?:b|ib)?\b", r"\1gb", low)


def _occurs(word: str, text: str) -> bool:
    """As a word's beginning, not followed by another digit: "a10" is in "a10g", not in "a100"; "b200" is not in "gb200"."""
    before = r"(?<!\d)" if word[0].isdigit() else r"(?<![a-z0-9])"
    return re.search(before + re.escape(word) + r"(?!\d)", text) is not None


def _files(folder: Path) -> Iterator[Path]:
    return folder.glob("*.toml") if folder.is_dir() else iter(())


def _overlay(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in top.items():
        inner = merged.get(key)
        merged[key] = _overlay(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
    return merged
