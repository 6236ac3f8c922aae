# ruff: noqa: E501
"""Accelerators that people own, with the source of every row.

Peaks are dense bf16 with fp32 accumulation, as the vendor prints them (half of a "with sparsity" figure, and of the
advertised tensor rate of GeForce cards); devices without bf16 have their fp16 rate. Bandwidth of the device's own link (NVLink, Infinity Fabric, PCIe) is per
direction: half of the bidirectional figure that vendors print. It is the default for the link inside a node.

Shares of these peaks that training reaches are of kinds of cards (`ds_hetero.cluster.catalogue`), those of
attention of kinds and kernels (`ds_hetero.cluster.catalogue`), each with its source. `python -m
benchmarks.real_cards` holds what they predict against public measurements; `ds-hetero profile` measures one's own.

Rates of attention by kernel and kind of card, each with the measurement behind it.

A rate is the share of the card's peak that a kernel reaches on heads of 128 and long sequences, forward and backward
(10 operations, as FlashAttention-2 counts them, arXiv:2307.08691). ``narrow`` is the share of that on heads of 64.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ds_hetero.cluster.topology import Cluster, DeviceSpec, Efficiency
from ds_hetero.common.reading import shortened
from ds_hetero.common.text import GB, GIB, TERA
from ds_hetero.errors import ClusterError

HEAD_WIDTH = 128  # at which the rates hold
HALF_KEYS = 147  # keys at which half of a rate is left, full attention; fitted to the charts of "flash_attn_2"
EDGE_KEYS = 184  # keys per query that a causal square costs beyond its half; likewise


class AttentionRate(NamedTuple):
    """Rate of a kernel on a card: shares of the peak, the share on heads of 64, and where they were measured."""

    forward: float
    backward: float
    narrow: float
    source: str


_CHARTS = "FlashAttention-2's charts (Dao-AILab/flash-attention, assets) and FlashAttention-3, figures 5 and 6"
_FA3 = "FlashAttention-3 (arXiv:2407.08608), figures 5 and 6"
_TORCH = "torch's flash kernel is FlashAttention-2's code; not measured on its own"
_GUESS = "assumed from FlashAttention-2's share on other cards: no measurement of this card"

Rates = Mapping[str, AttentionRate]


def _version_2(forward: float, backward: float, source: str, **others: AttentionRate) -> dict[str, AttentionRate]:
    """Rates of FlashAttention-2, of torch's copy of it, and of a Triton kernel, which reaches about 0.8 of them."""
    return {
        "flash_attn_2": AttentionRate(forward, backward, 0.86, source),
        "torch": AttentionRate(forward, backward, 0.86, f"{_TORCH}; {source}"),
        "triton": AttentionRate(0.8 * forward, 0.7 * backward, 0.86, f"assumed, 0.8 and 0.7 of flash_attn_2: {source}"),
        **others,
    }


AMPERE = _version_2(0.70, 0.645, f"{_CHARTS} (forward and backward together); forward alone USP (arXiv:2405.07719)")
HOPPER = _version_2(
    0.386,
    0.336,
    _CHARTS,
    flash_attn_3=AttentionRate(0.69, 0.585, 0.72, _FA3),
    cudnn=AttentionRate(0.634, 0.54, 0.67, _FA3),
)
BLACKWELL = _version_2(
    0.211,
    0.17,
    "Dao-AILab/flash-attention, issue 1589: B200, heads of 64",
    flash_attn_4=AttentionRate(0.71, 0.55, 0.8, "FlashAttention-4 as announced (1,605 TFLOPS forward); not checked"),
    cudnn=AttentionRate(0.60, 0.50, 0.8, "assumed, 0.85 of flash_attn_4: no measurement of this card"),
)
GA102 = _version_2(0.88, 0.78, "gpu-mode/ring-attention, issue 10: RTX A5000, heads of 64")
CONSUMER = _version_2(0.70, 0.60, _GUESS)
ADA_SERVER = _version_2(0.55, 0.45, _GUESS)
SMALL = _version_2(0.60, 0.50, _GUESS)
TURING = {"triton": AttentionRate(0.35, 0.30, 0.86, _GUESS), "torch": AttentionRate(0.35, 0.30, 0.86, _GUESS)}
CDNA2 = _version_2(0.35, 0.25, _GUESS)
CDNA3 = _version_2(0.40, 0.30, _GUESS)
OTHER = {"torch": AttentionRate(0.35, 0.25, 0.86, _GUESS)}


def with_attention(device: DeviceSpec, kernel: str, rates: Rates) -> DeviceSpec:
    """The ``device`` with a kernel's ``rates``. Raises `ClusterError`: the kernel does not run there."""
    rate = rates.get(kernel)
    if rate is None:
        raise ClusterError(
            f"attention {shortened(kernel)} has no rate on {device.name}; there are {', '.join(rates)}. "
            "Take one of these, or give efficiency.attention_forward and attention_backward in the cluster file."
        )
    efficiency = replace(
        device.efficiency,
        attention_forward=rate.forward,
        attention_backward=rate.backward,
        attention_narrow=rate.narrow,
    )
    return replace(device, attention_kernel=kernel, efficiency=efficiency)


NO_DATASHEET = "no public datasheet"
"""How the source of a row begins whose numbers are assumed."""


class CardKind(NamedTuple):
    """Cards that reach the same shares of their peaks: outside attention, by kernel of attention, and where from."""

    efficiency: Efficiency
    attention: Rates
    source: str


class CardRow(NamedTuple):
    """A card in people's units."""

    name: str  # of the catalogue
    tflops: float  # peak, 10^12 operations per second
    gib: float  # memory, GiB
    gb_per_s: float  # bandwidth of the memory, GB/s
    link: str  # what joins such cards inside a node
    link_gb_per_s: float  # GB/s of that link per pair and direction
    pcie: tuple[int, int]  # generation and width of the card's own connector
    watts: float | None  # power under load; None if not known
    kind: CardKind  # of cards that reach the same shares of their peaks
    source: str  # where the numbers are printed
    platform: str = "cuda"  # what PyTorch calls such devices
    ranks: int = 1  # devices that PyTorch sees of one card; the numbers are those of one device
    fp32_tflops: float | None = None  # peak, of cards without bf16; None of all others
    shares_host: bool = False  # its memory is the machine's: offloads free nothing


def _kind(multiprocessors: int, matmul: float, memory: float, attention: Rates, source: str) -> CardKind:
    """Half-sizes are about half a wave of 128-row tiles over all multiprocessors."""
    return CardKind(
        efficiency=Efficiency(
            matmul=matmul,
            memory=memory,
            matmul_half_tokens=256,
            attention_half_rows=64 * multiprocessors,
            attention_half_kv=HALF_KEYS,
            attention_edge_keys=EDGE_KEYS,
            attention_width=HEAD_WIDTH,
            layer_host_s=LAYER_HOST_S,
            attention_overhead_s=10e-6,
        ),
        attention=attention,
        source=source,
    )


LAYER_HOST_S = 0.6e-3
"""Least time of a layer's forward in eager PyTorch; see `ds_hetero.cost.terms.host` for what comes on top."""

_FIT = "fitted to steps of llm-foundry, xtuner, torchtune and others: python -m benchmarks.real_cards"
_BEST = "large products as in stas00/ml-engineering (MAMF), less 0.15 as on the H100; memory as on the H100"
_N8192 = "products of n = 8192 in mli/transformers-benchmarks; memory assumed"
_ASSUMED = "assumed: no measurement of this card"
_HOPPER = _kind(132, 0.63, 0.52, HOPPER, _FIT)
_A100_80 = _kind(108, 0.765, 0.62, AMPERE, _FIT)
_A100_40 = _kind(108, 0.73, 0.71, AMPERE, _FIT)
_BLACKWELL = _kind(148, 0.63, 0.58, BLACKWELL, _BEST)
_PRO_BLACKWELL = _kind(148, 0.70, 0.75, CONSUMER, _ASSUMED)
_ADA = _kind(142, 0.65, 0.75, ADA_SERVER, _ASSUMED)  # L40S and L40 meet their power limit first
_GA102 = _kind(84, 0.61, 0.75, GA102, _N8192)
_CONSUMER = _kind(100, 0.90, 0.75, CONSUMER, _N8192)
_SMALL = _kind(60, 0.75, 0.75, SMALL, _ASSUMED)
_A30 = _kind(56, 0.75, 0.75, SMALL, _ASSUMED)
_L4 = _kind(58, 0.55, 0.75, SMALL, _ASSUMED)
_A10 = _kind(72, 0.60, 0.75, SMALL, _ASSUMED)
_TURING = _kind(60, 0.60, 0.75, TURING, _ASSUMED)
_CDNA2 = _kind(110, 0.50, 0.60, CDNA2, _ASSUMED)
_CDNA3 = _kind(304, 0.50, 0.60, CDNA3, _BEST)
_OTHER = _kind(64, 0.50, 0.60, OTHER, _ASSUMED)  # nothing of this project has run there
_CPU = CardKind(Efficiency(), {}, "none: run ds-hetero profile")

MEASURED_ERROR = {"A100-SXM-80GB": 0.15, "A100-SXM-40GB": 0.15, "H100-SXM-80GB": 0.15}
"""Cards whose steps were measured, with an error that 8 of 10 steps stay below; `benchmarks.real_cards` counts them."""

FEW_ERROR = 0.30
FEW_MEASUREMENTS = {"RTX-3090": 10, "RTX-4090": 9, "RTX-A5000": 3, "H200-SXM-141GB": 7}
"""Cards of which `benchmarks.real_cards` has few steps, of the first three LoRA and QLoRA alone: 8 of 10 are within 0.25,
0.19, 0.13 and 0.20, to which no rate was fitted; the error stays wider for what was not measured."""

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
    CardRow("A100-SXM-80GB", 312, 80, 2039, "NVLink 3", 300, _P4, 400, _A100_80, "NVIDIA A100 datasheet, 80GB SXM"),
    CardRow("A100-SXM-40GB", 312, 40, 1555, "NVLink 3", 300, _P4, 400, _A100_40, "NVIDIA A100 datasheet, 40GB SXM"),
    CardRow("A100-PCIe-80GB", 312, 80, 1935, "PCIe 4 x16", 32, _P4, 300, _A100_80, "NVIDIA A100 datasheet, 80GB PCIe"),
    CardRow("A100-PCIe-40GB", 312, 40, 1555, "PCIe 4 x16", 32, _P4, 250, _A100_40, "NVIDIA A100 datasheet, 40GB PCIe"),
    CardRow("A800-SXM-80GB", 312, 80, 2039, "NVLink 3", 200, _P4, 400, _A100_80, "A100 SXM with NVLink of 400 GB/s bidirectional"),
    CardRow("A800-PCIe-80GB", 312, 80, 1935, "PCIe 4 x16", 32, _P4, 300, _A100_80, "NVIDIA A800 datasheet, 80GB PCIe"),
    CardRow("A40", 149.7, 48, 696, "PCIe 4 x16", 32, _P4, 300, _GA102, "NVIDIA A40 datasheet"),
    CardRow("A30", 165, 24, 933, "PCIe 4 x16", 32, _P4, 165, _A30, "NVIDIA A30 datasheet"),
    CardRow("A16", 17.9, 16, 200, "PCIe 4 x16, a quarter", 8, (4, 4), 62.5, _SMALL, "NVIDIA A16 datasheet, one of 4 GPUs of a board", ranks=4),
    CardRow("L40S", 362, 48, 864, "PCIe 4 x16", 32, _P4, 350, _ADA, "NVIDIA L40S datasheet"),
    CardRow("L40", 181, 48, 864, "PCIe 4 x16", 32, _P4, 300, _ADA, "NVIDIA L40 datasheet"),
    CardRow("L4", 121, 24, 300, "PCIe 4 x16", 32, _P4, 72, _L4, "NVIDIA L4 datasheet"),
    CardRow("A10", 125, 24, 600, "PCIe 4 x16", 32, _P4, 150, _A10, "NVIDIA A10 datasheet"),
    CardRow("V100-SXM-32GB", 125, 32, 900, "NVLink 2", 150, _P3, 300, _TURING, _V100, fp32_tflops=15.7),
    CardRow("V100-SXM-16GB", 125, 16, 900, "NVLink 2", 150, _P3, 300, _TURING, _V100, fp32_tflops=15.7),
    CardRow("V100-PCIe-32GB", 112, 32, 900, "PCIe 3 x16", 16, _P3, 250, _TURING, _V100, fp32_tflops=14.0),
    CardRow("V100-PCIe-16GB", 112, 16, 900, "PCIe 3 x16", 16, _P3, 250, _TURING, _V100, fp32_tflops=14.0),
    CardRow("P100-SXM-16GB", 21.2, 16, 732, "NVLink 1", 80, _P3, 300, _TURING, _P100, fp32_tflops=10.6),
    CardRow("P100-PCIe-16GB", 18.7, 16, 732, "PCIe 3 x16", 16, _P3, 250, _TURING, _P100, fp32_tflops=9.3),
    CardRow("T4", 65, 16, 320, "PCIe 3 x16", 16, _P3, 70, _TURING, "NVIDIA T4 datasheet; fp16, the device has no bf16", fp32_tflops=8.1),
    CardRow("RTX-PRO-6000", 503.8, 96, 1792, "PCIe 5 x16", 64, _P5, 600, _PRO_BLACKWELL, "NVIDIA RTX Blackwell PRO architecture whitepaper, Workstation Edition"),
    CardRow("RTX-6000-Ada", 364.2, 48, 960, "PCIe 4 x16", 32, _P4, 300, _ADA, "NVIDIA RTX 6000 Ada datasheet, a quarter of its fp8 rate with sparsity"),
    CardRow("RTX-A6000", 154.8, 48, 768, "PCIe 4 x16", 32, _P4, 300, _GA102, "NVIDIA RTX A6000 datasheet, half of its rate with sparsity"),
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
    CardRow("RTX-5070", 61.7, 12, 672, "PCIe 5 x16", 64, _P5, 250, _CONSUMER, "NVIDIA RTX Blackwell architecture whitepaper: twice its fp32 rate"),
    CardRow("RTX-5060Ti-16GB", 47.4, 16, 448, "PCIe 5 x8", 32, (5, 8), 180, _SMALL, "NVIDIA GeForce specifications: twice its fp32 rate"),
    CardRow("RTX-4090D", 147.1, 24, 1008, "PCIe 4 x16", 32, _P4, 425, _CONSUMER, "NVIDIA GeForce RTX 4090 D specifications: twice its fp32 rate of 73.5"),
    CardRow("RTX-4090-48GB", 165.2, 48, 1008, "PCIe 4 x16", 32, _P4, 450, _CONSUMER, NO_DATASHEET + "; an RTX 4090 with twice its memory, sold by third parties"),
    CardRow("RTX-4080Super", 104.4, 16, 736.3, "PCIe 4 x16", 32, _P4, 320, _CONSUMER, "NVIDIA GeForce specifications: twice its fp32 rate, as for AD103"),
    CardRow("RTX-4070Ti", 80.2, 12, 504.2, "PCIe 4 x16", 32, _P4, 285, _CONSUMER, "NVIDIA GeForce specifications: twice its fp32 rate, as for AD104"),
    CardRow("RTX-4070", 58.3, 12, 504.2, "PCIe 4 x16", 32, _P4, 200, _SMALL, "NVIDIA GeForce specifications: twice its fp32 rate, as for AD104"),
    CardRow("RTX-4060Ti-16GB", 44.1, 16, 288, "PCIe 4 x8", 16, (4, 8), 165, _SMALL, "NVIDIA GeForce specifications: twice its fp32 rate, as for AD106"),
    CardRow("RTX-4060Ti-8GB", 44.1, 8, 288, "PCIe 4 x8", 16, (4, 8), 160, _SMALL, "NVIDIA GeForce specifications: twice its fp32 rate, as for AD106"),
    CardRow("RTX-3090Ti", 80, 24, 1008, "PCIe 4 x16", 32, _P4, 450, _CONSUMER, "NVIDIA GeForce specifications: twice its fp32 rate, as for GA102"),
    CardRow("RTX-3080-12GB", 61.3, 12, 912, "PCIe 4 x16", 32, _P4, 350, _CONSUMER, "NVIDIA GeForce specifications: twice its fp32 rate, as for GA102"),
    CardRow("RTX-3070", 40.6, 8, 448, "PCIe 4 x16", 32, _P4, 220, _SMALL, "NVIDIA Ampere GA102 whitepaper: twice its fp32 rate"),
    CardRow("RTX-3060Ti", 32.4, 8, 448, "PCIe 4 x16", 32, _P4, 200, _SMALL, "NVIDIA GeForce specifications: twice its fp32 rate, as for GA104"),
    CardRow("RTX-A5000", 111.1, 24, 768, "PCIe 4 x16", 32, _P4, 230, _GA102, "NVIDIA RTX A5000 datasheet, half of its rate with sparsity"),
    CardRow("RTX-A4000", 76.7, 16, 448, "PCIe 4 x16", 32, _P4, 140, _GA102, "NVIDIA RTX A4000 datasheet, half of its rate with sparsity"),
    CardRow("Quadro-RTX-8000", 130.5, 48, 672, "PCIe 3 x16", 16, _P3, 295, _TURING, "NVIDIA Quadro RTX 8000 datasheet; fp16, the device has no bf16", fp32_tflops=16.3),
    CardRow("P40", 11.8, 24, 346, "PCIe 3 x16", 16, _P3, 250, _TURING, "NVIDIA Tesla P40 datasheet; fp32, its fp16 is slower and it has no bf16", fp32_tflops=11.8),
    CardRow("GTX-1080Ti", 11.3, 11, 484, "PCIe 3 x16", 16, _P3, 250, _TURING, "NVIDIA GeForce specifications; fp32, its fp16 is slower and it has no bf16", fp32_tflops=11.3),
    CardRow("GTX-1080", 8.9, 8, 320, "PCIe 3 x16", 16, _P3, 180, _TURING, "NVIDIA GeForce GTX 1080 whitepaper; fp32, its fp16 is slower and it has no bf16", fp32_tflops=8.9),
    CardRow("A10G", 70, 24, 600, "PCIe 4 x16", 32, _P4, 300, _GA102, "NVIDIA A10G as AWS prints it for G5 instances: 70 TFLOPS of fp16 tensor cores"),
    CardRow("GH200-96GB", 989.5, 96, 4000, "NVLink 4", 450, _P5, 1000, _HOPPER, "NVIDIA GH200 datasheet, HBM3"),
    CardRow("GH200-144GB", 989.5, 144, 4900, "NVLink 4", 450, _P5, 1000, _HOPPER, "NVIDIA GH200 datasheet, HBM3e"),
    CardRow("GB10", 125, 119, 273, "ConnectX-7", 25, _P5, 140, _PRO_BLACKWELL, "NVIDIA DGX Spark datasheet: an eighth of its fp4 rate with sparsity; 128 GB shared with the host", shares_host=True),
    CardRow("RX-7900XTX", 122.8, 24, 960, "PCIe 4 x16", 32, _P4, 355, _OTHER, "AMD Radeon RX 7900 XTX specifications: twice its fp32 rate", "rocm"),
    CardRow("W7900", 122.6, 48, 864, "PCIe 4 x16", 32, _P4, 295, _OTHER, "AMD Radeon PRO W7900 datasheet", "rocm"),
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
    CardRow("CPU", 0.1, 4, 10, "shared memory", 5, _P4, None, _CPU, "placeholder for one core; run ds-hetero profile", "cpu"),
)  # fmt: skip


THROUGH_HOST = 0.5
"""Share of PCIe's rate, one way with both in use, that cards without peer-to-peer get through the host's memory.

Source: 15 GB/s each way on PCIe 4 x16 with peer-to-peer off (p2pBandwidthLatencyTest, NVIDIA/nccl issue 814).
A collective reaches `NOMINAL_SHARE` of that copy's rate: ten steps of two RTX 3090 are then off by 17 % in the median,
without it by 21 % (`benchmarks.real_cards`); those of RTX 4090 do not depend on it.
"""

_GEFORCE = re.compile(r"RTX-[2-5]0[5-9]0")


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A device and what it comes with."""

    device: DeviceSpec  # its numbers
    link_name: str  # what joins such devices inside a node
    link_bytes_per_s: float  # of that link, one pair, one direction
    pcie_generation: int  # of the card's connector; a slot may be older
    pcie_lanes: int  # of the card's connector; a slot may be narrower
    platform: str  # ``cuda``, ``rocm``, ``xpu``, ``hpu`` or ``cpu``: what PyTorch calls such devices
    ranks: int  # devices that PyTorch sees of one card; ``device`` is one of them
    peer_to_peer: bool  # whether the driver lets such cards write into each other's memory; False of GeForce
    attention: Rates  # rates of kernels that run there, the one that an installation would choose first
    bf16_flops_per_s: float | None  # at most, where it has no bf16 and computes in fp32; None where it has


NOMINAL_SHARE = 0.8
"""Share of a link's printed rate that collectives reach: 0.78 of NVLink 3 by all-reduces of 8 A100, 0.88 of NVLink 4 by
copies of an H200, 0.70 to 0.74 of an MI300X (stas00/ml-engineering, network and accelerator benchmarks)."""

FRAGMENTATION = 0.06
"""Memory that an allocator holds beside tensors, as a share: fsdp_qlora and Qwen, reserved against predicted."""

PROFILED_ERROR = 0.15
"""Error of steps on cards whose rates somebody measured: of those that the catalogue has from measurements."""

UNMEASURED_ERROR = 0.45
"""Error of steps on cards that no measurement backs: assumed, three times that of measured ones."""


def usual_reserve(memory_bytes: int) -> int:
    """Bytes of a card that no tensor gets: 1.5 GiB for the driver's context and NCCL, an eighth of small cards."""
    return min(int(1.5 * GIB), memory_bytes // 8)


def pcie_bytes_per_s(generation: int, lanes: int) -> float:
    """Nominal rate of a PCIe connector in one direction: 1 GB/s a lane in generation 3, doubled by each next one."""
    return GB * lanes * 2.0 ** (generation - 3)


def _entry(row: CardRow) -> CatalogueEntry:
    kind, is_cpu = row.kind, row.platform == "cpu"
    memory_bytes = int(row.gib * GIB)
    device = DeviceSpec(
        name=row.name,
        peak_flops_per_s=row.tflops * TERA,
        memory_bytes=memory_bytes,
        memory_bytes_per_s=row.gb_per_s * GB,
        reserved_bytes=0 if is_cpu else usual_reserve(memory_bytes),
        fragmentation=0.0 if is_cpu else FRAGMENTATION,
        error=FEW_ERROR if row.name in FEW_MEASUREMENTS else MEASURED_ERROR.get(row.name, UNMEASURED_ERROR),
        measured=row.name in MEASURED_ERROR,
        source=row.source,
        efficiency=kind.efficiency,
        watts=row.watts,
        shares_host_memory=row.shares_host,
    )
    in_fp32 = None if row.fp32_tflops is None else row.fp32_tflops * TERA
    if kind.attention:
        device = with_attention(device, next(iter(kind.attention)), kind.attention)
    peer_to_peer = not _GEFORCE.match(row.name)
    rate = row.link_gb_per_s * GB * (1 if peer_to_peer else THROUGH_HOST)
    link = row.link if peer_to_peer else f"{row.link} through the host"
    return CatalogueEntry(device, link, rate, *row.pcie, row.platform, row.ranks, peer_to_peer, kind.attention, in_fp32)


CATALOGUE: dict[str, CatalogueEntry] = {row.name: _entry(row) for row in ROWS}


_NOT_RUN = {
    "rocm": "ROCm has not been tried with this engine: its plans for {} are predictions only",
    "hpu": "this engine does not run on {} (HPU): planning only",
    "xpu": "this engine does not run on {} (XPU): planning only",
}


def with_kernel(cluster: Cluster, kernel: str | None) -> Cluster:
    """The cluster with an attention kernel's rates on known devices. Raises `ClusterError`: it does not run there."""
    if kernel is None:
        return cluster

    def changed(device: DeviceSpec) -> DeviceSpec:
        entry = CATALOGUE.get(device.name)
        return device if entry is None else with_attention(device, kernel, entry.attention)

    return cluster.with_devices(changed)


def confidence(devices: Iterable[DeviceSpec]) -> str:
    """Say whose rates of attention are meant, and of which cards there is no measurement."""
    kinds = {device.name: device for device in devices}.values()
    kernels = dict.fromkeys(device.attention_kernel or "as measured" for device in kinds)
    text = f"attention: {', '.join(kernels)}"
    unknown = [device.name for device in kinds if not device.measured]
    few = [f"{name} ({FEW_MEASUREMENTS[name]} steps)" for name in unknown if name in FEW_MEASUREMENTS]
    none = [name for name in unknown if name not in FEW_MEASUREMENTS]
    text += f"; few measurements of this card: {', '.join(few)}" if few else ""
    return text + (f"; no measurement of this card: {', '.join(none)}" if none else "")


def device_remarks(devices: Sequence[DeviceSpec]) -> tuple[str, ...]:
    """Sentences about devices that this engine does not run on, or not in one job, without bf16, or with guesses."""
    platforms: dict[str, list[str]] = {}
    for device in devices:
        if device.name in CATALOGUE:
            names = platforms.setdefault(CATALOGUE[device.name].platform, [])
            if device.name not in names:
                names.append(device.name)
    out = [_NOT_RUN[kind].format(", ".join(names)) for kind, names in platforms.items() if kind in _NOT_RUN]
    known = {device.name: CATALOGUE[device.name] for device in devices if device.name in CATALOGUE}
    out += [_without_bf16(entry, entry.bf16_flops_per_s) for entry in known.values() if entry.bf16_flops_per_s]
    assumed = {device.name: device.source for device in devices if device.source.startswith(NO_DATASHEET)}
    out += [f"the numbers of {name} are assumed: {source}" for name, source in assumed.items()]
    if len(platforms) > 1:
        kinds = " beside ".join(kind.upper() for kind in platforms)
        out.append(f"{kinds} in one job is not supported: planning only")
    return tuple(out)


def _without_bf16(entry: CatalogueEntry, bf16_flops_per_s: float) -> str:
    rates = f"{bf16_flops_per_s / TERA:g} of {entry.device.peak_flops_per_s / TERA:g} TFLOP/s at best"
    return (
        f"{entry.device.name} has no bf16, its figures are those of fp16: in bf16 it computes in fp32, at {rates}. "
        "Train such a job in fp16; one in bf16 is refused at its start"
    )
