"""Pages are correct: links, commands and options exist, shown commands run, generated pages are up to date."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from windlass.cli import build

TOP = Path(__file__).resolve().parents[2]
DOCS = TOP / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
ALL = [*PAGES, TOP / "README.md", TOP / "ARCHITECTURE.md", TOP / "CONTRIBUTING.md"]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.M | re.S)
ELSEWHERE = 'title="on this machine"'
"""Marks blocks that train; tests/story runs them in order and in one folder."""
CHEAP = {"clusters", "plan", "budget", "show", "init", "profile", "compare", "energy"}
"""Commands that are executed if a page shows them in a console block; launch only as a dry run."""
COMMANDS = typer.main.get_command(build()).commands


def script(name):
    spec = importlib.util.spec_from_file_location(name, TOP / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


joined = script("stories").joined


def page_id(path):
    return path.relative_to(TOP).as_posix()


def shown(text):
    """The command lines of a page: indented or fenced, without their comments."""
    code = [joined(body) for _, body in FENCE.findall(text)]
    code += re.findall(r"^    (windlass .*)$", text, re.M)
    for line in "\n".join(code).splitlines():
        line = re.sub(r"\s+#.*$", "", line.strip().removeprefix("$ "))
        if line.startswith("windlass "):
            yield line


# -- generated -----------------------------------------------------------------------------------------------------------


def test_the_reference_is_up_to_date():
    pages = script("make_reference").pages()
    stale = [name for name, text in pages.items() if (DOCS / "reference" / name).read_text() != text]
    assert not stale, f"run scripts/make_reference.py: {stale}"


def test_the_reference_has_every_command_and_key():
    pages = script("make_reference").pages()
    assert all(f"`windlass {name}`" in pages["cli.md"] for name in COMMANDS)
    assert "`batch_tokens`" in pages["recipe.md"] and "`energy_joules`" in pages["metrics.md"]


def test_every_key_has_a_meaning_and_is_written_as_in_the_file():
    pages = script("make_reference").pages()
    for name in ("recipe.md", "data-file.md", "sweep-file.md", "cluster-file.md"):
        rows = re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \| (.*) \|$", pages[name], re.M)
        assert len(rows) > 10, name
        assert not [key for key, _, _, meaning in rows if not meaning.strip()], name
        assert not [key for key, _, default, _ in rows if default in ("`True`", "`False`", "`None`")], name
    cells = {line.replace("\\|", "").count("|") for line in pages["cli.md"].splitlines() if line.startswith("| `")}
    assert cells == {4}, "a bar in a cell starts a new column"


@pytest.mark.timeout(900)
def test_tables_of_figures_are_up_to_date():
    """Tables of the planner may differ by 10 %; tables of benchmark results must be equal."""
    tables = script("make_tables")
    pages = tables.pages()
    assert {DOCS / "concepts" / "techniques.md", DOCS / "guides" / "story-gptnl.md"} <= set(pages)
    stale = {p.name: names for p in pages if (names := tables.stale(p))}
    assert not stale, f"run scripts/make_tables.py: {stale}"


def test_a_table_with_other_figures_is_out_of_date():
    same = script("make_tables")._same
    assert same("| a | 10.0 |", "| a | 10.4 |", True)
    assert not same("| a | 10 |", "| a | 20 |", True)
    assert not same("| a | 10 |\n| b | 1 |", "| a | 10 |", True)
    assert not same("| a | 10.0 |", "| a | 10.4 |", False)


def test_pictures_that_pages_show_exist_and_are_shown():
    shown = {t for p in ALL for t in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", p.read_text())}
    drawn = {p.name for folder in ("pictures", "images") for p in (DOCS / folder).iterdir()}
    assert drawn <= {Path(t).name for t in shown}, "a picture that no page shows"


MOST_WORDS = 600
"""Two to three minutes of reading."""
READ_PAGES = [DOCS / "lab.md", *(p for p in PAGES if p.parent.name in ("guides", "concepts"))]


def prose_words(text):
    """Words of a page without its code blocks and tables."""
    lines = FENCE.sub("", text).splitlines()
    return sum(len(line.split()) for line in lines if not line.startswith("|"))


def test_words_of_code_and_tables_are_not_counted():
    assert prose_words("# Two words\n\n| a | b |\n|---|---|\n```bash\nls -l\n```\n- three `windlass plan` more\n") == 8


@pytest.mark.parametrize("page", READ_PAGES, ids=page_id)
def test_a_guide_or_concept_is_short(page):
    """If a page is too long, link to what another page says, use a table, or split it by job."""
    assert prose_words(page.read_text()) <= MOST_WORDS


WIDE = 95
"""Characters of a line of code that a page of the site shows without wrapping."""


@pytest.mark.parametrize("page", [p for p in PAGES if p.parent.name not in ("clusters", "reference")], ids=page_id)
def test_code_fits_the_page(page):
    """Wrapped commands are hard to read; a long command continues after a backslash instead."""
    lines = [line for _, body in FENCE.findall(page.read_text()) for line in body.splitlines()]
    assert not [line for line in lines if len(line) > WIDE]


# -- links and names ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", ALL, ids=page_id)
def test_links_lead_to_files(page):
    text = FENCE.sub("", page.read_text())
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    broken = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert not broken


@pytest.mark.parametrize("page", [p for p in ALL if p.parent.name != "clusters"], ids=page_id)
def test_files_that_a_page_names_exist(page):
    named = set(
        re.findall(r"(?<![\w/.])((?:recipes|benchmarks|scripts|containers|tests)/[\w./-]*[\w-])", page.read_text())
    )
    assert not [n for n in named if not (TOP / n).exists() and not list(TOP.glob(f"{n}*"))]


@pytest.mark.parametrize(
    "page", [p for p in ALL if p.parent.name != "reference" and p.name != "ARCHITECTURE.md"], ids=page_id
)
def test_commands_and_options_that_a_page_shows_exist(page):
    wrong = []
    for line in shown(page.read_text()):
        arguments = line.split()[1:]
        if arguments[0].startswith("-") or not arguments[0].islower():
            continue
        command = COMMANDS.get(arguments[0])
        if command is None:
            wrong.append(line)
            continue
        inner = getattr(command, "commands", {})
        command = inner.get(arguments[1], command) if len(arguments) > 1 else command
        options = {o for p in command.params for o in (*p.opts, *p.secondary_opts)} | {"--debug", "--help"}
        wrong += [
            line
            for w in arguments[1:]
            if w.startswith("--") and w != "--" and w.strip("[]").split("=")[0] not in options
        ]
    assert not wrong


def test_pages_that_the_program_names_exist():
    """Pages that error messages and recipes name exist."""
    sources = [*(TOP / "src").rglob("*.py"), *(TOP / "recipes").rglob("*.toml")]
    named = {m for p in sources for m in re.findall(r"\bdocs/[\w/-]+\.md", p.read_text())}
    assert named and not [n for n in named if not (TOP / n).is_file()]


# -- what is shown runs --------------------------------------------------------------------------------------------------


def console_lines(page):
    fences = FENCE.finditer(page.read_text())
    blocks = [m[2] for m in fences if m[1] == "console" and ELSEWHERE not in m[0].splitlines()[0]]
    return [line[2:] for body in map(joined, blocks) for line in body.splitlines() if line.startswith("$ windlass ")]


# Their commands take long; one story is enough for every change.
LONG_PAGES = (
    "story-gptnl.md",
    "story-gptnl-charts.md",
    "story-italia.md",
    "story-lumi.md",
    "story-ultrascale.md",
    "story-hackathon.md",
)


def with_commands():
    pages = [page for page in ALL if console_lines(page)]
    return [pytest.param(p, marks=pytest.mark.slow if p.name in LONG_PAGES else (), id=page_id(p)) for p in pages]


@pytest.mark.parametrize("page", with_commands())
def test_console_blocks_run(page, tmp_path):
    for folder in ("recipes", "tests"):
        (tmp_path / folder).symlink_to(TOP / folder)
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "windlass"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m windlass "$@"\n')
    program.chmod(0o755)
    env = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "COLUMNS": "160"}
    for line in console_lines(page):
        name = line.split()[1]
        assert name in CHEAP or "--dry-run" in line, f"{line} takes long: show it in a bash block"
        done = subprocess.run(line, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        assert done.stdout.strip()


# -- the site ------------------------------------------------------------------------------------------------------------


def test_new_pages_join_the_section_of_their_folder():
    complete = script("docs_nav").complete
    nav = [{"Start": "index.md"}, {"Guides": ["guides/a.md"]}]
    assert complete(nav, ["guides/a.md", "guides/b.md", "decisions/1.md"]) == [
        {"Start": "index.md"},
        {"Guides": ["guides/a.md", "guides/b.md"]},
        {"Decisions": ["decisions/1.md"]},
    ]
    assert nav[1] == {"Guides": ["guides/a.md"]}


def test_the_site_builds_without_a_warning_and_loads_nothing_external(tmp_path):
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("material") is None:
        pytest.skip("pip install 'windlass[docs]'")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=TOP, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    external = re.compile(
        r'(?:<script[^>]+src|<link[^>]+(?:stylesheet|preconnect|icon)[^>]+href|<img[^>]+src)="https?://'
    )
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) >= len(PAGES)
    assert not [p.name for p in pages if external.search(p.read_text()) or "fonts.googleapis" in p.read_text()]


# -- offline installation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [((), "missing argument: FOLDER"), (("a", "b"), "only one folder"), (("--moon",), "unknown option"), (("a", "--extras"), "needs a list")],
)  # fmt: skip
def test_the_wheelhouse_script_refuses(arguments, message, tmp_path):
    bash = shutil.which("bash")
    done = subprocess.run(
        [bash, str(TOP / "scripts" / "wheelhouse.sh"), *arguments], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2 and message in done.stderr
    assert not list(tmp_path.iterdir())
