"""The command line starts at once, never loads torch for help, and turns every error into one message and an exit code."""

import json
import os
import resource
import subprocess
import sys

import pytest

from windlass.cli import describe_failure

RECIPE = 'name = "r"\n[model]\nlayers = 1\nwidth = 32\nffn = 64\nheads = 2\nvocab = 128\n[data]\nseq_len = 16\nbatch_tokens = 32\n[train]\nsteps = 2\n[layout]\nmicro_batch = 2\n'

TORCH_FREE = (
    ["--help"],
    ["plan", "--help"],
    ["launch", "--help"],
    ["sweep", "--help"],
    ["report", "--help"],
    ["dash", "--help"],
    ["clusters"],
    ["show", "--schema"],
    [],
)


def windlass(*words, cwd=None, env=None):
    return subprocess.run(
        [sys.executable, "-m", "windlass", *map(str, words)],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=120,
        env={**os.environ, **(env or {})},
    )


@pytest.mark.parametrize("words", TORCH_FREE, ids=" ".join)
def test_torch_is_not_loaded(words):
    code = "import sys, runpy; sys.argv = ['windlass', *sys.argv[1:]]\ntry: runpy.run_module('windlass', run_name='__main__')\nexcept SystemExit as e: assert not e.code, e.code\nassert not {'torch', 'transformers'} & set(sys.modules), 'loaded'"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def cpu_seconds(*words):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert subprocess.run([sys.executable, *words], capture_output=True, timeout=120).returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("words", [("--help",), ("plan", "--help")], ids=" ".join)
def test_help_takes_under_0_3_seconds_of_cpu(words):
    """On a slow or crowded machine: at most three times what its libraries alone take."""
    bare = min(
        cpu_seconds("-c", "import typer.main, rich.console, rich.table, rich.panel, rich.markdown") for _ in range(2)
    )
    assert min(cpu_seconds("-m", "windlass", *words) for _ in range(4)) < max(0.3, 3 * bare)


def parts(root, path=()):
    yield " ".join(path), root
    for name, inner in getattr(root, "commands", {}).items():
        yield from parts(inner, (*path, name))


def test_every_help_writes_arguments_alike_and_flags_without_a_value():
    from windlass.cli import command

    root = command()
    names = list(root.commands)
    assert names.index("tokenizer") == names.index("tokenize") + 1
    for name, part in parts(root):
        context = part.make_context(name or "windlass", ["--json"] if not name else [], resilient_parsing=True)
        for param in part.get_params(context):
            if param.param_type_name == "argument":
                assert param.metavar and not set(param.metavar) & set("[]{} "), f"{name}: {param.metavar}"
                assert getattr(param, "help", None), f"{name} {param.name}: no word of help"
            elif getattr(param, "is_flag", False):
                assert param.metavar == "", f"{name} {param.opts}: looks as if it took a value"


def test_no_name_of_an_option_is_cut_off_in_80_columns(monkeypatch, capsys):
    from windlass.cli import command

    monkeypatch.setenv("COLUMNS", "80")
    root = command()
    for name in ("eval", "report", "sweep", "launch"):
        with pytest.raises(SystemExit):
            root([name, "--help"], prog_name="windlass")
    assert "…" not in capsys.readouterr().out


def test_alone_it_shows_the_seven_steps():
    done = windlass()
    assert done.returncode == 0
    assert all(word in done.stdout for word in ("plan", "tokenize", "sweep", "launch", "train", "watch", "report"))


def test_clusters_as_json():
    names = [c["name"] for c in json.loads(windlass("clusters", "--json").stdout)["clusters"]]
    assert "lumi-g" in names
    one = json.loads(windlass("clusters", "lumi-g", "--json").stdout)
    assert one["node"]["devices"] == 8
    assert one["device"]["bf16_tflops"] == 191.5


def test_show_prints_every_value_and_its_origin(tmp_path):
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        'name = "r"\n[model]\nlayers = 2\nwidth = 64\nffn = 128\nheads = 4\nvocab = 256\n[data]\ntokens = "1M"\n'
    )
    values = {v["key"]: v for v in json.loads(windlass("show", recipe, "nodes=3", "--json").stdout)["values"]}
    assert values["nodes"] == {"key": "nodes", "value": 3, "origin": "override"}
    assert values["data.tokens"]["value"] == 1_000_000
    assert "override" in windlass("show", recipe, "nodes=3").stdout


BAD = {
    "missing recipe": ("show", "no.toml"),
    "syntax": ("show", "syntax.toml"),
    "wrong type": ("show", "good.toml", "model.layers=many"),
    "unknown key": ("show", "good.toml", "model.layerz=2"),
    "negative": ("show", "good.toml", "model.layers=-2"),
    "unit typo": ("show", "good.toml", "data.tokens=45Q"),
    "unknown cluster": ("clusters", "lumi"),
    "unknown option": ("clusters", "--nope"),
    "unknown command": ("planx",),
}


@pytest.mark.parametrize("words", BAD.values(), ids=list(BAD))
def test_bad_input_ends_with_one_message_and_no_traceback(tmp_path, words):
    (tmp_path / "good.toml").write_text(
        'name = "r"\n[model]\nlayers = 2\nwidth = 64\nffn = 128\nheads = 4\nvocab = 256\n[data]\ntokens = "1M"\n'
    )
    (tmp_path / "syntax.toml").write_text("name = r\n")
    before = sorted(p.name for p in tmp_path.iterdir())
    done = windlass(*words, cwd=tmp_path)
    assert done.returncode not in (0, 70), done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert done.stderr.strip()
    if "unknown option" not in done.stderr and words[0] in ("show",):
        assert "hint" in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_an_argument_that_is_not_utf8_is_shown(tmp_path):
    done = windlass("report", os.fsdecode(b"no\xff"), cwd=tmp_path)
    assert done.returncode == 4 and "no\\udcff" in done.stderr
    done = windlass("show", os.fsdecode(b"no\xff.toml"), cwd=tmp_path)
    assert done.returncode == 2 and "no\\udcff.toml" in done.stderr


def test_a_limit_on_address_space_is_named(tmp_path):
    (tmp_path / "r.toml").write_text(RECIPE)
    shell = f"ulimit -v 100000; exec {sys.executable} -m windlass train r.toml --run run -q"
    done = subprocess.run(shell, shell=True, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 12 and "98 MiB" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(12, "Cannot allocate memory"),
        RuntimeError("can't start new thread"),
        RuntimeError("std::bad_alloc"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    ],
    ids=repr,
)
def test_a_lack_of_memory_is_no_fault_of_windlass(error):
    failure = describe_failure(error)
    assert failure.exit_code == 12 and "out of memory" in failure.message and "bug" not in (failure.hint or "")


@pytest.mark.parametrize(("library", "needed"), [("numpy", 192 << 20), ("torch", 1 << 30)])
def test_a_library_without_room_is_refused_before_it_ends_the_process(library, needed):
    # OpenBLAS exits with 1, the loader with 127 and C++ aborts: where exactly depends on the limit.
    program = f"""
import resource, sys
from windlass.errors import MemoryLimitError, guard_imports
resource.setrlimit(resource.RLIMIT_AS, ({needed - 4096}, resource.RLIM_INFINITY))
guard_imports()
try:
    import {library}
except MemoryLimitError as error:
    resource.setrlimit(resource.RLIMIT_AS, ({needed}, resource.RLIM_INFINITY))
    import {library}
    print(error.code, error.exit_code)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["system.memory-limit", "12"], done.stderr


def test_debug_shows_the_traceback(tmp_path):
    assert "Traceback" in windlass("show", "no.toml", "--debug", cwd=tmp_path).stderr


def test_a_reader_that_stops_early_is_no_error():
    done = subprocess.run(
        f"{sys.executable} -m windlass show --schema | head -1", shell=True, capture_output=True, text=True
    )
    assert done.stdout.startswith("{")
    assert "Traceback" not in done.stderr


def test_every_command_is_found_in_its_own_file():
    import typer.main

    from windlass.cli import build

    everything = typer.main.get_command(build()).commands
    assert len(everything) > 15
    for name in everything:
        assert name in typer.main.get_command(build(name)).commands, name
