"""Accelerators that people own, with the source of every row.

Peaks are dense bf16 with fp32 accumulation, as the vendor prints them (half of a "with sparsity" figure); devices
without bf16 have their fp16 rate. Bandwidth of the device's own link (NVLink, Infinity Fabric, PCIe) is per
direction: half of the bidirectional figure that vendors print. It is the default for the link inside a node.

Efficiencies are assumptions of this project until `ds-hetero profile` has measured the device: achieved shares as
published for FlashAttention-2 (arXiv:2307.08691: 73 % of the A100's peak forward, 63 % backward) and
FlashAttention-3 (arXiv:2407.08608: 75 % of the H100's forward, about 55 % backward), and half-sizes of about half a
wave of 128-row tiles over all multiprocessors.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_hetero.cluster.device import DeviceSpec, Efficiency
from ds_hetero.common.units import GB, GIB, TERA

__all__ = ["CATALOGUE", "CatalogueEntry", "catalogue_name"]


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A device and the link that it comes with."""

    device: DeviceSpec
    link_name: str
    link_bytes_per_s: float


def _assumed(multiprocessors: int, matmul: float, forward: float, backward: float) -> Efficiency:
    return Efficiency(
        matmul=matmul,
        attention_forward=forward,
        attention_backward=backward,
        memory=0.8,
        matmul_half_tokens=256,
        attention_half_rows=64 * multiprocessors,
        attention_half_kv=256,
        kernel_overhead_s=30e-6,
        attention_overhead_s=10e-6,
    )


# Assumed shares of the peak by generation: large products, attention forward, attention backward.
_BLACKWELL = _assumed(148, 0.70, 0.65, 0.50)
_HOPPER = _assumed(132, 0.70, 0.65, 0.50)
_AMPERE = _assumed(108, 0.80, 0.65, 0.55)
_ADA = _assumed(142, 0.65, 0.55, 0.45)  # L40S and L40 meet their power limit first
_CONSUMER = _assumed(100, 0.80, 0.70, 0.55)
_TURING = _assumed(60, 0.60, 0.35, 0.30)
_CDNA3 = _assumed(304, 0.55, 0.40, 0.30)

# name, peak TFLOPS, memory GiB, memory GB/s, link, link GB/s, efficiency, source
_Row = tuple[str, float, float, float, str, float, Efficiency, str]

_ROWS: tuple[_Row, ...] = (
    ("B300-SXM-288GB", 2250, 288, 8000, "NVLink 5", 900, _BLACKWELL, "NVIDIA DGX B300 datasheet, one of 8 GPUs"),
    ("B200-SXM-180GB", 2250, 180, 8000, "NVLink 5", 900, _BLACKWELL, "NVIDIA DGX B200 datasheet, one of 8 GPUs"),
    ("H200-SXM-141GB", 989.5, 141, 4800, "NVLink 4", 450, _HOPPER, "NVIDIA H200 datasheet"),
    ("H100-SXM-80GB", 989.5, 80, 3350, "NVLink 4", 450, _HOPPER, "NVIDIA H100 datasheet, SXM5"),
    ("H100-NVL-94GB", 835.5, 94, 3938, "NVLink bridge", 300, _HOPPER, "NVIDIA H100 NVL product brief"),
    ("H100-PCIe-80GB", 756.5, 80, 2039, "PCIe 5 x16", 64, _HOPPER, "NVIDIA H100 datasheet, PCIe"),
    ("H800-SXM-80GB", 989.5, 80, 3350, "NVLink 4", 200, _HOPPER, "H100 SXM5 with NVLink of 400 GB/s bidirectional"),
    ("A100-SXM-80GB", 312, 80, 2039, "NVLink 3", 300, _AMPERE, "NVIDIA A100 datasheet, 80GB SXM"),
    ("A100-SXM-40GB", 312, 40, 1555, "NVLink 3", 300, _AMPERE, "NVIDIA A100 datasheet, 40GB SXM"),
    ("A100-PCIe-80GB", 312, 80, 1935, "PCIe 4 x16", 32, _AMPERE, "NVIDIA A100 datasheet, 80GB PCIe"),
    ("A100-PCIe-40GB", 312, 40, 1555, "PCIe 4 x16", 32, _AMPERE, "NVIDIA A100 datasheet, 40GB PCIe"),
    ("A800-SXM-80GB", 312, 80, 2039, "NVLink 3", 200, _AMPERE, "A100 SXM with NVLink of 400 GB/s bidirectional"),
    ("A800-PCIe-80GB", 312, 80, 1935, "PCIe 4 x16", 32, _AMPERE, "NVIDIA A800 datasheet, 80GB PCIe"),
    ("L40S", 362, 48, 864, "PCIe 4 x16", 32, _ADA, "NVIDIA L40S datasheet"),
    ("L40", 181, 48, 864, "PCIe 4 x16", 32, _ADA, "NVIDIA L40 datasheet"),
    ("L4", 121, 24, 300, "PCIe 4 x16", 32, _assumed(58, 0.55, 0.5, 0.4), "NVIDIA L4 datasheet"),
    ("A10", 125, 24, 600, "PCIe 4 x16", 32, _assumed(72, 0.6, 0.5, 0.4), "NVIDIA A10 datasheet"),
    ("V100-SXM-32GB", 125, 32, 900, "NVLink 2", 150, _TURING, "NVIDIA V100 datasheet; fp16, the device has no bf16"),
    ("V100-SXM-16GB", 125, 16, 900, "NVLink 2", 150, _TURING, "NVIDIA V100 datasheet; fp16, the device has no bf16"),
    ("T4", 65, 16, 320, "PCIe 3 x16", 16, _TURING, "NVIDIA T4 datasheet; fp16, the device has no bf16"),
    ("RTX-4090", 165.2, 24, 1008, "PCIe 4 x16", 32, _CONSUMER, "NVIDIA Ada GPU architecture whitepaper, appendix A"),
    ("RTX-3090", 71, 24, 936, "PCIe 4 x16", 32, _CONSUMER, "NVIDIA Ampere GA102 whitepaper, appendix A"),
    ("RTX-3080Ti", 68.2, 12, 912, "PCIe 4 x16", 32, _CONSUMER, "twice its fp32 rate, as for GA102"),
    ("MI300X", 1307.4, 192, 5300, "Infinity Fabric", 64, _CDNA3, "AMD Instinct MI300X datasheet"),
    ("CPU", 0.1, 4, 10, "shared memory", 5, Efficiency(), "placeholder for one core; run ds-hetero profile"),
)  # fmt: skip

# Board power under load in watts: TDP, or "max. power", of the same datasheets.
_WATTS: dict[str, float] = {
    "B300-SXM-288GB": 1400,
    "B200-SXM-180GB": 1000,
    "H200-SXM-141GB": 700,
    "H100-SXM-80GB": 700,
    "H100-NVL-94GB": 400,
    "H100-PCIe-80GB": 350,
    "H800-SXM-80GB": 700,
    "A100-SXM-80GB": 400,
    "A100-SXM-40GB": 400,
    "A100-PCIe-80GB": 300,
    "A100-PCIe-40GB": 250,
    "A800-SXM-80GB": 400,
    "A800-PCIe-80GB": 300,
    "L40S": 350,
    "L40": 300,
    "L4": 72,
    "A10": 150,
    "V100-SXM-32GB": 300,
    "V100-SXM-16GB": 300,
    "T4": 70,
    "RTX-4090": 450,
    "RTX-3090": 350,
    "RTX-3080Ti": 350,
    "MI300X": 750,
}


def _entry(row: _Row) -> CatalogueEntry:
    name, tflops, gib, gb_per_s, link, link_gb_per_s, efficiency, source = row
    device = DeviceSpec(
        name=name,
        peak_flops_per_s=tflops * TERA,
        memory_bytes=int(gib * GIB),
        memory_bytes_per_s=gb_per_s * GB,
        reserved_bytes=0 if name == "CPU" else int(1.5 * GIB),
        source=source,
        efficiency=efficiency,
        watts=_WATTS.get(name),
    )
    return CatalogueEntry(device, link, link_gb_per_s * GB)


CATALOGUE: dict[str, CatalogueEntry] = {row[0]: _entry(row) for row in _ROWS}


def catalogue_name(driver_name: str, memory_bytes: int) -> str | None:
    """The catalogue's name of a device that its driver calls, say, ``NVIDIA A100-SXM4-80GB``, or None.

    The longest model word that occurs decides (A100 before A10), then the form factor, then the nearest memory.
    """
    squeezed = driver_name.upper().replace(" ", "").replace("-", "")
    words = {
        name: name.split("-")[0].upper() if not name.startswith("RTX") else name.replace("-", "").upper()
        for name in CATALOGUE
    }
    matches = [name for name, word in words.items() if word in squeezed and name != "CPU"]
    if not matches:
        return None
    longest = max(len(words[name]) for name in matches)

    def mismatch(name: str) -> tuple[bool, float]:
        form = next((form for form in ("PCIE", "NVL") if form in squeezed), "SXM")
        has_form = [form for form in ("SXM", "PCIE", "NVL") if form in name.upper()]
        return bool(has_form) and form not in has_form, abs(CATALOGUE[name].device.memory_bytes - memory_bytes)

    return min((name for name in matches if len(words[name]) == longest), key=mismatch)
