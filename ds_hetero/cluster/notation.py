"""A cluster in one line: ``5090,3090x2`` or ``8xH100 | 8xA100``.

    NOTATION  node | node | ...
    node      cards, separated by commas, in the order of the ranks
    cards     4090   2x4090   4090x2   2x4090@4x8

Behind ``@`` stands the slot of these cards, PCIe generation x lanes, where it is slower than the card. Inside a node of
cards with one kind of NVLink (or Infinity Fabric) ranks talk over that; else over PCIe, as fast as its slowest slot,
and half as fast through the host's memory where it has a GeForce, whose driver has no peer-to-peer.

The line becomes the content of a cluster file, so that what it means can be saved, read and changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ds_hetero.cluster.catalogue import CATALOGUE, NOMINAL_SHARE, THROUGH_HOST, pcie_bytes_per_s
from ds_hetero.cluster.datasheets import NO_DATASHEET
from ds_hetero.cluster.file_values import number, whole_number
from ds_hetero.cluster.names import Named, card_named
from ds_hetero.common.reading import MAX_RANKS, JsonDict, shortened
from ds_hetero.common.units import GB
from ds_hetero.errors import ClusterError

NETWORK_LATENCY_US = 10.0  # chosen, never measured; `ds-hetero profile` measures it
MAX_NOTATION = 20_000  # characters; chosen, never measured: a longer line is no cluster that somebody typed
LIKELY_COUNT = 128  # of an unknown card; a larger number is part of its name, as in GTX 1080 and 7900XTX
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
    remarks: tuple[str, ...]  # what was decided where the line left a choice, as sentences


class _Cards(NamedTuple):
    """Cards of one kind beside each other; ``slot`` is (generation, lanes) of PCIe, None for the card's own."""

    number: int
    named: Named
    slot: tuple[int, int] | None


def read_notation(gpus: str, network: str | None = None, nics: int | None = None) -> Notation:
    """Read a line of cards.

    Args:
        network: one port of a node to the network, see `network_gb_per_s`; needed if there are several nodes.
        nics: such ports of a node, which its cards share; 1 where left out.

    Raises:
        ClusterError: an unknown card, with the three nearest names; a name that fits several; a part of the line that
            is no card; several nodes without a network, or one node with one.
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
    num_ranks = sum(_ranks(cards) for node in nodes for cards in node)
    if num_ranks > MAX_RANKS:
        raise ClusterError(f"--gpus names {num_ranks:,} devices, more than {MAX_RANKS:,}.")
    entries = [_entry("node" if len(nodes) == 1 else f"node{i}", node) for i, node in enumerate(nodes)]
    content: JsonDict = {"description": f"made from --gpus {gpus!r}", "nodes": entries}
    if network is not None:
        rate = network_gb_per_s("--network", network)
        content["network"] = {
            "bandwidth_gb_per_s": rate,
            "latency_us": NETWORK_LATENCY_US,
            "nics": whole_number("--nics", 1 if nics is None else nics),
            "efficiency": NOMINAL_SHARE,
        }
    return Notation(content, tuple(dict.fromkeys(_remarks(cards for node in nodes for cards in node))))


def network_gb_per_s(where: str, text: str) -> float:
    """Read the rate of a link: ``25``, ``25GB/s`` and ``200Gbit/s`` are the same. Raises `ClusterError`: no rate."""
    match = _RATE.fullmatch(text.strip())
    unit = _UNITS.get(match["unit"].lower()) if match else None
    try:
        value = float(match["value"]) if match else None
    except ValueError:
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
    """Read the cards of one part. Raises `ClusterError`: no card, or no slot behind ``@``."""
    body, at, slot = text.partition("@")
    count, name = _count_and_name(body.strip())
    card = card_named(name)
    if not count:
        raise ClusterError(f"--gpus: {shortened(text)} is no card at all. Give 1 or more, or leave it out.")
    return _Cards(count, card, _slot(slot) if at else None)


def _count_and_name(text: str) -> tuple[int, str]:
    """Take a number off the name, before or behind it.

    The first reading whose name is in the catalogue counts, and that without a number is tried first. If none is, the
    smallest likely number is taken off, so that the error names the rest.
    """
    matches = [match for match in (pattern.fullmatch(text) for pattern in _COUNTED) if match]
    with_number = [(int(match["count"]), match["name"]) for match in matches]
    for reading in [(1, text), *with_number]:
        if _is_known(reading[1]):
            return reading
    likely = [reading for reading in with_number if reading[0] <= LIKELY_COUNT]
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
    """A node as cluster files write it."""
    devices: list[str] = []
    for cards in node:
        devices += [cards.named.name] * _ranks(cards)
    links = {CATALOGUE[device].link_name for device in devices}
    if len(links) == 1 and not any(cards.slot for cards in node):
        rate = min(CATALOGUE[device].link_bytes_per_s for device in devices)
    else:
        rate = min(_pcie(cards) for cards in node)
    entry: JsonDict = {"name": name}
    if len(set(devices)) == 1:
        entry |= {"device": devices[0], "count": len(devices)}
    else:
        entry["devices"] = devices
    return {**entry, "link": {"bandwidth_gb_per_s": rate / GB, "latency_us": 5, "efficiency": NOMINAL_SHARE}}


def _has_datasheet(name: str) -> bool:
    return not CATALOGUE[name].device.source.startswith(NO_DATASHEET)


def _ranks(cards: _Cards) -> int:
    return cards.number * CATALOGUE[cards.named.name].ranks


def _pcie(cards: _Cards) -> float:
    """Rate between these cards and others over the lanes of their slot."""
    entry = CATALOGUE[cards.named.name]
    generation, lanes = cards.slot or (entry.pcie_generation, entry.pcie_lanes)
    rate = pcie_bytes_per_s(min(generation, entry.pcie_generation), min(lanes, entry.pcie_lanes))
    return rate if entry.peer_to_peer else rate * THROUGH_HOST


def _remarks(every: Iterable[_Cards]) -> Iterable[str]:
    """Sentences about names that fit several cards, and about cards with several devices."""
    for cards in every:
        entry, name = CATALOGUE[cards.named.name], cards.named.name
        # A card that its maker does not sell (no datasheet) is meant by nobody who does not say so.
        others = [other for other in cards.named.others if _has_datasheet(other)]
        if others:
            yield f"taken for {name}, not for {' or '.join(others)}; say which one if it is another"
        if entry.ranks > 1:
            yield f"a card {name} is {entry.ranks} devices, and so {entry.ranks} ranks"
