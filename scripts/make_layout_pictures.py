"""Draws docs/pictures/layout-*.svg: what each of 8 devices (2 nodes of 4) holds under each layout, and when a pipeline works.

python scripts/make_layout_pictures.py

Degrees and stages come from `windlass.layout`, which the engine uses too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from windlass.config import LayoutConfig
from windlass.layout.resolve import JobSize, complete_layout
from windlass.layout.stages import stages as stages_of
from windlass.layout.types import Layout

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
DEVICES, PER_NODE = 8, 4
LEFT, COLUMN, WIDTH = 92, 98, 92 + 8 * 98 + 16

STYLE = """
.paper{fill:#ffffff}.ink{fill:#1f2933}.dim{fill:#5b6875}.node{fill:#f1f4f7}.empty{fill:none;stroke:#c4ccd4}.line{stroke:#8a96a3;fill:none}
.weights{fill:#2f6fb5}.copy{fill:#a9c9ea}.gradients{fill:#d9772b}.moments{fill:#5f8f3e}.passing{fill:none;stroke:#2f6fb5;stroke-dasharray:3 2}
.batch{fill:#7d5ba6}.forward{fill:#2f6fb5}.backward{fill:#d9772b}.on{fill:#ffffff}
text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;font-size:12px}.small{font-size:10.5px}.name{font-weight:600;font-size:14px}
@media (prefers-color-scheme:dark){.paper{fill:#1b222b}.ink{fill:#e4e9ee}.dim{fill:#9fabb8}.node{fill:#252e39}.empty{stroke:#47535f}.line{stroke:#75828f}
.weights{fill:#5b9be0}.copy{fill:#3d6894}.gradients{fill:#e8934f}.moments{fill:#86b562}.passing{stroke:#5b9be0}.batch{fill:#a98ad0}.forward{fill:#5b9be0}
.backward{fill:#e8934f}.on{fill:#10151b}}
"""


@dataclass
class Sheet:
    """The shapes drawn so far, and their lowest point."""

    title: str
    parts: list[str] = field(default_factory=list)
    height: float = 0.0

    def box(self, x: float, y: float, width: float, height: float, kind: str, round_: float = 0) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{round_:g}" class="{kind}"/>'
        )
        self.height = max(self.height, y + height)

    def text(self, x: float, y: float, words: str, kind: str = "ink", anchor: str = "start") -> None:
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>')
        self.height = max(self.height, y + 4)

    def line(self, x: float, y: float, to_x: float, to_y: float) -> None:
        self.parts.append(f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" class="line"/>')

    def save(self, name: str) -> None:
        height = self.height + 12
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}" role="img">'
        body = f'<title>{escape(self.title)}</title><style>{STYLE}</style><rect width="{WIDTH}" height="{height:g}" class="paper"/>'
        (PICTURES / f"{name}.svg").write_text("\n".join([head, body, *self.parts, "</svg>"]) + "\n")


@dataclass(frozen=True)
class Rank:
    """Coordinates of a device in the mesh: pipeline, replicate, shard, tensor."""

    number: int
    pipeline: int
    replicate: int
    shard: int
    tensor: int
    context: int
    data: int


def ranks(config: LayoutConfig) -> tuple[Layout, list[Rank]]:
    layout = complete_layout(config, JobSize(devices=DEVICES, devices_per_node=PER_NODE, seq_len=4096, sequences=16))
    coordinates = []
    for number in range(DEVICES):
        outer, tensor = divmod(number, layout.tensor)
        outer, shard = divmod(outer, layout.shard_size)
        pipeline, replicate = divmod(outer, layout.replicas // layout.shard_size)
        replica = replicate * layout.shard_size + shard
        data, context = divmod(replica, layout.context)
        coordinates.append(Rank(number, pipeline, replicate, shard, tensor, context, data))
    return layout, coordinates


def column(number: int) -> float:
    return LEFT + number * COLUMN


def nodes(sheet: Sheet, top: float, height: float) -> None:
    """The two nodes as panels behind what their devices hold."""
    for node in range(DEVICES // PER_NODE):
        sheet.box(column(node * PER_NODE) - 2, top, PER_NODE * COLUMN - 6, height, "node", 6)


def heading(sheet: Sheet, top: float) -> None:
    for node in range(DEVICES // PER_NODE):
        middle = column(node * PER_NODE) + PER_NODE * COLUMN / 2 - 5
        sheet.text(middle, top + 12, f"node {node}", "ink", "middle")
    for number in range(DEVICES):
        sheet.text(column(number) + COLUMN / 2 - 5, top + 28, f"rank {number}", "dim small", "middle")


def legend(sheet: Sheet, top: float, entries: list[tuple[str, str]]) -> None:
    x = float(LEFT)
    for kind, words in entries:
        sheet.box(x, top, 12, 12, kind, 2)
        sheet.text(x + 17, top + 10, words, "ink small")
        x += 36 + 6.2 * len(words)


# -- sharding ---------------------------------------------------------------------------------------------------------------

CELL, STACK, GAP = 9, 22, 5
SHARDED = {
    "none": ("every device holds everything", "one all-reduce per block, while the backward pass goes on"),
    "zero1": (
        "moments and fp32 weights divided",
        "a 16-bit copy of the weights stays for the whole step; gradients reduced once",
    ),
    "zero2": ("gradients too", "reduced and divided after each micro-batch"),
    "full": ("the copy of the weights too", "two blocks at a time are gathered, forward and backward (dashed)"),
    "hybrid": ("full inside a node, copies across", "gradients: divided inside the node, all-reduced across nodes"),
    "hybrid_zero2": ("zero2 inside a node, copies across", "the copy of the weights is gathered once per micro-batch"),
}


def held(shard: str, rank: Rank, layout: Layout) -> dict[str, list[str]]:
    """For each of 8 slices of the model: what is there of weights, gradients and moments."""
    mine = [layout.shard_size * slice_ // DEVICES == rank.shard for slice_ in range(DEVICES)]
    whole = shard == "none"
    copied = "copy" if shard in ("zero1", "zero2", "hybrid_zero2") else "empty"
    weights = ["weights" if whole or own else copied for own in mine]
    gradients = ["gradients" if whole or shard == "zero1" or own else "empty" for own in mine]
    moments = ["moments" if whole or own else "empty" for own in mine]
    return {"weights": weights, "gradients": gradients, "moments": moments}


def sharding() -> None:
    sheet = Sheet("What each of 8 devices holds under each kind of sharding")
    legend(sheet, 10, [
        ("weights", "weights, fp32"), ("copy", "their 16-bit copy"), ("gradients", "gradients"), ("moments", "moments of AdamW"),
        ("batch", "sequences of a batch of 16"), ("empty", "not here"),
    ])  # fmt: skip
    heading(sheet, 30)
    top = 66.0
    for shard, (what, how) in SHARDED.items():
        layout, all_ranks = ranks(LayoutConfig(shard=shard))
        nodes(sheet, top, DEVICES * CELL + 48)
        sheet.text(8, top + 20, shard, "ink name")
        for rank in all_ranks:
            _stacks(sheet, held(shard, rank, layout), column(rank.number) + 8, top + 6)
            if shard in ("full", "hybrid"):
                sheet.box(column(rank.number) + 6, top + 4, STACK + 4, 2 * CELL + 3, "passing", 2)
            _reads(sheet, rank, layout, top + 6 + DEVICES * CELL + 6)
        sheet.text(column(0) + 6, top + DEVICES * CELL + 40, f"{what}; {how}", "dim small")
        top += DEVICES * CELL + 60
    sheet.save("layout-sharding")


def _stacks(sheet: Sheet, holding: dict[str, list[str]], x: float, y: float) -> None:
    for number, kinds in enumerate(holding.values()):
        for slice_, kind in enumerate(kinds):
            sheet.box(x + number * (STACK + GAP), y + slice_ * CELL, STACK, CELL - 2, kind, 1)


def _all_read(sheet: Sheet, all_ranks: list[Rank], layout: Layout, top: float, words: str) -> None:
    """The last row of a picture: which sequences of the batch each rank reads."""
    nodes(sheet, top, 40)
    sheet.text(8, top + 20, "reads", "ink small")
    for rank in all_ranks:
        _reads(sheet, rank, layout, top + 6)
    sheet.text(column(0) + 6, top + 34, words, "dim small")


def _reads(sheet: Sheet, rank: Rank, layout: Layout, y: float) -> None:
    each = 16 // layout.data
    first = rank.data * each
    sheet.box(column(rank.number) + 8, y, 3 * STACK + 2 * GAP, 14, "batch", 3)
    words = f"{first}-{first + each - 1}" if each > 1 else str(first)
    sheet.text(column(rank.number) + 8 + (3 * STACK + 2 * GAP) / 2, y + 11, words, "on small", "middle")


# -- tensor, context ------------------------------------------------------------------------------------------------------------


def tensor() -> None:
    """Tensor 4 inside each node, two data-parallel replicas."""
    layout, all_ranks = ranks(LayoutConfig(tensor=4, shard="none"))
    sheet = Sheet("Tensor and sequence parallelism: 4 devices of a node share each layer, 2 replicas")
    legend(sheet, 10, [
        ("weights", "the part of a matrix that is here"), ("copy", "positions of the sequence that are here"), ("batch", "sequences of a batch of 16"),
        ("empty", "elsewhere"),
    ])  # fmt: skip
    heading(sheet, 30)
    rows = [
        ("embedding\nhead", "rows of the vocabulary", "rows"),
        ("norms\nresidual", "a stretch of each sequence", "time"),
        ("wq wk wv\nw1 w3", "columns: some heads", "columns"),
        ("wo, w2", "rows: the sum over ranks is reduce-scattered", "rows"),
    ]
    top = 66.0
    for name, what, kind in rows:
        nodes(sheet, top, 92)
        for line, words in enumerate(name.split("\n")):
            sheet.text(8, top + 20 + 14 * line, words, "ink small")
        for rank in all_ranks:
            _quarter(sheet, column(rank.number) + 20, top + 8, kind, rank.tensor, layout.tensor)
        sheet.text(column(0) + 6, top + 84, what, "dim small")
        top += 104
    _all_read(sheet, all_ranks, layout, top, "the ranks of a tensor group read the same sequences; gradients are all-reduced between the nodes")  # fmt: skip
    sheet.save("layout-tensor")


def _quarter(sheet: Sheet, x: float, y: float, kind: str, number: int, parts: int) -> None:
    """A square cut into strips, one of which is on this device."""
    size = 56
    for part in range(parts):
        here = ("copy" if kind == "time" else "weights") if part == number else "empty"
        step = size / parts
        if kind == "columns":
            sheet.box(x + part * step, y, step - 2, size - 2, here, 1)
        else:
            sheet.box(x, y + part * step, size - 2, step - 2, here, 1)


def context() -> None:
    """Context 4, two replicas, sharding over all."""
    layout, all_ranks = ranks(LayoutConfig(context=4, shard="full"))
    sheet = Sheet("Context parallelism: 4 devices share each long sequence, 2 groups")
    legend(sheet, 10, [
        ("weights", "queries that this rank answers"), ("copy", "keys and values it gathers"), ("batch", "sequences of a batch of 16"), ("empty", "not needed"),
    ])  # fmt: skip
    heading(sheet, 30)
    top, size = 66.0, 64
    nodes(sheet, top, 100)
    sheet.text(8, top + 20, "attention", "ink small")
    sheet.text(8, top + 34, "query down,", "dim small")
    sheet.text(8, top + 46, "key across", "dim small")
    for rank in all_ranks:
        step = size / layout.context
        for q in range(layout.context):
            for k in range(layout.context):
                here = "empty" if q != rank.context or k > q else ("weights" if k == q else "copy")
                sheet.box(column(rank.number) + 14 + k * step, top + 8 + q * step, step - 2, step - 2, here, 1)
    sheet.text(column(0) + 6, top + 92, "each rank holds a quarter of the positions; the last one of a group looks back at most", "dim small")  # fmt: skip
    top += 112
    _all_read(sheet, all_ranks, layout, top, "ranks of a context group take stretches of the same sequences; weights, gradients and moments are divided as shard says, over all 8")  # fmt: skip
    sheet.save("layout-context")


# -- pipeline ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    stage: int
    forward: bool
    micro_batch: int
    begin: int
    end: int


def one_f_one_b(stages: int, micro_batches: int) -> list[Work]:
    """When each stage does what, if a forward pass takes one tick and a backward pass two."""
    orders = [list(_order(stage, stages, micro_batches)) for stage in range(stages)]
    done: dict[tuple[int, bool, int], int] = {}
    free, found = [0] * stages, []
    while any(orders):
        for stage, order in enumerate(orders):
            if not order:
                continue
            forward, number = order[0]
            needs = _needs(stage, forward, number, stages)
            if needs is not None and needs not in done:
                continue
            begin = max(free[stage], 0 if needs is None else done[needs])
            end = begin + (1 if forward else 2)
            done[stage, forward, number] = free[stage] = end
            found.append(Work(stage, forward, number, begin, end))
            order.pop(0)
    return found


def _order(stage: int, stages: int, count: int) -> Iterator[tuple[bool, int]]:
    """Enough forward passes to fill the later stages, then one forward and one backward in turn, then the rest backward."""
    ahead = min(count, stages - 1 - stage)
    yield from ((True, n) for n in range(ahead))
    for n in range(count - ahead):
        yield True, ahead + n
        yield False, n
    yield from ((False, n) for n in range(count - ahead, count))


def _needs(stage: int, forward: bool, number: int, stages: int) -> tuple[int, bool, int] | None:
    if forward:
        return None if stage == 0 else (stage - 1, True, number)
    return (stage, True, number) if stage == stages - 1 else (stage + 1, False, number)


def pipeline() -> None:
    """Pipeline 4, two replicas; 8 micro-batches in a step."""
    layout, all_ranks = ranks(LayoutConfig(pipeline=4, shard="none"))
    layers = [stage.layers for stage in stages_of(16, layout.pipeline)]
    sheet = Sheet(
        "Pipeline parallelism: 4 stages of a model of 16 layers, 2 replicas, and the 1F1B schedule of 8 micro-batches"
    )
    legend(
        sheet,
        10,
        [("weights", "layers that are here"), ("batch", "sequences of a batch of 16"), ("empty", "on other ranks")],
    )
    heading(sheet, 30)
    top = 66.0
    nodes(sheet, top, 132)
    sheet.text(8, top + 20, "layers", "ink small")
    for rank in all_ranks:
        x = column(rank.number) + 22
        for layer in range(16):
            here = "weights" if layer in layers[rank.pipeline] else "empty"
            sheet.box(x, top + 6 + layer * 5.5, 44, 4, here, 1)
        ends = {0: "embedding", layout.pipeline - 1: "norm, head"}.get(rank.pipeline, "")
        sheet.text(x + 22, top + 106, ends, "dim small", "middle")
        _reads(sheet, rank, layout, top + 112)
    top += 144
    _gantt(sheet, top, layout.pipeline, 8)
    sheet.save("layout-pipeline")


def _gantt(sheet: Sheet, top: float, stages: int, micro_batches: int) -> None:
    works = one_f_one_b(stages, micro_batches)
    total = max(w.end for w in works)
    tick, high = (WIDTH - LEFT - 20) / total, 26
    legend(
        sheet,
        top,
        [("forward", "forward pass of a micro-batch"), ("backward", "backward pass"), ("empty", "the bubble: waiting")],
    )
    top += 20
    for stage in range(stages):
        y = top + stage * (high + 5)
        sheet.text(8, y + 17, f"stage {stage}", "ink small")
        sheet.box(LEFT, y, total * tick, high, "empty", 2)
        for work in (w for w in works if w.stage == stage):
            kind = "forward" if work.forward else "backward"
            x, width = LEFT + work.begin * tick, (work.end - work.begin) * tick
            sheet.box(x + 0.5, y + 1, width - 1, high - 2, kind, 2)
            sheet.text(x + width / 2, y + 17, str(work.micro_batch), "on small", "middle")
    y = top + stages * (high + 5) + 12
    busy = sum(w.end - w.begin for w in works) / (stages * total)
    sheet.line(LEFT, y - 8, LEFT + total * tick, y - 8)
    sheet.text(LEFT, y + 6, f"time; {1 - busy:.0%} bubble = (stages - 1) / (micro-batches + stages - 1) for {stages} stages and {micro_batches} micro-batches; gradients are reduced once, at the end", "dim small")  # fmt: skip


def main() -> None:
    for draw in (sharding, tensor, pipeline, context):
        draw()
    print(*sorted(path.name for path in PICTURES.glob("layout-*.svg")))


if __name__ == "__main__":
    main()
