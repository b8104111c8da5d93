"""Stand-ins for drivers: they answer in the units and with the errors of the real libraries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest


class FakeNvml:
    """pynvml's calls: energy in millijoules since the driver was loaded, power in milliwatts, errors of its own class."""

    class NVMLError(Exception):
        pass

    def __init__(self, millijoules: list[list[int | None]], milliwatts: int = 690_000, starts: bool = True) -> None:
        self._rows, self._watts, self._starts = millijoules, milliwatts, starts
        self._reads = [0] * len(millijoules)

    def nvmlInit(self) -> None:
        if not self._starts:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return len(self._rows)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}aaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        for index in range(len(self._rows)):
            if uuid == self.nvmlDeviceGetUUID(index):
                return index
        raise self.NVMLError("Not Found")

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        row = self._rows[handle]
        value = row[min(self._reads[handle], len(row) - 1)]
        self._reads[handle] += 1
        if value is None:
            raise self.NVMLError("Not Supported")
        return value

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return self._watts

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=97, memory=40)


@dataclass
class Script:
    """A sensor that plays samples back, one list per reading; the last one repeats."""

    readings: list[list[Any]]
    name: str = "nvml"
    note: str = ""
    used: float | None = None
    update_seconds: float | None = None
    at: int = field(default=0)

    def read(self) -> list[Any]:
        found = self.readings[min(self.at, len(self.readings) - 1)]
        self.at += 1
        return found

    def utilization(self) -> float | None:
        return self.used

    def close(self) -> None: ...


@pytest.fixture
def nvml() -> type[FakeNvml]:
    return FakeNvml


@pytest.fixture
def script() -> type[Script]:
    return Script


@pytest.fixture
def clock() -> Callable[[], float]:
    """One second per look."""
    state = {"now": 0.0}

    def tick() -> float:
        state["now"] += 1.0
        return state["now"]

    return tick
