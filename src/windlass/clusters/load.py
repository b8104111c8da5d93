"""Reads and checks cluster and device files: those shipped with windlass, overlaid with the user's own."""

import logging
import os
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from windlass.clusters.masks import lint_masks
from windlass.clusters.model import Cluster, Device
from windlass.config.load import read_toml, validate
from windlass.errors import ConfigError
from windlass.files import FileStamps, file_stamps

SHIPPED = Path(__file__).parent / "data"
logger = logging.getLogger(__name__)


def user_folder() -> Path:
    """Where a user adds a machine or overrides a value with one TOML file."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "windlass" / "clusters"


def cluster_names() -> list[str]:
    return sorted({p.stem for folder in (SHIPPED, user_folder()) for p in folder.glob("*.toml")} - {"devices"})


def load_cluster(name: str) -> Cluster:
    """The shipped file with the user's file of the same name laid over it, checked."""
    paths = SHIPPED / f"{name}.toml", user_folder() / f"{name}.toml"
    cluster = _read_cluster(name, *paths, file_stamps(*paths))
    load_device(cluster.device)
    return cluster


@cache
def _read_cluster(name: str, shipped: Path, own: Path, stamps: FileStamps) -> Cluster:
    """Read once while the files stay the same: a dashboard asks for the cluster of each of its runs."""
    if not shipped.is_file() and not own.is_file():
        names, lower = cluster_names(), name.lower().replace("mn5", "marenostrum5")
        close = [n for n in names if lower and (lower in n or n in lower)] or get_close_matches(
            lower, names, cutoff=0.5
        )
        suggestion = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(names)};"
        raise ConfigError(
            "clusters.unknown-cluster",
            f"unknown cluster {name!r}",
            hint=f"{suggestion} add your own as {user_folder()}/{name}.toml",
        )
    origin = str(own if own.is_file() else shipped)
    cluster = validate(Cluster, {"name": name} | _read_overlaid(shipped, own), origin)
    paths, fitted_on = [str(path) for path in (shipped, own) if path.is_file()], cluster.efficiency.fitted_on
    constants = f"fitted to measured runs on {fitted_on}" if fitted_on else "the planner's own"
    logger.info("cluster %s: %s; efficiency constants: %s", name, " and ".join(paths), constants)
    node, binding = cluster.node, cluster.binding
    faults = list(lint_masks(cluster, binding.masks)) if binding.kind == "mask" else []
    if (node.cores_usable or 0) > node.cores:
        faults.append(f"cores_usable ({node.cores_usable}) is more than cores ({node.cores})")
    if faults:
        raise ConfigError(
            "clusters.invalid-binding",
            f"cluster {name}: " + "; ".join(faults),
            hint="correct the file: two ranks on one core run at half speed without a warning",
        )
    return cluster


def nearest_masks(entries: Sequence[str]) -> tuple[str, list[str]] | None:
    """The cluster whose masks agree with most of these entries, at least half, and its masks."""
    best: tuple[int, str, list[str]] = (0, "", [])
    for name in cluster_names():
        try:
            masks = load_cluster(name).binding.masks
        except ConfigError:  # a file of the user that is wrong itself
            continue
        equal = sum(mask.lower() == entry.lower() for mask, entry in zip(masks, entries, strict=False))
        best = max(best, (equal, name, masks), key=lambda candidate: candidate[0])
    return (best[1], best[2]) if best[0] and 2 * best[0] >= len(best[2]) else None


def _read_overlaid(shipped: Path, own: Path) -> dict[str, Any]:
    raw = read_toml(shipped)[0] if shipped.is_file() else {}
    return overlay(raw, read_toml(own)[0]) if own.is_file() else raw


def overlay(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """The values of both; tables that both have are overlaid in turn."""
    shared = [k for k, v in top.items() if isinstance(v, Mapping) and isinstance(base.get(k), Mapping)]
    return {**base, **top, **{key: overlay(base[key], top[key]) for key in shared}}


def devices() -> dict[str, Device]:
    paths = SHIPPED / "devices.toml", user_folder() / "devices.toml"
    return _read_devices(*paths, file_stamps(*paths))


@cache
def _read_devices(shipped: Path, own: Path, stamps: FileStamps) -> dict[str, Device]:
    return {
        name: validate(Device, {"name": name, **value}, f"devices.toml: {name}")
        for name, value in _read_overlaid(shipped, own).items()
    }


def load_device(name: str) -> Device:
    by_name = devices()
    if name not in by_name:
        close = get_close_matches(name, by_name, n=3, cutoff=0.3) or sorted(by_name)
        raise ConfigError(
            "clusters.unknown-device",
            f"unknown device {name!r}",
            hint=f"use one of {', '.join(close)}, or add yours to {user_folder()}/devices.toml",
        )
    return by_name[name]


def device_by_driver_name(reported: str) -> Device | None:
    """The device whose pattern matches the driver's name ("NVIDIA H200"), or None: no guess, hence no wrong MFU."""
    # Not followed by a digit: "nvidia a10" is not the beginning of "NVIDIA A100".
    matches = [
        (len(pattern), device)
        for device in devices().values()
        for pattern in device.name_patterns
        if re.search(re.escape(pattern) + r"(?!\d)", reported.lower())
    ]
    return max(matches, key=lambda match: match[0])[1] if matches else None


def find_device(text: str) -> Device | None:
    """The device that a table of runs means: "H100-80GB", "8x A100 (SXM4, 40G)" or a driver's name.

    The longest alias decides. Unlike `device_by_driver_name` a bare "A100" means its commonest part: the reader of a
    table has no driver to ask.
    """
    by_name = devices()
    if text.strip().lower() in by_name:
        return by_name[text.strip().lower()]
    # Lower case, single spaces, memory as "80gb" (also of "A100-40"), without a count in front ("8xA100").
    lower = re.sub(r"(?<=[a-z0-9])[-_](16|24|32|40|48|64|80|94|96)\b(?![-_.]?\s*g)", r" \1gb", text.lower())
    lower = re.sub(r"[^a-z0-9.]+", " ", lower)
    lower = re.sub(r"\b\d+\s*x\s*(?=[a-z])", "", lower)
    lower = re.sub(r"\b(\d+)\s*g(?:b|ib)?\b", r"\1gb", lower)

    def occurs(word: str) -> bool:
        # At the start of a word and not followed by a digit: "a10" is in "a10g", not in "a100"; "b200" not in "gb200".
        before = r"(?<!\d)" if word[0].isdigit() else r"(?<![a-z0-9])"
        return re.search(before + re.escape(word) + r"(?!\d)", lower) is not None

    matches = [
        (len(alias), -order, device)
        for order, device in enumerate(by_name.values())
        for alias in device.aliases
        if all(occurs(word) for word in alias.split())
    ]
    return max(matches, key=lambda match: match[:2])[2] if matches else device_by_driver_name(text)
