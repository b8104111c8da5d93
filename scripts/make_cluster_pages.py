"""Writes docs/clusters/*.md from the cluster files: the facts of each cluster with their reliability, and a sample job script.

    python scripts/make_cluster_pages.py [--check]

--check writes nothing and exits with 1 if a page is out of date; a test runs it.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from windlass.clusters import Cluster, cluster_names, load_cluster, load_device
from windlass.clusters.describe import facts
from windlass.clusters.load import SHIPPED
from windlass.config import Recipe, validate
from windlass.config.load import flatten
from windlass.launch.job import train_job
from windlass.launch.script import render
from windlass.units import print_seconds

WIDE = "---\nhide: [toc]\n---\n"
"""Front matter: tables use the width of the table of contents."""
FOLDER = Path(__file__).parents[1] / "docs" / "clusters"
CONTAINERS = {
    "singularity": "The Singularity command line was rendered and compared with a golden file; SingularityCE was not executed by our tests.",
    "apptainer": "The Apptainer command line was rendered and compared with a golden file; Apptainer was not executed by our tests.",
    "charliecloud": "tests/slurm executes jobs in a Charliecloud container.",
    "none": "No container runtime is described.",
}


def page(cluster: Cluster) -> str:
    verified, unverified = [], []
    keys_in_file = set(written(cluster.name))
    for fact in facts(cluster):
        read = f" ({fact.on})" if fact.on else ""
        row = f"| `{fact.key}` | {_cell(_as_toml(fact.shown))} | {fact.status} | {_cell(fact.source)}{read} |"
        if (
            fact.key not in keys_in_file
            or fact.key.startswith(("env.", "container.env.", "notes", "name", "title", "site"))
            or fact.source == ""
        ):
            continue
        (unverified if fact.status in ("unverified", "assumed", "derived") else verified).append(row)
    head = "| key | value | status | source (read) |\n|---|---|---|---|\n"
    parts = [
        WIDE + f"# {cluster.title}",
        f"{cluster.site}. Generated from `src/windlass/clusters/data/{cluster.name}.toml` by `scripts/make_cluster_pages.py`: edit that file, not this page.",
        _verified(cluster),
        _modules(cluster) if cluster.slurm else "",
        "## Partitions\n\n" + _queues(cluster)
        if cluster.slurm
        else "No scheduler: `windlass launch` starts a detached process on this machine, with the same commands.",
        "## Documented, or measured by others\n\n" + head + "\n".join(verified),
        "## Not verified: derived, assumed or from secondary sources\n\n"
        + (head + "\n".join(unverified) if unverified else "Nothing."),
        "## Environment\n\n" + _environment(cluster) if cluster.env else "",
        "## Known pitfalls\n\n"
        + "\n".join(f"- {note}" for note in [*cluster.notes, *(cluster.slurm.rules.values() if cluster.slurm else [])]),
        "## Sample job script\n\n```bash\n" + render(_example(cluster), cluster) + "```" if cluster.slurm else "",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def written(name: str) -> list[str]:
    """Dotted keys that the file itself has; a default of ours is not a fact about a cluster."""
    return [key for key, _ in flatten(tomllib.loads((SHIPPED / f"{name}.toml").read_text()))]


def _verified(cluster: Cluster) -> str:
    live = (
        f"Verified on the live system on {cluster.verified_on}."
        if cluster.verified_on
        else "**Not yet verified on the live system**; no job of ours has run there."
    )
    probe = (
        f"`windlass clusters {cluster.name} --probe` on a login node shows which values are out of date."
        if cluster.slurm
        else ""
    )
    return f"{live} {probe} {CONTAINERS[cluster.container.runtime]}".replace("  ", " ")


def _modules(cluster: Cluster) -> str:
    loads = "; ".join(f"`module load {name}`" for name in cluster.modules)
    return f'`environment = "module"` loads: {loads or "not known, so it is refused without `launch.modules`"}.'


def _queues(cluster: Cluster) -> str:
    rows = ["| partition | QOS | wall-time limit | nodes | use |", "|---|---|---|---|---|"]
    for p in cluster.slurm.partitions if cluster.slurm else []:
        nodes = f"{p.min_nodes} to {p.max_nodes or 'all'}"
        rows.append(
            f"| {p.name} | {p.qos or ''} | {print_seconds(p.max_time) if p.max_time else 'unknown'} | {nodes} | "
            f"{p.use_for}{f'; {p.cores} cores per node' if p.cores else ''} |"
        )
    return "\n".join(rows)


def _environment(cluster: Cluster) -> str:
    rows = ["| variable | value | why | source |", "|---|---|---|---|"]
    return "\n".join(
        [
            *rows,
            *(f"| `{k}` | `{_cell(v.value)}` | {_cell(v.why)} | {_cell(v.source)} |" for k, v in cluster.env.items()),
        ]
    )


def _as_toml(shown: str) -> str:
    return {"True": "true", "False": "false"}.get(shown, shown)


def _cell(text: str) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def _example(cluster: Cluster):
    """A model of seven billion parameters on four nodes."""
    raw = {
        "name": "example", "cluster": cluster.name, "nodes": 4, "data": {"store": "data/store", "tokens": "1T", "seq_len": 4096, "batch_tokens": "4Mi"},
        "model": {"layers": 32, "width": 4096, "ffn": 11008, "heads": 32, "vocab": 32000}, "layout": {"shard": "hybrid", "micro_batch": 1},
        "launch": {"account": "ACCOUNT", "venv": "/project/venv", "chain": 3},
    }  # fmt: skip
    recipe = validate(Recipe, raw, "example")
    return train_job(recipe, cluster, "/project/runs/example", workdir="/project")


def index() -> str:
    rows = [
        "# Known clusters",
        "",
        "| cluster | site | devices per node | verified on the live system |",
        "|---|---|---|---|",
    ]
    for name in shipped():
        c = load_cluster(name)
        rows.append(
            f"| [{c.title}]({name}.md) | {c.site} | {c.node.devices} x {load_device(c.device).name} | {c.verified_on or 'not yet'} |"
        )
    return (
        "\n".join(
            [
                *rows,
                "",
                "Add your own as `~/.config/windlass/clusters/NAME.toml`; a file with the name of one of ours is merged over it.",
            ]
        )
        + "\n"
    )


def shipped() -> list[str]:
    return [name for name in cluster_names() if (SHIPPED / f"{name}.toml").is_file()]


def main() -> int:
    pages = {"index.md": index(), **{f"{name}.md": page(load_cluster(name)) for name in shipped()}}
    stale = [
        name for name, text in pages.items() if not (FOLDER / name).is_file() or (FOLDER / name).read_text() != text
    ]
    if "--check" in sys.argv:
        print("out of date: " + ", ".join(stale) if stale else "all pages are up to date")
        return int(bool(stale))
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in stale:
        (FOLDER / name).write_text(pages[name])
    print(f"wrote {len(stale)} of {len(pages)} pages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
