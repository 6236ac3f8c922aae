"""Numbers of tokens that ranks exchange before and after attention, if some tokens have another rank in attention."""

from __future__ import annotations

from dataclasses import dataclass

from ds_hetero.values.placement import Placement


@dataclass(frozen=True)
class MoveTable:
    """Numbers of tokens that one rank sends and receives before attention; after attention they go back.

    The rank sends the last of its tokens, and appends the received ones to those that it keeps.
    """

    sent: tuple[int, ...]  # tokens sent to each rank of the replica
    received: tuple[int, ...]  # tokens received from each rank of the replica

    def sizes(self, unit: int, *, back: bool = False) -> tuple[list[int], list[int]]:
        """Return the elements that this rank sends to, and receives from, each rank.

        Args:
            unit: elements of one token.
            back: the way back, after attention, on which sent and received tokens swap.
        """
        sent = [tokens * unit for tokens in self.sent]
        received = [tokens * unit for tokens in self.received]
        return (received, sent) if back else (sent, received)


def move_table(placement: Placement, rank: int) -> MoveTable:
    """Count the tokens that ``rank`` sends and receives in the moves of a placement."""
    sent = dict.fromkeys(placement.schedule.ranks, 0)
    received = dict.fromkeys(placement.schedule.ranks, 0)
    for move in placement.moves:
        if move.holder == rank:
            sent[move.attention_rank] += move.tokens
        if move.attention_rank == rank:
            received[move.holder] += move.tokens
    return MoveTable(tuple(sent.values()), tuple(received.values()))
