"""Sentences about devices, for people: assumed rates, few measurements, platforms that cannot train."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ds_hetero.cluster.catalogue import CATALOGUE, CatalogueEntry
from ds_hetero.cluster.datasheets import NO_DATASHEET
from ds_hetero.cluster.step_errors import FEW_MEASUREMENTS
from ds_hetero.cluster.topology import DeviceSpec
from ds_hetero.common.units import TERA

_NOT_RUN = {
    "rocm": "ROCm has not been tried with this engine: its plans for {} are predictions only",
    "hpu": "this engine does not run on {} (HPU): planning only",
    "xpu": "this engine does not run on {} (XPU): planning only",
}


def confidence(devices: Iterable[DeviceSpec]) -> str:
    """Name the attention kernels whose rates are used, and the devices with few or no measurements."""
    distinct_devices = {device.name: device for device in devices}.values()
    kernels = dict.fromkeys(device.attention_kernel or "as measured" for device in distinct_devices)
    little_measured, never_measured = [], []
    for device in distinct_devices:
        if device.measured:
            continue
        if device.name in FEW_MEASUREMENTS:
            little_measured.append(f"{device.name} ({FEW_MEASUREMENTS[device.name]} steps)")
        else:
            never_measured.append(device.name)
    parts = [f"attention: {', '.join(kernels)}"]
    if little_measured:
        parts.append(f"few measurements of this card: {', '.join(little_measured)}")
    if never_measured:
        parts.append(f"no measurement of this card: {', '.join(never_measured)}")
    return "; ".join(parts)


def device_remarks(devices: Sequence[DeviceSpec]) -> tuple[str, ...]:
    """Return sentences about unsupported platforms, devices without bf16, assumed numbers and mixed platforms."""
    entries = {device.name: CATALOGUE[device.name] for device in devices if device.name in CATALOGUE}
    names_by_platform: dict[str, list[str]] = {}
    for name, entry in entries.items():
        names_by_platform.setdefault(entry.platform, []).append(name)
    remarks = []
    for platform, names in names_by_platform.items():
        if platform in _NOT_RUN:
            remarks.append(_NOT_RUN[platform].format(", ".join(names)))
    for entry in entries.values():
        if entry.bf16_flops_per_s:
            remarks.append(_without_bf16(entry, entry.bf16_flops_per_s))
    assumed_sources = {device.name: device.source for device in devices if device.source.startswith(NO_DATASHEET)}
    remarks += [f"the numbers of {name} are assumed: {source}" for name, source in assumed_sources.items()]
    if len(names_by_platform) > 1:
        platforms = " beside ".join(platform.upper() for platform in names_by_platform)
        remarks.append(f"{platforms} in one job is not supported: planning only")
    return tuple(remarks)


def _without_bf16(entry: CatalogueEntry, bf16_flops_per_s: float) -> str:
    rates = f"{bf16_flops_per_s / TERA:g} of {entry.device.peak_flops_per_s / TERA:g} TFLOP/s at best"
    return (
        f"{entry.device.name} has no bf16, its figures are those of fp16: in bf16 it computes in fp32, at {rates}. "
        "Train such a job in fp16; one in bf16 is refused at its start"
    )
