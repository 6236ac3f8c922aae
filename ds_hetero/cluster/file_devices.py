"""Read the section ``devices`` of a cluster file: new devices, and measured values of devices of the catalogue.

devices:
  my-gpu: {peak_tflops: 120, memory_gib: 24, memory_bandwidth_gb_per_s: 900}
  H100-SXM-80GB: {efficiency: {matmul: 0.68}}           # other values stay as in the catalogue
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from ds_hetero.cluster.attention_rates import with_attention
from ds_hetero.cluster.catalogue import CATALOGUE, usual_reserve
from ds_hetero.cluster.file_values import (
    DEVICE_KEYS,
    OVERHEAD_S,
    POSITIVE,
    SHARE,
    SIZE,
    Bounds,
    expect_keys,
    read_number,
)
from ds_hetero.cluster.step_errors import PROFILED_ERROR, UNMEASURED_ERROR
from ds_hetero.cluster.topology import DeviceSpec, Efficiency
from ds_hetero.common.reading import MAX_SEQ_LEN, JsonDict, JsonObject, shortened
from ds_hetero.common.units import GIB
from ds_hetero.errors import ClusterError

# Keys of a device beside the numbers of `DEVICE_KEYS`.
_OTHER_DEVICE_KEYS = ("efficiency", "source", "attention", "measured", "attention_s", "shares_host_memory")


def _efficiency_bounds(name: str) -> Bounds:
    """Return the bounds of a field of `Efficiency`: a time, a share of a peak, or a number of tokens, rows or keys."""
    if name.endswith("_s"):
        return OVERHEAD_S
    shares = ("matmul", "attention_forward", "attention_backward", "attention_narrow", "memory")
    return SHARE if name in shares else SIZE


_EFFICIENCY_KEYS = {field.name: _efficiency_bounds(field.name) for field in fields(Efficiency)}


def read_devices(data: JsonObject) -> dict[str, DeviceSpec]:
    """Return the catalogue's devices by name, with the entries of ``devices`` added or changed."""
    if not isinstance(data, Mapping):
        raise ClusterError(f"devices must map names to their numbers, got {shortened(data)}.")
    catalogue = {name: entry.device for name, entry in CATALOGUE.items()}
    for name, entry in data.items():
        catalogue[name] = _read_device(name, entry, catalogue.get(name))
    return catalogue


def _read_device(name: str, entry: JsonObject, catalogue_device: DeviceSpec | None) -> DeviceSpec:
    """Return the device that one entry of ``devices`` describes.

    Args:
        catalogue_device: the catalogue's device of this name, whose other values stay; None for a new device.
    """
    where = f"devices.{shortened(name)[1:-1]}"
    required = set() if catalogue_device else {"peak_tflops", "memory_gib", "memory_bandwidth_gb_per_s"}
    expect_keys(where, entry, required=required, allowed={*DEVICE_KEYS, *_OTHER_DEVICE_KEYS})
    base = catalogue_device
    values = _read_device_numbers(where, entry)
    if "attention_s" in entry:
        values["attention_s"] = _read_attention_times(f"{where}.attention_s", entry["attention_s"])
    if "source" in entry:
        values["source"] = str(entry["source"])
    for key in ("measured", "shares_host_memory"):
        if key in entry:
            values[key] = entry[key] is True
    # The kernel comes first: values under efficiency replace the kernel's rates.
    if "attention" in entry:
        values["attention_kernel"] = str(entry["attention"])
        if base and name in CATALOGUE and entry["attention"]:
            base = with_attention(base, str(entry["attention"]), CATALOGUE[name].attention)
    elif "attention_forward" in entry.get("efficiency", ()):
        values["attention_kernel"] = ""  # measured rates are of no kernel of the catalogue
    if "efficiency" in entry:
        base_efficiency = base.efficiency if base else Efficiency()
        values["efficiency"] = _read_efficiency(f"{where}.efficiency", entry["efficiency"], base_efficiency)
    device = replace(base, **values) if base else _new_device(name, values)
    if device.reserved_bytes >= device.memory_bytes:
        raise ClusterError(
            f"{where}.reserved_gib is {device.reserved_bytes / GIB:g}, but memory_gib is "
            f"{device.memory_bytes / GIB:g}. Give a smaller reserve, which leaves memory for tensors."
        )
    return device


def _read_device_numbers(where: str, entry: JsonObject) -> JsonDict:
    """Read the numbers of an entry of ``devices`` in SI units, by field of `DeviceSpec`."""
    values: JsonDict = {}
    for key, (field, unit, bounds) in DEVICE_KEYS.items():
        if key in entry:
            values[field] = read_number(f"{where}.{key}", entry[key], bounds) * unit
    for field in ("memory_bytes", "reserved_bytes"):
        if field in values:
            values[field] = int(values[field])
    return values


def _new_device(name: str, values: JsonObject) -> DeviceSpec:
    """Make a device that the catalogue lacks.

    Its reserve is the usual one unless given. An entry with ``efficiency`` counts as profiled, whose predictions err
    less than those of a device with peaks alone.
    """
    is_measured = "efficiency" in values
    usual = {
        "reserved_bytes": usual_reserve(values["memory_bytes"]),
        "error": PROFILED_ERROR if is_measured else UNMEASURED_ERROR,
        "measured": is_measured,
    }
    return DeviceSpec(name=name, **{**usual, **values})


def _read_attention_times(where: str, data: object) -> tuple[tuple[int, float], ...]:
    """Read measured seconds of attention by tokens, such as ``{4096: 0.01}``; JSON has the tokens as text."""
    if not isinstance(data, Mapping) or not data:
        raise ClusterError(f"{where} must map tokens to seconds, got {shortened(data)}.")
    times = []
    for tokens, seconds in data.items():
        if not str(tokens).isdecimal() or not 1 <= int(tokens) <= MAX_SEQ_LEN:
            raise ClusterError(
                f"{where}: tokens must be whole numbers from 1 to {MAX_SEQ_LEN:,}, got {shortened(tokens)}."
            )
        times.append((int(tokens), read_number(f"{where}.{tokens}", seconds, POSITIVE)))
    return tuple(sorted(times))


def _read_efficiency(where: str, data: Any, base: Efficiency) -> Efficiency:
    """Read an efficiency; fields that it leaves out stay as in ``base``."""
    expect_keys(where, data, required=set(), allowed=set(_EFFICIENCY_KEYS))
    return replace(base, **{key: read_number(f"{where}.{key}", data[key], _EFFICIENCY_KEYS[key]) for key in data})
