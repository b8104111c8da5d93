"""`windlass clusters`: what we know of each machine, how sure we are, and how the live answer differs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from windlass.clusters import Cluster


def register(app: typer.Typer) -> None:
    app.command("clusters")(clusters)


def clusters(
    name: Annotated[str | None, typer.Argument(help="Show this machine; all are listed when left out.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    probe: Annotated[
        bool, typer.Option("--probe", help="Ask the live scheduler and show where the file is out of date.")
    ] = False,
    devices: Annotated[bool, typer.Option("--devices", help="List the known accelerators instead.")] = False,
) -> None:
    """What is known of each machine, with source and date; your own go to ~/.config/windlass/clusters/."""
    from windlass.clusters import load_cluster

    if devices:
        _devices(as_json)
    elif probe:
        _probe(name, as_json)
    elif name is None:
        _list(as_json)
    else:
        _show(load_cluster(name), as_json)


def _list(as_json: bool) -> None:
    from windlass.cli.output import console, print_json, table
    from windlass.clusters import cluster_names, load_cluster, load_device
    from windlass.units import print_bytes

    known = [load_cluster(n) for n in cluster_names()]
    if as_json:
        print_json({"clusters": [_json(c) for c in known]})
        return
    rows = []
    for c in known:
        d = load_device(c.device)
        longest = max(
            (p.max_time for p in (c.slurm.partitions if c.slurm else []) if p.max_time and p.gpus), default=None
        )
        rows.append((
            c.name, c.nodes or "unknown", f"{c.node.devices} x {d.name}", print_bytes(d.memory), _number(d.bf16_tflops),
            _number(c.links.inter_gbs_per_node), f"{longest / 3600:g} h" if longest else "no limit", c.network.internet,
            _number(c.grid.pue), _number(c.grid.g_per_kwh), c.verified_on or "never",
        ))  # fmt: skip
    columns = (
        "cluster",
        "nodes",
        "devices per node",
        "memory",
        "bf16 TFLOP/s",
        "GB/s per node",
        "longest job",
        "internet",
        "PUE",
        "g CO2/kWh",
        "verified live",
    )
    console().print(
        table("Machines we know (per device where not said otherwise)", columns, rows, right=(1, 4, 5, 6, 8, 9))
    )
    console().print("windlass clusters NAME shows every value with its source; --devices lists the accelerators.")


def _json(cluster: Cluster) -> dict[str, Any]:
    from windlass.clusters import load_device

    value: dict[str, Any] = cluster.model_dump(mode="json", exclude_none=False)
    value["device"] = load_device(cluster.device).model_dump(mode="json")
    return value


def _show(cluster: Cluster, as_json: bool) -> None:
    from windlass.cli.output import console, print_json, table
    from windlass.clusters import load_device
    from windlass.clusters.describe import facts

    if as_json:
        print_json(_json(cluster))
        return
    out = console()
    out.print(
        f"[bold]{cluster.title}[/bold], {cluster.site}; compared with the live machine: {cluster.verified_on or 'never'}"
    )
    own = [f for f in facts(cluster) if not f.key.startswith(("env.", "container.env.", "name", "title", "site"))]
    columns = ("key", "value", "status", "read", "source")
    out.print(table("Machine", columns, [(f.key, f.shown, f.status, f.on, f.source) for f in own]))
    if cluster.env:
        out.print(
            table(
                "Environment",
                ("variable", "value", "why", "source"),
                [(k, v.value, v.why, v.source) for k, v in cluster.env.items()],
            )
        )
    device = load_device(cluster.device)
    out.print(
        table(f"Device {device.name}", columns, [(f.key, f.shown, f.status, f.on, f.source) for f in facts(device)])
    )
    for note in cluster.notes:
        out.print(f"- {note}", markup=False)


def _devices(as_json: bool) -> None:
    from windlass.cli.output import console, print_json, table
    from windlass.clusters import devices
    from windlass.units import print_bytes

    known = devices()
    if as_json:
        print_json({"devices": [d.model_dump(mode="json") for d in known.values()]})
        return
    rows = [(d.name, d.vendor, print_bytes(d.memory), _number(d.bf16_tflops), _number(d.fp8_tflops, "none"), _number(d.matmul_tflops), _number(d.bandwidth_gbs), _number(d.tdp_watts), ", ".join(k for k, s in d.sources.items() if s.status in ("unverified", "assumed"))) for d in known.values()]  # fmt: skip
    columns = (
        "device",
        "vendor",
        "memory",
        "bf16 TFLOP/s",
        "fp8 TFLOP/s",
        "best matmul",
        "GB/s",
        "W",
        "unverified or assumed",
    )
    console().print(table("Devices (dense peaks)", columns, rows, right=(2, 3, 4, 5, 6, 7)))


def _probe(name: str | None, as_json: bool) -> None:
    from windlass.cli.output import console, print_json, table
    from windlass.clusters import load_cluster
    from windlass.clusters.probe import probe

    found = probe(load_cluster(name) if name else None)
    if as_json:
        print_json(found.as_dict())
        return
    console().print(table(found.title, ("key", "file says", "machine says", ""), found.rows()))


def _number(value: float | None, unknown: str = "unknown") -> str:
    return unknown if value is None else f"{value:g}"
