"""`windlass clusters`: the known clusters and devices with sources, and the comparison with the live machine."""

from typing import Annotated, Any

import typer

from windlass.cli.options import JsonOption
from windlass.cli.output import show, table, text_of
from windlass.units import print_bytes

# The columns that a narrow terminal can do without, the least important first, as for every table.
CLUSTER_DROP = ("verified live", "PUE", "internet", "GB/s per node", "longest job")
DEVICE_DROP = ("unverified or assumed", "vendor", "fp8 TFLOP/s")
FACT_DROP = ("date", "status")
FACT_COLUMNS = ("key", "value", "status", "date", "source")
CLUSTER_COLUMNS = (
    "cluster", "nodes", "devices per node", "memory", "bf16 TFLOP/s", "GB/s per node", "longest job", "internet",
    "PUE", "g CO2/kWh", "verified live",
)  # fmt: skip
DEVICE_COLUMNS = (
    "device", "vendor", "memory", "bf16 TFLOP/s", "fp8 TFLOP/s", "best matmul", "GB/s", "W", "unverified or assumed",
)  # fmt: skip


def clusters(
    name: Annotated[str | None, typer.Argument(help="Cluster to show (default: list all).")] = None,
    as_json: JsonOption = False,
    probe: Annotated[
        bool, typer.Option("--probe", help="Ask the live scheduler and show where the file is out of date.")
    ] = False,
    devices: Annotated[bool, typer.Option("--devices", help="List the known accelerators instead.")] = False,
) -> None:
    """Show the known clusters, with the source and date of every value; add your own in
    ~/.config/windlass/clusters/."""
    from windlass.clusters import cluster_names, describe, load_cluster, load_device
    from windlass.clusters import devices as load_devices
    from windlass.clusters.probe import probe as probe_machine

    if devices:
        rows: list[Any] = [
            (
                d.name, d.vendor, print_bytes(d.memory), text_of(d.bf16_tflops, "g"),
                text_of(d.fp8_tflops, "g", "none"), text_of(d.matmul_tflops, "g"), text_of(d.bandwidth_gbs, "g"),
                text_of(d.tdp_watts, "g"),
                ", ".join(key for key, source in d.sources.items() if source.status in ("unverified", "assumed")),
            )
            for d in load_devices().values()
        ]  # fmt: skip
        documents = [device.model_dump(mode="json") for device in load_devices().values()]
        listed = table("Devices (dense peaks)", DEVICE_COLUMNS, rows, right=(2, 3, 4, 5, 6, 7), drop=DEVICE_DROP)
        show(as_json, {"devices": documents}, listed)
    elif probe:
        result = probe_machine(load_cluster(name) if name else None)
        rows = [(d.key, d.file, d.machine, d.verdict) for d in result.differences]
        title = f"{result.cluster}: cluster file and live machine ({result.host})"
        show(
            as_json,
            result,
            table(title, ("key", "file", "machine", ""), rows),
            f"installed tools: {', '.join(result.tools) or 'none'}",
        )
    elif name is None:
        rows, documents = [], []
        for c in map(load_cluster, cluster_names()):
            device = load_device(c.device)
            limits = [p.max_time for p in (c.slurm.partitions if c.slurm else []) if p.max_time and p.gpus]
            rows.append((
                c.name, c.nodes or "unknown", f"{c.node.devices} x {device.name}", print_bytes(device.memory),
                text_of(device.bf16_tflops, "g"), text_of(c.links.inter_gbs_per_node, "g"),
                f"{max(limits) / 3600:g} h" if limits else "no limit", c.network.internet, text_of(c.grid.pue, "g"),
                text_of(c.grid.g_per_kwh, "g"), c.verified_on or "never",
            ))  # fmt: skip
            documents.append({**c.model_dump(mode="json"), "device": device.model_dump(mode="json")})
        title = "Known clusters (figures are per device unless noted)"
        advice = "windlass clusters NAME shows every value with its source; --devices lists the accelerators."
        listed = table(title, CLUSTER_COLUMNS, rows, right=(1, 4, 5, 6, 8, 9), drop=CLUSTER_DROP)
        show(as_json, {"clusters": documents}, listed, advice)
    else:
        cluster = load_cluster(name)
        device = load_device(cluster.device)
        hidden = ("env.", "container.env.", "name", "title", "site")
        sources: dict[str, str] = {}  # text -> its number; one source is given for many values

        def cite(source: str) -> str:
            return sources.setdefault(source, f"[{len(sources) + 1}]") if source else ""

        rows = [
            (f.key, f.shown, f.status, f.on, cite(f.source))
            for f in describe.facts(cluster)
            if not f.key.startswith(hidden)
        ]
        variables = [(variable, v.value, v.why, cite(v.source)) for variable, v in cluster.env.items()]
        device_rows = [(f.key, f.shown, f.status, f.on, cite(f.source)) for f in describe.facts(device)]
        show(
            as_json,
            {**cluster.model_dump(mode="json"), "device": device.model_dump(mode="json")},
            f"{cluster.title}, {cluster.site}; last verified on the live system: {cluster.verified_on or 'never'}",
            table("Cluster", FACT_COLUMNS, rows, drop=FACT_DROP),
            table("Environment", ("variable", "value", "why", "source"), variables) if variables else None,
            table(f"Device {device.name}", FACT_COLUMNS, device_rows, drop=FACT_DROP),
            table("Sources", ("", ""), [(number, source) for source, number in sources.items()]),
            *(f"- {note}" for note in cluster.notes),
        )
