"""The job that a point's command requests by its own srun call, and mistakes that can be found before it runs."""

import re
import shlex
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.clusters.model import Cluster
from windlass.config.sweep import LoadedSweep
from windlass.errors import ConfigError
from windlass.launch.checks import Finding, check_bindings
from windlass.launch.sweep.points import SweepPoint
from windlass.units import parse_seconds

# Our name of an srun option, and how srun writes it.
OPTIONS = {
    "nodes": ("--nodes", "-N"),
    "tasks": ("--ntasks-per-node",),
    "gpus": ("--gpus", "-G"),
    "account": ("--account", "-A"),
    "partition": ("--partition", "-p"),
    "qos": ("--qos", "-q"),
    "time": ("--time", "-t"),
}
# A point's own values for its job, ours first.
NODES_KEYS = ("nodes", "num_nodes")
DEVICES_KEYS = ("devices", "num_devices", "num_gpus")
# Options of srun without a value: the word after them is the program.
FLAGS = re.compile(r"--(?:exclusive|exact|overlap|whole|label|unbuffered|pty|quiet|verbose|no-kill)|-[EKklOQsuvXZ]+")
SRUN = re.compile(r"(?:^|[\s;&|(])srun\s")
PRODUCT = re.compile(r"\$\(\(\s*(\d+)\s*\*\s*(\d+)\s*\)\)")
# `--gpus ((2*8))`: without the dollar sign bash reads two subshells, which cannot stand here.
LOST_DOLLAR = re.compile(r"(--?[A-Za-z][\w-]*)[ =]\(\((.*?)\)\)")
# A line of a DVC stage that is an option: it would be started as a command.
OPTION_LINES = re.compile(r"\(\n\s*(-\S.*)\n\)")


@dataclass(frozen=True, kw_only=True)
class SrunRequest:
    """The options of the first srun call; None if an option is missing or only the shell can evaluate it."""

    nodes: int | None = None
    tasks: int | None = None  # per node
    gpus: int | None = None  # of all nodes
    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    seconds: float | None = None


def srun_request(point: SweepPoint) -> SrunRequest | None:
    """None: the command does not call srun itself."""
    text = PRODUCT.sub(lambda m: str(int(m[1]) * int(m[2])), " ".join(point.command(Path("FOLDER"))))
    call = SRUN.search(text)
    if call is None:
        return None
    values = _options(text[call.end() :])

    def number(name: str) -> int | None:
        count = values.get(name, "").partition("-")[0]  # `-N 1-2`: at least one
        return int(count) if count.isdigit() else None

    time, seconds = values.get("time", ""), None
    if time.isdigit():  # SLURM counts a plain number in minutes
        seconds = 60.0 * int(time)
    elif re.fullmatch(r"[\d:-]+", time):
        seconds = parse_seconds(time)
    names = {key: values.get(key) for key in ("account", "partition", "qos")}
    return SrunRequest(nodes=number("nodes"), tasks=number("tasks"), gpus=number("gpus"), seconds=seconds, **names)


def _options(text: str) -> dict[str, str]:
    """The options in front of the program."""
    try:
        arguments = shlex.split(text)
    except ValueError:
        arguments = text.split()
    names, values, index = {way: name for name, ways in OPTIONS.items() for way in ways}, {}, 0
    while index < len(arguments) and arguments[index].startswith("-"):
        option, equals, value = arguments[index].partition("=")
        if not option.startswith("--") and len(option) > 2 and option[:2] in names:  # -N2
            option, equals, value = option[:2], "=", option[2:]
        if not equals and not FLAGS.fullmatch(option) and index + 1 < len(arguments):
            index, value = index + 1, arguments[index + 1]
        if option in names and "$" not in value:
            values[names[option]] = value
        index += 1
    return values


def place_of(point: SweepPoint) -> tuple[int, int | None]:
    """Nodes, and devices per node (None: all of a node), from the point's values, else from its srun call."""
    request = (srun_request(point) if point.recipe is None else None) or SrunRequest()
    counts: list[int | None] = []
    for keys, asked in ((NODES_KEYS, request.nodes), (DEVICES_KEYS, request.tasks)):
        value = next((point.settings[key] for key in keys if is_number(point.settings.get(key))), asked)
        if value is not None and (value != int(value) or value < 1):
            nearest = max(1, round(value))
            raise ConfigError(
                "sweep.invalid-shape",
                f"point {point.name}: {keys[0]} = {value:g} is not a whole number of at least 1",
                hint=f"the nearest possible number is {nearest}",
            )
        counts.append(None if value is None else int(value))
    return (point.recipe.nodes if point.recipe is not None else counts[0] or 1), point.devices or counts[1]


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_commands(loaded: LoadedSweep, points: Sequence[SweepPoint], cluster: Cluster | None) -> list[Finding]:
    """Faults of the points' commands, each once and with its line in the file. Recipes have none here."""
    findings: dict[tuple[str, str], Finding] = {}
    commands = [point for point in points if point.recipe is None]
    lines = loaded.text.splitlines()

    def line_of(part: str) -> str:
        number = next((n for n, line in enumerate(lines, 1) if part in line.partition("#")[0]), None)
        return f"line {number}: " if number else ""

    for point in commands:
        text, request = " ".join(point.command(Path("FOLDER"))), srun_request(point)
        faults = _shell_faults(point, lines, line_of) if point is commands[0] else []
        faults += _shape_faults(point, request) if request else []
        faults += check_bindings(text, cluster, tasks=request.tasks if request else None, line_of=line_of)
        for fault in faults:
            findings.setdefault((fault.rule, fault.message), fault)
    return list(findings.values())


def _shell_faults(point: SweepPoint, lines: Sequence[str], line_of: Callable[[str], str]) -> list[Finding]:
    """Check the first point only: the commands of the others differ only in their values."""
    argv = point.command(Path("FOLDER"))
    text, findings = " ".join(argv), []
    if OPTION_LINES.search(text):
        options = OPTION_LINES.findall(text)
        message = f"{line_of(options[0])}`{options[0]}` and {len(options) - 1} more lines begin with an option"
        message += ": each line of `cmd` is a command of its own, for DVC too"
        hint = "give all lines below `cmd: >-` the same indentation: YAML then folds them into one line"
        findings.append(Finding("lines", "refuse", message, hint))
    if LOST_DOLLAR.search(text):
        matches = ((number, LOST_DOLLAR.search(line)) for number, line in enumerate(lines, 1))
        place, match = next(((f"line {n}: ", m) for n, m in matches if m), ("", LOST_DOLLAR.search(text)))
        option, sum_text = match.groups() if match else ("", "")
        message = f"{place}`{option} (({sum_text}))` is not arithmetic: the dollar sign is missing"
        findings.append(Finding("arithmetic", "refuse", message, f"write {option} $(({sum_text}))"))
    if not findings and argv[:2] == ["bash", "-c"]:
        try:
            syntax = subprocess.run(["bash", "-n", "-c", argv[2]], capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):  # no bash here: the point itself will show it
            return findings
        if syntax.returncode:
            message = "; ".join(line.removeprefix("bash: ") for line in syntax.stderr.splitlines()[:2])
            findings.append(
                Finding("syntax", "refuse", f"bash cannot read the command: {message}", "close all quotes and $(( ))")
            )
    return findings


def _shape_faults(point: SweepPoint, request: SrunRequest) -> list[Finding]:
    """Differences between the point's values and its own srun call."""
    nodes, devices = place_of(point)
    ranks = nodes * (devices or request.tasks or 1)
    rows = (
        ("nodes", request.nodes, nodes, "-N"),
        ("tasks", request.tasks, devices, "--ntasks-per-node"),
        ("gpus", request.gpus, ranks if devices else None, "--gpus"),
    )
    return [
        Finding(
            rule,
            "refuse",
            f"point {point.name}: srun {option} {asked}, but the point has {nodes} nodes x {devices} devices",
            f"write {option} {wanted}",
        )
        for rule, asked, wanted, option in rows
        if asked is not None and wanted is not None and asked != wanted
    ]


def refuse_commands(findings: Sequence[Finding], path: Path, *, force: bool) -> None:
    if findings and not force:
        faults = "".join(f"\n  {f.rule}: {f.message}" + (f" -> {f.hint}" if f.hint else "") for f in findings)
        count = f"{len(findings)} fault{'s' * (len(findings) != 1)}"
        raise ConfigError(
            "sweep.faulty-command", f"{path}: {count} in the command:{faults}", hint="use --force to run it anyway"
        )
