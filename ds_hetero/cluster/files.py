"""Cluster files: YAML or JSON in people's units, one `Cluster` in SI units.

```yaml
description: anything                                   # optional
nodes:
  - name: h100
    device: H100-SXM-80GB                               # with count: n devices of one kind
    count: 8
    link: {bandwidth_gb_per_s: 450, latency_us: 5}      # inside the node; left out, the catalogue's
    nics: {count: 4, bandwidth_gb_per_s: 25}            # optional: what the node's ranks share towards other nodes
    repeat: 2                                           # optional: number of nodes like this, h100-0, h100-1
  - name: mixed
    devices: [RTX-4090, RTX-4090, RTX-3090]             # instead of device and count
    link: {bandwidth_gb_per_s: 25, latency_us: 5, total_gb_per_s: 50}   # total: a switch that all pairs share
network: {bandwidth_gb_per_s: 25, latency_us: 10}       # between any two nodes; needed when there are several
links:   [{between: [h100, mixed], bandwidth_gb_per_s: 1.25, latency_us: 50}]     # optional overrides
devices:                                                # optional: new devices, or measured values of known ones
  my-gpu: {peak_tflops: 120, memory_gib: 24, memory_bandwidth_gb_per_s: 900}
  H100-SXM-80GB: {efficiency: {matmul: 0.68}}           # the rest stays as in the catalogue
  L40S: {price_per_hour: 0.9, watts: 350, idle_watts: 35}   # for the objectives cost and energy
profile: {...}                                          # optional: raw measurements, written by ds-hetero profile
```

Bandwidths are per pair and direction; GB is 10^9 bytes, GiB 2^30. A link may also carry measured values:
``p2p_efficiency`` and ``all_to_all_efficiency``, achieved shares of its bandwidth, and ``all_to_all_latency_us``.
Without ``nics`` every rank has a port of its own to the network. A `Cluster` is in SI units: reading a file converts
its units once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ds_hetero.cluster.catalogue import CATALOGUE
from ds_hetero.cluster.device import DeviceSpec, Efficiency
from ds_hetero.cluster.file_values import DEVICE_KEYS, MAY_BE_ZERO, did_you_mean, expect_keys, number, whole_number
from ds_hetero.cluster.topology import Cluster, Link, Node
from ds_hetero.common.paths import config_dir
from ds_hetero.common.units import GB, MICRO
from ds_hetero.errors import ClusterError

__all__ = ["cluster_from_dict", "cluster_names", "load_cluster"]

DEFAULT_LATENCY_S = 5e-6  # inside a node, where the link is left to the catalogue

_LINK_KEYS = {
    "bandwidth_gb_per_s",
    "latency_us",
    "p2p_efficiency",
    "all_to_all_efficiency",
    "all_to_all_latency_us",
}
_EFFICIENCY_KEYS = {field.name for field in fields(Efficiency)}


def load_cluster(source: str | Path | Mapping[str, Any]) -> Cluster:
    """A cluster from a file, from the name of one in ds_configs/clusters, or from the same written inline.

    Raises:
        ClusterError: no such file or name, not YAML or JSON, or anything that `cluster_from_dict` refuses.
    """
    if isinstance(source, Mapping):
        return cluster_from_dict(source)
    path = Path(source)
    ready = config_dir() / "clusters" / f"{source}.yaml"
    if not path.is_file() and ready.is_file():
        path = ready
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(
            f"cannot read cluster {str(source)!r}: it is neither a readable file nor a known name"
            f"{did_you_mean(str(source), cluster_names())} Known names: {', '.join(cluster_names())}."
        ) from error
    return cluster_from_dict(_parse(path, text))


def cluster_names() -> tuple[str, ...]:
    """Names of the cluster files that come with the package."""
    return tuple(sorted(path.stem for path in (config_dir() / "clusters").glob("*.yaml")))


def cluster_from_dict(data: Mapping[str, Any]) -> Cluster:
    """A cluster from the content of a cluster file.

    Raises:
        ClusterError: unknown device, key or node; a number that is missing, not positive or not a number; the message
            names the place in the file and what would be accepted.
    """
    expect_keys(
        "cluster",
        data,
        required={"nodes"},
        allowed={"nodes", "network", "links", "devices", "description", "profile"},
    )
    catalogue = _devices(data.get("devices") or {})
    entries = data["nodes"]
    if not isinstance(entries, Sequence) or isinstance(entries, str) or not entries:
        raise ClusterError(f"nodes must be a list with at least one node, got {entries!r}.")
    nodes = tuple(node for i, entry in enumerate(entries) for node in _nodes(i, entry, catalogue))
    names = [node.name for node in nodes]
    for name in names:
        if names.count(name) > 1:
            raise ClusterError(f"two nodes are named {name!r}. Give every node a name of its own.")
    if "network" in data:
        network = _link("network", "network", data["network"])
    elif len(nodes) == 1:
        network = replace(nodes[0].link, name="network")
    else:
        raise ClusterError(
            f"network is missing, but there are {len(nodes)} nodes. "
            "Add network: {bandwidth_gb_per_s: ..., latency_us: ...}, the link between two ranks of different nodes."
        )
    return Cluster(nodes=nodes, network=network, links=_overrides(data.get("links") or [], nodes))


def _parse(path: Path, text: str) -> Any:
    if path.suffix == ".json":
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise ClusterError(f"{path} is not JSON: {error}.") from error
    import yaml  # 20 ms, and JSON files do without

    try:
        return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise ClusterError(f"{path} is not YAML: {error}.") from error


def _devices(data: Mapping[str, Any]) -> dict[str, DeviceSpec]:
    if not isinstance(data, Mapping):
        raise ClusterError(f"devices must map names to their numbers, got {data!r}.")
    catalogue = {name: entry.device for name, entry in CATALOGUE.items()}
    for name, entry in data.items():
        where = f"devices.{name}"
        known = catalogue.get(name)
        required = set() if known else {"peak_tflops", "memory_gib", "memory_bandwidth_gb_per_s"}
        expect_keys(where, entry, required=required, allowed={*DEVICE_KEYS, "efficiency", "source"})
        values: dict[str, Any] = {
            field: number(f"{where}.{key}", entry[key], zero_ok=key in MAY_BE_ZERO) * unit
            for key, (field, unit) in DEVICE_KEYS.items()
            if key in entry
        }
        for field in ("memory_bytes", "reserved_bytes"):
            if field in values:
                values[field] = int(values[field])
        if "source" in entry:
            values["source"] = str(entry["source"])
        if "efficiency" in entry:
            base = known.efficiency if known else Efficiency()
            values["efficiency"] = _efficiency(f"{where}.efficiency", entry["efficiency"], base)
        catalogue[name] = replace(known, **values) if known else DeviceSpec(name=name, **values)
    return catalogue


def _efficiency(where: str, data: Any, base: Efficiency) -> Efficiency:
    expect_keys(where, data, required=set(), allowed=_EFFICIENCY_KEYS)
    shares = {"matmul", "attention_forward", "attention_backward", "memory"}
    return replace(base, **{key: number(f"{where}.{key}", data[key], zero_ok=key not in shares) for key in data})


def _nodes(index: int, data: Any, catalogue: Mapping[str, DeviceSpec]) -> list[Node]:
    where = f"nodes[{index}]"
    expect_keys(
        where,
        data,
        required={"name"},
        allowed={"name", "device", "count", "devices", "link", "nics", "repeat"},
    )
    name = data["name"]
    if not isinstance(name, str) or not name:
        raise ClusterError(f"{where}.name must be a word, got {name!r}.")
    where = f"{where} ({name})"
    if ("device" in data) == ("devices" in data) or ("devices" in data and "count" in data):
        raise ClusterError(f"{where} takes either device and count, or devices with one name per rank.")
    if "device" in data:
        names: Any = [data["device"]] * whole_number(f"{where}.count", data.get("count", 1))
    else:
        names = data["devices"]
        if not isinstance(names, Sequence) or isinstance(names, str) or not names:
            raise ClusterError(f"{where}.devices must be a list of device names, one per rank, got {names!r}.")
    for device in names:
        if not isinstance(device, str) or device not in catalogue:
            raise ClusterError(
                f"{where}: device {device!r} is not known{did_you_mean(str(device), catalogue)} "
                f"Use one of {', '.join(catalogue)}, or describe it under devices."
            )
    devices = tuple(catalogue[device] for device in names)
    link = data.get("link")
    switch = None
    if link is None:
        inside = _catalogue_link(where, name, devices)
    else:
        if isinstance(link, Mapping) and "total_gb_per_s" in link:
            switch = number(f"{where}.link.total_gb_per_s", link["total_gb_per_s"]) * GB
            link = {key: value for key, value in link.items() if key != "total_gb_per_s"}
        inside = _link(f"{where}.link", f"inside {name}", link)
    nic = None
    if "nics" in data:
        expect_keys(
            f"{where}.nics", data["nics"], required={"bandwidth_gb_per_s"}, allowed={"count", "bandwidth_gb_per_s"}
        )
        one_nic = number(f"{where}.nics.bandwidth_gb_per_s", data["nics"]["bandwidth_gb_per_s"]) * GB
        nic = whole_number(f"{where}.nics.count", data["nics"].get("count", 1)) * one_nic
    repeat = whole_number(f"{where}.repeat", data.get("repeat", 1))
    copies = [name] if repeat == 1 else [f"{name}-{i}" for i in range(repeat)]
    return [
        Node(name=copy, devices=devices, link=inside, nic_bytes_per_s=nic, switch_bytes_per_s=switch, group=name)
        for copy in copies
    ]


def _catalogue_link(where: str, name: str, devices: Sequence[DeviceSpec]) -> Link:
    entries = [CATALOGUE[device.name] for device in devices if device.name in CATALOGUE]
    if len(entries) < len(devices):
        raise ClusterError(
            f"{where}.link is missing, and the catalogue does not know the device. "
            "Add link: {bandwidth_gb_per_s: ..., latency_us: ...}, the link between two ranks inside the node."
        )
    slowest = min(entry.link_bytes_per_s for entry in entries)
    return Link(name=f"inside {name}", latency_s=DEFAULT_LATENCY_S, bytes_per_s=slowest)


def _link(where: str, name: str, data: Any) -> Link:
    expect_keys(where, data, required={"bandwidth_gb_per_s"}, allowed=_LINK_KEYS)
    shares = {
        key: number(f"{where}.{key}", data[key]) for key in ("p2p_efficiency", "all_to_all_efficiency") if key in data
    }
    latencies = {
        key: number(f"{where}.{key}", data[key], zero_ok=True) * MICRO
        for key in ("latency_us", "all_to_all_latency_us")
        if key in data
    }
    return Link(
        name=name,
        latency_s=latencies.get("latency_us", DEFAULT_LATENCY_S),
        all_to_all_latency_s=latencies.get("all_to_all_latency_us"),
        bytes_per_s=number(f"{where}.bandwidth_gb_per_s", data["bandwidth_gb_per_s"]) * GB,
        **shares,
    )


def _overrides(data: Any, nodes: Sequence[Node]) -> tuple[tuple[tuple[int, int], Link], ...]:
    if not isinstance(data, Sequence) or isinstance(data, str):
        raise ClusterError(f"links must be a list of {{between: [node, node], ...}}, got {data!r}.")
    table: dict[tuple[int, int], Link] = {}
    for i, entry in enumerate(data):
        where = f"links[{i}]"
        expect_keys(where, entry, required={"between", "bandwidth_gb_per_s"}, allowed={"between", *_LINK_KEYS})
        between = entry["between"]
        if not isinstance(between, Sequence) or isinstance(between, str) or len(between) != 2:
            raise ClusterError(f"{where}.between must name two nodes, got {between!r}.")
        ends = [_nodes_named(f"{where}.between", name, nodes) for name in between]
        pairs = {(min(a, b), max(a, b)) for a in ends[0] for b in ends[1] if a != b}
        if not pairs:
            raise ClusterError(
                f"{where}.between names {between[0]!r} twice, which is one node. Its inner link is nodes[].link."
            )
        link = _link(where, f"{between[0]} - {between[1]}", {k: v for k, v in entry.items() if k != "between"})
        for pair in pairs:
            table[pair] = link
    return tuple(sorted(table.items(), key=lambda item: item[0]))


def _nodes_named(where: str, name: Any, nodes: Sequence[Node]) -> list[int]:
    """Indices of the node ``name``, or of all copies of the entry ``name``."""
    indices = [i for i, node in enumerate(nodes) if name in (node.name, node.group)]
    if not indices:
        known = list(dict.fromkeys([node.group for node in nodes] + [node.name for node in nodes]))
        raise ClusterError(
            f"{where}: there is no node {name!r}{did_you_mean(str(name), known)} The nodes are {', '.join(known)}."
        )
    return indices
