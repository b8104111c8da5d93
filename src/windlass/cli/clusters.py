"""`windlass clusters`: the known clusters and devices, how reliable each value is, and the comparison with the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from windlass.clusters import Cluster


def register(app: typer.Typer) -> None:
    app.command("clusters")(clusters)


def clusters(
    name: Annotated[str | None, typer.Argument(help="Cluster to show (default: list all).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    probe: Annotated[
        bool, typer.Option("--probe", help="Ask the live scheduler and show where the file is out of date.")
    ] = False,
    devices: Annotated[bool, typer.Option("--devices", help="List the known accelerators instead.")] = False,
) -> None:
    """Show the known clusters with source and date of every value; add your own in ~/.config/windlass/clusters/."""
    from windlass.clusters import load_cluster

    if devices:
        _print_devices(as_json)
    elif probe:
        _print_probe(name, as_json)
    elif name is None:
        _print_list(as_json)
    else:
        _print_cluster(load_cluster(name), as_json)


def _print_list(as_json: bool) -> None:
    from windlass.cli.output import console, print_json, table
    from windlass.clusters import cluster_names, load_cluster, load_device
    from windlass.units import print_bytes

    all_clusters = [load_cluster(name) for name in cluster_names()]
    if as_json:
        print_json({"clusters": [_document(cluster) for cluster in all_clusters]})
        return
    columns = ("cluster", "nodes", "devices per node", "memory", "bf16 TFLOP/s", "GB/s per node", "longest job", "internet",
               "PUE", "g CO2/kWh", "verified live")  # fmt: skip
    rows = []
    for c in all_clusters:
        device, partitions = load_device(c.device), c.slurm.partitions if c.slurm else []
        longest = max((p.max_time for p in partitions if p.max_time and p.gpus), default=None)
        rows.append((
            c.name, c.nodes or "unknown", f"{c.node.devices} x {device.name}", print_bytes(device.memory),
            _number(device.bf16_tflops), _number(c.links.inter_gbs_per_node),
            f"{longest / 3600:g} h" if longest else "no limit", c.network.internet, _number(c.grid.pue),
            _number(c.grid.g_per_kwh), c.verified_on or "never",
        ))  # fmt: skip
    title = "Known clusters (figures are per device unless noted)"
    console().print(table(title, columns, rows, right=(1, 4, 5, 6, 8, 9)))
    console().print("windlass clusters NAME shows every value with its source; --devices lists the accelerators.")


def _document(cluster: Cluster) -> dict[str, Any]:
    from windlass.clusters import load_device

    device = load_device(cluster.device).model_dump(mode="json")
    return {**cluster.model_dump(mode="json", exclude_none=False), "device": device}


def _print_cluster(cluster: Cluster, as_json: bool) -> None:
    from windlass.cli.output import console, print_json, table
    from windlass.clusters import load_device
    from windlass.clusters.describe import facts

    if as_json:
        print_json(_document(cluster))
        return
    out, device = console(), load_device(cluster.device)
    verified = cluster.verified_on or "never"
    out.print(f"[bold]{cluster.title}[/bold], {cluster.site}; compared with the live machine: {verified}")
    hidden = ("env.", "container.env.", "name", "title", "site")
    columns = ("key", "value", "status", "read", "source")
    rows = [(f.key, f.shown, f.status, f.on, f.source) for f in facts(cluster) if not f.key.startswith(hidden)]
    out.print(table("Cluster", columns, rows))
    if cluster.env:
        variables = [(name, v.value, v.why, v.source) for name, v in cluster.env.items()]
        out.print(table("Environment", ("variable", "value", "why", "source"), variables))
    rows = [(f.key, f.shown, f.status, f.on, f.source) for f in facts(device)]
    out.print(table(f"Device {device.name}", columns, rows))
    for note in cluster.notes:
        out.print(f"- {note}", markup=False)


def _print_devices(as_json: bool) -> None:
    from windlass.cli.output import console, print_json, table
    from windlass.clusters import devices
    from windlass.units import print_bytes

    all_devices = devices().values()
    if as_json:
        print_json({"devices": [device.model_dump(mode="json") for device in all_devices]})
        return
    columns = ("device", "vendor", "memory", "bf16 TFLOP/s", "fp8 TFLOP/s", "best matmul", "GB/s", "W",
               "unverified or assumed")  # fmt: skip
    rows = [
        (
            d.name, d.vendor, print_bytes(d.memory), _number(d.bf16_tflops), _number(d.fp8_tflops, "none"),
            _number(d.matmul_tflops), _number(d.bandwidth_gbs), _number(d.tdp_watts),
            ", ".join(key for key, source in d.sources.items() if source.status in ("unverified", "assumed")),
        )
        for d in all_devices
    ]  # fmt: skip
    console().print(table("Devices (dense peaks)", columns, rows, right=(2, 3, 4, 5, 6, 7)))


def _print_probe(name: str | None, as_json: bool) -> None:
    from windlass.cli.output import console, print_json, table
    from windlass.clusters import load_cluster
    from windlass.clusters.probe import probe

    result = probe(load_cluster(name) if name else None)
    if as_json:
        print_json(result.as_dict())
        return
    rows = [(d.key, d.file, d.machine, d.verdict) for d in result.differences]
    console().print(table(result.title, ("key", "file", "machine", ""), rows))


def _number(value: float | None, unknown: str = "unknown") -> str:
    return unknown if value is None else f"{value:g}"
