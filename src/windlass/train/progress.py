"""Training progress in the terminal: one line per logged step, and every automatic choice with its reason."""

import contextlib
import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from windlass.train.hooks import Hook, Training
from windlass.train.validate import Validation
from windlass.units import print_joules, print_rate, print_seconds, print_share, print_tokens, print_watts

# The Italia team's target range of the driver's GPU utilization.
UTILIZATION_BAND = (0.70, 0.90)
BAR_WIDTH = 10


class ProgressDisplay(Hook):
    """A bar on a terminal; elsewhere at most a line every few seconds, so that logs stay short."""

    def __init__(self, quiet: bool = False, gap_seconds: float = 5.0) -> None:
        self.quiet, self.gap_seconds, self._shown_at = quiet, gap_seconds, 0.0
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._utilization: list[float] = []
        self._energy_is_known = True

    def say(self, text: str) -> None:
        """Print a line. A full disk under the log, or a closed pipe, must not end the run."""
        if not self.quiet and text:
            with contextlib.suppress(OSError):
                self.console.print(text, markup=False)

    def on_start(self, training: Training) -> None:
        if self.quiet or not sys.stderr.isatty():
            return
        steps, eta = TextColumn("step {task.completed:,}/{task.total:,}"), TimeRemainingColumn(compact=True)
        columns = (steps, BarColumn(bar_width=BAR_WIDTH), TextColumn("ETA"), eta, TextColumn("{task.description}"))
        self._bar = Progress(*columns, console=self.console)
        self._task = self._bar.add_task("", total=training.plan.steps, completed=training.step)
        self._bar.start()

    def on_log(self, training: Training, line: dict[str, Any]) -> None:
        if self.quiet:
            return
        self._energy_is_known = line["energy_joules"] is not None
        if line.get("utilization") is not None:
            self._utilization.append(line["utilization"])
        if self._bar is not None:
            with contextlib.suppress(OSError):
                steps = len(f"step {line['step']:,}/{training.plan.steps:,}")
                text = cut_at_parts(
                    describe_line(line), self.console.width - steps - BAR_WIDTH - len(" ETA 00:00:00   ")
                )
                self._bar.update(self._task, completed=line["step"], description=text)
        elif time.monotonic() - self._shown_at > self.gap_seconds or line["step"] == training.plan.steps:
            self._shown_at = time.monotonic()
            self.say(f"step {line['step']}/{training.plan.steps}  {describe_line(line)}")

    def on_eval(self, training: Training, validation: Validation) -> None:
        self.say(f"step {training.step}: validation {validation.text()}")

    def on_stop(self, training: Training, reason: str | None) -> None:
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.stop()
        if reason == "error":
            return
        self.say(utilization_advice(self._utilization))
        duration = print_seconds(time.monotonic() - training.started_at)
        finished = f"finished {print_tokens(training.tokens)} tokens after {duration}"
        finished += "" if self._energy_is_known else "; energy was not measured (`windlass energy RUN` says why)"
        stopped = f"stopped after {duration}: {reason}; run the same command to resume"
        self.say(f"step {training.step}: {stopped if reason else finished}")


def utilization_advice(utilization: list[float]) -> str:
    """What the mean utilization suggests; empty when it was not measured."""
    if not utilization:
        return ""
    mean, (low, high) = sum(utilization) / len(utilization), UTILIZATION_BAND
    text = f"GPU utilization {print_share(mean, digits=0)}"
    if mean < low:
        advice = "check data_seconds, try a larger layout.micro_batch or train.compile, or run `windlass profile`"
        return f"{text}, below {print_share(low, digits=0)}: the devices are waiting; {advice}"
    if mean > high:
        return f"{text}, above {print_share(high, digits=0)}: the devices are never idle; MFU shows whether they compute well"
    return f"{text}, inside the target range of {print_share(low, digits=0)} to {print_share(high, digits=0)}"


def cut_at_parts(text: str, width: int) -> str:
    """What fits of `describe_line` on a narrow terminal: complete parts only."""
    while len(text) > width and "  " in text:
        text = text.rpartition("  ")[0]
    return text


def describe_line(line: dict[str, Any]) -> str:
    """Loss, speed, MFU, and energy so far with power and joules per token of the last seconds; what is not measured is
    said once, at the start or at the end of a run, and not in each line."""
    parts = [f"loss {'not finite' if line['loss'] is None else format(line['loss'], '.4f')}"]
    parts.append(print_rate(line["tokens_per_second"]))
    if line["mfu"] is not None:
        parts.append(f"MFU {print_share(line['mfu'])}")
    if line["energy_joules"] is not None:
        parts.append(print_joules(line["energy_joules"]))
        parts += [print_watts(line["watts"])] if line.get("watts") is not None else []
        per_token = line.get("joules_per_token")
        parts += [f"{print_joules(per_token)}/token"] if per_token is not None else []
    return "  ".join(parts)
