"""Is our energy right, and what does measuring cost? On a machine with an NVIDIA GPU, torch and nvidia-ml-py, in about 90 seconds:

    python benchmarks/energy_check.py --out benchmarks/results/energy_check.json

1. Windows of several lengths and loads, against NVML's counter read directly (by ctypes, not through our code) just before and just after each of
   ours. The counter moves in jumps (about every 100 ms): where one falls between two readings, the direct ones give a least and a most, and a window
   is off by what it lies outside of them. Beside them the area under NVML's power, which shows that the counter itself tells the truth.
2. Processor time of the thread that a training run samples with, once a second, by the thread's own clock, as a share of one core.
3. Step time with and without that sampler, in turns (off, on, on, off, ...): the mean step of each turn, so that a step which waited counts.

The file is written after each part. `--device cpu` tries the script on any machine: an invented counter and small products; not a measurement.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

sys.path[:1] = [
    str(Path(__file__).resolve().parents[1] / "src")
]  # instead of this folder, whose names hide those of the standard library

from windlass.config.observe import EnergyConfig  # noqa: E402
from windlass.energy.meter import Meter  # noqa: E402
from windlass.energy.sensors import Sample, Sensor, SensorHost  # noqa: E402
from windlass.energy.sensors.nvml import NvmlSensor  # noqa: E402
from windlass.energy.window import MeasurementWindow  # noqa: E402
from windlass.runs.folder import Run  # noqa: E402
from windlass.runs.manifest import commit  # noqa: E402

BEGAN = time.monotonic()
SPANS = [("products", 1.0), ("products", 3.0), ("products", 8.0), ("copies", 4.0), ("half", 3.0), ("idle", 4.0)]
TURN_SECONDS = 4.0
MOST_TURNS, FEWEST_TURNS = 8, 4
GOALS = {"window_off_percent": 1.0, "sampler_percent_of_a_core": 0.5, "step_change_percent": 0.5}

Step = Callable[[], None]


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGAN:5.1f} s] {text}", flush=True)


class Reference(Protocol):
    """The counter and the power as a stranger to our code would read them."""

    def joules(self) -> float: ...

    def watts(self) -> float: ...


class Direct:
    """NVML by ctypes: shares no code with the sensor."""

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


class Invented(Sensor):
    """Stands in for a GPU where there is none: 30 W of idling and 70 W for each second of processor time."""

    name = "invented"

    def joules(self) -> float:
        return 30.0 * time.monotonic() + 70.0 * time.process_time()

    def watts(self) -> float:
        return 100.0

    def read(self) -> list[Sample]:
        return [Sample("gpu0", "device", self.joules(), self.watts())]


class Bench:
    """The device, its sensors and the loads it is put under."""

    def __init__(self, device: str) -> None:
        import torch

        self.torch, self.dry = torch, device == "cpu"
        self.index = None if self.dry else int(device)
        self.place = "cpu" if self.dry else f"cuda:{device}"
        self.reference: Reference = Invented(SensorHost()) if self.index is None else Direct(self.index)
        size = 256 if self.dry else 8192
        kind = torch.float32 if self.dry else torch.bfloat16
        self._a, self._b = (torch.randn(size, size, device=self.place, dtype=kind) for _ in range(2))

    def sensor(self) -> Sensor:
        return Invented(SensorHost()) if self.index is None else NvmlSensor(SensorHost(devices=[self.index], env={}))

    def wait(self) -> None:
        if not self.dry:
            self.torch.cuda.synchronize()

    def loads(self) -> dict[str, Step]:
        return {
            "products": self._products,
            "copies": self._copies,
            "half": self._half,
            "idle": lambda: time.sleep(0.05),
        }

    def _products(self) -> None:
        for _ in range(8):
            self._a @ self._b
        self.wait()

    def _copies(self) -> None:
        for _ in range(64):
            self._a.copy_(self._b)
        self.wait()

    def _half(self) -> None:
        began = time.monotonic()
        self._products()
        time.sleep(time.monotonic() - began)

    def train_step(self) -> Step:
        """Forward, backward and an optimizer that starts many small kernels: the host matters, as in training."""
        torch, width, layers = self.torch, (64 if self.dry else 2048), (4 if self.dry else 24)
        model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(layers)]).to(self.place)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        rows = torch.randn(64 if self.dry else 4096, width, device=self.place)

        def step() -> None:
            with torch.autocast(self.place.split(":")[0], dtype=torch.bfloat16, enabled=not self.dry):
                loss = model(rows).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            self.wait()

        return step


def run_for(step: Step, seconds: float) -> int:
    end, steps = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        step()
        steps += 1
    return steps


class Area:
    """The area under the power, read ten times a second by a thread of this script."""

    def __init__(self, reference: Reference) -> None:
        self.joules, self._reference, self._stop = 0.0, reference, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        at, watts = time.monotonic(), self._reference.watts()
        while True:
            last = self._stop.wait(0.1)
            now, new = time.monotonic(), self._reference.watts()
            self.joules += (watts + new) / 2 * (now - at)
            at, watts = now, new
            if last:
                return

    def __enter__(self) -> Area:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def one_window(bench: Bench, kind: str, seconds: float) -> dict[str, Any]:
    step = bench.loads()[kind]
    run_for(step, 0.5)  # the power of the span before must not count as this load's
    window = MeasurementWindow(sensors=[bench.sensor()])
    read = bench.reference.joules
    with Area(bench.reference) as area:
        outer_begin = read()
        window.begin()
        inner_begin = read()
        run_for(step, seconds)
        inner_end = read()
        found = window.end()
        outer_end = read()
    ours, least, most = found.joules, inner_end - inner_begin, outer_end - outer_begin
    if ours is None or least <= 0:
        raise SystemExit(f"a window of {seconds} s was not measured: ours {ours}, direct {least} to {most} J")
    direct = min(max(ours, least), most)
    say(
        f"{kind:8} {found.seconds:5.2f} s  window {ours:9.2f} J  direct {least:9.2f} to {most:9.2f} J  {100 * (ours / direct - 1):+.3f} %"
    )
    return {
        "load": kind, "seconds": found.seconds, "window_joules": ours, "direct_joules": [least, most], "off_percent": 100 * (ours / direct - 1),
        "watts": ours / found.seconds, "resolution_joules": found.resolution_joules, "area_under_power_joules": area.joules, "area_off_percent": 100 * (area.joules / direct - 1),
    }  # fmt: skip


def windows(bench: Bench, scale: float) -> dict[str, Any]:
    run_for(bench.loads()["products"], 1.5 * scale)
    rows = [one_window(bench, kind, seconds * scale) for kind, seconds in SPANS]
    least, most = (sum(r["direct_joules"][i] for r in rows) for i in (0, 1))
    ours = sum(r["window_joules"] for r in rows)
    together = 100 * (ours / min(max(ours, least), most) - 1)
    return {
        "rows": rows,
        "worst_off_percent": max(abs(r["off_percent"]) for r in rows),
        "together_off_percent": together,
    }


@contextmanager
def sampling(bench: Bench) -> Iterator[Callable[[], float]]:
    """The meter of a training run, once a second, with its file; gives the processor seconds that its thread has used."""
    with tempfile.TemporaryDirectory() as folder:
        sensors = [bench.sensor()] if bench.dry else None
        meter = Meter(
            None,
            EnergyConfig(),
            devices=None if bench.dry else [bench.index or 0],
            run=Run(Path(folder)),
            sensors=sensors,
        )
        meter.start()
        ident = meter._ticker._thread.ident
        assert ident is not None
        clock = time.pthread_getcpuclockid(ident)
        try:
            yield lambda: time.clock_gettime(clock)
        finally:
            meter.stop()


def sampler_cost(bench: Bench, seconds: float) -> dict[str, Any]:
    """By the thread's clock, and as a check by the whole process, which does nothing else meanwhile."""
    with sampling(bench) as spent:
        began, thread, process = time.monotonic(), spent(), time.process_time()
        time.sleep(seconds)
        wall, thread, process = time.monotonic() - began, spent() - thread, time.process_time() - process
    say(f"sampler: {1e3 * thread:.2f} ms of processor in {wall:.1f} s = {100 * thread / wall:.4f} % of a core")
    return {
        "seconds": wall, "thread_cpu_seconds": thread, "percent_of_a_core": 100 * thread / wall, "process_percent_of_a_core": 100 * process / wall,
    }  # fmt: skip


def one_turn(bench: Bench, step: Step, steps: int, sampled: bool) -> dict[str, Any]:
    def timed() -> tuple[float, list[float]]:
        times, began = [], time.perf_counter()
        for _ in range(steps):
            at = time.perf_counter()
            step()
            times.append(time.perf_counter() - at)
        return time.perf_counter() - began, times

    cpu = None
    if sampled:
        with sampling(bench) as spent:
            before = spent()
            wall, times = timed()
            cpu = spent() - before
    else:
        wall, times = timed()
    say(f"steps {'with   ' if sampled else 'without'} the sampler: mean {1e3 * wall / steps:.4f} ms of {steps}")
    return {
        "sampled": sampled, "steps": steps, "seconds": wall, "mean_ms": 1e3 * wall / steps, "median_ms": 1e3 * statistics.median(times),
        "slowest_ms": 1e3 * max(times), "sampler_percent_of_a_core": None if cpu is None else 100 * cpu / wall,
    }  # fmt: skip


def call_costs(bench: Bench, calls: int = 40) -> dict[str, float]:
    """Processor milliseconds of one call to the driver, by name: what a sample is made of."""
    if bench.index is None:
        return {}
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(bench.index)
    found = {}
    for name in ("TotalEnergyConsumption", "PowerUsage", "UtilizationRates"):
        call, began = getattr(pynvml, f"nvmlDeviceGet{name}"), time.thread_time()
        for _ in range(calls):
            call(handle)
            time.sleep(0.01)  # as in a sampler: the driver's caches are cold again
        found[name] = 1e3 * (time.thread_time() - began) / calls
    pynvml.nvmlShutdown()
    say(f"processor ms a call: {json.dumps(found)}")
    return found


def step_times(bench: Bench, scale: float, limit: float) -> dict[str, Any]:
    """As many turns as fit before the limit, the same number of steps in each; pairs in mirrored order, so that drift hits both alike."""
    step = bench.train_step()
    run_for(step, 1.0 * scale)
    steps = max(10, round(run_for(step, scale) * TURN_SECONDS))
    left = limit - (time.monotonic() - BEGAN)
    pairs = max(FEWEST_TURNS, min(MOST_TURNS, int(left / TURN_SECONDS / scale))) // 2
    order = [bool((turn + 1) // 2 % 2) for turn in range(2 * pairs)]
    return {"turns": [one_turn(bench, step, steps, sampled) for sampled in order]}


def judged_steps(turns: list[dict[str, Any]]) -> dict[str, float]:
    means = {kind: [t["mean_ms"] for t in turns if t["sampled"] is kind] for kind in (False, True)}
    without, with_it = statistics.median(means[False]), statistics.median(means[True])
    return {
        "mean_step_ms_without": without,
        "mean_step_ms_with": with_it,
        "change_percent": 100 * (with_it / without - 1),
        "spread_without_percent": 100 * (max(means[False]) - min(means[False])) / without,
        "spread_with_percent": 100 * (max(means[True]) - min(means[True])) / without,
    }


def judge(result: dict[str, Any]) -> dict[str, bool]:
    """Only what has been measured is judged."""
    passes = {}
    if "windows" in result:
        passes["window within 1 %"] = result["windows"]["worst_off_percent"] <= GOALS["window_off_percent"]
    if "sampler" in result:
        passes["sampler under 0.5 % of a core"] = (
            result["sampler"]["percent_of_a_core"] < GOALS["sampler_percent_of_a_core"]
        )
    if "step_time" in result:
        found = result["step_time"]
        noise = max(GOALS["step_change_percent"], found["spread_without_percent"])
        passes["step time within noise"] = found["change_percent"] <= noise
    return passes


def _answer(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip() or None
    except (OSError, subprocess.TimeoutExpired):
        return None


def about(bench: Bench, given_commit: str | None) -> dict[str, Any]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,power.limit", "--format=csv,noheader"]
    return {
        "command": " ".join(["python", *sys.argv]),
        "commit": given_commit or commit(),
        "device": "none: a dry run with an invented counter" if bench.dry else _answer(*query),
        "torch": bench.torch.__version__,
        "python": platform.python_version(),
        "time": time.time(),
        "goals": GOALS,
    }


def write(out: Path | None, result: dict[str, Any]) -> None:
    result["passes"] = judge(result)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="0", help="number of the GPU, or cpu for a dry run")
    parser.add_argument("--commit", help="where the tree is a copy without its history")
    parser.add_argument("--cost-seconds", type=float, default=20.0)
    parser.add_argument("--limit-seconds", type=float, default=92.0, help="the last part fits its turns into this")
    parser.add_argument("--scale", type=float, default=1.0, help="shortens the spans of a dry run")
    words = parser.parse_args()
    bench = Bench(words.device)
    say(f"ready on {bench.place}")
    result: dict[str, Any] = {"about": about(bench, words.commit)}
    result["windows"] = windows(bench, words.scale)
    write(words.out, result)
    result["sampler"] = sampler_cost(bench, words.cost_seconds)
    result["sampler"]["call_milliseconds"] = call_costs(bench)
    write(words.out, result)
    found = step_times(bench, words.scale, words.limit_seconds)
    result["step_time"] = {**judged_steps(found["turns"]), **found}
    result["about"]["wall_seconds"] = time.monotonic() - BEGAN
    write(words.out, result)
    say(f"{json.dumps(judged_steps(found['turns']))}\n{json.dumps(result['passes'], indent=2)}")
    sys.exit(0 if all(result["passes"].values()) else 1)


if __name__ == "__main__":
    main()
