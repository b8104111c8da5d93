"""Tables fit the terminal, long work announces itself, and --verbose says where values come from."""

from __future__ import annotations

import io
import logging
import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from windlass.cli import GROUPS, command, main, split_at_dashes
from windlass.cli.output import COPIED, WORD_WIDTH, bar, fit_columns, table, working, wrap


def printed(part, width):
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(part)
    return out.getvalue()


def test_columns_are_left_out_by_priority_and_named():
    columns = [("name", ["leonardo-booster"], False), ("tokens/s", ["781,648"], True), ("note", ["x" * 30], False)]
    assert fit_columns(columns, ("tokens/s",), 80) == {0: 16, 1: 8, 2: 30}
    assert fit_columns(columns, ("tokens/s",), 52) == {0: 16, 2: 30}
    assert fit_columns(columns, ("note", "tokens/s"), 52) == {0: 16, 1: 8}
    text = printed(
        table("t", ["name", "tokens/s", "note"], [["a" * 20, "781,648", "n" * 30]], right=(1,), drop=("note",)), 40
    )
    assert "781,648" in text and "Not shown: note" in text and "--json" in text
    assert "Not shown" not in printed(table("t", ["name", "tokens/s"], [["a", 1]]), 40)


@settings(max_examples=12, deadline=None)
@given(
    st.lists(
        st.tuples(st.from_regex(r"[a-z-]{1,30}", fullmatch=True), st.integers(0, 10**15), st.integers(0, 10**9)),
        min_size=1,
        max_size=4,
    ),
    st.integers(60, 160),
)
def test_no_number_and_no_name_is_broken(rows, width):
    cells = [(name, f"{a:,}", f"{b:,}", "some words that may be wrapped anywhere " * 3) for name, a, b in rows]
    lines = printed(
        table(None, ("name", "first number", "second", "text"), cells, right=(1, 2), drop=("second",)), width
    )
    for name, first, second, _ in cells:
        assert re.search(rf"(?m)^ {re.escape(name)} +{re.escape(first)} ", lines)
        assert second in lines or "Not shown: second" in lines
    assert max(map(len, lines.splitlines())) <= width


def test_a_name_that_is_too_long_is_abbreviated():
    text = printed(table(None, ("kernel", "us"), [["k" * 100, "12,345"]], right=(1,)), 60)
    assert "k" * WORD_WIDTH in text.replace("…", "") and "…" in text and "12,345" in text


@pytest.mark.parametrize(
    "text", ["see runs/a/report.html " + "x " * 50, "run windlass plan r.toml " + "x " * 50, "a\nb" + " x" * 50]
)
def test_what_people_copy_is_not_wrapped(text):
    assert COPIED.search(text) and wrap(text, 40) == text


def test_other_lines_are_wrapped_at_words():
    assert wrap(" 1. " + "word " * 20, 40).splitlines()[1].startswith("   word")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    "stream, quiet, is_shown", [(Terminal, False, True), (Terminal, True, False), (io.StringIO, False, False)]
)
def test_long_work_is_announced_on_a_terminal_only(stream, quiet, is_shown, monkeypatch):
    monkeypatch.setattr(sys, "stderr", out := stream())
    monkeypatch.setenv("TERM", "xterm")
    with working("loading step-1000", quiet=quiet):
        pass
    assert ("loading step-1000" in out.getvalue()) == is_shown


def test_a_log_gets_a_line_of_progress_each_minute(monkeypatch, capsys):
    """What an earlier command had done (40 of 100) does not count as speed."""
    clock = iter([0.0, 0.0, 30.0, 60.0, 61.0, 130.0])
    monkeypatch.setattr("windlass.cli.output.time.monotonic", lambda: next(clock))
    with bar("tokenizing") as update:
        for done in (40, 50, 60, 61, 70):
            update(done, 100, "tokenizing: 5M tokens")
    assert capsys.readouterr().err.splitlines() == [
        "tokenizing: 5M tokens: 60 %, 2 min left", "tokenizing: 5M tokens: 70 %, 2 min 10 s left",
    ]  # fmt: skip


def test_help_has_a_group_for_every_command(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["windlass", "--help"])
    main()
    text = capsys.readouterr().out
    places = [text.index(f"─ {group} ─") for group in ("Plan", "Data", "Run", "Watch", "Evaluate", "Cluster")]
    assert places == sorted(places)
    assert {name.split()[0] for name in GROUPS} == {*command().commands}
    assert "--verbose" in text


@pytest.mark.parametrize("option", ["-v", "--verbose", "--debug"])
def test_verbose_names_files_error_codes_and_tracebacks(option, tmp_path, monkeypatch, capsys):
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        'name = "r"\n[model]\nlayers = 1\nwidth = 32\nffn = 64\nheads = 2\nvocab = 128\n[train]\nsteps = 2\n'
    )
    logger = logging.getLogger("windlass")
    handlers, level = list(logger.handlers), logger.level
    try:
        for words, code in ((["show", str(recipe), "nodes=3"], 0), (["show", "missing.toml"], 2)):
            monkeypatch.setattr(sys, "argv", ["windlass", *words, option])
            if code:
                with pytest.raises(SystemExit, match=str(code)):
                    main()
            else:
                main()
    finally:
        logger.handlers, logger.level = handlers, level
    errors = capsys.readouterr().err
    assert f"recipe: {recipe} (overridden: nodes)" in errors
    assert "Traceback" in errors and "config.file-missing (exit code 2)" in errors


def test_options_behind_two_dashes_belong_to_the_submitted_command():
    assert split_at_dashes(["submit", "-v", "--", "eval", "x", "-v"]) == (["submit", "-v"], ["--", "eval", "x", "-v"])
    assert split_at_dashes(["plan", "-v"]) == (["plan", "-v"], [])
