"""Catalogue of devices: peak rates of the datasheet, shares of the peaks that kernels reach, and the link; SI units."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ds_hetero.cluster.attention_rates import Rates, with_attention
from ds_hetero.cluster.datasheets import ROWS, CardRow
from ds_hetero.cluster.step_errors import MEASURED_ERROR, step_error
from ds_hetero.cluster.topology import Cluster, DeviceSpec
from ds_hetero.common.units import GB, GIB, TERA

THROUGH_HOST_SHARE = 0.5
"""Share of PCIe's rate in one direction, with both in use, that cards without peer-to-peer reach through the host.

Source: 15 GB/s each way on PCIe 4 x16 with peer-to-peer off (p2pBandwidthLatencyTest, NVIDIA/nccl issue 814). A
collective reaches `LINK_EFFICIENCY` of this rate: with this factor the predictions of ten steps of two RTX 3090 are off
by 17 % in the median, without it by 21 % (`benchmarks.real_cards`); steps of RTX 4090 do not depend on it.
"""

_GEFORCE = re.compile(r"RTX-[2-5]0[5-9]0")


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """Catalogue entry of a device: its numbers, its link, its connector and its attention kernels."""

    device: DeviceSpec
    link_name: str  # name of the link between such devices inside a node
    link_bytes_per_s: float  # rate of this link for one pair in one direction
    pcie_generation: int  # of the card's connector; a slot may be older
    pcie_lanes: int  # of the card's connector; a slot may be narrower
    platform: str  # PyTorch's name for such devices: ``cuda``, ``rocm``, ``xpu``, ``hpu`` or ``cpu``
    ranks: int  # number of devices that PyTorch sees on one card; ``device`` is one of them
    peer_to_peer: bool  # whether the driver lets such cards write into each other's memory; False for GeForce
    attention: Rates  # rates of the attention kernels that run on it; an installation chooses the first one
    bf16_flops_per_s: float | None  # fp32 peak of a device without bf16, which computes bf16 in fp32; else None


LINK_EFFICIENCY = 0.8
"""Share of a link's printed rate that collectives reach.

Sources: 0.78 of NVLink 3 by all-reduces of 8 A100, 0.88 of NVLink 4 by copies of an H200, 0.70 to 0.74 of an MI300X
(stas00/ml-engineering, network and accelerator benchmarks).
"""

FRAGMENTATION = 0.06
"""Memory that the allocator wastes, as a share of the tensors' bytes.

Source: the reserved bytes that fsdp_qlora and Qwen print.
"""


def usual_reserve(memory_bytes: int) -> int:
    """Return the bytes that tensors cannot use: 1.5 GiB for the driver's context and NCCL, at most 1/8 of the memory.

    Both numbers are chosen, never measured.
    """
    return min(int(1.5 * GIB), memory_bytes // 8)


def pcie_bytes_per_s(generation: int, lanes: int) -> float:
    """Return the nominal rate of PCIe in one direction: 1 GB/s a lane in generation 3, twice that in each later one."""
    return GB * lanes * 2.0 ** (generation - 3)


def _entry(row: CardRow) -> CatalogueEntry:
    """Return the entry of a datasheet row; the device has the rates of the kernel that an installation chooses."""
    rates = row.kind.attention
    device = _device(row)
    if rates:
        usual_kernel = next(iter(rates))
        device = with_attention(device, usual_kernel, rates)
    link_name, link_bytes_per_s = row.link, row.link_gb_per_s * GB
    peer_to_peer = not _GEFORCE.match(row.name)
    if not peer_to_peer:
        link_name, link_bytes_per_s = f"{row.link} through the host", link_bytes_per_s * THROUGH_HOST_SHARE
    pcie_generation, pcie_lanes = row.pcie
    return CatalogueEntry(
        device=device,
        link_name=link_name,
        link_bytes_per_s=link_bytes_per_s,
        pcie_generation=pcie_generation,
        pcie_lanes=pcie_lanes,
        platform=row.platform,
        ranks=row.ranks,
        peer_to_peer=peer_to_peer,
        attention=rates,
        bf16_flops_per_s=None if row.fp32_tflops is None else row.fp32_tflops * TERA,
    )


def _device(row: CardRow) -> DeviceSpec:
    """Return the device of a datasheet row, without rates of attention."""
    is_cpu = row.platform == "cpu"
    memory_bytes = int(row.gib * GIB)
    return DeviceSpec(
        name=row.name,
        peak_flops_per_s=row.tflops * TERA,
        memory_bytes=memory_bytes,
        memory_bytes_per_s=row.gb_per_s * GB,
        reserved_bytes=0 if is_cpu else usual_reserve(memory_bytes),
        fragmentation=0.0 if is_cpu else FRAGMENTATION,
        error=step_error(row.name),
        measured=row.name in MEASURED_ERROR,
        source=row.source,
        efficiency=row.kind.efficiency,
        watts=row.watts,
        shares_host_memory=row.shares_host,
    )


CATALOGUE: dict[str, CatalogueEntry] = {row.name: _entry(row) for row in ROWS}


def with_kernel(cluster: Cluster, kernel: str | None) -> Cluster:
    """Return the cluster with an attention kernel's rates on all devices of the catalogue; unchanged without a kernel.

    Raises:
        ClusterError: the kernel has no rate on one of the devices.
    """
    if kernel is None:
        return cluster

    def with_rates(device: DeviceSpec) -> DeviceSpec:
        entry = CATALOGUE.get(device.name)
        return device if entry is None else with_attention(device, kernel, entry.attention)

    return cluster.with_devices(with_rates)
