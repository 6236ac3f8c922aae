"""Keys, units and bounds of the values in a cluster file: check them, and write such files.

Every message names the place in the file, such as ``nodes[0] (h100).link``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from ds_hetero.cluster.topology import Cluster, DeviceSpec, Link
from ds_hetero.common.reading import MAX_RANKS, JsonDict, JsonObject, is_whole, shortened, whole_rule
from ds_hetero.common.spelling import did_you_mean
from ds_hetero.common.units import GB, GIB, MICRO, TERA
from ds_hetero.errors import ClusterError


class Bounds(NamedTuple):
    """Range of a number in a cluster file, both ends included."""

    minimum: float
    maximum: float


MIN_SIMILARITY = 0.5
"""Similarity to an unknown word from which a message offers a known one; see `did_you_mean`. Chosen, never measured."""

# Bounds are far beyond all devices that exist: they catch wrong units, and keep sums and products finite.
POSITIVE = Bounds(1e-6, 1e6)  # GB/s, GiB, TFLOPS, W
_NOT_NEGATIVE = Bounds(0, 1e6)
SHARE = Bounds(1e-6, 1)  # share of a peak
LINK_RATIO = Bounds(1e-6, 100)  # rate of one link over that of another, which may be the slower one
SIZE = Bounds(0, 1e9)  # tokens, rows or keys
DURATION_US = Bounds(0, 1e9)
OVERHEAD_S = Bounds(0, 1e3)

# Keys of a device in the file, each with the field of `DeviceSpec`, the file's unit in SI units, and the bounds.
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
# Quantities that people write without a unit, each with the key that has it.
_KEY_WITH_UNIT = {
    "bandwidth": "bandwidth_gb_per_s, in GB/s (10^9 bytes per second, one direction)",
    "memory_bandwidth": "memory_bandwidth_gb_per_s, in GB/s (10^9 bytes per second)",
    "latency": "latency_us, in microseconds",
    "memory": "memory_gib, in GiB (2^30 bytes)",
    "peak": "peak_tflops, in 10^12 dense bf16 operations per second",
    "total": "total_gb_per_s, in GB/s (10^9 bytes per second)",
}


def expect_keys(where: str, data: Any, *, required: set[str], allowed: set[str]) -> None:
    """Refuse a value that is not a mapping, lacks a required key, or has one that is not allowed.

    Args:
        where: place of the value in the file.

    Raises:
        ClusterError: says the place and the accepted keys; for a key without a unit, such as ``latency``, it says the
            key with the unit.
    """
    if not isinstance(data, Mapping):
        keys = ", ".join(sorted(allowed))
        raise ClusterError(f"{where} must be a mapping with the keys {keys}, got {shortened(data)}.")
    for key in data:
        if key in allowed:
            continue
        # The longest stem first: memory_bandwidth also begins with memory.
        stems = sorted(_KEY_WITH_UNIT, key=len, reverse=True)
        stem = next((stem for stem in stems if str(key).startswith(stem)), None)
        if stem and any(name.startswith(stem) for name in allowed):
            place = f"{where}.{shortened(key)[1:-1]}"
            raise ClusterError(f"{place}: this file has one unit per quantity. Give {_KEY_WITH_UNIT[stem]}.")
        hint, keys = did_you_mean(str(key), allowed, MIN_SIMILARITY), ", ".join(sorted(allowed))
        raise ClusterError(f"{where}: unknown key {shortened(key)}{hint}. It takes {keys}.")
    missing = sorted(required - set(data))
    if missing:
        raise ClusterError(f"{where}: missing {', '.join(missing)}. It takes {', '.join(sorted(allowed))}.")


def read_number(where: str, value: Any, bounds: Bounds = POSITIVE) -> float:
    """Check that a value at place ``where`` is a number within its bounds, and return it as a float.

    Raises:
        ClusterError: the value is not a number, or out of bounds.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < inf:
        raise ClusterError(f"{where} must be a number without a unit, got {shortened(value)}; the unit is in the key.")
    if value < 0 or (value == 0 < bounds.minimum):
        rule = "at least" if bounds.minimum == 0 else "greater than"
        raise ClusterError(f"{where} must be {rule} 0, got {shortened(value)}.")
    if not bounds.minimum <= value <= bounds.maximum:
        raise ClusterError(
            f"{where} must be between {bounds.minimum:g} and {bounds.maximum:g}, got {shortened(value)}."
        )
    return float(value)


def read_whole_number(where: str, value: Any, or_else: str = "") -> int:
    """Check that a value at place ``where`` is a whole number from 1 to `MAX_RANKS`, and return it.

    Args:
        or_else: end of the rule in the message, such as ``or per_rank``, if the key takes other values, too.

    Raises:
        ClusterError: any other value.
    """
    if not is_whole(value, 1, MAX_RANKS):
        rule = f"{whole_rule(value, 1, MAX_RANKS)} {or_else}".strip()
        raise ClusterError(f"{where} must be {rule}, got {shortened(value)}.")
    return int(value)


def check_cluster_file(option: str, file: Path) -> None:
    """Raise `ClusterError` if the file given by ``option`` ends in neither ``.yaml``, ``.yml`` nor ``.json``."""
    if file.suffix not in (".json", ".yaml", ".yml"):
        raise ClusterError(f"{option} must end in .yaml or .json, got {shortened(str(file))}.")


def write_cluster(content: JsonObject, file: Path) -> None:
    """Write the content of a cluster file: as JSON if its name ends in ``.json``, else as YAML."""
    if file.suffix == ".json":
        text = json.dumps(content, indent=1)
    else:
        import yaml

        text = yaml.safe_dump(dict(content), sort_keys=False)
    file.write_text(text, encoding="utf-8")


def cluster_to_dict(cluster: Cluster) -> JsonDict:
    """Return the content of a cluster file that describes a cluster.

    The content has all numbers of every device, so that it means the same after the catalogue has changed.
    """
    content: JsonDict = {"nodes": []}
    for node in cluster.nodes:
        entry: JsonDict = {"name": node.name, "devices": [device.name for device in node.devices]}
        entry["link"] = _link_to_dict(node.link)
        if node.switch_bytes_per_s is not None:
            entry["link"]["total_gb_per_s"] = node.switch_bytes_per_s / GB
        nic_bytes_per_s = node.nic_bytes_per_s
        if nic_bytes_per_s is None:
            entry["nics"] = "per_rank"
        else:
            entry["nics"] = {"count": 1, "bandwidth_gb_per_s": nic_bytes_per_s / GB}
        if node.host_memory_bytes is not None:
            entry["host_memory_gib"] = node.host_memory_bytes / GIB
        content["nodes"].append(entry)
    content["network"] = _link_to_dict(cluster.network)
    content["links"] = [
        {"between": [cluster.nodes[a].name, cluster.nodes[b].name], **_link_to_dict(link)}
        for (a, b), link in cluster.links
    ]
    content["devices"] = {device.name: _device_to_dict(device) for device in cluster.devices}
    return content


def _link_to_dict(link: Link) -> dict[str, float]:
    """Return a link's entry in a cluster file; efficiencies of 1 are left out."""
    entry = {"bandwidth_gb_per_s": link.bytes_per_s / GB, "latency_us": link.latency_s / MICRO}
    for key in ("p2p_efficiency", "all_to_all_efficiency"):
        if getattr(link, key) != 1.0:
            entry[key] = getattr(link, key)
    if link.all_to_all_latency_s is not None:
        entry["all_to_all_latency_us"] = link.all_to_all_latency_s / MICRO
    return entry


def _device_to_dict(device: DeviceSpec) -> JsonDict:
    """Return a device's entry in a cluster file."""
    content: JsonDict = {}
    for key, (field, unit, _) in DEVICE_KEYS.items():
        value = getattr(device, field)
        if value is not None:
            content[key] = value / unit
    content |= {"source": device.source, "attention": device.attention_kernel, "measured": device.measured}
    if device.shares_host_memory:
        content["shares_host_memory"] = True
    content["efficiency"] = asdict(device.efficiency)
    return content
