"""Is our energy right, and what does measuring cost? On a machine with an NVIDIA GPU, torch and nvidia-ml-py:

    python benchmarks/energy_check.py --out benchmarks/results/energy_check.json

1. Windows of several lengths under load and idle, against NVML's counter read directly (by ctypes, not through our code) around the same span.
2. Processor time of the 1 Hz sampler, as a share of one core.
3. Step time with and without the sampler, in turns.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:1] = [
    str(Path(__file__).resolve().parents[1] / "src")
]  # instead of this folder, whose names hide those of the standard library

from windlass.energy.sampler import Sampler  # noqa: E402
from windlass.energy.sensors.nvml import NvmlSensor  # noqa: E402
from windlass.energy.window import Ticker, Window  # noqa: E402


class Direct:
    """NVML by ctypes: the reference that shares no code with the sensor."""

    def __init__(self, index: int) -> None:
        self._lib = ctypes.CDLL("libnvidia-ml.so.1")
        self._check(self._lib.nvmlInit_v2())
        self._handle = ctypes.c_void_p()
        self._check(self._lib.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(self._handle)))

    def joules(self) -> float:
        value = ctypes.c_ulonglong()
        self._check(self._lib.nvmlDeviceGetTotalEnergyConsumption(self._handle, ctypes.byref(value)))
        return value.value / 1e3

    def watts(self) -> float:
        value = ctypes.c_uint()
        self._check(self._lib.nvmlDeviceGetPowerUsage(self._handle, ctypes.byref(value)))
        return value.value / 1e3

    @staticmethod
    def _check(code: int) -> None:
        if code:
            raise SystemExit(f"NVML answered with error {code}")


def load(torch: Any, size: int = 8192) -> Callable[[], None]:
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def step() -> None:
        for _ in range(8):
            a @ b

    return step


def span(torch: Any, step: Callable[[], None] | None, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if step is None:
            time.sleep(0.05)
        else:
            step()
            torch.cuda.synchronize()


def windows(torch: Any, direct: Direct, index: int) -> list[dict[str, Any]]:
    step, rows = load(torch), []
    span(torch, step, 3.0)
    for kind, seconds in [("load", 1.0), ("load", 3.0), ("load", 10.0), ("load", 30.0), ("idle", 10.0)] * 2:
        window = Window(sensors=[NvmlSensor([index], env={})])
        before = direct.joules()
        window.begin()
        span(torch, step if kind == "load" else None, seconds)
        found = window.end()
        after = direct.joules()
        ours, reference = found.joules or 0.0, after - before
        rows.append(
            {
                "kind": kind,
                "seconds": round(found.seconds, 3),
                "window_joules": ours,
                "direct_joules": reference,
                "off_percent": 100 * (ours / reference - 1),
            }
        )
        print(
            f"{kind:5} {found.seconds:6.2f} s  window {ours:10.2f} J  direct {reference:10.2f} J  off {rows[-1]['off_percent']:+.3f} %"
        )
    return rows


def power_against_counter(torch: Any, direct: Direct) -> dict[str, float]:
    """The trapezoid of power beside the counter: what a device without a counter would give."""
    step, total = load(torch), 0.0
    span(torch, step, 2.0)
    began, before, last_at, last = time.monotonic(), direct.joules(), time.monotonic(), direct.watts()
    while time.monotonic() - began < 20.0:
        span(torch, step, 0.5)
        now, watts = time.monotonic(), direct.watts()
        total += (watts + last) / 2 * (now - last_at)
        last_at, last = now, watts
    counter = direct.joules() - before
    return {"power_joules": total, "counter_joules": counter, "off_percent": 100 * (total / counter - 1)}


def sampler_cost(index: int, seconds: float) -> dict[str, float]:
    """Processor time of the whole process while only the sampler runs, against the same sleep without it."""

    def spent(with_sampler: bool) -> float:
        sampler = Sampler([NvmlSensor([index], env={})])
        ticker = Ticker(sampler.read, 1.0, "sampler")
        sampler.read()
        if with_sampler:
            ticker.start()
        began = time.process_time()
        time.sleep(seconds)
        used = time.process_time() - began
        ticker.stop() if with_sampler else None
        return used

    without, with_it = spent(False), spent(True)
    return {
        "seconds": seconds,
        "cpu_seconds": with_it - without,
        "percent_of_a_core": 100 * (with_it - without) / seconds,
    }


def step_times(torch: Any, index: int, steps: int = 150, turns: int = 6) -> dict[str, float]:
    """Median step with and without the 1 Hz sampler, in turns, so that drift of the clock speed hits both."""
    step = load(torch, 4096)
    found: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(2 * turns):
        sampled = bool(turn % 2)
        sampler = Sampler([NvmlSensor([index], env={})])
        ticker = Ticker(sampler.read, 1.0, "sampler")
        if sampled:
            ticker.start()
        times = []
        for _ in range(steps):
            began = time.perf_counter()
            step()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        if sampled:
            ticker.stop()
        found[sampled].append(statistics.median(times[10:]))
    without, with_it = statistics.median(found[False]), statistics.median(found[True])
    noise = max(found[False]) - min(found[False])
    return {
        "step_ms_without": 1e3 * without,
        "step_ms_with": 1e3 * with_it,
        "change_percent": 100 * (with_it / without - 1),
        "noise_percent": 100 * noise / without,
    }


def about() -> dict[str, Any]:
    import torch

    top = Path(__file__).resolve().parents[1]
    commit = subprocess.run(
        ["git", "-C", str(top), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version,power.limit", "--format=csv,noheader"],
        capture_output=True,
        text=True,
    ).stdout.strip()
    return {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit or None,
        "device": driver,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "time": time.time(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--cost-seconds", type=float, default=60.0)
    words = parser.parse_args()
    import torch

    direct = Direct(words.device)
    rows = windows(torch, direct, words.device)
    result = {
        "about": about(), "windows": rows, "worst_off_percent": max(abs(r["off_percent"]) for r in rows), "power_sampling": power_against_counter(torch, direct),
        "sampler": sampler_cost(words.device, words.cost_seconds), "step_time": step_times(torch, words.device),
    }  # fmt: skip
    result["passes"] = {
        "window within 1 %": result["worst_off_percent"] <= 1.0,
        "sampler under 0.5 % of a core": result["sampler"]["percent_of_a_core"] < 0.5,
        "step time within noise": abs(result["step_time"]["change_percent"])
        <= max(0.5, result["step_time"]["noise_percent"]),
    }
    print(json.dumps({k: v for k, v in result.items() if k != "windows"}, indent=2))
    if words.out:
        words.out.parent.mkdir(parents=True, exist_ok=True)
        words.out.write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(0 if all(result["passes"].values()) else 1)


if __name__ == "__main__":
    main()
