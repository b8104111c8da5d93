"""What does a person at the terminal see? One line per logged step, and every automatic choice with its reason."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Any

from windlass.train.hooks import Hook
from windlass.units import print_joules, print_seconds, print_tokens

if TYPE_CHECKING:
    from windlass.train.job import Job


class Progress(Hook):
    """A bar on a terminal; at most a line every few seconds elsewhere, so that logs stay short."""

    def __init__(self, quiet: bool = False, gap_seconds: float = 5.0) -> None:
        from rich.console import Console

        self.quiet, self.gap, self._shown = quiet, gap_seconds, 0.0
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._bar: Any = None
        self._busy: list[float] = []

    def say(self, text: str) -> None:
        """A full disk under the log, or a reader that went away, must not end what it reports on."""
        if not self.quiet and text:
            with contextlib.suppress(OSError):
                self.console.print(text, markup=False)

    def on_start(self, job: Job) -> None:
        if self.quiet or not sys.stderr.isatty():
            return
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TimeRemainingColumn(),
            console=self.console,
        )
        self._task = self._bar.add_task("step", total=job.geometry.steps, completed=job.step)
        self._bar.start()

    def on_log(self, job: Job, line: dict[str, Any]) -> None:
        if self.quiet:
            return
        if line.get("utilization") is not None:
            self._busy.append(line["utilization"])
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.update(self._task, completed=line["step"], description=_words(line))
        elif time.monotonic() - self._shown > self.gap or line["step"] == job.geometry.steps:
            self._shown = time.monotonic()
            self.say(f"step {line['step']}/{job.geometry.steps}  {_words(line)}")

    def on_eval(self, job: Job, val_loss: float) -> None:
        found = job.validation
        parts = found.sources if found is not None and len(found.sources) > 1 else {}
        by = ", ".join(f"{name} {part.loss:.4f}" for name, part in parts.items())
        self.say(f"step {job.step}: validation loss {val_loss:.4f}" + (f" ({by})" if by else ""))

    def on_stop(self, job: Job, reason: str | None) -> None:
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.stop()
        if reason != "error":
            lasted = print_seconds(time.monotonic() - job.began)
            end = (
                f"stopped after {lasted}: {reason}; the same command goes on from here"
                if reason
                else f"finished {print_tokens(job.tokens)} tokens after {lasted}"
            )
            self.say(band_advice(self._busy))
            self.say(f"step {job.step}: {end}")


BAND = (0.70, 0.90)
"""The Italia team's working band of the driver's GPU utilisation."""


def band_advice(busy: list[float]) -> str:
    """What the mean utilisation suggests; nothing when it was not measured."""
    if not busy:
        return ""
    mean, (low, high) = sum(busy) / len(busy), BAND
    said = f"GPU utilisation {mean:.0%}"
    if mean < low:
        return f"{said}, below {low:.0%}: the devices wait; look at data_seconds, a larger layout.micro_batch, train.compile, or `windlass profile`"
    if mean > high:
        return f"{said}, above {high:.0%}: the devices are never idle; whether they compute well is for MFU to say"
    return f"{said}, inside the band of {low:.0%} to {high:.0%}"


def _words(line: dict[str, Any]) -> str:
    share = "MFU unknown" if line["mfu"] is None else f"MFU {line['mfu']:.1%}"
    loss = "not finite" if line["loss"] is None else f"{line['loss']:.4f}"
    return f"loss {loss}  {print_tokens(line['tokens_per_second'])} tok/s  {share}  {_energy(line)}"


def _energy(line: dict[str, Any]) -> str:
    """Energy so far, power, and joules per token of the last seconds; what no sensor read is not measured."""
    if line["energy_joules"] is None:
        return "energy not measured"
    parts = [print_joules(line["energy_joules"])]
    parts += [f"{line['watts']:.0f} W"] if line.get("watts") is not None else []
    parts += [f"{line['joules_per_token']:.3g} J/token"] if line.get("joules_per_token") is not None else []
    return "  ".join(parts)
