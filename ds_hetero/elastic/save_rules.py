"""Rules by which ranks agree on saves, as pure functions, so that tests can try all orders of events.

choose_slot          the slot that a rank writes to; never that of the committed save
committed_step       the newest step that every rank has written and copied
complete_saves       the saves of which all parts are in memory somewhere
choose_copy_nodes    the nodes that get the copies of each part
slot_bytes           the memory that parts and copies take on every node

Example: two ranks on two nodes, with one copy of each part. Node 1 dies while the save of step 6 is written, and node 0
then has

    slot    part of rank 0    copy of rank 1's part
    A       step 4            step 4
    B       step 6            step 6, incomplete

so the job resumes from step 4.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ds_hetero.elastic.segments import Save

SLOTS = ("A", "B")


class PartCopy(NamedTuple):
    """A segment with a rank's part of a save: the part itself, or a copy on another node."""

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
    """Return the sort key of a slot by its save: a slot without a save comes first, then the older save."""
    return (-1, "") if save is None else (save.step, save.start)


def committed_step(done_by_rank: Iterable[int]) -> int:
    """Return the newest step that every rank has written and copied; -1 if a rank has none.

    Args:
        done_by_rank: each rank's newest step that is written and copied, -1 without one.
    """
    return min(done_by_rank)


def complete_saves(copies_of_parts: Iterable[PartCopy]) -> list[tuple[Save, dict[int, list[tuple[str, str]]]]]:
    """Return the saves of which every rank's part exists, newest first, each with the places of the parts by rank."""
    places_by_save: dict[Save, dict[int, list[tuple[str, str]]]] = {}
    for part_copy in copies_of_parts:
        places_by_rank = places_by_save.setdefault(part_copy.save, {})
        places_by_rank.setdefault(part_copy.rank, []).append(part_copy.place)
    complete = [save for save, places_by_rank in places_by_save.items() if len(places_by_rank) == save.world_size]
    complete.sort(reverse=True)
    return [(save, _sorted_places(places_by_save[save])) for save in complete]


def _sorted_places(places_by_rank: Mapping[int, Sequence[tuple[str, str]]]) -> dict[int, list[tuple[str, str]]]:
    """Sort by rank, and the places of each rank by name, so that every rank tries them in the same order."""
    return {rank: sorted(places) for rank, places in sorted(places_by_rank.items())}


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A rank's part of a save, before it is copied."""

    rank: int
    node: str
    num_bytes: int


def choose_copy_nodes(parts: Sequence[Part], free_bytes: Mapping[str, int], copies: int) -> dict[int, tuple[str, ...]]:
    """Choose the nodes that hold the copies of every part: the nodes with most free memory, except the part's own node.

    The largest part is placed first, and the first name wins a tie, so that all ranks choose the same nodes. With fewer
    other nodes than copies, each of them gets one copy. A copy has two slots, like the part itself.

    Args:
        parts: of all ranks.
        free_bytes: free shared memory by node, once the parts themselves are stored.
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
        places: nodes of the copies of each rank's part, see `choose_copy_nodes`.
    """
    needed = dict.fromkeys((part.node for part in parts), 0)
    for part in parts:
        for node in {part.node, *places[part.rank]}:
            needed[node] += len(SLOTS) * part.num_bytes
    return needed
