"""Predict the time of one layer for a placement of documents.

    predicted = max over units of (outside attention + max(attention + fragments, received))

No barrier separates attention from the rest of a layer, so units have to balance the sum of both. If tokens move before
and after attention (`remapping`), all units wait for the moves. Then the slowest time outside attention and the slowest
time in attention are added.

Attention hides receiving. A unit receives the keys and values of all tokens of its documents that it does not have
itself. A node receives those that none of its units has, as fast as the link of its busiest unit allows. A document
that is cut costs each of its units additional attention (fragments), for tiles of query rows that are not filled.

Example: two units take 6 s and 5 s outside attention and 2 s and 5 s in attention, fragments included, and receive for
3 s each. The units end after 6 + 3 = 9 s and 5 + 5 = 10 s, so the layer takes 10 s.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import mul

from ds_hetero.planner.document_search.crossing import crossing_of, in_order
from ds_hetero.planner.document_search.unit_costs import Pieces, UnitCosts


@dataclass(frozen=True, slots=True)
class Loads:
    """Tokens and times of all units in one layer."""

    tokens: tuple[int, ...]  # ``[unit]``
    linear_s: tuple[float, ...]  # outside attention, ``[unit]``
    attention_s: tuple[float, ...]  # attention without fragments, ``[unit]``
    fragments_s: tuple[float, ...]  # additional attention because documents are cut, ``[unit]``
    received_s: tuple[float, ...]  # receiving keys, values and their gradients, ``[unit]``
    exchange_s: float = 0.0  # exchange of heads between nodes, for which all units wait
    moved_s: float | None = None  # moving tokens before and after attention; None if no tokens are moved

    @property
    def compute_s(self) -> float:
        """Time of computing on the slowest unit, without fragments."""
        if self.moved_s is not None:
            return max(self.linear_s) + max(self.attention_s)
        return max(map(sum, zip(self.linear_s, self.attention_s, strict=True)))

    @property
    def predicted_s(self) -> float:
        """Predicted time of the layer."""
        if self.moved_s is not None:
            in_attention_s = (unit_s - linear_s for unit_s, linear_s in zip(self.units_s, self.linear_s, strict=True))
            return self.exchange_s + self.moved_s + max(self.linear_s) + max(in_attention_s)
        return self.exchange_s + max(self.units_s)

    @property
    def units_s(self) -> list[float]:
        """Time of every unit, ``[unit]``."""
        units = zip(self.linear_s, self.attention_s, self.fragments_s, self.received_s, strict=True)
        return [linear + max(attention + fragments, received) for linear, attention, fragments, received in units]

    def fits(self, costs: UnitCosts) -> bool:
        """Whether every unit has memory for its tokens."""
        return all(tokens <= limit for tokens, limit in zip(self.tokens, costs.most_tokens, strict=True))

    def with_padding(self, tokens: Sequence[int], costs: UnitCosts) -> Loads:
        """Return the loads with ``tokens[unit]`` more tokens outside every document, which have no attention."""
        all_tokens = tuple(a + b for a, b in zip(self.tokens, tokens, strict=True))
        linear_s = tuple(count * s for count, s in zip(all_tokens, costs.token_s, strict=True))
        return replace(self, tokens=all_tokens, linear_s=linear_s)


def ideal_s(lengths: Sequence[int], costs: UnitCosts, padding: int = 0) -> float:
    """Return a lower bound of the time of every placement: perfect balance over units, free communication.

    Here the work outside attention and the work in attention can each be divided in any way. Unit d alone would need
    a_d seconds for the first and b_d for the second, and gets the shares x_d and y_d. The linear program

        min T   subject to   sum x = sum y = 1,   x_d a_d + y_d b_d <= T

    has the dual  max over r of (1 + r) / sum_d max(1 / a_d, r / b_d),  whose maximum is at the ratio b_d / a_d of some
    unit. With equal ratios this is the work over the sum of speeds.

    Args:
        padding: tokens of the row outside every document.
    """
    tokens, squares = sum(lengths) + padding, sum(map(mul, lengths, lengths))
    # Sums of 1 / a over units whose ratio is r or larger, and of 1 / b over the other units.
    linear_speed, attention_speed = 0.0, 0.0
    by_ratio = []
    for token_s, square_s, most_tokens in zip(costs.token_s, costs.square_s, costs.most_tokens, strict=True):
        if most_tokens:
            linear_s, attention_s = tokens * token_s, squares * square_s
            by_ratio.append((attention_s / linear_s, 1 / linear_s, 1 / attention_s))
            linear_speed += 1 / linear_s
    bound_s = 0.0
    for ratio, unit_linear_speed, unit_attention_speed in sorted(by_ratio):
        bound_s = max(bound_s, (1 + ratio) / (linear_speed + ratio * attention_speed))
        linear_speed -= unit_linear_speed
        attention_speed += unit_attention_speed
    return bound_s


def loads_of(lengths: Sequence[int], pieces: Iterable[Pieces], costs: UnitCosts) -> Loads:
    """Return the loads of a placement, in which ``pieces[j]`` has the units of document j with their tokens."""
    num_units, node_of = len(costs.token_s), costs.node
    # By unit: its tokens, these times the lengths of their documents, lengths of its cut documents, tokens received.
    tokens, token_squares, cut_lengths, received = ([0] * num_units for _ in range(4))
    crossed = [0] * costs.num_nodes  # tokens that a node receives from other nodes
    entering = [0.0] * num_units  # by unit: tokens that enter its node over the unit's link
    for length, ring in zip(lengths, pieces, strict=True):
        if len(ring) == 1:
            ((unit, _),) = ring
            tokens[unit] += length
            token_squares[unit] += length * length
            continue
        tokens_of_node: dict[int, int] = {}
        for unit, count in ring:
            tokens[unit] += count
            token_squares[unit] += count * length
            cut_lengths[unit] += length
            received[unit] += length - count
            tokens_of_node[node_of[unit]] = tokens_of_node.get(node_of[unit], 0) + count
        if len(tokens_of_node) > 1:
            for node, count in tokens_of_node.items():
                crossed[node] += length - count
            for unit, entering_tokens in crossing_of(in_order(ring, costs), costs).entering.items():
                entering[unit] += entering_tokens
    inside_s = (count * costs.receive_s[node] for count, node in zip(received, node_of, strict=True))
    entered_s = crossing_s(crossed, entering, costs)
    return Loads(
        tokens=tuple(tokens),
        linear_s=tuple(count * s for count, s in zip(tokens, costs.token_s, strict=True)),
        attention_s=tuple(square * s for square, s in zip(token_squares, costs.square_s, strict=True)),
        fragments_s=tuple(costs.fragment_rows * n * s for n, s in zip(cut_lengths, costs.square_s, strict=True)),
        received_s=tuple(max(s, entered_s[node]) for s, node in zip(inside_s, node_of, strict=True)),
    )


def crossing_s(crossed: Sequence[int], entering: Sequence[float], costs: UnitCosts) -> list[float]:
    """Return the seconds until keys and values of other nodes have arrived, by node.

    Args:
        crossed: tokens that a node receives from other nodes, ``[node]``.
        entering: tokens that enter the node over the link of a unit, ``[unit]``.
    """
    arrived_s = [tokens * s for tokens, s in zip(crossed, costs.cross_s, strict=True)]
    if costs.link_s:
        for tokens, node in zip(entering, costs.node, strict=True):
            arrived_s[node] = max(arrived_s[node], tokens * costs.link_s[node])
    return arrived_s
