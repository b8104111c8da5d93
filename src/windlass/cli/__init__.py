"""The command line: parse the arguments, call one function, print. No other package prints or exits.

Every other file of this package defines one command or a few related ones and has `register(app)`. It imports the code that
does the work inside the command, so that `windlass --help` starts at once.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

import typer

from windlass.errors import WindlassError

# `windlass --help` lists the commands in this order, which is the order of a project.
COMMANDS = (
    "demo", "init", "show", "clusters", "plan", "budget", "data", "train", "resume", "checkpoints", "launch", "sweep", "watch", "dash",
    "profile", "evaluate", "generate", "export", "finetune", "energy", "report", "doctor",
)  # fmt: skip


# Commands that are defined in a file of another name.
FILE_OF_COMMAND = {
    "tokenize": "data", "tokenizer": "data", "jobs": "launch", "logs": "launch", "cancel": "launch", "submit": "launch", "link": "launch",
    "compare": "profile", "sync": "report", "eval": "evaluate", "import": "export",
}  # fmt: skip


# Package -> the extra of pyproject.toml that installs it.
EXTRAS = {
    "torch": "train", "safetensors": "train", "psutil": "train", "tokenizers": "data", "tiktoken": "data", "sentencepiece": "data",
    "zstandard": "data", "pyarrow": "data", "transformers": "eval", "lm_eval": "eval", "sacrebleu": "eval", "matplotlib": "png",
    "wandb": "trackers", "tensorboard": "trackers", "mlflow": "trackers",
}  # fmt: skip


def defining_file(name: str | None) -> str | None:
    """The file that defines a command; None (all files) for `--help` and for unknown commands."""
    return FILE_OF_COMMAND.get(name or "") or (name if name in COMMANDS and name != "evaluate" else None)


def build(name: str | None = None) -> typer.Typer:
    """The typer application; with a command's name only the part that this command needs, which starts sooner."""
    from windlass.cli.start import start

    app = typer.Typer(
        name="windlass",
        help="From a compute allocation to a trained language model: plan, tokenize, sweep, launch, train, watch, profile, eval, report.",
        no_args_is_help=False,
        add_completion=True,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
        epilog="Every command accepts --debug, which prints the full traceback of an error.",
    )
    app.callback(invoke_without_command=True)(start)
    only = defining_file(name)
    for module in COMMANDS if only is None else (only,):
        import_module(f"windlass.cli.{module}").register(app)
    return app


def command(name: str | None = None) -> Any:
    """The application with uniform help texts: metavars in capitals, flags without a value."""
    import typer.main

    root: Any = typer.main.get_command(build(name))
    # typer lists groups last; `tokenizer` belongs after `tokenize`.
    order = list(root.commands)
    if {"tokenize", "tokenizer"} <= set(order):
        order.insert(order.index("tokenize") + 1, order.pop(order.index("tokenizer")))
    root.commands = {name: root.commands[name] for name in order}
    _simplify_help(root)
    return root


def _simplify_help(part: Any) -> None:
    original = part.get_help_option

    def help_option(context: Any) -> Any:
        option = original(context)
        if option is not None:
            option.metavar = ""
        return option

    part.get_help_option = help_option
    for param in part.params:
        if getattr(param, "is_flag", False):
            param.metavar = ""  # newer releases of typer print <bool> there
        elif param.param_type_name == "argument":
            param.metavar = (param.metavar or param.name.upper()).removesuffix("...").strip("[]")
    for inner in getattr(part, "commands", {}).values():
        _simplify_help(inner)


def main() -> None:
    """Entry point of the `windlass` command: errors become one message, a hint and an exit code."""
    # Searching for pydantic plugins reads the metadata of every installed package, and no model of ours uses one.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    debug = _take_debug_flag()
    if sys.argv[1:2] == ["help"]:  # as in git and many other tools
        sys.argv[1:] = [*sys.argv[2:3], "--help"]
    if "_WINDLASS_COMPLETE" in os.environ:
        _complete()
    try:
        code = command(sys.argv[1] if len(sys.argv) > 1 else None)(standalone_mode=False)
        if isinstance(code, int) and code:  # outside standalone mode typer.Exit(75) is returned as a value
            sys.exit(code)
    except WindlassError as error:
        if debug:
            raise
        _print_error(error.message, error.hint)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        _print_error(
            "stopped by Ctrl-C", "files are written completely or not at all, so you can run the same command again"
        )
        sys.exit(130)
    except BrokenPipeError:  # `windlass ... | head` closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        if debug:
            raise
        _print_error(_os_message(error), _os_hint(error))
        sys.exit(1)
    except ModuleNotFoundError as error:
        if debug or (extra := EXTRAS.get((error.name or "").split(".")[0])) is None:
            _finish(error, debug)
        _print_error(
            f"this command needs {error.name}, which is not installed",
            f"pip install 'windlass[{extra}]'; docs/install.md",
        )
        sys.exit(1)
    except Exception as error:
        _finish(error, debug)


def _complete() -> None:
    """Answer the shell's completion request, with names of clusters and runs."""
    from windlass.cli.complete import add_completions

    root = command()
    add_completions(root)
    root(prog_name="windlass")


def _finish(error: Exception, debug: bool) -> None:
    # typer bundles click privately in newer releases, so its exceptions are recognised by shape, not by class.
    if hasattr(error, "exit_code") and hasattr(error, "show"):
        error.show()
        sys.exit(int(error.exit_code))
    if type(error).__name__ == "Exit" and hasattr(error, "exit_code"):
        sys.exit(int(error.exit_code))
    if type(error).__name__ == "Abort":
        sys.exit(130)
    if debug:
        raise error
    _print_error(
        f"{type(error).__name__}: {error}",
        "this is a bug in windlass: run again with --debug for the traceback, and report it",
    )
    sys.exit(70)


def _take_debug_flag() -> bool:
    debug = "--debug" in sys.argv[1:]
    if debug:
        sys.argv = [sys.argv[0], *(a for a in sys.argv[1:] if a != "--debug")]
    return debug or bool(os.environ.get("WINDLASS_DEBUG"))


def _os_message(error: OSError) -> str:
    where = f" {error.filename}" if error.filename else ""
    return f"cannot access{where}: {error.strerror or error}" if where else str(error.strerror or error)


def _os_hint(error: OSError) -> str:
    import errno

    return {
        errno.ENOSPC: "the disk is full: free some space or choose another folder with --run; complete files are kept",
        errno.EDQUOT: "your quota is used up: free some space or choose another file system",
        errno.EACCES: "no permission to read or write there: ask the owner, or choose another folder",
        errno.EROFS: "that file system is read-only: choose another folder",
    }.get(error.errno or 0, "check the path and its permissions; run with --debug for the traceback")


def _print_error(message: str, hint: str | None) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Text.assemble(("error: ", "bold red"), message))
    if hint:
        console.print(Text.assemble(("hint:  ", "bold cyan"), with_pages(hint)))


def with_pages(hint: str) -> str:
    """Replace `docs/guides/data.md` by the page's path on this disk: inside the package in a wheel, else in the checkout."""
    import re
    from pathlib import Path

    package = Path(__file__).resolve().parents[1]

    def on_disk(match: re.Match[str]) -> str:
        places = (package / match.group(), package.parents[1] / match.group())
        return next((str(p) for p in places if p.is_file()), match.group())

    return re.sub(r"\bdocs/[\w/-]+\.md", on_disk, hint)
