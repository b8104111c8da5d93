"""docs/teams.md: every statement has a state and something that shows it, and what is named exists and runs."""

import ast
import importlib.util
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]
PAGE = TOP / "docs" / "teams.md"
STATES = {"real", "stand-in", "predicted", "described", "later", "out of scope", "no hardware here"}
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.read_text().splitlines()
    if re.match(r"\| \d+ \|", line)
]
TESTS = sorted({name for row in ROWS for name in re.findall(r"`((?:tests|benchmarks)/[^`]*\.py::[^`]+)`", row[-1])})
COMMANDS = sorted({command for row in ROWS for command in re.findall(r"`(windlass [^`]+)`", row[-1])})
# One of each kind that is cheap; the others are slow.
SAMPLE = (
    "windlass budget --cluster leonardo-booster",
    "windlass clusters lumi-g",
    "windlass compare tests/profile/data/llama-eager.json.gz tests/profile/data/mi250.json.gz",
    "windlass launch recipes/italia_9b_leonardo.toml",
    "windlass plan recipes/retnet_300m_lumi.toml",
    "windlass profile tests/profile/data/mi250.json.gz",
    "windlass show recipes/italia_9b_leonardo.toml",
    "windlass sweep recipes/sweeps/lepiszcze.toml",
)


def test_every_statement_has_its_number_and_a_state():
    assert [len(row) for row in ROWS] == [4] * len(ROWS)
    assert [int(row[0]) for row in ROWS] == list(range(1, 195))
    assert not [row for row in ROWS if row[2] not in STATES]
    assert not [row[0] for row in ROWS if not row[1] or not row[3]]
    defined = re.findall(r"^\| ([a-z -]+) \| (?!meaning)", PAGE.read_text(), re.M)
    assert set(defined) == STATES


def test_what_is_real_predicted_or_a_stand_in_names_a_command_a_test_or_a_page():
    evidence = re.compile(r"`windlass |\.py::|\]\([^)]+\.md")
    states = {"real", "stand-in", "predicted", "described"}
    assert not [row[0] for row in ROWS if row[2] in states and not evidence.search(row[3])]


@cache
def defined_tests(file):
    """Names of a test file: functions, and methods as Class::method."""
    names = set()
    for node in ast.parse((TOP / file).read_text()).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names |= {f"{node.name}::{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
    return names


def test_every_named_test_exists():
    assert len(TESTS) > 80
    missing = []
    for test in TESTS:
        file, _, name = test.partition("::")
        if not (TOP / file).is_file() or name not in defined_tests(file):
            missing.append(test)
    assert not missing


def is_sampled(command):
    return command.startswith(SAMPLE)


def test_the_sample_is_on_the_page():
    assert not [start for start in SAMPLE if not any(command.startswith(start) for command in COMMANDS)]


@pytest.mark.parametrize("command", [c if is_sampled(c) else pytest.param(c, marks=pytest.mark.slow) for c in COMMANDS])
def test_a_command_of_the_page_runs(command, tmp_path):
    spec = importlib.util.spec_from_file_location("stories", TOP / "scripts" / "stories.py")
    stories = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stories)
    environment = stories.prepare(tmp_path)
    done = subprocess.run(
        command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
