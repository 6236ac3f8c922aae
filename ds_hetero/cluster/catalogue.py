"""Accelerators that people own, with the source of every row.

Peaks are dense bf16 with fp32 accumulation, as the vendor prints them (half of a "with sparsity" figure); devices
without bf16 have their fp16 rate. Bandwidth of the device's own link (NVLink, Infinity Fabric, PCIe) is per
direction: half of the bidirectional figure that vendors print. It is the default for the link inside a node.

Shares of these peaks that training reaches are of kinds of cards (`ds_hetero.cluster.catalogue_rows`), those of
attention of kinds and kernels (`ds_hetero.cluster.catalogue_rows`), each with its source. `python -m
benchmarks.real_cards` holds what they predict against public measurements; `ds-hetero profile` measures one's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ds_hetero.cluster.catalogue_rows import MEASURED_ERROR, ROWS, CardRow, Rates, with_attention
from ds_hetero.cluster.topology import Cluster, DeviceSpec
from ds_hetero.common.text import GB, GIB, TERA

THROUGH_HOST = 0.5
"""Share of PCIe's rate, one way with both in use, that cards without peer-to-peer get through the host's memory.

Source: 15 GB/s each way on PCIe 4 x16 with peer-to-peer off (p2pBandwidthLatencyTest, NVIDIA/nccl issue 814).
"""

_GEFORCE = re.compile(r"RTX-[2-5]0[5-9]0")


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A device and what it comes with.

    Args:
        bf16_flops_per_s: the most it reaches in bf16 where it has none and computes in fp32; None where it has.
    """

    device: DeviceSpec  # its numbers
    link_name: str  # what joins such devices inside a node
    link_bytes_per_s: float  # of that link, one pair, one direction
    pcie_generation: int  # of the card's connector; a slot may be older
    pcie_lanes: int  # of the card's connector; a slot may be narrower
    platform: str  # ``cuda``, ``rocm``, ``xpu``, ``hpu`` or ``cpu``: what PyTorch calls such devices
    ranks: int  # devices that PyTorch sees of one card; ``device`` is one of them
    peer_to_peer: bool  # whether the driver lets such cards write into each other's memory; False of GeForce
    attention: Rates  # rates of kernels that run there, the one that an installation would choose first
    bf16_flops_per_s: float | None


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
        error=MEASURED_ERROR.get(row.name, UNMEASURED_ERROR),
        measured=row.name in MEASURED_ERROR,
        source=row.source,
        efficiency=kind.efficiency,
        watts=row.watts,
    )
    in_fp32 = None if row.fp32_tflops is None else row.fp32_tflops * TERA
    if kind.attention:
        device = with_attention(device, next(iter(kind.attention)), kind.attention)
    peer_to_peer = not _GEFORCE.match(row.name)
    rate = row.link_gb_per_s * GB * (1 if peer_to_peer else THROUGH_HOST)
    link = row.link if peer_to_peer else f"{row.link} through the host"
    return CatalogueEntry(device, link, rate, *row.pcie, row.platform, row.ranks, peer_to_peer, kind.attention, in_fp32)


CATALOGUE: dict[str, CatalogueEntry] = {row.name: _entry(row) for row in ROWS}


def with_kernel(cluster: Cluster, kernel: str | None) -> Cluster:
    """Return the cluster with the rates of a kernel of attention on all its devices of the catalogue.

    Raises:
        ClusterError: the kernel does not run on one of them.
    """
    if kernel is None:
        return cluster

    def changed(device: DeviceSpec) -> DeviceSpec:
        entry = CATALOGUE.get(device.name)
        return device if entry is None else with_attention(device, kernel, entry.attention)

    nodes = tuple(replace(node, devices=tuple(map(changed, node.devices))) for node in cluster.nodes)
    return replace(cluster, nodes=nodes)


def confidence(devices: Iterable[DeviceSpec]) -> str:
    """Say whose rates of attention are meant, and of which cards there is no measurement."""
    kinds = {device.name: device for device in devices}.values()
    kernels = dict.fromkeys(device.attention_kernel or "as measured" for device in kinds)
    text = f"attention: {', '.join(kernels)}"
    unknown = [device.name for device in kinds if not device.measured]
    return text + (f"; no measurement of this card: {', '.join(unknown)}" if unknown else "")
