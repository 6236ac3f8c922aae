"""Keys, units and checks of the values in a cluster file, and a `Cluster` written as such a file.

Every message names the place in the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from ds_hetero.cluster.topology import Cluster, DeviceSpec, Efficiency, Link
from ds_hetero.common.reading import MAX_RANKS, JsonDict, JsonObject, is_whole, shortened, whole_rule
from ds_hetero.common.spelling import did_you_mean
from ds_hetero.common.units import GB, GIB, MICRO, TERA
from ds_hetero.errors import ClusterError


class Bounds(NamedTuple):
    """Range of a number in a cluster file, both ends included."""

    least: float
    most: float


LIKENESS = 0.5  # of a word with a known one, from which a message asks whether that is meant
"""Least similarity of a word of a cluster file to one that is offered in its place; see `did_you_mean`."""

POSITIVE = Bounds(1e-6, 1e6)  # GB/s, GiB, TFLOPS, W: from a thousand bytes or a million operations a second upwards
_NOT_NEGATIVE = Bounds(0, 1e6)
SHARE = Bounds(1e-6, 1)  # of a peak
LINK_RATIO = Bounds(1e-6, 100)  # measured on one link against another, which may be the slower one
SIZE = Bounds(0, 1e9)  # tokens, rows or keys
DURATION_US = Bounds(0, 1e9)
OVERHEAD_S = Bounds(0, 1e3)

# Keys of the file, the field that each fills, the unit behind it, and what it may be.
DEVICE_KEYS = {
    "peak_tflops": ("peak_flops_per_s", TERA, POSITIVE),
    "memory_gib": ("memory_bytes", GIB, POSITIVE),
    "memory_bandwidth_gb_per_s": ("memory_bytes_per_s", GB, POSITIVE),
    "reserved_gib": ("reserved_bytes", GIB, _NOT_NEGATIVE),
    "fragmentation": ("fragmentation", 1.0, Bounds(0, 10)),
    "error": ("error", 1.0, Bounds(0, 10)),
    "watts": ("watts", 1.0, POSITIVE),
    "idle_watts": ("idle_watts", 1.0, _NOT_NEGATIVE),
    "price_per_hour": ("price_per_hour", 1.0, _NOT_NEGATIVE),
}
_UNIT_OF = {
    "bandwidth": "bandwidth_gb_per_s, in GB/s (10^9 bytes per second, one direction)",
    "memory_bandwidth": "memory_bandwidth_gb_per_s, in GB/s (10^9 bytes per second)",
    "latency": "latency_us, in microseconds",
    "memory": "memory_gib, in GiB (2^30 bytes)",
    "peak": "peak_tflops, in 10^12 dense bf16 operations per second",
    "total": "total_gb_per_s, in GB/s (10^9 bytes per second)",
}


def expect_keys(where: str, data: Any, *, required: set[str], allowed: set[str]) -> None:
    """Refuse what is no mapping, lacks a required key or has one that is not allowed; ``where`` is its place."""
    if not isinstance(data, Mapping):
        keys = ", ".join(sorted(allowed))
        raise ClusterError(f"{where} must be a mapping with the keys {keys}, got {shortened(data)}.")
    for key in data:
        if key in allowed:
            continue
        stem = next((s for s in sorted(_UNIT_OF, key=len, reverse=True) if str(key).startswith(s)), None)
        if stem and any(name.startswith(stem) for name in allowed):
            place = f"{where}.{shortened(key)[1:-1]}"
            raise ClusterError(f"{place}: this file has one unit per quantity. Give {_UNIT_OF[stem]}.")
        hint, keys = did_you_mean(str(key), allowed, LIKENESS), ", ".join(sorted(allowed))
        raise ClusterError(f"{where}: unknown key {shortened(key)}{hint}. It takes {keys}.")
    missing = sorted(required - set(data))
    if missing:
        raise ClusterError(f"{where}: missing {', '.join(missing)}. It takes {', '.join(sorted(allowed))}.")


def number(where: str, value: Any, bounds: Bounds = POSITIVE) -> float:
    """A number within its bounds; ``where`` is its place in the file."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < inf:
        raise ClusterError(f"{where} must be a number without a unit, got {shortened(value)}; the unit is in the key.")
    if value < 0 or (value == 0 < bounds.least):
        rule = "at least" if bounds.least == 0 else "greater than"
        raise ClusterError(f"{where} must be {rule} 0, got {shortened(value)}.")
    if not bounds.least <= value <= bounds.most:
        raise ClusterError(f"{where} must be between {bounds.least:g} and {bounds.most:g}, got {shortened(value)}.")
    return float(value)


def whole_number(where: str, value: Any, or_else: str = "") -> int:
    """A whole number from 1 to `MAX_RANKS`; ``where`` is its place in the file, ``or_else`` what else it may be."""
    if not is_whole(value, 1, MAX_RANKS):
        rule = f"{whole_rule(value, 1, MAX_RANKS)} {or_else}".strip()
        raise ClusterError(f"{where} must be {rule}, got {shortened(value)}.")
    return int(value)


def check_cluster_file(option: str, file: Path) -> None:
    """Refuse a file name that ends in neither ``.yaml`` nor ``.json``. Raises `ClusterError`."""
    if file.suffix not in (".json", ".yaml", ".yml"):
        raise ClusterError(f"{option} must end in .yaml or .json, got {shortened(str(file))}.")


def write_cluster(content: JsonObject, file: Path) -> None:
    """Write the content of a cluster file as JSON or YAML, as the file's ending says."""
    if file.suffix == ".json":
        text = json.dumps(content, indent=1)
    else:
        import yaml

        text = yaml.safe_dump(dict(content), sort_keys=False)
    file.write_text(text, encoding="utf-8")


def cluster_to_dict(cluster: Cluster) -> JsonDict:
    """The content of a cluster file, with every device written out, so that no catalogue is needed to read it."""
    out: JsonDict = {"nodes": []}
    for node in cluster.nodes:
        entry: JsonDict = {"name": node.name, "devices": [device.name for device in node.devices]}
        entry["link"] = _link_to_dict(node.link)
        if node.switch_bytes_per_s is not None:
            entry["link"]["total_gb_per_s"] = node.switch_bytes_per_s / GB
        ports = node.nic_bytes_per_s
        entry["nics"] = "per_rank" if ports is None else {"count": 1, "bandwidth_gb_per_s": ports / GB}
        if node.host_memory_bytes is not None:
            entry["host_memory_gib"] = node.host_memory_bytes / GIB
        out["nodes"].append(entry)
    out["network"] = _link_to_dict(cluster.network)
    out["links"] = [
        {"between": [cluster.nodes[a].name, cluster.nodes[b].name], **_link_to_dict(link)}
        for (a, b), link in cluster.links
    ]
    out["devices"] = {device.name: _device_to_dict(device) for device in cluster.devices}
    return out


def _link_to_dict(link: Link) -> dict[str, float]:
    out = {"bandwidth_gb_per_s": link.bytes_per_s / GB, "latency_us": link.latency_s / MICRO}
    for key in ("p2p_efficiency", "all_to_all_efficiency"):
        if getattr(link, key) != 1.0:
            out[key] = getattr(link, key)
    if link.all_to_all_latency_s is not None:
        out["all_to_all_latency_us"] = link.all_to_all_latency_s / MICRO
    return out


def _device_to_dict(device: DeviceSpec) -> JsonDict:
    values = {key: (getattr(device, field), unit) for key, (field, unit, _) in DEVICE_KEYS.items()}
    numbers = {key: value / unit for key, (value, unit) in values.items() if value is not None}
    efficiency = {field.name: getattr(device.efficiency, field.name) for field in fields(Efficiency)}
    words = {"source": device.source, "attention": device.attention_kernel, "measured": device.measured}
    shared = {"shares_host_memory": True} if device.shares_host_memory else {}
    return {**numbers, **words, **shared, "efficiency": efficiency}
