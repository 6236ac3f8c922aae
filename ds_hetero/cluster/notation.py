"""A cluster in one line: ``5090,3090x2`` or ``8xH100 | 8xA100``.

    NOTATION  node | node | ...
    node      cards, separated by commas, in the order of the ranks
    cards     4090   2x4090   4090x2   2x4090@4x8

The PCIe slot of these cards follows behind ``@``, generation x lanes, if it is slower than the card. If all cards of a
node have the same NVLink (or Infinity Fabric), its ranks use that. Otherwise they use PCIe at the rate of the slowest
slot, and at half of that through the host's memory if one is a GeForce, whose driver has no peer-to-peer.

The line becomes the content of a cluster file, so that its meaning can be saved, read and changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from ds_hetero.cluster.catalogue import CATALOGUE, NOMINAL_SHARE, THROUGH_HOST, pcie_bytes_per_s
from ds_hetero.cluster.datasheets import NO_DATASHEET
from ds_hetero.cluster.file_values import number, whole_number
from ds_hetero.cluster.names import Named, card_named
from ds_hetero.common.reading import MAX_RANKS, JsonDict, shortened
from ds_hetero.common.units import GB
from ds_hetero.errors import ClusterError

NETWORK_LATENCY_US = 10.0  # chosen, never measured; `ds-hetero profile` measures it
MAX_NOTATION = 20_000  # characters; chosen, never measured: nobody types a longer line
LIKELY_COUNT = 128  # largest count before or after an unknown name; a larger number belongs to it, as in 7900XTX
_COUNTED = (
    re.compile(r"(?P<count>\d{1,7})\s*[x*×]\s*(?P<name>.+)", re.IGNORECASE),  # noqa: RUF001 - people type the sign
    re.compile(r"(?P<name>.+?)\s*[x*×]\s*(?P<count>\d{1,7})", re.IGNORECASE),  # noqa: RUF001
)
_SLOT = re.compile(r"(?:pcie\s*)?(?P<generation>[1-6])(?:\.0)?\s*x\s*(?P<lanes>\d{1,2})", re.IGNORECASE)
_RATE = re.compile(r"(?P<value>[\d.]+)\s*(?P<unit>[a-z/]*)", re.IGNORECASE)
_UNITS = {"": 1.0, "gb/s": 1.0, "gbyte/s": 1.0, "gbit/s": 1 / 8, "gbit": 1 / 8, "gbps": 1 / 8, "gbe": 1 / 8, "g": 1 / 8}


class Notation(NamedTuple):
    """Meaning of a line of cards."""

    content: JsonDict  # of a cluster file
    remarks: tuple[str, ...]  # sentences about choices that the line left open


class _Cards(NamedTuple):
    """One part of a node: a number of equal cards."""

    number: int
    named: Named
    slot: tuple[int, int] | None  # PCIe generation and lanes; None for those of the card


def read_notation(gpus: str, network: str | None = None, nics: int | None = None) -> Notation:
    """Read a line of cards.

    Args:
        network: rate of one NIC, see `network_gb_per_s`; required for several nodes.
        nics: NICs of a node, which its cards share; 1 if left out.

    Raises:
        ClusterError: an unknown card, with the three nearest names; a name that fits several cards; a part of the line
            without a card; several nodes without a network, or one node with a network.
    """
    if len(gpus) > MAX_NOTATION:
        raise ClusterError(f"--gpus is longer than {MAX_NOTATION:,} characters. Write a cluster file, see --cluster.")
    nodes = [_node(i, text) for i, text in enumerate(gpus.split("|"))]
    if len(nodes) > 1 and network is None:
        raise ClusterError(
            f"--gpus names {len(nodes)} nodes. Say what joins them: --network 25 for a port of 25 GB/s each way, or "
            "--network 200Gbit/s; --nics N where a node has N such ports."
        )
    if len(nodes) == 1 and (network, nics) != (None, None):
        option = "--nics" if network is None else "--network"
        raise ClusterError(
            f"{option} joins nodes, and --gpus names one. Separate nodes by a bar: --gpus '5090 | 3090'."
        )
    all_cards = list(chain.from_iterable(nodes))
    num_ranks = sum(map(_ranks, all_cards))
    if num_ranks > MAX_RANKS:
        raise ClusterError(f"--gpus names {num_ranks:,} devices, more than {MAX_RANKS:,}.")
    names = ["node"] if len(nodes) == 1 else [f"node{i}" for i in range(len(nodes))]
    entries = [_entry(name, node) for name, node in zip(names, nodes, strict=True)]
    content: JsonDict = {"description": f"made from --gpus {gpus!r}", "nodes": entries}
    if network is not None:
        rate = network_gb_per_s("--network", network)
        content["network"] = {
            "bandwidth_gb_per_s": rate,
            "latency_us": NETWORK_LATENCY_US,
            "nics": whole_number("--nics", 1 if nics is None else nics),
            "efficiency": NOMINAL_SHARE,
        }
    return Notation(content, tuple(dict.fromkeys(_remarks(all_cards))))


def network_gb_per_s(where: str, text: str) -> float:
    """Read the rate of a link in GB/s: ``25``, ``25GB/s`` and ``200Gbit/s`` are the same. Raises `ClusterError`."""
    match = _RATE.fullmatch(text.strip())
    unit = _UNITS.get(match["unit"].lower()) if match else None
    try:
        value = float(match["value"]) if match else None
    except ValueError:  # the pattern lets 1.2.3 through
        value = None
    if unit is None or value is None:
        raise ClusterError(
            f"{where} must be a number of GB/s, such as 25 or 25GB/s, or of Gbit/s, such as 200Gbit/s; got "
            f"{shortened(text)}."
        )
    return number(where, value * unit)


def _node(index: int, text: str) -> list[_Cards]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ClusterError(
            f"--gpus: node {index} has an empty place in {shortened(text)}. Write its cards with commas between them, "
            "such as 5090,3090x2."
        )
    return [_cards(part) for part in parts]


def _cards(text: str) -> _Cards:
    """Read one part, such as ``3090x2@4x8``. Raises `ClusterError`: its card, count or slot cannot be read."""
    body, at, slot = text.partition("@")
    count, name = _count_and_name(body.strip())
    card = card_named(name)
    if not count:
        raise ClusterError(f"--gpus: {shortened(text)} asks for 0 cards. Give 1 or more, or leave it out.")
    return _Cards(count, card, _slot(slot) if at else None)


def _count_and_name(text: str) -> tuple[int, str]:
    """Separate the count, before or after the name, from the name.

    Of all readings, the first one whose name is in the catalogue is taken, beginning with that without a count. If no
    name is in the catalogue, the reading with the smallest likely count is, so that the error shows the name alone.
    """
    matches = [pattern.fullmatch(text) for pattern in _COUNTED]
    with_count = [(int(match["count"]), match["name"]) for match in matches if match]
    for count, name in [(1, text), *with_count]:
        if _is_known(name):
            return count, name
    likely = [(count, name) for count, name in with_count if count <= LIKELY_COUNT]
    return min(likely, default=(1, text))


def _is_known(name: str) -> bool:
    try:
        card_named(name)
    except ClusterError:
        return False
    return True


def _slot(text: str) -> tuple[int, int]:
    match = _SLOT.fullmatch(text.strip())
    lanes = int(match["lanes"]) if match else 0
    if match is None or lanes not in (1, 2, 4, 8, 16):
        raise ClusterError(
            f"--gpus: the slot behind @ is PCIe generation x lanes, such as 4x8 or 3x16; got {shortened(text)}."
        )
    return int(match["generation"]), lanes


def _entry(name: str, node: Sequence[_Cards]) -> JsonDict:
    """A node as an entry of a cluster file."""
    devices: list[str] = []
    for cards in node:
        devices += [cards.named.name] * _ranks(cards)
    links = {CATALOGUE[device].link_name for device in devices}
    if len(links) == 1 and not any(cards.slot for cards in node):
        bytes_per_s = min(CATALOGUE[device].link_bytes_per_s for device in devices)
    else:
        bytes_per_s = min(_pcie_bytes_per_s(cards) for cards in node)
    entry: JsonDict = {"name": name}
    if len(set(devices)) == 1:
        entry |= {"device": devices[0], "count": len(devices)}
    else:
        entry["devices"] = devices
    # 5 us is the default latency of cluster files, see `ds_hetero.cluster.files.DEFAULT_LATENCY_S`.
    entry["link"] = {"bandwidth_gb_per_s": bytes_per_s / GB, "latency_us": 5, "efficiency": NOMINAL_SHARE}
    return entry


def _has_datasheet(name: str) -> bool:
    return not CATALOGUE[name].device.source.startswith(NO_DATASHEET)


def _ranks(cards: _Cards) -> int:
    """Ranks on these cards: one per device, of which some cards have several."""
    return cards.number * CATALOGUE[cards.named.name].ranks


def _pcie_bytes_per_s(cards: _Cards) -> float:
    """Rate between these cards and others over PCIe: that of the slot or of the card, the slower one."""
    entry = CATALOGUE[cards.named.name]
    generation, lanes = cards.slot or (entry.pcie_generation, entry.pcie_lanes)
    rate = pcie_bytes_per_s(min(generation, entry.pcie_generation), min(lanes, entry.pcie_lanes))
    return rate if entry.peer_to_peer else rate * THROUGH_HOST


def _remarks(all_cards: Iterable[_Cards]) -> Iterable[str]:
    """Yield sentences about names that fit several cards, and about cards with several devices."""
    for cards in all_cards:
        name = cards.named.name
        entry = CATALOGUE[name]
        # A card without a datasheet is not sold by its maker: whoever means it names it in full.
        alternatives = [other for other in cards.named.others if _has_datasheet(other)]
        if alternatives:
            yield f"taken for {name}, not for {' or '.join(alternatives)}; say which one if it is another"
        if entry.ranks > 1:
            yield f"a card {name} is {entry.ranks} devices, and so {entry.ranks} ranks"
