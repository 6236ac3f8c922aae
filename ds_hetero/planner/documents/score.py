"""Predicted time of one block for a batch whose documents are placed.

    predicted = max over units of (outside attention + max(attention, received))

No barrier separates attention from the rest, so it is sums that units have to balance; what a unit receives hides under
all of its attention. A unit of a ring receives the keys and values of every token of a document that it does not hold,
and a node those that none of its units holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_hetero.planner.documents.bins import Pieces
from ds_hetero.planner.documents.costs import UnitCosts

__all__ = ["Loads", "ideal_s", "loads_of"]


@dataclass(frozen=True, slots=True)
class Loads:
    """What units and nodes do in one block.

    Args:
        tokens: of every unit.
        linear_s: outside attention, of every unit.
        attention_s: of every unit.
        received_s: receiving keys and values and their gradients, of every unit.
        received_tokens: tokens whose keys and values reach another unit of their node, in all.
        crossing_tokens: the same from node to node.
    """

    tokens: tuple[int, ...]
    linear_s: tuple[float, ...]
    attention_s: tuple[float, ...]
    received_s: tuple[float, ...]
    received_tokens: int
    crossing_tokens: int

    @property
    def compute_s(self) -> float:
        """Time of the unit that computes the longest."""
        return max(map(sum, zip(self.linear_s, self.attention_s, strict=True)))

    @property
    def predicted_s(self) -> float:
        """Time of the block."""
        units = zip(self.linear_s, self.attention_s, self.received_s, strict=True)
        return max(linear_s + max(attention_s, received_s) for linear_s, attention_s, received_s in units)


def ideal_s(lengths: Sequence[int], costs: UnitCosts) -> float:
    """Work over the sum of speeds: every unit takes the same mix of all documents, and links cost nothing."""
    tokens, squares = sum(lengths), sum(n * n for n in lengths)
    speed = 0.0
    for token_s, square_s, most in zip(costs.token_s, costs.square_s, costs.most_tokens, strict=True):
        if most:
            speed += 1 / (tokens * token_s + squares * square_s)
    return 1 / speed


def loads_of(lengths: Sequence[int], pieces: Sequence[Pieces], costs: UnitCosts) -> Loads:
    """The loads of a placement: ``pieces[j]`` are the units of document j with their tokens."""
    units, nodes = len(costs.token_s), costs.num_nodes
    tokens, token_squares = [0] * units, [0] * units
    inside_s, crossed_s = [0.0] * units, [0.0] * nodes
    received = crossing = 0
    for length, ring in zip(lengths, pieces, strict=True):
        for unit, count in ring:
            tokens[unit] += count
            token_squares[unit] += count * length
        if len(ring) == 1:
            continue
        of_node: dict[int, int] = {}
        for unit, count in ring:
            node = costs.node[unit]
            of_node[node] = of_node.get(node, 0) + count
        for unit, count in ring:
            inside_s[unit] += (length - count) * costs.receive_s[costs.node[unit]]
            received += length - count
        if len(of_node) > 1:
            for node, count in of_node.items():
                crossed_s[node] += (length - count) * costs.cross_s[node]
                crossing += length - count
    return Loads(
        tokens=tuple(tokens),
        linear_s=tuple(count * s for count, s in zip(tokens, costs.token_s, strict=True)),
        attention_s=tuple(square * s for square, s in zip(token_squares, costs.square_s, strict=True)),
        received_s=tuple(max(s, crossed_s[node]) for s, node in zip(inside_s, costs.node, strict=True)),
        received_tokens=received - crossing,
        crossing_tokens=crossing,
    )
