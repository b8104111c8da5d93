"""The command line: parse the arguments, call one function, print. No other package prints or exits.

Every other file of this package defines one command or a few related ones. It imports the code that does the work
inside the command, so that `windlass --help` starts at once.
"""

import errno
import os
import re
import signal
import sys
import traceback
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import typer

from windlass.cli import output
from windlass.errors import (
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    TerminatedError,
    WindlassError,
    guard_imports,
    interrupt_exit_code,
    lack_of_memory,
)

# Group -> command -> its file and function, in the order of `windlass --help`, which is the order of a project.
COMMANDS = {
    "Plan": {"init": "init.init", "show": "show.show", "plan": "plan.plan", "budget": "budget.budget"},
    "Data": {
        "tokenize": "data.tokenize", "tokenizer train": "data.train", "tokenizer compare": "data.compare",
        "data": "data.data",
    },
    "Run": {
        "demo": "demo.demo", "train": "train.train", "resume": "resume.resume", "finetune": "finetune.finetune",
        "sweep": "sweep.sweep", "launch": "launch.launch", "checkpoints": "checkpoints.checkpoints",
    },
    "Watch": {
        "watch": "watch.watch", "dash": "dash.dash", "report": "report.report", "compare": "profile.compare",
        "profile": "profile.profile", "energy": "energy.energy", "sync": "report.sync",
    },
    "Evaluate": {
        "eval": "evaluate.eval_", "generate": "generate.generate", "chat": "chat.chat", "export": "export.export",
        "import": "export.import_",
    },
    "Cluster": {
        "clusters": "clusters.clusters", "doctor": "doctor.doctor", "jobs": "launch.jobs", "logs": "launch.logs",
        "cancel": "launch.cancel", "submit": "launch.submit_any", "stage": "launch.stage", "image": "image.image",
        "link": "launch.link",
    },
}  # fmt: skip
GROUPS = {name: group for group, commands in COMMANDS.items() for name in commands}
HELP_OPTIONS = ["-h", "--help"]
VERBOSE_OPTIONS = {"-v", "--verbose", "--debug"}  # --debug is its old name
SETTINGS: dict[str, dict[str, Any]] = {
    "submit": {"context_settings": {"ignore_unknown_options": True}},
    "link": {"hidden": True},
}
# Package -> the extra of pyproject.toml that installs it.
EXTRAS = {
    "torch": "train", "safetensors": "train", "psutil": "train", "tokenizers": "data", "tiktoken": "data",
    "sentencepiece": "data", "zstandard": "data", "pyarrow": "data", "jinja2": "data", "transformers": "eval",
    "lm_eval": "eval", "sacrebleu": "eval", "rouge_score": "eval", "matplotlib": "png", "wandb": "trackers", "tensorboard": "trackers", "mlflow": "trackers",
}  # fmt: skip
OS_HINTS = {
    errno.ENOSPC: "the disk is full: free some space or choose another folder; complete files are kept",
    errno.EDQUOT: "your quota is used up: free some space or choose another file system",
    errno.EACCES: "no permission to read or write there: ask the owner, or choose another folder",
    errno.EROFS: "that file system is read-only: choose another folder",
}
MEMORY_CODES = ("system.memory-limit", "system.out-of-memory")


@dataclass(frozen=True)
class Failure:
    """What the command line prints of an error."""

    code: str
    message: str
    hint: str | None
    exit_code: int


def build(only: str | None = None) -> typer.Typer:
    """The typer application. `only` makes it start sooner: with a command's name it has that command alone, with a help
    option all commands without their parameters, which its list does not show."""
    from windlass.cli.start import start

    app = typer.Typer(
        name="windlass",
        help="From a compute allocation to a trained language model: plan, tokenize, sweep, launch, train, watch, "
        "profile, eval, report.",
        no_args_is_help=False,
        add_completion=True,
        rich_markup_mode="rich",
        context_settings={"help_option_names": HELP_OPTIONS},
        pretty_exceptions_enable=False,
        epilog="Every command accepts -v (--verbose).",
    )
    app.callback(invoke_without_command=True)(start)
    tokenizer = typer.Typer(
        name="tokenizer", help="Train a tokenizer, and compare how well it fits each language.", no_args_is_help=True
    )
    for name in [name for name in GROUPS if name.split()[0] == only] or GROUPS:
        file, _, function = COMMANDS[GROUPS[name]][name].partition(".")
        implementation = getattr(import_module(f"windlass.cli.{file}"), function)
        is_inner = name.startswith("tokenizer ")
        settings = {**SETTINGS.get(name, {}), "rich_help_panel": None if is_inner else GROUPS[name]}
        # Line breaks of the source are not those of the help text.
        text = "\n\n".join(" ".join(part.split()) for part in implementation.__doc__.split("\n\n"))
        register = (tokenizer if is_inner else app).command(name.split()[-1], help=text, **settings)
        register((lambda: None) if only in HELP_OPTIONS else implementation)
    if tokenizer.registered_commands:
        app.add_typer(tokenizer, rich_help_panel=GROUPS["tokenizer train"])
    return app


def command(only: str | None = None) -> Any:
    """The application with uniform help texts: metavars in capitals, flags without a value."""
    from typer.main import get_command

    root: Any = get_command(build(only))
    # typer lists groups last; `tokenizer` belongs after `tokenize`.
    order = list(dict.fromkeys(name.split()[0] for name in GROUPS))
    root.commands = {name: root.commands[name] for name in order if name in root.commands}
    _simplify_help(root)
    return root


def _simplify_help(part: Any) -> None:
    original, format_help = part.get_help_option, part.format_help

    def help_option(context: Any) -> Any:
        option = original(context)
        if option is not None:
            option.metavar = ""
        return option

    def narrow_help(context: Any, formatter: Any) -> None:
        # In 80 columns the explanations need the room: no old names of options, and types as short as possible.
        for param in part.params:
            if param.param_type_name == "option":
                long = [name for name in param.opts if name.startswith("--")]
                param.opts = [name for name in param.opts if name not in long[1:]]
                if (
                    hasattr(param, "display_type") and param.metavar is None
                ):  # older releases of typer have no such method
                    param.metavar = re.sub(r" range|list\[|\]", "", param.display_type(context)).lower()
        format_help(context, formatter)

    part.get_help_option, part.format_help = help_option, narrow_help
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
    own, others = split_at_dashes(sys.argv[1:])
    output.json_printed = False
    is_verbose = bool(VERBOSE_OPTIONS & {*own}) or bool(os.environ.get("WINDLASS_DEBUG"))
    sys.argv[1:] = [argument for argument in own if argument not in VERBOSE_OPTIONS] + others
    if is_verbose:
        _log_details()
    if sys.argv[1:2] == ["help"]:  # as in git and many other tools
        sys.argv[1:] = [*sys.argv[2:3], "--help"]
    if "_WINDLASS_COMPLETE" in os.environ:  # the shell asks for completions
        from windlass.cli.complete import add_completions

        root = command()
        add_completions(root)
        root(prog_name="windlass")
    # A file name that is not UTF-8 and a damaged text are shown as \udcff instead of ending the command.
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    guard_imports()
    signal.signal(signal.SIGTERM, terminate)
    code = 0
    try:
        root = command(sys.argv[1] if len(sys.argv) > 1 else None)
        # Not by calling it: that turns Ctrl-C into an exit code without a message.
        with root.make_context("windlass", sys.argv[1:]) as context:
            root.invoke(context)
    except BrokenPipeError:  # `windlass ... | head` closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt):  # a second one must not cut off the message
            set_stop_signals(signal.SIG_IGN)
        code = report_failure(error, as_json="--json" in own, is_verbose=is_verbose)
    if code in (EXIT_INTERRUPTED, EXIT_TERMINATED):  # a second signal ends the process without a traceback
        set_stop_signals(signal.SIG_DFL)
    if code:
        sys.exit(code)


def set_stop_signals(handler: signal.Handlers) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def terminate(number: int, frame: FrameType | None) -> None:
    raise TerminatedError


def report_failure(error: BaseException, *, as_json: bool, is_verbose: bool) -> int:
    """Print an error and its hint on the error stream, with --json also as the one document on standard output;
    returns the exit code."""
    # typer bundles click privately in newer releases, so its exceptions are recognised by shape, not by class.
    if type(error).__name__ == "Exit":
        return int(getattr(error, "exit_code", 0))
    if type(error).__name__ == "NoArgsIsHelpError":  # `windlass tokenizer`: its help is the answer
        error.show()  # type: ignore[attr-defined]
        return 2
    suggest_options(error)
    failure = describe_failure(error)
    if as_json and not output.json_printed:
        output.print_json({"error": asdict(failure)})
        sys.stdout.flush()
    if is_verbose and not isinstance(error, KeyboardInterrupt):
        traceback.print_exception(error)
    if failure.code in MEMORY_CODES:  # rich, and what libraries do at exit, would need more of it
        sys.stderr.write(f"error: {failure.message}\nhint:  {failure.hint}\n")
        sys.stderr.flush()
        os._exit(failure.exit_code)
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Text.assemble(("error: ", "bold red"), failure.message))
    if failure.hint:
        console.print(Text.assemble(("hint:  ", "bold cyan"), failure.hint))
    if is_verbose:
        console.print(f"code:  {failure.code} (exit code {failure.exit_code})", style="dim")
    return failure.exit_code


def suggest_options(error: Any) -> None:
    """For an option that a command does not have: its nearest options, or all of them."""
    if type(error).__name__ != "NoSuchOption" or error.ctx is None:
        return
    from difflib import get_close_matches

    options = [name.strip("-") for param in error.ctx.command.params for name in param.opts if name.startswith("--")]
    wrong = error.option_name.strip("-")
    near = get_close_matches(wrong, options, n=2, cutoff=0.6) or [name for name in options if wrong in name]
    error.possibilities = [f"--{name}" for name in near or options]


def split_at_dashes(argv: list[str]) -> tuple[list[str], list[str]]:
    """What follows `--` belongs to another command: `windlass submit -- eval RUN -v`."""
    end = argv.index("--") if "--" in argv else len(argv)
    return argv[:end], argv[end:]


def _log_details() -> None:
    """Print what the packages log, such as the files that values come from, with the milliseconds since the start."""
    import logging

    from windlass import __version__

    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(relativeCreated)6.0f ms  %(message)s"))
    logger = logging.getLogger("windlass")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    version = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    logger.info("windlass %s in %s, Python %s", __version__, Path(__file__).parents[1], version)


def describe_failure(error: BaseException) -> Failure:
    if isinstance(error, WindlassError):
        return Failure(error.code, error.message, error.hint and with_pages(error.hint), error.exit_code)
    if isinstance(error, KeyboardInterrupt) or type(error).__name__ == "Abort":  # typer's, for the end of the input
        hint = "files are written completely or not at all, so you can run the same command again"
        cause = "SIGTERM" if isinstance(error, TerminatedError) else "Ctrl-C"
        code = interrupt_exit_code(error) if isinstance(error, KeyboardInterrupt) else EXIT_INTERRUPTED
        return Failure("cli.interrupted", f"stopped by {cause}", hint, code)
    if hasattr(error, "format_message"):
        message = error.format_message().rstrip(".")
        context = getattr(error, "ctx", None)
        program = "windlass" if context is None else context.command_path
        hint = f"`{program} --help` shows how to use it"
        return Failure("cli.usage", message[:1].lower() + message[1:], hint, 2)
    if (limited := lack_of_memory(error)) is not None:
        return describe_failure(limited)
    if isinstance(error, OSError):
        reason = str(error.strerror or error)
        message = f"cannot access {error.filename}: {reason}" if error.filename else reason
        default = "check the path and its permissions; -v prints the traceback"
        return Failure("system.file-access", message, OS_HINTS.get(error.errno or 0, default), 1)
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    if extra := EXTRAS.get((name or "").split(".")[0]):
        hint = with_pages(f"pip install 'windlass[{extra}]'; docs/install.md")
        return Failure("system.package-missing", f"this command needs {name}, which is not installed", hint, 1)
    hint = "this is a bug in windlass: run the command again with -v and report the traceback"
    return Failure("cli.bug", f"{type(error).__name__}: {error}", hint, 70)


def with_pages(hint: str) -> str:
    """Replace `docs/guides/data.md` by the page's path on this disk: in the package (wheel) or in the checkout."""
    package = Path(__file__).resolve().parents[1]

    def page_path(match: re.Match[str]) -> str:
        places = (package / match.group(), package.parents[1] / match.group())
        return next((str(p) for p in places if p.is_file()), match.group())

    return re.sub(r"\bdocs/[\w/-]+\.md", page_path, hint)
