"""Makes pictures of README and stories by running the commands they show, or by asking the planner: docs/pictures/NAME.svg.

python scripts/make_pictures.py plan          # or no name for all that need no long run

Pictures of the stories' small runs come from scripts/stories.py.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

TOP = Path(__file__).resolve().parents[1]
PICTURES = TOP / "docs" / "pictures"
COMMANDS = {
    "plan": (["plan", "recipes/gptnl_8b_snellius.toml", "--top", "5"], 26, 160),
    "clusters": (["clusters"], 20, 150),
}


def record(words: list[str], lines: int, width: int) -> str:
    """The command's own output as a picture of so many columns, cut after `lines`."""
    from rich.console import Console
    from rich.text import Text

    env = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(width), "TERM": "xterm-256color"}
    done = subprocess.run(
        [sys.executable, "-m", "windlass", *words], capture_output=True, text=True, cwd=TOP, env=env, check=True
    )
    shown = [line.rstrip() for line in done.stdout.splitlines()]
    if len(shown) > lines:
        shown = [*shown[:lines], "..."]
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(Text(f"$ windlass {' '.join(words)}", style="bold green"))
    console.print(Text.from_ansi("\n".join(shown)))
    svg = console.export_svg(title="windlass")
    # The picture must open without a network: no fonts from elsewhere.
    return re.sub(r"@font-face\s*\{[^}]*\}", "", svg)


# -- charts of the stories -------------------------------------------------------------------------------------------------


def budget_curves(target: Path) -> None:
    """GPT-NL's slide: six sizes, 88 H100 at an MFU of 0.4."""
    words = [
        "--cluster",
        "snellius-h100",
        "--nodes",
        "22",
        "--days",
        "120",
        "--mfu",
        "0.4",
        "--sizes",
        "1B,2B,7B,13B,30B,70B",
    ]
    subprocess.run(
        [sys.executable, "-m", "windlass", "budget", *words, "--png", str(target)],
        cwd=TOP,
        check=True,
        capture_output=True,
    )


def strong_scaling(target: Path, title: str, recipes: dict[str, str], counts: list[int]) -> None:
    """Predicted tokens/s over devices, with the perfect line of each model from its first size."""
    from windlass.clusters import load_cluster
    from windlass.config import load_recipe
    from windlass.figures import Chart, line, save_picture
    from windlass.planner.scaling import scaling

    series = []
    for index, (name, label) in enumerate(recipes.items()):
        recipe = load_recipe(TOP / "recipes" / f"{name}.toml").recipe
        found = scaling(recipe.model_copy(update={"layout": None}), load_cluster(recipe.cluster), counts)
        devices, rates = [p.devices for p in found], [p.tokens_per_second() or 0.0 for p in found]
        series.append(line(label, devices, rates, colour=index))
        series.append(
            line(f"{label}, perfect", devices, [rates[0] / devices[0] * d for d in devices], dashed=True, colour=index)
        )
    caption = "Predicted; the best layout at each size, the same batch throughout."
    chart = Chart(
        title=title,
        series=tuple(series),
        x_title="devices",
        y_title="tokens/s",
        log_x=True,
        log_y=True,
        caption=caption,
    )
    save_picture(chart, target)


def oom_map(target: Path) -> None:
    """8B on four nodes of four H100: tokens/s of a device for each way to shard and to recompute, or OOM."""
    from windlass.clusters import load_cluster
    from windlass.config import load_recipe
    from windlass.figures import Heat, save_picture
    from windlass.planner import plan
    from windlass.planner.explain import explain_layout

    words = ["nodes=4", "data.batch_tokens=4Mi", "data.seq_len=4096"]
    recipe = load_recipe(TOP / "recipes" / "gptnl_8b_snellius.toml", words).recipe.model_copy(update={"layout": None})
    plans = plan(recipe, load_cluster(recipe.cluster))
    batches = [1, 2, 4, 8, 16]
    rows = [
        (shard, again)
        for shard in ("none", "zero1", "zero2", "hybrid", "full")
        for again in ("none", "selective", "full")
    ]

    def cell(shard: str, again: str, batch: int) -> tuple[float | None, str]:
        found = explain_layout(plans, f"shard={shard},micro_batch={batch},recompute={again}").plan
        if found is None or not found.fits:
            return None, "OOM"
        rate = found.step.tokens_per_second_per_device
        return rate, f"{rate:,.0f}"

    made = [[cell(*row, batch) for batch in batches] for row in rows]
    heat = Heat(
        title="8B on four nodes of four H100: tokens/s of a device, or OOM (predicted)", x=tuple(map(str, batches)), x_title="micro-batch, sequences of 4,096 tokens",
        y=tuple(f"{shard}, recompute {again}" for shard, again in rows), values=tuple(tuple(v for v, _ in r) for r in made),
        labels=tuple(tuple(w for _, w in r) for r in made), unit="tokens/s", height=560,
    )  # fmt: skip
    save_picture(heat, target)


CHARTS: dict[str, Callable[[Path], None]] = {
    "story-gptnl-budget": budget_curves,
    "story-gptnl-scaling": lambda target: strong_scaling(
        target, "Snellius, four H100 a node", {"gptnl_1b_snellius": "1.1B", "gptnl_8b_snellius": "8B", "gptnl_30b_snellius": "30B"}, [1, 2, 4, 8, 16]),
    "story-lumi-scaling": lambda target: strong_scaling(
        target, "LUMI, eight GCDs a node", {"viking_33b_lumi": "Viking 33B", "study_140b_lumi": "140B"}, [16, 32, 64, 128, 256]),
    "story-ultrascale-oom": oom_map,
}  # fmt: skip


def main() -> int:
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[1:] or [*COMMANDS, *CHARTS]:
        target = PICTURES / f"{name}.svg"
        if name in CHARTS:
            CHARTS[name](target)
        else:
            target.write_text(record(*COMMANDS[name]))
        print(f"wrote docs/pictures/{name}.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
