"""Marks figures beyond the highest that was ever published (`measured.toml`)."""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from windlass.clusters import Device
from windlass.units import print_share, print_tokens


@cache
def limits() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def mfu_beyond(mfu: float | None, device: Device, precision: str) -> list[str]:
    """A sentence when no run on this generation of devices has reached the MFU; nothing where no run is known."""
    limit = limits()["mfu"].get(device.generation, {}).get("fp8" if precision == "fp8" else "bf16")
    if mfu is None or limit is None or mfu <= limit["highest"]:
        return []
    return [
        f"an MFU of {print_share(mfu)} is above {print_share(limit['highest'])}, the highest ever measured on "
        f"{device.generation} devices ({limit['source']})"
    ]


def tokens_beyond(tokens: float | None, parameters: float) -> list[str]:
    total, each = limits()["tokens"]["total"], limits()["tokens"]["per_parameter"]
    beyond = []
    if tokens is not None and tokens > total["highest"]:
        beyond.append(
            f"{print_tokens(tokens)} tokens are more than {print_tokens(total['highest'])}, the most that any "
            f"published run was trained on ({total['source']})"
        )
    if tokens is not None and tokens > each["highest"] * parameters:
        beyond.append(
            f"{tokens / parameters:,.0f} tokens per parameter are more than {each['highest']:,}, the most of any "
            f"published run ({each['source']})"
        )
    return beyond
