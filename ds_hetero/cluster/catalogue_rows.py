"""The rows of the catalogue: one card each, with the vendor's document that its numbers are from.

Peaks are dense bf16 with fp32 accumulation; where a vendor prints only a "with sparsity" figure, half of it. GeForce
cards accumulate in fp32 at half the tensor rate that is advertised. Bandwidth of a card's own link is one direction.
"""

# ruff: noqa: E501  # a card is a line

from __future__ import annotations

from typing import NamedTuple

from ds_hetero.cluster.device import Efficiency

NO_DATASHEET = "no public datasheet"
"""How the source of a row begins whose numbers are assumed."""


class CardRow(NamedTuple):
    """A card in people's units.

    Args:
        name: of the catalogue.
        tflops: peak, 10^12 operations per second.
        gib: memory, GiB.
        gb_per_s: bandwidth of the memory, GB/s.
        link: what joins such cards inside a node.
        link_gb_per_s: GB/s of that link per pair and direction.
        pcie: generation and width of the card's own connector.
        watts: power under load; None if not known.
        efficiency: achieved shares of the peaks.
        source: where the numbers are printed.
        platform: what PyTorch calls such devices.
        ranks: devices that PyTorch sees of one card; the numbers are those of one device.
        fp32_tflops: peak in fp32 of a card without bf16, which is the most it reaches in bf16; None of all others.
    """

    name: str
    tflops: float
    gib: float
    gb_per_s: float
    link: str
    link_gb_per_s: float
    pcie: tuple[int, int]
    watts: float | None
    efficiency: Efficiency
    source: str
    platform: str = "cuda"
    ranks: int = 1
    fp32_tflops: float | None = None


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
_SMALL = _assumed(60, 0.75, 0.60, 0.50)
_TURING = _assumed(60, 0.60, 0.35, 0.30)
_CDNA2 = _assumed(110, 0.55, 0.35, 0.25)
_CDNA3 = _assumed(304, 0.55, 0.40, 0.30)
_OTHER = _assumed(64, 0.50, 0.35, 0.25)  # nothing of this project has run there

_P3, _P4, _P5, _P6 = (3, 16), (4, 16), (5, 16), (6, 16)
_V100 = "NVIDIA V100 datasheet; fp16, the device has no bf16"
_P100 = "NVIDIA Tesla P100 datasheet; fp16, the device has no bf16 and no tensor cores"
_GB_RACK = "one of 72 GPUs, half of the printed rate with sparsity"

ROWS: tuple[CardRow, ...] = (
    CardRow("B300-SXM-288GB", 2250, 288, 8000, "NVLink 5", 900, _P6, 1400, _BLACKWELL, "NVIDIA DGX B300 datasheet, one of 8 GPUs"),
    CardRow("B200-SXM-180GB", 2250, 180, 8000, "NVLink 5", 900, _P5, 1000, _BLACKWELL, "NVIDIA DGX B200 datasheet, one of 8 GPUs"),
    CardRow("GB300-279GB", 2500, 279, 8000, "NVLink 5", 900, _P6, 1400, _BLACKWELL, f"NVIDIA GB300 NVL72 datasheet, {_GB_RACK}"),
    CardRow("GB200-186GB", 2500, 186, 8000, "NVLink 5", 900, _P5, 1200, _BLACKWELL, f"NVIDIA GB200 NVL72 datasheet, {_GB_RACK}"),
    CardRow("H200-SXM-141GB", 989.5, 141, 4800, "NVLink 4", 450, _P5, 700, _HOPPER, "NVIDIA H200 datasheet"),
    CardRow("H100-SXM-80GB", 989.5, 80, 3350, "NVLink 4", 450, _P5, 700, _HOPPER, "NVIDIA H100 datasheet, SXM5"),
    CardRow("H100-NVL-94GB", 835.5, 94, 3938, "NVLink bridge", 300, _P5, 400, _HOPPER, "NVIDIA H100 NVL product brief"),
    CardRow("H100-PCIe-80GB", 756.5, 80, 2039, "PCIe 5 x16", 64, _P5, 350, _HOPPER, "NVIDIA H100 datasheet, PCIe"),
    CardRow("H800-SXM-80GB", 989.5, 80, 3350, "NVLink 4", 200, _P5, 700, _HOPPER, "H100 SXM5 with NVLink of 400 GB/s bidirectional"),
    CardRow("H20-96GB", 148, 96, 4000, "NVLink 4", 450, _P5, 400, _HOPPER, "NVIDIA HGX H20 product brief"),
    CardRow("A100-SXM-80GB", 312, 80, 2039, "NVLink 3", 300, _P4, 400, _AMPERE, "NVIDIA A100 datasheet, 80GB SXM"),
    CardRow("A100-SXM-40GB", 312, 40, 1555, "NVLink 3", 300, _P4, 400, _AMPERE, "NVIDIA A100 datasheet, 40GB SXM"),
    CardRow("A100-PCIe-80GB", 312, 80, 1935, "PCIe 4 x16", 32, _P4, 300, _AMPERE, "NVIDIA A100 datasheet, 80GB PCIe"),
    CardRow("A100-PCIe-40GB", 312, 40, 1555, "PCIe 4 x16", 32, _P4, 250, _AMPERE, "NVIDIA A100 datasheet, 40GB PCIe"),
    CardRow("A800-SXM-80GB", 312, 80, 2039, "NVLink 3", 200, _P4, 400, _AMPERE, "A100 SXM with NVLink of 400 GB/s bidirectional"),
    CardRow("A800-PCIe-80GB", 312, 80, 1935, "PCIe 4 x16", 32, _P4, 300, _AMPERE, "NVIDIA A800 datasheet, 80GB PCIe"),
    CardRow("A40", 149.7, 48, 696, "PCIe 4 x16", 32, _P4, 300, _CONSUMER, "NVIDIA A40 datasheet"),
    CardRow("A30", 165, 24, 933, "PCIe 4 x16", 32, _P4, 165, _assumed(56, 0.75, 0.6, 0.5), "NVIDIA A30 datasheet"),
    CardRow("A16", 17.9, 16, 200, "PCIe 4 x16, a quarter", 8, (4, 4), 62.5, _SMALL, "NVIDIA A16 datasheet, one of 4 GPUs of a board", ranks=4),
    CardRow("L40S", 362, 48, 864, "PCIe 4 x16", 32, _P4, 350, _ADA, "NVIDIA L40S datasheet"),
    CardRow("L40", 181, 48, 864, "PCIe 4 x16", 32, _P4, 300, _ADA, "NVIDIA L40 datasheet"),
    CardRow("L4", 121, 24, 300, "PCIe 4 x16", 32, _P4, 72, _assumed(58, 0.55, 0.5, 0.4), "NVIDIA L4 datasheet"),
    CardRow("A10", 125, 24, 600, "PCIe 4 x16", 32, _P4, 150, _assumed(72, 0.6, 0.5, 0.4), "NVIDIA A10 datasheet"),
    CardRow("V100-SXM-32GB", 125, 32, 900, "NVLink 2", 150, _P3, 300, _TURING, _V100, fp32_tflops=15.7),
    CardRow("V100-SXM-16GB", 125, 16, 900, "NVLink 2", 150, _P3, 300, _TURING, _V100, fp32_tflops=15.7),
    CardRow("V100-PCIe-32GB", 112, 32, 900, "PCIe 3 x16", 16, _P3, 250, _TURING, _V100, fp32_tflops=14.0),
    CardRow("V100-PCIe-16GB", 112, 16, 900, "PCIe 3 x16", 16, _P3, 250, _TURING, _V100, fp32_tflops=14.0),
    CardRow("P100-SXM-16GB", 21.2, 16, 732, "NVLink 1", 80, _P3, 300, _TURING, _P100, fp32_tflops=10.6),
    CardRow("P100-PCIe-16GB", 18.7, 16, 732, "PCIe 3 x16", 16, _P3, 250, _TURING, _P100, fp32_tflops=9.3),
    CardRow("T4", 65, 16, 320, "PCIe 3 x16", 16, _P3, 70, _TURING, "NVIDIA T4 datasheet; fp16, the device has no bf16", fp32_tflops=8.1),
    CardRow("RTX-PRO-6000", 503.8, 96, 1792, "PCIe 5 x16", 64, _P5, 600, _BLACKWELL, "NVIDIA RTX Blackwell PRO architecture whitepaper, Workstation Edition"),
    CardRow("RTX-6000-Ada", 364.2, 48, 960, "PCIe 4 x16", 32, _P4, 300, _ADA, "NVIDIA RTX 6000 Ada datasheet, a quarter of its fp8 rate with sparsity"),
    CardRow("RTX-A6000", 154.8, 48, 768, "PCIe 4 x16", 32, _P4, 300, _CONSUMER, "NVIDIA RTX A6000 datasheet, half of its rate with sparsity"),
    CardRow("RTX-5090", 209.5, 32, 1792, "PCIe 5 x16", 64, _P5, 575, _CONSUMER, "NVIDIA RTX Blackwell architecture whitepaper, appendix A"),
    CardRow("RTX-5080", 112.6, 16, 960, "PCIe 5 x16", 64, _P5, 360, _CONSUMER, "NVIDIA RTX Blackwell architecture whitepaper, appendix A"),
    CardRow("RTX-5070Ti", 87.9, 16, 896, "PCIe 5 x16", 64, _P5, 300, _CONSUMER, "NVIDIA RTX Blackwell architecture whitepaper: twice its fp32 rate"),
    CardRow("RTX-4090", 165.2, 24, 1008, "PCIe 4 x16", 32, _P4, 450, _CONSUMER, "NVIDIA Ada GPU architecture whitepaper, appendix A"),
    CardRow("RTX-4080", 97.5, 16, 716.8, "PCIe 4 x16", 32, _P4, 320, _CONSUMER, "NVIDIA Ada GPU architecture whitepaper, appendix A"),
    CardRow("RTX-4070TiSuper", 88.2, 16, 672, "PCIe 4 x16", 32, _P4, 285, _CONSUMER, "NVIDIA GeForce specifications: twice its fp32 rate, as for AD102"),
    CardRow("RTX-3090", 71, 24, 936, "PCIe 4 x16", 32, _P4, 350, _CONSUMER, "NVIDIA Ampere GA102 whitepaper, appendix A"),
    CardRow("RTX-3080Ti", 68.2, 12, 912, "PCIe 4 x16", 32, _P4, 350, _CONSUMER, "twice its fp32 rate, as for GA102"),
    CardRow("RTX-3080-10GB", 59.5, 10, 760, "PCIe 4 x16", 32, _P4, 320, _CONSUMER, "NVIDIA Ampere GA102 whitepaper, appendix A"),
    CardRow("RTX-3060-12GB", 25.5, 12, 360, "PCIe 4 x16", 32, _P4, 170, _SMALL, "NVIDIA GeForce specifications: twice its fp32 rate, as for GA102"),
    CardRow("RTX-2080Ti", 53.8, 11, 616, "PCIe 3 x16", 16, _P3, 250, _TURING, "NVIDIA Turing whitepaper, reference card; fp16, the device has no bf16", fp32_tflops=13.4),
    CardRow("Titan-RTX", 130.5, 24, 672, "PCIe 3 x16", 16, _P3, 280, _TURING, "NVIDIA Titan RTX specifications; fp16, the device has no bf16", fp32_tflops=16.3),
    CardRow("MI355X", 2516.6, 288, 8000, "Infinity Fabric", 76.8, _P5, 1400, _CDNA3, "AMD Instinct MI355X datasheet", "rocm"),
    CardRow("MI325X", 1307.4, 256, 6000, "Infinity Fabric", 64, _P5, 1000, _CDNA3, "AMD Instinct MI325X datasheet", "rocm"),
    CardRow("MI300X", 1307.4, 192, 5300, "Infinity Fabric", 64, _P5, 750, _CDNA3, "AMD Instinct MI300X datasheet", "rocm"),
    CardRow("MI308X", 188.4, 192, 5300, "Infinity Fabric", 64, _P5, 650, _CDNA3, NO_DATASHEET + "; an MI300X with 80 of 304 compute units", "rocm"),
    CardRow("MI250X", 191.5, 64, 1638.4, "Infinity Fabric", 50, _P4, 280, _CDNA2, "AMD Instinct MI250X datasheet, one of two dies", "rocm", ranks=2),
    CardRow("MI210", 181, 64, 1638.4, "PCIe 4 x16", 32, _P4, 300, _CDNA2, "AMD Instinct MI210 datasheet", "rocm"),
    CardRow("Gaudi-3", 1835, 128, 3700, "three ports of 200 Gb/s per pair", 75, _P5, 900, _OTHER, "Intel Gaudi 3 white paper, HL-325L", "hpu"),
    CardRow("Gaudi-2", 432, 96, 2460, "three ports of 100 Gb/s per pair", 37.5, _P4, 600, _OTHER, "Intel Gaudi 2 white paper, HL-225H", "hpu"),
    CardRow("Max-1550", 839, 128, 3276.8, "Xe Link", 53, _P5, 600, _OTHER, "Intel Data Center GPU Max 1550 product brief, both tiles", "xpu"),
    CardRow("Arc-B580", 116.5, 12, 456, "PCIe 4 x8", 16, (4, 8), 190, _OTHER, "Intel Arc B580 specifications, half of its int8 rate", "xpu"),
    CardRow("CPU", 0.1, 4, 10, "shared memory", 5, _P4, None, Efficiency(), "placeholder for one core; run ds-hetero profile", "cpu"),
)  # fmt: skip
