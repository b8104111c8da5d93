"""Which setting is fastest on one GPU, which does not fit, and did the planner know? A grid of at least 20 points in five minutes.

    python benchmarks/gpu_sweep.py --measure              # on the GPU: writes gpu_sweep.json after each point
    python benchmarks/gpu_sweep.py --render               # anywhere: gpu_sweep.csv, .md, .html and pictures from that JSON
    python benchmarks/gpu_sweep.py --measure --render --tiny --out DIR [--memory-limit BYTES]   # does it all run, on a CPU?

The points are those of recipes/sweeps/one_gpu.toml. They run in one process, because a CUDA context and the imports would cost more
than the points; before each, what the one before held is freed and the peak counter is set back, and the bytes that were still
held are kept with the result. When that is more than a little, or when a point takes the process with it, a new process goes on
with the next point. Running out of memory is a result. Two warm-up steps, then five timed ones or 1.2 s, whichever is longer; step
times by CUDA events, memory is the allocator's peak, energy is NVML's counter over the timed steps. --measure goes on where it
stopped, and --again begins anew.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Instead of this folder, where tokenize.py hides a module of Python's own.
sys.path[:1] = [str(ROOT / "src"), str(ROOT)]

SWEEP = ROOT / "recipes/sweeps/one_gpu.toml"
TINY = {"layers": 2, "width": 64, "ffn": 96, "heads": 4, "kv_heads": 2, "vocab": 256}
WARM, TIMED, TIMED_SECONDS = 2, 5, 1.2
HELD_BYTES = 256 * 2**20
"""More than this left over from the point before, and a new process goes on: its peaks would no longer be a point's own."""
AGAIN = 75
"""Exit code of a worker that wants a fresh process."""
TOO_LATE = 124
POINT_SECONDS = 60.0
"""A point that takes longer is ended, and the next begins in a new process."""
MARGIN_SECONDS = 12.0
"""No point begins with less time than this left."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="run the points that have no result yet")
    parser.add_argument("--render", action="store_true", help="table, page and pictures from the JSON")
    parser.add_argument("--again", action="store_true", help="forget the results that are there")
    parser.add_argument("--seconds", type=float, default=285, help="begin no point that would not end before this")
    parser.add_argument("--tiny", action="store_true", help="a model of 0.1M parameters and 64 tokens, for a CPU")
    parser.add_argument(
        "--memory-limit", type=int, help="bytes of private memory for the worker (out of memory on a CPU)"
    )
    parser.add_argument(
        "--device", default=None, help="predict for this device (devices.toml) instead of the one measured"
    )
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ROOT / "benchmarks" / "results")))
    parser.add_argument("--commit", help="where the tree was copied to without its .git: the commit it was of")
    parser.add_argument("--worker", type=float, metavar="DEADLINE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    store = Store(args.out / "gpu_sweep.json")
    if args.worker is not None:
        return work(store, args.worker, tiny=args.tiny)
    if args.measure:
        measure(store, args)
    if args.render:
        render(store, args)
    return 0


class Store:
    """gpu_sweep.json: written whole after every change, so that whatever ends the run loses one point at most."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, Any]:
        return json.loads(self.path.read_text()) if self.path.is_file() else {"about": {}, "points": {}}

    def write(self, record: dict[str, Any]) -> None:
        beside = self.path.with_suffix(".part")
        beside.write_text(json.dumps(record, indent=1) + "\n")
        beside.replace(self.path)

    def put(self, name: str, result: dict[str, Any]) -> None:
        record = self.read()
        record["points"][name] = result
        self.write(record)

    def missing(self, names: Sequence[str]) -> list[str]:
        done = self.read()["points"]
        return [name for name in names if "outcome" not in done.get(name, {})]


# -- the points ---------------------------------------------------------------------------------------------------------------


def load(tiny: bool) -> tuple[Any, list[Any]]:
    """The sweep and its points, variant by variant: what is lost when time runs out is the last variant, not the largest batch."""
    from dataclasses import replace

    from windlass.config.sweep import load_sweep
    from windlass.launch.sweep.points import make_points

    loaded = load_sweep(SWEEP)
    if tiny:
        base = {**loaded.base, "model": TINY, "data": {"seq_len": 64}}
        base["train"] = {**base["train"], "precision": "fp32"}
        loaded = replace(loaded, base=base)
    order = [value["name"] for value in loaded.sweep.matrix["variant"]]
    return loaded, sorted(make_points(loaded), key=lambda p: order.index(p.values["variant"]))


# -- measuring ----------------------------------------------------------------------------------------------------------------


def measure(store: Store, args: argparse.Namespace) -> None:
    """One worker after the other until every point has a result or the time is up."""
    began = time.time()
    _, points = load(args.tiny)
    names = [p.name for p in points]
    if args.again:
        store.path.unlink(missing_ok=True)
    record, command = store.read(), " ".join(["python", *sys.argv])
    earlier = (
        record["about"].get("command") if record["points"] else None
    )  # a second command measures what the first left
    about = {"command": "; ".join(filter(None, [earlier, command])), "commit": args.commit or commit()}
    store.write({**record, "about": {**record["about"], **about}})
    deadline = began + args.seconds
    while store.missing(names) and deadline - time.time() > MARGIN_SECONDS:
        code = run_worker(store, args, deadline)
        if code == 0:
            break
        if code != AGAIN:
            blame(store, code)
    left = store.missing(names)
    record = store.read()
    spent = float(record["about"].get("wall_seconds") or 0) + time.time() - began
    store.write({**record, "about": {**record["about"], "wall_seconds": spent}})
    print(f"{len(names) - len(left)} of {len(names)} points in {time.time() - began:.0f} s" + (f"; not measured: {', '.join(left)}" if left else ""))  # fmt: skip


def run_worker(store: Store, args: argparse.Namespace, deadline: float) -> int:
    words = [sys.executable, str(Path(__file__).resolve()), "--worker", str(deadline), "--out", str(args.out)]
    words += ["--tiny"] if args.tiny else []
    limit = args.memory_limit

    def limited() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    process = subprocess.Popen(words, preexec_fn=limited)
    try:
        while time.time() < min(deadline + MARGIN_SECONDS, begun_at(store) + POINT_SECONDS):
            if process.poll() is not None:
                return process.returncode
            time.sleep(0.2)
        return TOO_LATE
    finally:
        process.kill()
        process.wait()


def begun_at(store: Store) -> float:
    """When the running point began; now, when none runs."""
    running = [r["began_at"] for r in store.read()["points"].values() if "outcome" not in r]
    return running[0] if running else time.time()


def blame(store: Store, code: int) -> None:
    """The worker ended in the middle of a point: that is the point's result."""
    for name, result in store.read()["points"].items():
        if "outcome" not in result:
            late = code == TOO_LATE
            detail = (
                f"not done after {time.time() - result['began_at']:.0f} s"
                if late
                else f"the process ended with exit code {code}"
            )
            store.put(name, {**result, "outcome": "timeout" if late else "error", "detail": detail})
            return
    raise SystemExit(f"the worker ended with exit code {code} before its first point")


def work(store: Store, deadline: float, *, tiny: bool) -> int:
    """All points in this process, as long as it is clean."""
    import torch

    _, points = load(tiny)
    cuda = torch.cuda.is_available()
    record = store.read()
    store.write({**record, "about": {**record["about"], **about(tiny)}})
    todo = store.missing([p.name for p in points])
    for point in (p for p in points if p.name in todo):
        if deadline - time.time() < MARGIN_SECONDS:
            return 0
        held = free(cuda)
        if held > HELD_BYTES:
            print(f"{held / 2**20:.0f} MiB are still held: a new process goes on", flush=True)
            return AGAIN
        store.put(point.name, {"began_at": time.time()})
        began = time.perf_counter()
        result = attempt(point, cuda)
        result |= {"held_before_bytes": held, "seconds": time.perf_counter() - began}
        store.put(point.name, result)
        print(words_of(point.name, result), flush=True)
    return 0


def free(cuda: bool) -> int:
    """Let go of everything that a point held; bytes that stay all the same."""
    import torch

    torch._dynamo.reset()  # each point compiles anew; otherwise the recompile limit is hit
    gc.collect()
    if not cuda:
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def attempt(point: Any, cuda: bool) -> dict[str, Any]:
    from windlass.train.failure import OutOfMemoryError, explain

    try:
        return {"outcome": "ok", **measure_point(point, cuda)}
    except Exception as error:
        known = explain(error)
        kind = "oom" if isinstance(known, OutOfMemoryError) else "error"
        # Words only: the exception itself would hold the frames, and with them the memory.
        return {"outcome": kind, "detail": f"{type(error).__name__}: {error}".splitlines()[0][:300]}


def measure_point(point: Any, cuda: bool) -> dict[str, Any]:
    from benchmarks.one_process import open_training, stepping

    folder = Path(tempfile.mkdtemp(prefix="windlass-sweep-"))
    try:
        training = open_training(point.recipe, folder)
        with stepping(training) as next_step:
            return timed_steps(training, next_step, cuda)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def timed_steps(training: Any, next_step: Callable[[float], Any], cuda: bool) -> dict[str, Any]:
    from windlass.train.metrics import memory_bytes

    losses: list[Any] = []

    def step() -> None:
        losses[:] = [next_step(1e-4).values]

    clock = Clock(cuda)
    began = time.perf_counter()
    warm = []
    for _ in range(WARM):
        clock.steps(step, 1)
        warm.append(clock.seconds()[0])
    first = time.perf_counter() - began
    count = max(TIMED, min(40, round(TIMED_SECONDS / warm[-1])))
    meter = meter_of(cuda)
    began = time.perf_counter()
    clock.steps(step, count)
    span, joules = time.perf_counter() - began, meter()
    return {
        "step_seconds": clock.seconds(), "warm_seconds": warm, "span_seconds": span, "energy_joules": joules, "tokens_per_step": training.plan.tokens_per_step,
        "memory_bytes": memory_bytes(training.world.device), "first_steps_seconds": first, "loss": float(losses[0][0]), **reserved(cuda),
    }  # fmt: skip


class Clock:
    """Seconds of each step, by CUDA events; by the host's clock where there is no GPU."""

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        self.marks: list[Any] = []

    def steps(self, step: Any, count: int) -> None:
        from windlass.train.step import mark

        self.marks = [mark(self.cuda)]
        for _ in range(count):
            step()
            self.marks.append(mark(self.cuda))
        if self.cuda:
            import torch

            torch.cuda.synchronize()

    def seconds(self) -> list[float]:
        from windlass.train.step import seconds_between

        return [seconds_between(a, b) for a, b in itertools.pairwise(self.marks)]


def meter_of(cuda: bool) -> Any:
    """Begin to measure; the answer is a function that ends it. None where nothing can be read."""
    if not cuda:
        return lambda: None
    from windlass.energy.window import MeasurementWindow

    window = MeasurementWindow(devices=[0])
    window.begin()

    def end() -> float | None:
        found = [s.joules for s in window.end().sources if s.source == "nvml"]
        return found[0] if found else None

    return end


def reserved(cuda: bool) -> dict[str, Any]:
    import torch

    return {"reserved_bytes": torch.cuda.max_memory_reserved() if cuda else None}


def about(tiny: bool) -> dict[str, Any]:
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "device": device, "torch": torch.__version__, "python": platform.python_version(), "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "tiny": tiny, "sweep": str(SWEEP.relative_to(ROOT)), "warm": WARM, "timed": f"{TIMED} steps or {TIMED_SECONDS} s",
    }  # fmt: skip


def commit() -> str | None:
    try:
        words = ["git", "describe", "--always", "--dirty=+"]
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or None
    except OSError:
        return None


def words_of(name: str, result: dict[str, Any]) -> str:
    if result["outcome"] != "ok":
        return f"{name}: {result['outcome']}: {result['detail']} ({result['seconds']:.1f} s)"
    step, joules = median(result["step_seconds"]), joules_per_token(result)
    energy = "energy not measured" if joules is None else f"{joules * 1e3:.2f} mJ/token"
    return f"{name}: {result['tokens_per_step'] / step:,.0f} tokens/s, {result['memory_bytes'] / 2**30:.1f} GiB, {energy} ({result['seconds']:.1f} s)"


def joules_per_token(result: dict[str, Any]) -> float | None:
    joules = result.get("energy_joules")
    return None if joules is None else joules / (len(result["step_seconds"]) * result["tokens_per_step"])


# -- table, page and pictures ---------------------------------------------------------------------------------------------------


def render(store: Store, args: argparse.Namespace) -> None:
    """The stored numbers become a sweep folder, and the sweep's own code draws it."""
    record = store.read()
    loaded, points = load(bool(record["about"].get("tiny")))
    device = args.device or device_of(record["about"]["device"])
    with tempfile.TemporaryDirectory(prefix="windlass-sweep-") as folder:
        work = sweep_folder(Path(folder) / "one-gpu", loaded, points, record, device)
        rows = draw(work, args.out)
    text = markdown(record, rows, device)
    (args.out / "gpu_sweep.md").write_text(text)
    print(text)


def device_of(driver_name: str) -> str:
    from windlass.clusters import device_by_driver_name

    found = device_by_driver_name(driver_name)
    return found.name if found is not None else "cpu"


def sweep_folder(path: Path, loaded: Any, points: Sequence[Any], record: dict[str, Any], device: str) -> Any:
    from windlass.clusters.model import Cluster, Links, Node
    from windlass.launch.sweep.expect import expect
    from windlass.launch.sweep.folder import SweepRun, open_sweep_folder

    machine = Cluster(name="one", title="one device", device=device, node=Node(devices=1, cores=16), links=Links(intra_gbs=100, inter_gbs_per_node=10))  # fmt: skip
    expected = [expect(loaded.sweep, point, lambda _: machine) for point in points]
    folder = open_sweep_folder(path, loaded, points)
    for point in points:
        result = record["points"].get(point.name)
        if result is not None and "outcome" in result:
            folder.add_outcome({"point": point.name, "evidence": "benchmark", "detail": "", **{k: result.get(k) for k in ("outcome", "detail", "seconds")}})  # fmt: skip
            write_run(folder.point(point.name), point, result, device)
    return SweepRun(loaded=loaded, folder=folder, points=points, expected=expected)


def write_run(run: Any, point: Any, result: dict[str, Any], device: str) -> None:
    """The timed steps as metrics lines; energy in equal parts, as it was read once for all of them."""
    from windlass.files import append_line

    if result["outcome"] != "ok":
        return
    seconds, tokens, joules = result["step_seconds"], result["tokens_per_step"], result.get("energy_joules")
    run.path.mkdir(parents=True, exist_ok=True)
    # Two lines for the warm-up, which the sweep's own reading leaves out.
    for index, value in enumerate([seconds[0]] * 2 + list(seconds), start=1):
        speed = tokens / value
        share = None if joules is None else joules / len(seconds) * index
        append_line(run.metrics_file, {
            "step": index, "tokens": tokens * index, "step_seconds": value, "tokens_per_second": speed, "tokens_per_second_per_device": speed,
            "mfu": mfu_of(point.recipe, speed, device), "memory_bytes": result["memory_bytes"], "energy_joules": share, "loss": result["loss"],
        })  # fmt: skip


def mfu_of(recipe: Any, speed: float, device: str) -> float | None:
    from windlass.clusters.load import load_device
    from windlass.cost.flops import mfu
    from windlass.models.presets import model_spec

    known = load_device(device)
    peak = known.fp32_tflops if recipe.train.precision == "fp32" else known.bf16_tflops
    return mfu(model_spec(recipe.model), recipe.data.seq_len, speed, peak).value


def draw(work: Any, out: Path) -> list[dict[str, Any]]:
    from windlass.launch.sweep.results import collect_rows, write_page, write_tables

    rows = collect_rows(work)
    write_tables(work, rows)
    page = write_page(work, rows, work.sweep.rank_by)
    shutil.copy2(work.folder.table("csv"), out / "gpu_sweep.csv")
    shutil.copy2(page, out / "gpu_sweep.html")
    for picture in sorted(work.folder.pictures.glob("*.png")):
        shutil.copy2(picture, out / f"gpu_sweep_{picture.name}")
    return rows


def markdown(record: dict[str, Any], rows: Sequence[dict[str, Any]], device: str) -> str:
    facts = record["about"]
    lines = [
        "# A grid on one GPU", "",
        f"`{facts['command']}` on {facts['device']}, torch {facts['torch']}, Python {facts['python']}, {facts['date']}, commit {facts['commit'] or 'unknown'}; {facts['wall_seconds']:.0f} s for all points.",
        f"Points: `{facts['sweep']}`, in one process, each after the one before was freed; {facts['warm']} warm-up steps, then {facts['timed']}. Predicted by `windlass plan`'s arithmetic for `{device}`.",
        "Memory is the allocator's peak. MFU counts 6 x (parameters without the input embedding) + 12 x layers x width x sequence, of the dense bf16 peak (fp32: of its own).", "",
        "| point | outcome | tok/s | predicted | MFU % | GiB | predicted | chance of OOM | mJ/token | step ms |", "|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    lines += [line_of(row) for row in rows]
    return "\n".join([*lines, "", *verdicts(rows), ""])


def line_of(row: dict[str, Any]) -> str:
    def show(key: str, words: str, scale: float = 1.0) -> str:
        value = row.get(key)
        return "" if value is None else format(value * scale, words)

    cells = [
        row["point"], row.get("outcome") or "not measured", show("tokens_per_second", ",.0f"), show("predicted_tokens_per_second_per_device", ",.0f"), show("mfu", ".1f", 100),
        show("memory_bytes", ".1f", 2**-30), show("predicted_memory_bytes", ".1f", 2**-30), show("oom_chance", ".0%"), show("joules_per_token", ".2f", 1e3),
        show("step_seconds", ".1f", 1e3),
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def fitted() -> set[tuple[Any, ...]]:
    """Configurations of this model from which the planner's own constants were fitted (gpu_plan.py): it had seen those."""
    path = ROOT / "benchmarks" / "results" / "gpu_plan.json"
    rows = json.loads(path.read_text())["rows"] if path.is_file() else []
    mine = [r for r in rows if r["size"] == "0.4b" and r["seq"] == 2048]
    return {(r["micro_batch"], r.get("recompute", "none"), r.get("precision", "bf16"), r.get("compile"), "auto") for r in mine}  # fmt: skip


def is_fitted(row: dict[str, Any], known: set[tuple[Any, ...]]) -> bool:
    return tuple(row[k] for k in ("micro_batch", "recompute", "precision", "compile", "attention")) in known


def verdicts(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Right or wrong about memory, and how far off in speed and bytes: over all, and over what the planner had not seen."""
    known = fitted()
    new = [r for r in rows if not is_fitted(r, known)]
    lines = [f"All {len(rows)} points:", *errors_of(rows), ""]
    names = ", ".join(r["point"] for r in rows if r not in new)
    return [*lines, f"Without the {len(rows) - len(new)} whose configuration was among those that the planner's constants were fitted to ({names}):", *errors_of(new)]  # fmt: skip


def errors_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    judged = [r for r in rows if r.get("outcome") in ("ok", "oom") and r.get("oom_chance") is not None]
    right = sum((r["oom_chance"] > 0.5) == (r["outcome"] == "oom") for r in judged)
    lines = [f"- fit or out of memory: {right} of {len(judged)} predicted correctly ({sum(r['outcome'] == 'oom' for r in judged)} ran out of memory)."]  # fmt: skip
    for what, seen, said in (("step time", "step_seconds", "predicted_step_seconds"), ("memory", "memory_bytes", "predicted_memory_bytes")):  # fmt: skip
        errors = [abs(r[said] / r[seen] - 1) for r in rows if r.get("outcome") == "ok" and r.get(seen) and r.get(said)]
        if errors:
            lines.append(f"- {what}: median error {median(errors):.1%}, worst {max(errors):.1%} over {len(errors)} points.")  # fmt: skip
    return lines


if __name__ == "__main__":
    sys.exit(main())
