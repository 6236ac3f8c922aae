# ruff: noqa: E501
"""Datasheets of accelerators, one row each, with the source of its numbers.

Peaks are dense bf16 with fp32 accumulation, as the vendor prints them (half of a "with sparsity" figure, and of the
advertised tensor rate of GeForce cards); devices without bf16 have their fp16 rate. Bandwidth of the device's own link
(NVLink, Infinity Fabric, PCIe) is per direction: half of the bidirectional figure that vendors print. It is the default
for the link inside a node.
"""

from __future__ import annotations

from typing import NamedTuple

from ds_hetero.cluster.device_kinds import (
    A10_KIND,
    A30_KIND,
    A100_40_KIND,
    A100_80_KIND,
    ADA_KIND,
    BLACKWELL_KIND,
    CDNA2_KIND,
    CDNA3_KIND,
    CONSUMER_KIND,
    CPU_KIND,
    GA102_KIND,
    HOPPER_KIND,
    L4_KIND,
    OTHER_KIND,
    PASCAL_KIND,
    PRO_BLACKWELL_KIND,
    SMALL_KIND,
    TURING_KIND,
    CardKind,
)

NO_DATASHEET = "no public datasheet"
"""First words of ``source`` in a row whose numbers are assumed."""


class CardRow(NamedTuple):
    """One device in the units that datasheets use."""

    name: str  # name in the catalogue
    tflops: float  # peak, 10^12 FLOPs per second
    gib: float  # memory, GiB
    gb_per_s: float  # bandwidth of the memory, GB/s
    link: str  # name of the link between such cards inside a node
    link_gb_per_s: float  # rate of this link per pair and direction, GB/s
    pcie: tuple[int, int]  # PCIe generation and lanes of the card's connector
    watts: float | None  # power under load; None if unknown
    kind: CardKind  # shares of the peaks that it reaches
    source: str  # where the numbers are printed
    platform: str = "cuda"  # PyTorch's name for such devices
    ranks: int = 1  # number of devices that PyTorch sees on one card; the numbers are those of one device
    fp32_tflops: float | None = None  # fp32 peak of cards without bf16; None for all others
    shares_host: bool = False  # whether the device uses the host's memory, so that offloads free nothing


_P3, _P4, _P5, _P6 = (3, 16), (4, 16), (5, 16), (6, 16)
_V100 = "NVIDIA V100 datasheet; fp16, the device has no bf16"
_P100 = "NVIDIA Tesla P100 datasheet; fp16, the device has no bf16 and no tensor cores"
_GB_RACK = "one of 72 GPUs, half of the printed rate with sparsity"

ROWS: tuple[CardRow, ...] = (
    CardRow("B300-SXM-288GB", 2250, 288, 8000, "NVLink 5", 900, _P6, 1400, BLACKWELL_KIND, "NVIDIA DGX B300 datasheet, one of 8 GPUs"),
    CardRow("B200-SXM-180GB", 2250, 180, 8000, "NVLink 5", 900, _P5, 1000, BLACKWELL_KIND, "NVIDIA DGX B200 datasheet, one of 8 GPUs"),
    CardRow("GB300-279GB", 2500, 279, 8000, "NVLink 5", 900, _P6, 1400, BLACKWELL_KIND, f"NVIDIA GB300 NVL72 datasheet, {_GB_RACK}"),
    CardRow("GB200-186GB", 2500, 186, 8000, "NVLink 5", 900, _P5, 1200, BLACKWELL_KIND, f"NVIDIA GB200 NVL72 datasheet, {_GB_RACK}"),
    CardRow("H200-SXM-141GB", 989.5, 141, 4800, "NVLink 4", 450, _P5, 700, HOPPER_KIND, "NVIDIA H200 datasheet"),
    CardRow("H100-SXM-80GB", 989.5, 80, 3350, "NVLink 4", 450, _P5, 700, HOPPER_KIND, "NVIDIA H100 datasheet, SXM5"),
    CardRow("H100-NVL-94GB", 835.5, 94, 3938, "NVLink bridge", 300, _P5, 400, HOPPER_KIND, "NVIDIA H100 NVL product brief"),
    CardRow("H100-PCIe-80GB", 756.5, 80, 2039, "PCIe 5 x16", 64, _P5, 350, HOPPER_KIND, "NVIDIA H100 datasheet, PCIe"),
    CardRow("H800-SXM-80GB", 989.5, 80, 3350, "NVLink 4", 200, _P5, 700, HOPPER_KIND, "H100 SXM5 with NVLink of 400 GB/s bidirectional"),
    CardRow("H20-96GB", 148, 96, 4000, "NVLink 4", 450, _P5, 400, HOPPER_KIND, "NVIDIA HGX H20 product brief"),
    CardRow("A100-SXM-80GB", 312, 80, 2039, "NVLink 3", 300, _P4, 400, A100_80_KIND, "NVIDIA A100 datasheet, 80GB SXM"),
    CardRow("A100-SXM-40GB", 312, 40, 1555, "NVLink 3", 300, _P4, 400, A100_40_KIND, "NVIDIA A100 datasheet, 40GB SXM"),
    CardRow("A100-PCIe-80GB", 312, 80, 1935, "PCIe 4 x16", 32, _P4, 300, A100_80_KIND, "NVIDIA A100 datasheet, 80GB PCIe"),
    CardRow("A100-PCIe-40GB", 312, 40, 1555, "PCIe 4 x16", 32, _P4, 250, A100_40_KIND, "NVIDIA A100 datasheet, 40GB PCIe"),
    CardRow("A800-SXM-80GB", 312, 80, 2039, "NVLink 3", 200, _P4, 400, A100_80_KIND, "A100 SXM with NVLink of 400 GB/s bidirectional"),
    CardRow("A800-PCIe-80GB", 312, 80, 1935, "PCIe 4 x16", 32, _P4, 300, A100_80_KIND, "NVIDIA A800 datasheet, 80GB PCIe"),
    CardRow("A40", 149.7, 48, 696, "PCIe 4 x16", 32, _P4, 300, GA102_KIND, "NVIDIA A40 datasheet"),
    CardRow("A30", 165, 24, 933, "PCIe 4 x16", 32, _P4, 165, A30_KIND, "NVIDIA A30 datasheet"),
    CardRow("A16", 17.9, 16, 200, "PCIe 4 x16, a quarter", 8, (4, 4), 62.5, SMALL_KIND, "NVIDIA A16 datasheet, one of 4 GPUs of a board", ranks=4),
    CardRow("L40S", 362, 48, 864, "PCIe 4 x16", 32, _P4, 350, ADA_KIND, "NVIDIA L40S datasheet"),
    CardRow("L40", 181, 48, 864, "PCIe 4 x16", 32, _P4, 300, ADA_KIND, "NVIDIA L40 datasheet"),
    CardRow("L4", 121, 24, 300, "PCIe 4 x16", 32, _P4, 72, L4_KIND, "NVIDIA L4 datasheet"),
    CardRow("A10", 125, 24, 600, "PCIe 4 x16", 32, _P4, 150, A10_KIND, "NVIDIA A10 datasheet"),
    CardRow("V100-SXM-32GB", 125, 32, 900, "NVLink 2", 150, _P3, 300, TURING_KIND, _V100, fp32_tflops=15.7),
    CardRow("V100-SXM-16GB", 125, 16, 900, "NVLink 2", 150, _P3, 300, TURING_KIND, _V100, fp32_tflops=15.7),
    CardRow("V100-PCIe-32GB", 112, 32, 900, "PCIe 3 x16", 16, _P3, 250, TURING_KIND, _V100, fp32_tflops=14.0),
    CardRow("V100-PCIe-16GB", 112, 16, 900, "PCIe 3 x16", 16, _P3, 250, TURING_KIND, _V100, fp32_tflops=14.0),
    CardRow("P100-SXM-16GB", 21.2, 16, 732, "NVLink 1", 80, _P3, 300, PASCAL_KIND, _P100, fp32_tflops=10.6),
    CardRow("P100-PCIe-16GB", 18.7, 16, 732, "PCIe 3 x16", 16, _P3, 250, PASCAL_KIND, _P100, fp32_tflops=9.3),
    CardRow("T4", 65, 16, 320, "PCIe 3 x16", 16, _P3, 70, TURING_KIND, "NVIDIA T4 datasheet; fp16, the device has no bf16", fp32_tflops=8.1),
    CardRow("RTX-PRO-6000", 503.8, 96, 1792, "PCIe 5 x16", 64, _P5, 600, PRO_BLACKWELL_KIND, "NVIDIA RTX Blackwell PRO architecture whitepaper, Workstation Edition"),
    CardRow("RTX-6000-Ada", 364.2, 48, 960, "PCIe 4 x16", 32, _P4, 300, ADA_KIND, "NVIDIA RTX 6000 Ada datasheet, a quarter of its fp8 rate with sparsity"),
    CardRow("RTX-A6000", 154.8, 48, 768, "PCIe 4 x16", 32, _P4, 300, GA102_KIND, "NVIDIA RTX A6000 datasheet, half of its rate with sparsity"),
    CardRow("RTX-5090", 209.5, 32, 1792, "PCIe 5 x16", 64, _P5, 575, CONSUMER_KIND, "NVIDIA RTX Blackwell architecture whitepaper, appendix A"),
    CardRow("RTX-5080", 112.6, 16, 960, "PCIe 5 x16", 64, _P5, 360, CONSUMER_KIND, "NVIDIA RTX Blackwell architecture whitepaper, appendix A"),
    CardRow("RTX-5070Ti", 87.9, 16, 896, "PCIe 5 x16", 64, _P5, 300, CONSUMER_KIND, "NVIDIA RTX Blackwell architecture whitepaper: twice its fp32 rate"),
    CardRow("RTX-4090", 165.2, 24, 1008, "PCIe 4 x16", 32, _P4, 450, CONSUMER_KIND, "NVIDIA Ada GPU architecture whitepaper, appendix A"),
    CardRow("RTX-4080", 97.5, 16, 716.8, "PCIe 4 x16", 32, _P4, 320, CONSUMER_KIND, "NVIDIA Ada GPU architecture whitepaper, appendix A"),
    CardRow("RTX-4070TiSuper", 88.2, 16, 672, "PCIe 4 x16", 32, _P4, 285, CONSUMER_KIND, "NVIDIA GeForce specifications: twice its fp32 rate, as for AD102"),
    CardRow("RTX-3090", 71, 24, 936, "PCIe 4 x16", 32, _P4, 350, CONSUMER_KIND, "NVIDIA Ampere GA102 whitepaper, appendix A"),
    CardRow("RTX-3080Ti", 68.2, 12, 912, "PCIe 4 x16", 32, _P4, 350, CONSUMER_KIND, "twice its fp32 rate, as for GA102"),
    CardRow("RTX-3080-10GB", 59.5, 10, 760, "PCIe 4 x16", 32, _P4, 320, CONSUMER_KIND, "NVIDIA Ampere GA102 whitepaper, appendix A"),
    CardRow("RTX-3060-12GB", 25.5, 12, 360, "PCIe 4 x16", 32, _P4, 170, SMALL_KIND, "NVIDIA GeForce specifications: twice its fp32 rate, as for GA102"),
    CardRow("RTX-5070", 61.7, 12, 672, "PCIe 5 x16", 64, _P5, 250, CONSUMER_KIND, "NVIDIA RTX Blackwell architecture whitepaper: twice its fp32 rate"),
    CardRow("RTX-5060Ti-16GB", 47.4, 16, 448, "PCIe 5 x8", 32, (5, 8), 180, SMALL_KIND, "NVIDIA GeForce specifications: twice its fp32 rate"),
    CardRow("RTX-4090D", 147.1, 24, 1008, "PCIe 4 x16", 32, _P4, 425, CONSUMER_KIND, "NVIDIA GeForce RTX 4090 D specifications: twice its fp32 rate of 73.5"),
    CardRow("RTX-4090-48GB", 165.2, 48, 1008, "PCIe 4 x16", 32, _P4, 450, CONSUMER_KIND, NO_DATASHEET + "; an RTX 4090 with twice its memory, sold by third parties"),
    CardRow("RTX-4080Super", 104.4, 16, 736.3, "PCIe 4 x16", 32, _P4, 320, CONSUMER_KIND, "NVIDIA GeForce specifications: twice its fp32 rate, as for AD103"),
    CardRow("RTX-4070Ti", 80.2, 12, 504.2, "PCIe 4 x16", 32, _P4, 285, CONSUMER_KIND, "NVIDIA GeForce specifications: twice its fp32 rate, as for AD104"),
    CardRow("RTX-4070", 58.3, 12, 504.2, "PCIe 4 x16", 32, _P4, 200, SMALL_KIND, "NVIDIA GeForce specifications: twice its fp32 rate, as for AD104"),
    CardRow("RTX-4060Ti-16GB", 44.1, 16, 288, "PCIe 4 x8", 16, (4, 8), 165, SMALL_KIND, "NVIDIA GeForce specifications: twice its fp32 rate, as for AD106"),
    CardRow("RTX-4060Ti-8GB", 44.1, 8, 288, "PCIe 4 x8", 16, (4, 8), 160, SMALL_KIND, "NVIDIA GeForce specifications: twice its fp32 rate, as for AD106"),
    CardRow("RTX-3090Ti", 80, 24, 1008, "PCIe 4 x16", 32, _P4, 450, CONSUMER_KIND, "NVIDIA GeForce specifications: twice its fp32 rate, as for GA102"),
    CardRow("RTX-3080-12GB", 61.3, 12, 912, "PCIe 4 x16", 32, _P4, 350, CONSUMER_KIND, "NVIDIA GeForce specifications: twice its fp32 rate, as for GA102"),
    CardRow("RTX-3070", 40.6, 8, 448, "PCIe 4 x16", 32, _P4, 220, SMALL_KIND, "NVIDIA Ampere GA102 whitepaper: twice its fp32 rate"),
    CardRow("RTX-3060Ti", 32.4, 8, 448, "PCIe 4 x16", 32, _P4, 200, SMALL_KIND, "NVIDIA GeForce specifications: twice its fp32 rate, as for GA104"),
    CardRow("RTX-A5000", 111.1, 24, 768, "PCIe 4 x16", 32, _P4, 230, GA102_KIND, "NVIDIA RTX A5000 datasheet, half of its rate with sparsity"),
    CardRow("RTX-A4000", 76.7, 16, 448, "PCIe 4 x16", 32, _P4, 140, GA102_KIND, "NVIDIA RTX A4000 datasheet, half of its rate with sparsity"),
    CardRow("Quadro-RTX-8000", 130.5, 48, 672, "PCIe 3 x16", 16, _P3, 295, TURING_KIND, "NVIDIA Quadro RTX 8000 datasheet; fp16, the device has no bf16", fp32_tflops=16.3),
    CardRow("P40", 11.8, 24, 346, "PCIe 3 x16", 16, _P3, 250, PASCAL_KIND, "NVIDIA Tesla P40 datasheet; fp32, its fp16 is slower and it has no bf16", fp32_tflops=11.8),
    CardRow("GTX-1080Ti", 11.3, 11, 484, "PCIe 3 x16", 16, _P3, 250, PASCAL_KIND, "NVIDIA GeForce specifications; fp32, its fp16 is slower and it has no bf16", fp32_tflops=11.3),
    CardRow("GTX-1080", 8.9, 8, 320, "PCIe 3 x16", 16, _P3, 180, PASCAL_KIND, "NVIDIA GeForce GTX 1080 whitepaper; fp32, its fp16 is slower and it has no bf16", fp32_tflops=8.9),
    CardRow("A10G", 70, 24, 600, "PCIe 4 x16", 32, _P4, 300, GA102_KIND, "NVIDIA A10G as AWS prints it for G5 instances: 70 TFLOPS of fp16 tensor cores"),
    CardRow("GH200-96GB", 989.5, 96, 4000, "NVLink 4", 450, _P5, 1000, HOPPER_KIND, "NVIDIA GH200 datasheet, HBM3"),
    CardRow("GH200-144GB", 989.5, 144, 4900, "NVLink 4", 450, _P5, 1000, HOPPER_KIND, "NVIDIA GH200 datasheet, HBM3e"),
    CardRow("GB10", 125, 119, 273, "ConnectX-7", 25, _P5, 140, PRO_BLACKWELL_KIND, "NVIDIA DGX Spark datasheet: an eighth of its fp4 rate with sparsity; 128 GB shared with the host", shares_host=True),
    CardRow("RX-7900XTX", 122.8, 24, 960, "PCIe 4 x16", 32, _P4, 355, OTHER_KIND, "AMD Radeon RX 7900 XTX specifications: twice its fp32 rate", "rocm"),
    CardRow("W7900", 122.6, 48, 864, "PCIe 4 x16", 32, _P4, 295, OTHER_KIND, "AMD Radeon PRO W7900 datasheet", "rocm"),
    CardRow("RTX-2080Ti", 53.8, 11, 616, "PCIe 3 x16", 16, _P3, 250, TURING_KIND, "NVIDIA Turing whitepaper, reference card; fp16, the device has no bf16", fp32_tflops=13.4),
    CardRow("Titan-RTX", 130.5, 24, 672, "PCIe 3 x16", 16, _P3, 280, TURING_KIND, "NVIDIA Titan RTX specifications; fp16, the device has no bf16", fp32_tflops=16.3),
    CardRow("MI355X", 2516.6, 288, 8000, "Infinity Fabric", 76.8, _P5, 1400, CDNA3_KIND, "AMD Instinct MI355X datasheet", "rocm"),
    CardRow("MI325X", 1307.4, 256, 6000, "Infinity Fabric", 64, _P5, 1000, CDNA3_KIND, "AMD Instinct MI325X datasheet", "rocm"),
    CardRow("MI300X", 1307.4, 192, 5300, "Infinity Fabric", 64, _P5, 750, CDNA3_KIND, "AMD Instinct MI300X datasheet", "rocm"),
    CardRow("MI308X", 188.4, 192, 5300, "Infinity Fabric", 64, _P5, 650, CDNA3_KIND, NO_DATASHEET + "; an MI300X with 80 of 304 compute units", "rocm"),
    CardRow("MI250X", 191.5, 64, 1638.4, "Infinity Fabric", 50, _P4, 280, CDNA2_KIND, "AMD Instinct MI250X datasheet, one of two dies", "rocm", ranks=2),
    CardRow("MI210", 181, 64, 1638.4, "PCIe 4 x16", 32, _P4, 300, CDNA2_KIND, "AMD Instinct MI210 datasheet", "rocm"),
    CardRow("Gaudi-3", 1835, 128, 3700, "three ports of 200 Gb/s per pair", 75, _P5, 900, OTHER_KIND, "Intel Gaudi 3 white paper, HL-325L", "hpu"),
    CardRow("Gaudi-2", 432, 96, 2460, "three ports of 100 Gb/s per pair", 37.5, _P4, 600, OTHER_KIND, "Intel Gaudi 2 white paper, HL-225H", "hpu"),
    CardRow("Max-1550", 839, 128, 3276.8, "Xe Link", 53, _P5, 600, OTHER_KIND, "Intel Data Center GPU Max 1550 product brief, both tiles", "xpu"),
    CardRow("Arc-B580", 116.5, 12, 456, "PCIe 4 x8", 16, (4, 8), 190, OTHER_KIND, "Intel Arc B580 specifications, half of its int8 rate", "xpu"),
    CardRow("CPU", 0.1, 4, 10, "shared memory", 5, _P4, None, CPU_KIND, "placeholder for one core; run ds-hetero profile", "cpu"),
)  # fmt: skip
