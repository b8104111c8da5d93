"""argv -> config -> one call per command. The only room that prints and exits.

Every file beside this one defines one command or a small family, imports nothing heavy at the top, and offers
`register(app)`; the part that does the work is imported inside the command, so `windlass --help` starts at once.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

import typer

from windlass.errors import WindlassError

# In the order of the story; `windlass --help` lists commands in this order.
COMMANDS = (
    "demo", "init", "show", "clusters", "plan", "budget", "data", "train", "resume", "checkpoints", "launch", "sweep", "watch", "dash",
    "profile", "evaluate", "generate", "export", "finetune", "energy", "report", "doctor",
)  # fmt: skip


# Commands that live in a file of another name.
HOMES = {
    "tokenize": "data", "tokenizer": "data", "jobs": "launch", "logs": "launch", "cancel": "launch", "submit": "launch", "link": "launch",
    "compare": "profile", "sync": "report", "eval": "evaluate", "import": "export",
}  # fmt: skip


# The extra of pyproject.toml that brings a package: what the base installation leaves out.
EXTRAS = {
    "torch": "train", "safetensors": "train", "psutil": "train", "tokenizers": "data", "tiktoken": "data", "sentencepiece": "data",
    "zstandard": "data", "pyarrow": "data", "transformers": "eval", "lm_eval": "eval", "sacrebleu": "eval", "matplotlib": "png",
    "wandb": "trackers", "tensorboard": "trackers", "mlflow": "trackers",
}  # fmt: skip


def home(word: str | None) -> str | None:
    """The one file that a command needs; None: all of them, for `--help` and for words that are no command."""
    return HOMES.get(word or "") or (word if word in COMMANDS and word != "evaluate" else None)


def build(word: str | None = None) -> typer.Typer:
    """The command line as one typer application; with a command's name only that part of it, which starts sooner."""
    from windlass.cli.start import start

    app = typer.Typer(
        name="windlass",
        help="From a compute allocation to a trained language model: plan, tokenize, sweep, launch, train, watch, profile, eval, report.",
        no_args_is_help=False,
        add_completion=True,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
        epilog="Any command takes --debug: the whole traceback of an error instead of one message.",
    )
    app.callback(invoke_without_command=True)(start)
    only = home(word)
    for name in COMMANDS if only is None else (only,):
        import_module(f"windlass.cli.{name}").register(app)
    return app


def command(word: str | None = None) -> Any:
    """The application as it is run: one way to write arguments, and flags that do not look as if they took a value."""
    import typer.main

    root: Any = typer.main.get_command(build(word))
    # typer lists groups last; the story has tokenizers beside tokens.
    order = list(root.commands)
    if {"tokenize", "tokenizer"} <= set(order):
        order.insert(order.index("tokenize") + 1, order.pop(order.index("tokenizer")))
    root.commands = {name: root.commands[name] for name in order}
    _plain_words(root)
    return root


def _plain_words(part: Any) -> None:
    made = part.get_help_option

    def help_option(context: Any) -> Any:
        option = made(context)
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
        _plain_words(inner)


def main() -> None:
    """Entry point of the `windlass` command: errors become one message, a hint and an exit code."""
    # Looking for plugins of pydantic reads what every installed package says of itself; no model of ours has use for one.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    debug = _take_debug_flag()
    if sys.argv[1:2] == ["help"]:  # what many tools answer to
        sys.argv[1:] = [*sys.argv[2:3], "--help"]
    if "_WINDLASS_COMPLETE" in os.environ:
        _complete()
    try:
        code = command(sys.argv[1] if len(sys.argv) > 1 else None)(standalone_mode=False)
        if isinstance(code, int) and code:  # outside standalone mode typer.Exit(75) comes back as a value
            sys.exit(code)
    except WindlassError as error:
        if debug:
            raise
        _complain(error.message, error.hint)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        _complain(
            "stopped by Ctrl-C", "files are written whole or not at all, so the same command can simply be run again"
        )
        sys.exit(130)
    except BrokenPipeError:  # `windlass ... | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        if debug:
            raise
        _complain(_os_message(error), _os_hint(error))
        sys.exit(1)
    except ModuleNotFoundError as error:
        if debug or (extra := EXTRAS.get((error.name or "").split(".")[0])) is None:
            _finish(error, debug)
        _complain(
            f"this command needs {error.name}, which is not installed",
            f"pip install 'windlass[{extra}]'; docs/install.md",
        )
        sys.exit(1)
    except Exception as error:
        _finish(error, debug)


def _complete() -> None:
    """The shell asks for words: the whole command tree, with names of machines and runs."""
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
    _complain(
        f"{type(error).__name__}: {error}",
        "this is a fault in windlass; run again with --debug for the traceback and report it",
    )
    sys.exit(70)


def _take_debug_flag() -> bool:
    debug = "--debug" in sys.argv[1:]
    if debug:
        sys.argv = [sys.argv[0], *(a for a in sys.argv[1:] if a != "--debug")]
    return debug or bool(os.environ.get("WINDLASS_DEBUG"))


def _os_message(error: OSError) -> str:
    where = f" {error.filename}" if error.filename else ""
    return f"the system refused{where}: {error.strerror or error}"


def _os_hint(error: OSError) -> str:
    import errno

    return {
        errno.ENOSPC: "the disk is full: free some space or choose another folder with --run; what was complete is still there",
        errno.EDQUOT: "your quota is used up: free some space or choose another file system",
        errno.EACCES: "you may not read or write there: ask whoever owns it, or choose another folder",
        errno.EROFS: "that file system is read-only: choose another folder",
    }.get(error.errno or 0, "check the path and its permissions; run with --debug for the traceback")


def _complain(message: str, hint: str | None) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Text.assemble(("error: ", "bold red"), message))
    if hint:
        console.print(Text.assemble(("hint:  ", "bold cyan"), with_pages(hint)))


def with_pages(hint: str) -> str:
    """`docs/guides/data.md` as the page's path on this disk: beside the package in a wheel, at the top of a checkout."""
    import re
    from pathlib import Path

    package = Path(__file__).resolve().parents[1]

    def found(match: re.Match[str]) -> str:
        places = (package / match.group(), package.parents[1] / match.group())
        return next((str(p) for p in places if p.is_file()), match.group())

    return re.sub(r"\bdocs/[\w/-]+\.md", found, hint)
