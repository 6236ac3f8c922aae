"""Notation of a cluster in one line, such as ``5090,3090x2`` or ``8xH100 | 8xA100``.

    NOTATION  node | node | ...
    node      cards, separated by commas, in the order of the ranks
    cards     4090   2x4090   4090x2   2x4090@4x8

``@`` gives the PCIe slot of these cards, generation x lanes, if it is slower than the card. If all cards of a node have
the same NVLink (or Infinity Fabric), its ranks use that. Otherwise they use PCIe at the rate of the slowest slot; if
one is a GeForce, whose driver has no peer-to-peer, at half of that, through the host's memory.

The line is translated into the content of a cluster file, which can be saved, read and changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from ds_hetero.cluster.catalogue import CATALOGUE, LINK_EFFICIENCY, THROUGH_HOST_SHARE, pcie_bytes_per_s
from ds_hetero.cluster.datasheets import NO_DATASHEET
from ds_hetero.cluster.file_values import read_number, read_whole_number
from ds_hetero.cluster.names import CardMatch, card_named
from ds_hetero.common.reading import MAX_RANKS, JsonDict, shortened
from ds_hetero.common.units import GB
from ds_hetero.errors import ClusterError

NETWORK_LATENCY_US = 10.0  # chosen, never measured; `ds-hetero profile` measures it
MAX_NOTATION = 20_000  # characters; chosen, never measured: nobody types a longer line
LIKELY_COUNT = 128  # largest count beside an unknown name; a larger number is part of the name, as in 7900XTX
# Cards that a machine holds at most: boards for NVSwitch and usual PCIe servers have 8. More cards in one entry are
# several machines; a cluster file describes a larger machine.
MOST_CARDS = 8
_ALONE = ("GB10",)  # cards that are a machine by themselves
_NAME_WITH_COUNT = (
    re.compile(r"(?P<count>\d{1,7})\s*[x*×]\s*(?P<name>.+)", re.IGNORECASE),  # noqa: RUF001 - people type the sign
    re.compile(r"(?P<name>.+?)\s*[x*×]\s*(?P<count>\d{1,7})", re.IGNORECASE),  # noqa: RUF001
)
_SLOT = re.compile(r"(?:pcie\s*)?(?P<generation>[1-6])(?:\.0)?\s*x\s*(?P<lanes>\d{1,2})", re.IGNORECASE)
_RATE = re.compile(r"(?P<value>[\d.]+)\s*(?P<unit>[a-z/]*)", re.IGNORECASE)
# GB/s of one of each unit, in lower case; a number alone is in GB/s.
_GB_PER_S_OF_UNIT = {
    "": 1.0,
    "gb/s": 1.0,
    "gbyte/s": 1.0,
    "gbit/s": 1 / 8,
    "gbit": 1 / 8,
    "gbps": 1 / 8,
    "gbe": 1 / 8,
    "g": 1 / 8,
}


class Notation(NamedTuple):
    """The cluster that a line describes."""

    content: JsonDict  # content of a cluster file
    remarks: tuple[str, ...]  # sentences, without full stop, on choices that the line left open
    assumed: tuple[str, ...] = ()  # what was assumed about machines, in a few words each


class _Cards(NamedTuple):
    """One part of a node: a number of equal cards."""

    num_cards: int
    card: CardMatch
    slot: tuple[int, int] | None  # PCIe generation and lanes of the slot; None: as many as the card has


def read_notation(
    gpus: str, network: str | None = None, nics: int | None = None, *, is_one_machine: bool = False
) -> Notation:
    """Read a line of cards.

    Args:
        network: rate of one NIC, see `network_gb_per_s`; required for several nodes.
        nics: NICs of a node, which its cards share; 1 if left out.
        is_one_machine: whether every entry is known to be one machine, however many cards it has.

    Raises:
        ClusterError: an unknown card, with the three nearest names; a name that fits several cards; a part of the line
            without a card; several nodes without a network, or one node with a network.
    """
    if len(gpus) > MAX_NOTATION:
        raise ClusterError(
            f"--gpus has {len(gpus):,} characters and is longer than {MAX_NOTATION:,}. Write a cluster file instead, "
            "see --cluster."
        )
    entries_of_cards = [_node(i, text) for i, text in enumerate(gpus.split("|"))]
    all_cards = list(chain.from_iterable(entries_of_cards))
    num_ranks = sum(map(_count_ranks, all_cards))
    if num_ranks > MAX_RANKS:
        raise ClusterError(f"--gpus names {num_ranks:,} devices, more than the {MAX_RANKS:,} of the largest cluster.")
    nodes, assumed = (entries_of_cards, ()) if is_one_machine else _machines(entries_of_cards)
    if len(nodes) > 1 and network is None:
        split_text = f" ({'; '.join(assumed)})" if assumed else ""
        raise ClusterError(
            f"--gpus names {len(nodes)} nodes{split_text}. Say what joins them: --network 25 for a port of 25 GB/s "
            "each way, or --network 200Gbit/s; --nics N where a node has N such ports."
        )
    if len(nodes) == 1 and (network, nics) != (None, None):
        option = "--nics" if network is None else "--network"
        raise ClusterError(
            f"{option} joins nodes, and --gpus names one. Separate nodes by a bar: --gpus '5090 | 3090'."
        )
    names = ["node"] if len(nodes) == 1 else [f"node{i}" for i in range(len(nodes))]
    entries = [_entry(name, node) for name, node in zip(names, nodes, strict=True)]
    content: JsonDict = {"description": f"made from --gpus {gpus!r}", "nodes": entries}
    remarks = list(_remarks_on_cards(all_cards))
    if network is not None:
        gb_per_s = network_gb_per_s("--network", network)
        content["network"] = {
            "bandwidth_gb_per_s": gb_per_s,
            "latency_us": NETWORK_LATENCY_US,
            "nics": read_whole_number("--nics", 1 if nics is None else nics),
            "efficiency": LINK_EFFICIENCY,
        }
        remarks += _remarks_on_network(network, gb_per_s)
    return Notation(content, tuple(dict.fromkeys(remarks)), assumed)


def network_gb_per_s(where: str, text: str) -> float:
    """Read the rate of a link in GB/s: ``25``, ``25GB/s`` and ``200Gbit/s`` are the same. Raises `ClusterError`."""
    match = _RATE.fullmatch(text.strip())
    gb_per_s_of_unit = _GB_PER_S_OF_UNIT.get(match["unit"].lower()) if match else None
    try:
        value = float(match["value"]) if match else None
    except ValueError:  # the pattern lets 1.2.3 through
        value = None
    if gb_per_s_of_unit is None or value is None:
        raise ClusterError(
            f"{where} must be a number of GB/s, such as 25 or 25GB/s, or of Gbit/s, such as 200Gbit/s; got "
            f"{shortened(text)}."
        )
    return read_number(where, value * gb_per_s_of_unit)


def _node(index: int, text: str) -> list[_Cards]:
    """Read the cards of one node: ``5090,3090x2``. Raises `ClusterError`: a part is empty or cannot be read."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ClusterError(
            f"--gpus: node {index} has an empty place in {shortened(text)}. Write its cards with commas between them, "
            "such as 5090,3090x2."
        )
    return [_cards(part) for part in parts]


def _machines(entries: Sequence[list[_Cards]]) -> tuple[list[list[_Cards]], tuple[str, ...]]:
    """Return the cards of every machine, and a sentence for each entry that was taken for several machines.

    An entry is divided if one machine cannot hold all its cards, see `MOST_CARDS`.
    """
    machines: list[list[_Cards]] = []
    assumed: list[str] = []
    for entry in entries:
        most = 1 if all(cards.card.name in _ALONE for cards in entry) else MOST_CARDS
        num_cards = sum(cards.num_cards for cards in entry)
        if num_cards <= most:
            machines.append(entry)
            continue
        parts = list(_parts(entry, most))
        machines += parts
        assumed.append(f"{num_cards} cards of one entry are {len(parts)} machines of at most {most}")
    return machines, tuple(assumed)


def _parts(entry: Sequence[_Cards], most: int) -> Iterator[list[_Cards]]:
    """Divide the cards of an entry, in order, over machines of ``most`` cards; yield the cards of every machine."""
    part: list[_Cards] = []
    room = most
    for cards in entry:
        left = cards.num_cards
        while left:
            taken = min(left, room)
            part.append(cards._replace(num_cards=taken))
            left, room = left - taken, room - taken
            if not room:
                yield part
                part, room = [], most
    if part:
        yield part


def _cards(text: str) -> _Cards:
    """Read one part, such as ``3090x2@4x8``. Raises `ClusterError`: its card, count or slot cannot be read."""
    body, at, slot = text.partition("@")
    count, name = _count_and_name(body.strip())
    card = card_named(name)
    if not count:
        raise ClusterError(f"--gpus: {shortened(text)} asks for 0 cards. Give 1 or more, or leave it out.")
    return _Cards(count, card, _slot(slot) if at else None)


def _count_and_name(text: str) -> tuple[int, str]:
    """Separate the count from the name, before or after which it stands.

    ``7900x2`` could be a card named so, 2 cards 7900, or 7900 cards 2. The first of these readings whose name is in the
    catalogue counts. If there is none, the reading with the smallest likely count does, so that the error message shows
    the name without the count.
    """
    matches = [pattern.fullmatch(text) for pattern in _NAME_WITH_COUNT]
    with_count = [(int(match["count"]), match["name"]) for match in matches if match]
    for count, name in [(1, text), *with_count]:
        if _is_known(name):
            return count, name
    likely_readings = [(count, name) for count, name in with_count if count <= LIKELY_COUNT]
    return min(likely_readings, default=(1, text))


def _is_known(name: str) -> bool:
    """Return True if the catalogue has a card for a name."""
    try:
        card_named(name)
    except ClusterError:
        return False
    return True


def _slot(text: str) -> tuple[int, int]:
    """Read a PCIe slot, ``4x8``, as generation and lanes. Raises `ClusterError`: it is not of this form."""
    match = _SLOT.fullmatch(text.strip())
    lanes = int(match["lanes"]) if match else 0
    if match is None or lanes not in (1, 2, 4, 8, 16):
        raise ClusterError(
            f"--gpus: the slot behind @ is PCIe generation x lanes, such as 4x8 or 3x16; got {shortened(text)}."
        )
    return int(match["generation"]), lanes


def _entry(name: str, node: Sequence[_Cards]) -> JsonDict:
    """Return the entry of a node in a cluster file."""
    devices: list[str] = []
    for cards in node:
        devices += [cards.card.name] * _count_ranks(cards)
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
    # 5 us is the default latency of cluster files, see `ds_hetero.cluster.file_links.DEFAULT_LATENCY_S`.
    entry["link"] = {"bandwidth_gb_per_s": bytes_per_s / GB, "latency_us": 5, "efficiency": LINK_EFFICIENCY}
    return entry


def _remarks_on_network(text: str, gb_per_s: float) -> Iterable[str]:
    """Yield a sentence about a rate without a unit, which people mean in Gbit/s as often as in GB/s.

    Args:
        text: value of ``--network``.
        gb_per_s: the rate that was read from it.
    """
    number = text.strip()
    has_unit = number[-1].isalpha()
    if not has_unit:
        yield (
            f"--network {number} is {number} GB/s, {8 * gb_per_s:g} Gbit/s; for {number} Gbit Ethernet write "
            f"{number}GbE"
        )


def _has_datasheet(name: str) -> bool:
    """Return True if the catalogue's numbers of a card are from a datasheet, and not assumed."""
    return not CATALOGUE[name].device.source.startswith(NO_DATASHEET)


def _count_ranks(cards: _Cards) -> int:
    """Count the ranks on these cards: one per device; some cards have several devices."""
    return cards.num_cards * CATALOGUE[cards.card.name].ranks


def _pcie_bytes_per_s(cards: _Cards) -> float:
    """Return the rate over PCIe between these cards and others, of the slot or of the card, whichever is slower."""
    entry = CATALOGUE[cards.card.name]
    generation, lanes = cards.slot or (entry.pcie_generation, entry.pcie_lanes)
    rate = pcie_bytes_per_s(min(generation, entry.pcie_generation), min(lanes, entry.pcie_lanes))
    return rate if entry.peer_to_peer else rate * THROUGH_HOST_SHARE


def _remarks_on_cards(all_cards: Iterable[_Cards]) -> Iterable[str]:
    """Yield sentences about names that fit several cards, and about cards with several devices."""
    for cards in all_cards:
        name = cards.card.name
        entry = CATALOGUE[name]
        # Cards without a datasheet are sold by third parties; their owners give the full name, so they are not offered.
        alternatives = [other for other in cards.card.alternatives if _has_datasheet(other)]
        if alternatives:
            yield f"taken for {name}, not for {' or '.join(alternatives)}; say which one if it is another"
        if entry.ranks > 1:
            yield f"a card {name} is {entry.ranks} devices, and so {entry.ranks} ranks"
