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

import re
from dataclasses import dataclass

from ds_hetero.cluster.catalogue_rows import ROWS, CardRow
from ds_hetero.cluster.device import DeviceSpec
from ds_hetero.common.units import GB, GIB, TERA

THROUGH_HOST = 0.5
"""Share of PCIe's rate, one way with both in use, that cards without peer-to-peer get through the host's memory.

Source: 15 GB/s each way on PCIe 4 x16 with peer-to-peer off (p2pBandwidthLatencyTest, NVIDIA/nccl issue 814).
"""

_GEFORCE = re.compile(r"RTX-[2-5]0[5-9]0")


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A device and what it comes with.

    Args:
        device: its numbers.
        link_name: what joins such devices inside a node.
        link_bytes_per_s: of that link, one pair, one direction.
        pcie_generation: of the card's connector; a slot may be older.
        pcie_lanes: of the card's connector; a slot may be narrower.
        platform: ``cuda``, ``rocm``, ``xpu``, ``hpu`` or ``cpu``: what PyTorch calls such devices.
        ranks: devices that PyTorch sees of one card; ``device`` is one of them.
        peer_to_peer: whether the driver lets such cards write into each other's memory; False of GeForce.
        bf16_flops_per_s: the most it reaches in bf16 where it has none and computes in fp32; None where it has.
    """

    device: DeviceSpec
    link_name: str
    link_bytes_per_s: float
    pcie_generation: int
    pcie_lanes: int
    platform: str
    ranks: int
    peer_to_peer: bool
    bf16_flops_per_s: float | None


def pcie_bytes_per_s(generation: int, lanes: int) -> float:
    """Nominal rate of a PCIe connector in one direction: 1 GB/s a lane in generation 3, doubled by each next one."""
    return GB * lanes * 2.0 ** (generation - 3)


def _entry(row: CardRow) -> CatalogueEntry:
    device = DeviceSpec(
        name=row.name,
        peak_flops_per_s=row.tflops * TERA,
        memory_bytes=int(row.gib * GIB),
        memory_bytes_per_s=row.gb_per_s * GB,
        reserved_bytes=0 if row.name == "CPU" else int(1.5 * GIB),
        source=row.source,
        efficiency=row.efficiency,
        watts=row.watts,
    )
    in_fp32 = None if row.fp32_tflops is None else row.fp32_tflops * TERA
    peer_to_peer = not _GEFORCE.match(row.name)
    rate = row.link_gb_per_s * GB * (1 if peer_to_peer else THROUGH_HOST)
    link = row.link if peer_to_peer else f"{row.link} through the host"
    return CatalogueEntry(device, link, rate, *row.pcie, row.platform, row.ranks, peer_to_peer, in_fp32)


CATALOGUE: dict[str, CatalogueEntry] = {row.name: _entry(row) for row in ROWS}
