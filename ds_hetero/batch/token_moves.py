"""Tokens that ranks exchange before and after attention, if a rank attends to other tokens than it holds elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

from ds_hetero.values.placement import Placement


@dataclass(frozen=True)
class MoveTable:
    """Numbers of tokens that one rank sends and receives before attention; after attention they go back.

    It sends the last of its tokens, and appends the received ones to those that it keeps.
    """

    gives: tuple[int, ...]  # sent to each rank of the replica
    takes: tuple[int, ...]  # received from each rank of the replica

    def sizes(self, unit: int, *, back: bool = False) -> tuple[list[int], list[int]]:
        """Return the elements that this rank sends to, and receives from, each rank; ``unit`` elements a token.

        Args:
            back: for the way back, after attention.
        """
        sent = [tokens * unit for tokens in self.gives]
        received = [tokens * unit for tokens in self.takes]
        return (received, sent) if back else (sent, received)


def move_table(placement: Placement, rank: int) -> MoveTable:
    """Return the moves of a placement in which ``rank`` takes part."""
    gives = dict.fromkeys(placement.schedule.ranks, 0)
    takes = dict.fromkeys(placement.schedule.ranks, 0)
    for move in placement.moves:
        if move.holds == rank:
            gives[move.attends] += move.tokens
        if move.attends == rank:
            takes[move.holds] += move.tokens
    return MoveTable(tuple(gives.values()), tuple(takes.values()))
