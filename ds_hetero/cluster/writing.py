"""From a `Cluster` back to the content of a cluster file, and from that to its text."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

from ds_hetero.cluster.device import DeviceSpec, Efficiency
from ds_hetero.cluster.file_values import DEVICE_KEYS
from ds_hetero.cluster.topology import Cluster, Link
from ds_hetero.common.reading import JsonDict, JsonObject, shortened
from ds_hetero.common.units import GB, MICRO
from ds_hetero.errors import ClusterError


def check_cluster_file(option: str, file: Path) -> None:
    """Refuse a name that does not say which format the file shall have.

    Raises:
        ClusterError: it ends in neither ``.yaml`` nor ``.json``.
    """
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
    return {**numbers, **words, "efficiency": efficiency}
