"""Tokens that a rank trades with all others before attention, where it holds others than it attends to."""

from __future__ import annotations

from dataclasses import dataclass

from ds_hetero.values.placement import Placement


@dataclass(frozen=True)
class MoveTable:
    """Tokens that one rank trades before attention, by rank of the replica; after it they go back.

    It gives the last that it holds, and takes those behind the ones that it keeps.
    """

    gives: tuple[int, ...]  # held for these ranks
    takes: tuple[int, ...]  # attended to, held by these ranks

    def sizes(self, unit: int, *, back: bool = False) -> tuple[list[int], list[int]]:
        """Elements that this rank sends to, and receives from, each rank, with ``unit`` for each token."""
        sent, received = ([tokens * unit for tokens in of_rank] for of_rank in (self.gives, self.takes))
        return (received, sent) if back else (sent, received)


def move_table(placement: Placement, rank: int) -> MoveTable:
    """The part of ``rank`` in the moves of a placement."""
    gives, takes = dict.fromkeys(placement.schedule.ranks, 0), dict.fromkeys(placement.schedule.ranks, 0)
    for move in placement.moves:
        if move.holds == rank:
            gives[move.attends] += move.tokens
        if move.attends == rank:
            takes[move.holds] += move.tokens
    return MoveTable(tuple(gives.values()), tuple(takes.values()))
