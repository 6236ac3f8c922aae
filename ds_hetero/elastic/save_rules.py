"""Rules by which ranks agree on saves. They are pure functions, so that a model of them can be tried through.

choose_slot     where a rank writes, so that the committed save is never overwritten
committed_step  what all ranks have, each on its own node and in its copies
whole_saves     of which saves every part is held by a node that is left
place_copies    which nodes hold the copies of a part
slot_bytes      what that takes of every node's memory
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ds_hetero.elastic.segments import Save

SLOTS = ("A", "B")


class Holding(NamedTuple):
    """A part of a save, and who holds it."""

    save: Save
    rank: int
    place: tuple[str, str]  # where it is


def choose_slot(slots: Mapping[str, Save | None], kept: Save | None) -> str:
    """Choose the slot to write to: not that of the save which is to outlive the next one.

    Args:
        slots: the save in each slot; None where it is dirty or empty.
        kept: the save that is committed, or was resumed from.
    """
    free = [slot for slot in SLOTS if kept is None or slots.get(slot) != kept]
    return min(free, key=lambda slot: (slots.get(slot) is not None, _age(slots.get(slot)), slot))


def _age(save: Save | None) -> tuple[int, str]:
    return (-1, "") if save is None else (save.step, save.start)


def committed_step(done_by_rank: Iterable[int]) -> int:
    """The newest step that every rank has written and copied; -1 where some rank has none."""
    return min(done_by_rank)


def whole_saves(holdings: Iterable[Holding]) -> list[tuple[Save, dict[int, list[tuple[str, str]]]]]:
    """List the saves of which all parts are held, newest first, with the places of each rank's part."""
    saves: dict[Save, dict[int, list[tuple[str, str]]]] = {}
    for holding in holdings:
        saves.setdefault(holding.save, {}).setdefault(holding.rank, []).append(holding.place)
    whole = [save for save, parts in saves.items() if len(parts) == save.world_size]
    newest_first = sorted(whole, reverse=True)
    return [(save, _in_order(saves[save])) for save in newest_first]


def _in_order(parts: Mapping[int, Sequence[tuple[str, str]]]) -> dict[int, list[tuple[str, str]]]:
    """Ranks ascending, and the places of each rank's part."""
    return {rank: sorted(places) for rank, places in sorted(parts.items())}


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A rank's part of a save, before it is copied."""

    rank: int
    node: str
    num_bytes: int


def place_copies(parts: Sequence[Part], free_bytes: Mapping[str, int], copies: int) -> dict[int, tuple[str, ...]]:
    """Choose the nodes of the copies of every part: other nodes than its own, those with most free memory first.

    A part has two slots on each node. Parts are placed from the largest on, and ties go to the first name, so that all
    ranks come to the same places. Where there are fewer other nodes than copies, each of them gets one.

    Args:
        parts: of all ranks.
        free_bytes: of every node's shared memory, the originals already taken off.
        copies: of each part.

    Returns:
        By rank, the nodes in order of preference.
    """
    left = dict(free_bytes)
    places: dict[int, tuple[str, ...]] = {}
    for part in sorted(parts, key=lambda part: (-part.num_bytes, part.rank)):
        others = sorted((node for node in left if node != part.node), key=lambda node: (-left[node], node))
        places[part.rank] = tuple(others[:copies])
        for node in places[part.rank]:
            left[node] -= len(SLOTS) * part.num_bytes
    return places


def slot_bytes(parts: Sequence[Part], places: Mapping[int, Sequence[str]]) -> dict[str, int]:
    """Bytes that every node needs for its own parts and the copies that it holds, two slots of each."""
    need = dict.fromkeys((part.node for part in parts), 0)
    for part in parts:
        for node in {part.node, *places[part.rank]}:
            need[node] += len(SLOTS) * part.num_bytes
    return need
