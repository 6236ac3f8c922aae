"""Simple placements: every document over all units, every document over one node, and the stream.

The planner is never predicted to be slower than any of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds_hetero.errors import BatchError
from ds_hetero.planner.documents.bins import Bins, Pieces
from ds_hetero.planner.documents.costs import UnitCosts

__all__ = ["everywhere"]


def everywhere(lengths: Sequence[int], costs: UnitCosts) -> list[Pieces]:
    """Every document over all units, in proportion to their speed as far as their memory goes.

    Raises:
        BatchError: the units' memory does not suffice.
    """
    units = range(len(costs.token_s))
    bins = Bins(list(costs.token_s), list(costs.square_s), list(costs.most_tokens))
    placed = []
    for length in lengths:
        pieces = bins.fill(units, length, length)
        if pieces is None:
            raise BatchError(
                f"a document of {length:,} tokens does not fit beside the others: units have room for "
                f"{', '.join(f'{room:,}' for room in bins.room)} tokens."
            )
        placed.append(pieces)
    return placed
