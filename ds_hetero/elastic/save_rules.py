"""Rules by which ranks agree on saves, as pure functions, so that tests can try all orders of events.

choose_slot     the slot that a rank writes to; never that of the committed save
committed_step  the newest step that every rank has written and copied
whole_saves     the saves of which all parts are in memory somewhere
place_copies    the nodes that get the copies of each part
slot_bytes      the memory that parts and copies take on every node

Example, two ranks with one copy each; rank 1's node dies while step 6 is written:

    node 0    own part of 4 in slot A, of 6 in slot B    copy of rank 1's part of 4 in A, of 6 unfinished in B
    node 1    lost
    resume    step 4: step 6 has a part of rank 0 only
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ds_hetero.elastic.segments import Save

SLOTS = ("A", "B")


class Holding(NamedTuple):
    """One copy of a rank's part of a save."""

    save: Save
    rank: int
    place: tuple[str, str]  # node, and name of the segment there


def choose_slot(slots: Mapping[str, Save | None], committed: Save | None) -> str:
    """Choose the slot to write to: a dirty or empty one first, then the older save, never the committed one.

    Args:
        slots: the save in each slot; None for a slot that is dirty or empty.
        committed: the save that is committed, or that this world resumed from; it has to outlive the next save.
    """
    free = [slot for slot in SLOTS if committed is None or slots.get(slot) != committed]
    return min(free, key=lambda slot: (*_age(slots.get(slot)), slot))


def _age(save: Save | None) -> tuple[int, str]:
    """Sort key of a slot; a slot without a save comes first."""
    return (-1, "") if save is None else (save.step, save.start)


def committed_step(done_by_rank: Iterable[int]) -> int:
    """Return the newest step that every rank has written and copied; -1 if a rank has none."""
    return min(done_by_rank)


def whole_saves(holdings: Iterable[Holding]) -> list[tuple[Save, dict[int, list[tuple[str, str]]]]]:
    """Return the saves of which every part exists, newest first, with the sorted places of each rank's part."""
    places_of: dict[Save, dict[int, list[tuple[str, str]]]] = {}
    for holding in holdings:
        places_by_rank = places_of.setdefault(holding.save, {})
        places_by_rank.setdefault(holding.rank, []).append(holding.place)
    complete = [save for save, places_by_rank in places_of.items() if len(places_by_rank) == save.world_size]
    complete.sort(reverse=True)
    return [(save, _in_order(places_of[save])) for save in complete]


def _in_order(places_by_rank: Mapping[int, Sequence[tuple[str, str]]]) -> dict[int, list[tuple[str, str]]]:
    """Sort by rank, and the places of each rank by name, so that every rank tries them in the same order."""
    return {rank: sorted(places) for rank, places in sorted(places_by_rank.items())}


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A rank's part of a save, before it is copied."""

    rank: int
    node: str
    num_bytes: int


def place_copies(parts: Sequence[Part], free_bytes: Mapping[str, int], copies: int) -> dict[int, tuple[str, ...]]:
    """Choose the nodes that hold the copies of every part: those with most free memory, but never the part's own node.

    The largest part is placed first, and the first name wins a tie, so that all ranks choose the same nodes. With fewer
    other nodes than copies, each of them gets one copy. A copy has two slots, like the part itself.

    Args:
        parts: of all ranks.
        free_bytes: of every node's shared memory, without the bytes of the parts themselves.
        copies: number of copies of each part.

    Returns:
        By rank, the nodes in order of preference.
    """
    remaining = dict(free_bytes)
    nodes_of: dict[int, tuple[str, ...]] = {}
    for part in sorted(parts, key=lambda part: (-part.num_bytes, part.rank)):
        other_nodes = [node for node in remaining if node != part.node]
        other_nodes.sort(key=lambda node: (-remaining[node], node))
        nodes_of[part.rank] = tuple(other_nodes[:copies])
        for node in nodes_of[part.rank]:
            remaining[node] -= len(SLOTS) * part.num_bytes
    return nodes_of


def slot_bytes(parts: Sequence[Part], places: Mapping[int, Sequence[str]]) -> dict[str, int]:
    """Return the bytes that every node needs for its own parts and for copies, two slots of each.

    Args:
        places: nodes of the copies of each rank's part, see `place_copies`.
    """
    needed = dict.fromkeys((part.node for part in parts), 0)
    for part in parts:
        for node in {part.node, *places[part.rank]}:
            needed[node] += len(SLOTS) * part.num_bytes
    return needed
