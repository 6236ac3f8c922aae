"""Cluster files: YAML or JSON in people's units, one `Cluster` in SI units.

```yaml
description: anything                                   # optional
nodes:
  - name: h100
    device: H100-SXM-80GB                               # with count: n devices of one kind
    count: 8
    link: {bandwidth_gb_per_s: 450, latency_us: 5}      # inside the node; left out, the catalogue's
    nics: {count: 4, bandwidth_gb_per_s: 25}            # optional: what the node's ranks share towards other nodes
    repeat: 2                                           # optional: so many nodes like this, h100-0, h100-1
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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from math import isfinite
from pathlib import Path
from typing import Any

from ds_hetero.cluster.catalogue import CATALOGUE
from ds_hetero.cluster.device import DeviceSpec, Efficiency
from ds_hetero.cluster.topology import Cluster, Link, Node
from ds_hetero.errors import ClusterError
from ds_hetero.paths import config_dir
from ds_hetero.text import nearest
from ds_hetero.units import GB, GIB, MICRO, TERA

__all__ = ["cluster_from_dict", "cluster_names", "cluster_to_dict", "load_cluster"]

DEFAULT_LATENCY_S = 5e-6  # inside a node, where the link is left to the catalogue

# Keys of the file, the unit behind each, and the field it fills.
_DEVICE_KEYS = {
    "peak_tflops": ("peak_flops_per_s", TERA),
    "memory_gib": ("memory_bytes", GIB),
    "memory_bandwidth_gb_per_s": ("memory_bytes_per_s", GB),
    "reserved_gib": ("reserved_bytes", GIB),
    "watts": ("watts", 1.0),
    "idle_watts": ("idle_watts", 1.0),
    "price_per_hour": ("price_per_hour", 1.0),
}
_MAY_BE_ZERO = {"reserved_gib", "idle_watts", "price_per_hour"}
_LINK_KEYS = {
    "bandwidth_gb_per_s",
    "latency_us",
    "p2p_efficiency",
    "all_to_all_efficiency",
    "all_to_all_latency_us",
}
_EFFICIENCY_KEYS = {field.name for field in fields(Efficiency)}
_UNIT_OF = {
    "bandwidth": "bandwidth_gb_per_s, in GB/s (10^9 bytes per second, one direction)",
    "memory_bandwidth": "memory_bandwidth_gb_per_s, in GB/s (10^9 bytes per second)",
    "latency": "latency_us, in microseconds",
    "memory": "memory_gib, in GiB (2^30 bytes)",
    "peak": "peak_tflops, in 10^12 dense bf16 operations per second",
    "total": "total_gb_per_s, in GB/s (10^9 bytes per second)",
}


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
            f"{_did_you_mean(str(source), cluster_names())} Known names: {', '.join(cluster_names())}."
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
    _expect(
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


def cluster_to_dict(cluster: Cluster) -> dict[str, Any]:
    """The content of a cluster file, with every device written out, so that no catalogue is needed to read it."""
    out: dict[str, Any] = {"nodes": []}
    for node in cluster.nodes:
        entry: dict[str, Any] = {"name": node.name, "devices": [device.name for device in node.devices]}
        entry["link"] = _link_to_dict(node.link)
        if node.switch_bytes_per_s is not None:
            entry["link"]["total_gb_per_s"] = node.switch_bytes_per_s / GB
        if node.nic_bytes_per_s is not None:
            entry["nics"] = {"count": 1, "bandwidth_gb_per_s": node.nic_bytes_per_s / GB}
        out["nodes"].append(entry)
    out["network"] = _link_to_dict(cluster.network)
    out["links"] = [
        {"between": [cluster.nodes[a].name, cluster.nodes[b].name], **_link_to_dict(link)}
        for (a, b), link in cluster.links
    ]
    out["devices"] = {device.name: _device_to_dict(device) for device in cluster.devices}
    return out


# --- parts of the file ------------------------------------------------------------------------------


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
        _expect(where, entry, required=required, allowed={*_DEVICE_KEYS, "efficiency", "source"})
        values: dict[str, Any] = {
            field: _number(f"{where}.{key}", entry[key], zero_ok=key in _MAY_BE_ZERO) * unit
            for key, (field, unit) in _DEVICE_KEYS.items()
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
    _expect(where, data, required=set(), allowed=_EFFICIENCY_KEYS)
    shares = {"matmul", "attention_forward", "attention_backward", "memory"}
    return replace(base, **{key: _number(f"{where}.{key}", data[key], zero_ok=key not in shares) for key in data})


def _nodes(index: int, data: Any, catalogue: Mapping[str, DeviceSpec]) -> list[Node]:
    where = f"nodes[{index}]"
    _expect(
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
        names: Any = [data["device"]] * _whole(f"{where}.count", data.get("count", 1))
    else:
        names = data["devices"]
        if not isinstance(names, Sequence) or isinstance(names, str) or not names:
            raise ClusterError(f"{where}.devices must be a list of device names, one per rank, got {names!r}.")
    for device in names:
        if not isinstance(device, str) or device not in catalogue:
            raise ClusterError(
                f"{where}: device {device!r} is not known{_did_you_mean(str(device), catalogue)} "
                f"Use one of {', '.join(catalogue)}, or describe it under devices."
            )
    devices = tuple(catalogue[device] for device in names)
    link = data.get("link")
    switch = None
    if link is None:
        inside = _catalogue_link(where, name, devices)
    else:
        if isinstance(link, Mapping) and "total_gb_per_s" in link:
            switch = _number(f"{where}.link.total_gb_per_s", link["total_gb_per_s"]) * GB
            link = {key: value for key, value in link.items() if key != "total_gb_per_s"}
        inside = _link(f"{where}.link", f"inside {name}", link)
    nic = None
    if "nics" in data:
        _expect(f"{where}.nics", data["nics"], required={"bandwidth_gb_per_s"}, allowed={"count", "bandwidth_gb_per_s"})
        each = _number(f"{where}.nics.bandwidth_gb_per_s", data["nics"]["bandwidth_gb_per_s"]) * GB
        nic = _whole(f"{where}.nics.count", data["nics"].get("count", 1)) * each
    repeat = _whole(f"{where}.repeat", data.get("repeat", 1))
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
    _expect(where, data, required={"bandwidth_gb_per_s"}, allowed=_LINK_KEYS)
    shares = {
        key: _number(f"{where}.{key}", data[key]) for key in ("p2p_efficiency", "all_to_all_efficiency") if key in data
    }
    latencies = {
        key: _number(f"{where}.{key}", data[key], zero_ok=True) * MICRO
        for key in ("latency_us", "all_to_all_latency_us")
        if key in data
    }
    return Link(
        name=name,
        latency_s=latencies.get("latency_us", DEFAULT_LATENCY_S),
        all_to_all_latency_s=latencies.get("all_to_all_latency_us"),
        bytes_per_s=_number(f"{where}.bandwidth_gb_per_s", data["bandwidth_gb_per_s"]) * GB,
        **shares,
    )


def _overrides(data: Any, nodes: Sequence[Node]) -> tuple[tuple[tuple[int, int], Link], ...]:
    if not isinstance(data, Sequence) or isinstance(data, str):
        raise ClusterError(f"links must be a list of {{between: [node, node], ...}}, got {data!r}.")
    table: dict[tuple[int, int], Link] = {}
    for i, entry in enumerate(data):
        where = f"links[{i}]"
        _expect(where, entry, required={"between", "bandwidth_gb_per_s"}, allowed={"between", *_LINK_KEYS})
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
    found = [i for i, node in enumerate(nodes) if name in (node.name, node.group)]
    if not found:
        known = list(dict.fromkeys([node.group for node in nodes] + [node.name for node in nodes]))
        raise ClusterError(
            f"{where}: there is no node {name!r}{_did_you_mean(str(name), known)} The nodes are {', '.join(known)}."
        )
    return found


# --- checks -----------------------------------------------------------------------------------------


def _expect(where: str, data: Any, *, required: set[str], allowed: set[str]) -> None:
    if not isinstance(data, Mapping):
        raise ClusterError(f"{where} must be a mapping with the keys {', '.join(sorted(allowed))}, got {data!r}.")
    for key in data:
        if key in allowed:
            continue
        stem = next((s for s in sorted(_UNIT_OF, key=len, reverse=True) if str(key).startswith(s)), None)
        if stem and any(name.startswith(stem) for name in allowed):
            raise ClusterError(f"{where}.{key}: this file has one unit per quantity. Give {_UNIT_OF[stem]}.")
        raise ClusterError(
            f"{where}: unknown key {key!r}{_did_you_mean(str(key), allowed)} It takes {', '.join(sorted(allowed))}."
        )
    missing = sorted(required - set(data))
    if missing:
        raise ClusterError(f"{where}: missing {', '.join(missing)}. It takes {', '.join(sorted(allowed))}.")


def _number(where: str, value: Any, *, zero_ok: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
        raise ClusterError(f"{where} must be a number without a unit, got {value!r}; the unit is in the key.")
    if value < 0 or (value == 0 and not zero_ok):
        raise ClusterError(f"{where} must be {'at least' if zero_ok else 'greater than'} 0, got {value!r}.")
    return float(value)


def _whole(where: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ClusterError(f"{where} must be a whole number >= 1, got {value!r}.")
    return value


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    close = nearest(word, known, cutoff=0.5)
    return f"; did you mean {close!r}?" if close else "."


def _link_to_dict(link: Link) -> dict[str, float]:
    out = {"bandwidth_gb_per_s": link.bytes_per_s / GB, "latency_us": link.latency_s / MICRO}
    for key in ("p2p_efficiency", "all_to_all_efficiency"):
        if getattr(link, key) != 1.0:
            out[key] = getattr(link, key)
    if link.all_to_all_latency_s is not None:
        out["all_to_all_latency_us"] = link.all_to_all_latency_s / MICRO
    return out


def _device_to_dict(device: DeviceSpec) -> dict[str, Any]:
    values = {key: (getattr(device, field), unit) for key, (field, unit) in _DEVICE_KEYS.items()}
    numbers = {key: value / unit for key, (value, unit) in values.items() if value is not None}
    efficiency = {field.name: getattr(device.efficiency, field.name) for field in fields(Efficiency)}
    return {**numbers, "source": device.source, "efficiency": efficiency}
