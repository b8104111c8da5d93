"""`windlass clusters`: the known clusters and devices with sources, and the comparison with the live machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from windlass.cli.output import show, table, text_of
from windlass.units import print_bytes

if TYPE_CHECKING:
    from windlass.clusters.model import Cluster, Device


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
    from windlass.clusters.probe import probe as probe_machine

    if devices:
        _show_devices(as_json)
    elif probe:
        result = probe_machine(load_cluster(name) if name else None)
        rows = [(d.key, d.file, d.machine, d.verdict) for d in result.differences]
        title = f"{result.cluster}: cluster file and live machine ({result.host})"
        tools = f"installed tools: {', '.join(result.tools) or 'none'}"
        show(as_json, result, table(title, ("key", "file", "machine", ""), rows), tools)
    elif name is None:
        _show_list(as_json)
    else:
        _show_cluster(load_cluster(name), as_json)


def _show_list(as_json: bool) -> None:
    from windlass.clusters import cluster_names, load_cluster, load_device

    columns = ("cluster", "nodes", "devices per node", "memory", "bf16 TFLOP/s", "GB/s per node", "longest job",
               "internet", "PUE", "g CO2/kWh", "verified live")  # fmt: skip
    rows, documents = [], []
    for c in map(load_cluster, cluster_names()):
        device, partitions = load_device(c.device), c.slurm.partitions if c.slurm else []
        longest = max((p.max_time for p in partitions if p.max_time and p.gpus), default=None)
        rows.append((
            c.name, c.nodes or "unknown", f"{c.node.devices} x {device.name}", print_bytes(device.memory),
            text_of(device.bf16_tflops, "g"), text_of(c.links.inter_gbs_per_node, "g"),
            f"{longest / 3600:g} h" if longest else "no limit", c.network.internet, text_of(c.grid.pue, "g"),
            text_of(c.grid.g_per_kwh, "g"), c.verified_on or "never",
        ))  # fmt: skip
        documents.append(_document(c, device))
    title = "Known clusters (figures are per device unless noted)"
    advice = "windlass clusters NAME shows every value with its source; --devices lists the accelerators."
    show(as_json, {"clusters": documents}, table(title, columns, rows, right=(1, 4, 5, 6, 8, 9)), advice)


def _document(cluster: Cluster, device: Device) -> dict[str, Any]:
    return {**cluster.model_dump(mode="json", exclude_none=False), "device": device.model_dump(mode="json")}


def _show_cluster(cluster: Cluster, as_json: bool) -> None:
    from windlass.clusters import load_device
    from windlass.clusters.describe import facts

    device, verified = load_device(cluster.device), cluster.verified_on or "never"
    hidden = ("env.", "container.env.", "name", "title", "site")
    columns = ("key", "value", "status", "read", "source")
    rows = [(f.key, f.shown, f.status, f.on, f.source) for f in facts(cluster) if not f.key.startswith(hidden)]
    device_rows = [(f.key, f.shown, f.status, f.on, f.source) for f in facts(device)]
    variables = [(name, v.value, v.why, v.source) for name, v in cluster.env.items()]
    show(
        as_json,
        _document(cluster, device),
        f"{cluster.title}, {cluster.site}; compared with the live machine: {verified}",
        table("Cluster", columns, rows),
        table("Environment", ("variable", "value", "why", "source"), variables) if variables else None,
        table(f"Device {device.name}", columns, device_rows),
        *(f"- {note}" for note in cluster.notes),
    )


def _show_devices(as_json: bool) -> None:
    from windlass.clusters import devices

    columns = ("device", "vendor", "memory", "bf16 TFLOP/s", "fp8 TFLOP/s", "best matmul", "GB/s", "W",
               "unverified or assumed")  # fmt: skip
    rows = [
        (
            d.name, d.vendor, print_bytes(d.memory), text_of(d.bf16_tflops, "g"), text_of(d.fp8_tflops, "g", "none"),
            text_of(d.matmul_tflops, "g"), text_of(d.bandwidth_gbs, "g"), text_of(d.tdp_watts, "g"),
            ", ".join(key for key, source in d.sources.items() if source.status in ("unverified", "assumed")),
        )
        for d in devices().values()
    ]  # fmt: skip
    document = {"devices": [device.model_dump(mode="json") for device in devices().values()]}
    show(as_json, document, table("Devices (dense peaks)", columns, rows, right=(2, 3, 4, 5, 6, 7)))
