"""How does the dashboard hold up? Opens a run of a million metric lines, and lets fifty viewers follow a live one over loopback:

    python benchmarks/dash_load.py --lines 1000000 --viewers 50 --seconds 30 --out benchmarks/results/dash_load.json

Server and viewers share this machine's cores, so the figures are on the safe side. With --browser a real Chromium opens the long run too.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parents[1]
sys.path[:1] = [str(TOP / "src"), str(TOP)]  # instead of this folder, whose names hide those of the standard library

from tests.report.sample_run import BEGIN, make_run, metric  # noqa: E402

from windlass.files import append_line  # noqa: E402
from windlass.runs.folder import Run  # noqa: E402


def long_run(root: Path, lines: int) -> Path:
    path = make_run(root / "long", name="long")
    tail = json.dumps({k: v for k, v in metric(1, BEGIN, 1.0).items() if k not in ("step", "loss", "grad_norm")})[1:]
    noise = [math.sin(i * 12.9898) * 0.05 for i in range(9973)]
    with (path / "metrics.jsonl").open("w") as file:
        for low in range(0, lines, 10_000):
            steps = range(low, min(lines, low + 10_000))
            file.write(
                "".join(
                    f'{{"step": {i}, "loss": {2 + 8 / (1 + i / 9000) + noise[i % 9973]:.6f}, "grad_norm": {1 + noise[-i % 9973]:.5f}, {tail}\n'
                    for i in steps
                )
            )
    return path


def start(root: Path) -> tuple[subprocess.Popen[str], str, int, str]:
    """`windlass dash` in a process of its own, as a user starts it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "windlass", "dash", str(root), "--json"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(TOP / "src")},
    )
    assert process.stdout is not None
    said = json.loads(process.stdout.readline())
    return process, said["url"], said["port"], said["url"].split("token=")[1]


class Viewer:
    def __init__(self, port: int, token: str, timeout: float = 30) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
        self._headers = {"Cookie": f"windlass{port}={token}", "Accept-Encoding": "gzip"}

    def get(self, path: str) -> tuple[float, bytes, int]:
        began = time.perf_counter()
        self._connection.request("GET", path, headers=self._headers)
        answer = self._connection.getresponse()
        body = answer.read()
        seconds = time.perf_counter() - began
        if answer.getheader("Content-Encoding") == "gzip":
            import gzip

            body = gzip.decompress(body)
        return seconds, body, answer.status


def opening(port: int, token: str, name: str) -> dict[str, Any]:
    """What a browser asks when a person clicks on the long run, first and again."""
    viewer = Viewer(port, token)
    listed, body, _ = viewer.get("/api/runs")
    run = next(r["id"] for r in json.loads(body)["runs"] if r["name"] == name)
    keys = "loss,tokens_per_second,mfu,watts,memory_bytes,grad_norm,val_loss"
    first = sum(viewer.get(path)[0] for path in (f"/api/run?id={run}", f"/api/series?id={run}&keys={keys}&points=900"))
    return {"list_seconds": listed, "first_open_seconds": listed + first, "run": run, "keys": keys}


def follow(port: int, token: str, run: str, seconds: float, found: list[float], problems: list[str]) -> None:
    viewer, have, end = Viewer(port, token), "", time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.monotonic()
        for path in (
            f"/api/run?id={run}",
            f"/api/series?id={run}&keys=loss,mfu,watts,tokens_per_second&points=900&have={have}",
        ):
            try:
                took, body, status = viewer.get(path)
            except OSError as error:
                problems.append(str(error))
                return
            found.append(took)
            if status != 200:
                problems.append(f"{status} for {path}")
            have = json.loads(body).get("version", have)
        time.sleep(max(0.0, 2.0 - (time.monotonic() - began)))


def crowd(port: int, token: str, live: Run, viewers: int, seconds: float) -> dict[str, Any]:
    _, body, _ = Viewer(port, token).get("/api/runs")
    run = next(r["id"] for r in json.loads(body)["runs"] if r["name"] == "live")
    found: list[float] = []
    problems: list[str] = []
    threads = [
        threading.Thread(target=follow, args=(port, token, run, seconds, found, problems)) for _ in range(viewers)
    ]
    for index, thread in enumerate(threads):
        thread.start()
        time.sleep(2.0 / viewers * (index < viewers - 1))
    step, end = 221, time.monotonic() + seconds
    while time.monotonic() < end:
        append_line(live.metrics_file, metric(step, time.time(), step * 3300.0))
        step += 1
        time.sleep(0.25)
    for thread in threads:
        thread.join()
    found.sort()
    at = lambda share: found[min(len(found) - 1, int(share * len(found)))] if found else None  # noqa: E731
    return {
        "viewers": viewers,
        "seconds": seconds,
        "requests": len(found),
        "p50_ms": 1e3 * at(0.5),
        "p95_ms": 1e3 * at(0.95),
        "p99_ms": 1e3 * at(0.99),
        "problems": problems[:5],
    }


def in_chromium(url: str) -> dict[str, Any]:
    """Click to drawn, in a real browser."""
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or shutil.which("google-chrome")
    flags = [
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
    ]
    with sync_playwright() as made, tempfile.TemporaryDirectory() as profile:
        context = made.chromium.launch_persistent_context(
            profile, executable_path=program, headless=True, args=flags, viewport={"width": 1440, "height": 900}
        )
        page = context.new_page()
        page.goto(url)
        page.wait_for_selector("#rows tr")
        began = time.perf_counter()
        page.click("#rows a:text('long')")
        page.wait_for_selector(".plot[data-key=loss] .js-line")
        drawn = time.perf_counter() - began
        frames = page.evaluate("""() => new Promise((done) => { const gaps = []; let last = performance.now(), n = 0;
          function frame(now) { gaps.push(now - last); last = now; window.scrollBy(0, 12); if (++n < 120) requestAnimationFrame(frame); else done(gaps.slice(1).sort((a, b) => a - b)); }
          requestAnimationFrame(frame); })""")
        context.close()
    return {
        "click_to_drawn_seconds": drawn,
        "scroll_frame_p95_ms": frames[int(0.95 * len(frames))],
        "scroll_frame_median_ms": frames[len(frames) // 2],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--viewers", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--browser", action="store_true")
    parser.add_argument("--out", type=Path)
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        long_run(root, words.lines)
        live = Run(make_run(root / "live", name="live", finished=False, steps=220))
        result: dict[str, Any] = {"lines": words.lines, "file_bytes": (root / "long" / "metrics.jsonl").stat().st_size}
        if words.browser:  # a server of its own, so that neither finds the other's columns already read
            process, url, _, _ = start(root)
            try:
                result["browser"] = in_chromium(url)
            finally:
                process.terminate()
                process.wait()
        process, url, port, token = start(root)
        try:
            result["opening"] = opening(port, token, "long")
            result["crowd"] = crowd(port, token, live, words.viewers, words.seconds)
        finally:
            process.terminate()
            process.wait()
    commit = subprocess.run(
        ["git", "-C", str(TOP), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    result["about"] = {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit or None,
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }
    print(json.dumps(result, indent=2))
    if words.out:
        words.out.parent.mkdir(parents=True, exist_ok=True)
        words.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
