"""Remarks about a cluster's devices, as sentences: assumed rates, few measurements, platforms that cannot train."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ds_hetero.cluster.catalogue import CATALOGUE, CatalogueEntry
from ds_hetero.cluster.datasheets import NO_DATASHEET
from ds_hetero.cluster.step_errors import FEW_MEASUREMENTS
from ds_hetero.cluster.topology import DeviceSpec
from ds_hetero.common.units import TERA

# Cards before Turing (sm75). Of the releases of torch that jobs run with, 2.13 and 2.14 have kernels for them in their
# wheels for CUDA 12.6 alone, and 2.15 has none (pytorch/pytorch issues 172352 and 190385).
_BEFORE_TURING = ("V100", "P100", "P40", "GTX-")
_NOT_RUN = {
    "rocm": "ROCm has not been tried with this engine: its plans for {} are predictions only",
    "hpu": "this engine does not run on {} (HPU): planning only",
    "xpu": "this engine does not run on {} (XPU): planning only",
}


def confidence(devices: Iterable[DeviceSpec]) -> str:
    """Return a text on how reliable a prediction is: attention kernels, and devices with few or no measurements.

    ``attention: flash_attn_2; few measurements of this card: RTX-3090 (10 steps)``.
    """
    distinct_devices = {device.name: device for device in devices}.values()
    kernels = dict.fromkeys(device.attention_kernel or "as measured" for device in distinct_devices)
    cards_with_few, cards_without = [], []
    for device in distinct_devices:
        if device.measured:
            continue
        if device.name in FEW_MEASUREMENTS:
            cards_with_few.append(f"{device.name} ({FEW_MEASUREMENTS[device.name]} steps)")
        else:
            cards_without.append(device.name)
    parts = [f"attention: {', '.join(kernels)}"]
    if cards_with_few:
        parts.append(f"few measurements of this card: {', '.join(cards_with_few)}")
    if cards_without:
        parts.append(f"no measurement of this card: {', '.join(cards_without)}")
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
    old = [name for name in entries if name.startswith(_BEFORE_TURING)]
    if old:
        remarks.append(
            f"the usual wheels of torch have no kernels for {', '.join(old)}: install torch 2.13 or 2.14 for CUDA 12.6 "
            "(cu126); 2.15 has no such wheel"
        )
    assumed_sources = {device.name: device.source for device in devices if device.source.startswith(NO_DATASHEET)}
    remarks += [f"the numbers of {name} are assumed: {source}" for name, source in assumed_sources.items()]
    if len(names_by_platform) > 1:
        platforms = " beside ".join(platform.upper() for platform in names_by_platform)
        remarks.append(f"{platforms} in one job is not supported: planning only")
    return tuple(remarks)


def _without_bf16(entry: CatalogueEntry, bf16_flops_per_s: float) -> str:
    """Return a sentence on how slowly a device without bf16 hardware computes bf16, and what to do."""
    rates = f"{bf16_flops_per_s / TERA:g} of {entry.device.peak_flops_per_s / TERA:g} TFLOP/s at best"
    return (
        f"{entry.device.name} has no bf16, its figures are those of fp16: in bf16 it computes in fp32, at {rates}. "
        "Train such a job in fp16; one in bf16 is refused at its start"
    )
