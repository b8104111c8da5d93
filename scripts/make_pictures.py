"""Makes the terminal pictures of the README by running the commands they show: docs/pictures/NAME.svg.

python scripts/make_pictures.py plan          # or no name for all that need no long run
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

TOP = Path(__file__).resolve().parents[1]
PICTURES = TOP / "docs" / "pictures"
WIDTH = 124

COMMANDS = {
    "plan": (["plan", "recipes/gptnl_8b_snellius.toml", "--top", "5"], 30),
    "clusters": (["clusters"], 20),
    "energy": (["energy", "runs/demo"], 40),
}


def record(words: list[str], lines: int) -> str:
    """The command's own output as a picture, cut after `lines`."""
    from rich.console import Console
    from rich.text import Text

    env = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(WIDTH), "TERM": "xterm-256color"}
    done = subprocess.run(
        [sys.executable, "-m", "windlass", *words], capture_output=True, text=True, cwd=TOP, env=env, check=True
    )
    shown = [line.rstrip() for line in done.stdout.splitlines()]
    if len(shown) > lines:
        shown = [*shown[:lines], "..."]
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(Text(f"$ windlass {' '.join(words)}", style="bold green"))
    console.print(Text.from_ansi("\n".join(shown)))
    svg = console.export_svg(title="windlass")
    # The picture must open without a network: no fonts from elsewhere.
    return re.sub(r"@font-face\s*\{[^}]*\}", "", svg)


def main() -> int:
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[1:] or [n for n in COMMANDS if n != "energy" or (TOP / "runs" / "demo").is_dir()]:
        words, lines = COMMANDS[name]
        (PICTURES / f"{name}.svg").write_text(record(words, lines))
        print(f"wrote docs/pictures/{name}.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
