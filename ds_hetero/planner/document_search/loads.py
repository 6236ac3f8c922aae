"""Predicted time of one block for a batch whose documents are placed.

    predicted = max over units of (outside attention + max(attention + fragments, received))

All units wait where tokens move before attention and after it, and the maxima of both are added.

No barrier separates attention from the rest, so it is sums that units have to balance; what a unit receives hides under
all of its attention. A unit of a ring receives the keys and values of every token of a document that it does not hold,
and a node those that none of its units holds, as fast as the link of its busiest unit allows. A document that is cut
costs each of its units the tiles that its last query rows do not fill.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import mul

from ds_hetero.planner.document_search.crossing import crossing_of, in_order
from ds_hetero.planner.document_search.unit_costs import Pieces, UnitCosts


@dataclass(frozen=True, slots=True)
class Loads:
    """Loads of units and nodes in one block."""

    tokens: tuple[int, ...]  # of every unit
    linear_s: tuple[float, ...]  # outside attention, of every unit
    attention_s: tuple[float, ...]  # of every unit
    fragments_s: tuple[float, ...]  # what cutting adds to that
    received_s: tuple[float, ...]  # receiving keys and values and their gradients, of every unit
    exchange_s: float = 0.0  # exchanging heads between nodes, for which all wait
    moved_s: float | None = None  # moving tokens before and after attention, for which all wait; None where none move

    @property
    def compute_s(self) -> float:
        """Time of the unit that computes the longest, whatever its documents are cut into."""
        if self.moved_s is not None:
            return max(self.linear_s) + max(self.attention_s)
        return max(map(sum, zip(self.linear_s, self.attention_s, strict=True)))

    @property
    def predicted_s(self) -> float:
        """Time of the block."""
        if self.moved_s is not None:
            inside_s = (s - linear_s for s, linear_s in zip(self.units_s, self.linear_s, strict=True))
            return self.exchange_s + self.moved_s + max(self.linear_s) + max(inside_s)
        return self.exchange_s + max(self.units_s)

    @property
    def units_s(self) -> list[float]:
        """Time of every unit."""
        units = zip(self.linear_s, self.attention_s, self.fragments_s, self.received_s, strict=True)
        return [linear + max(attention + fragments, received) for linear, attention, fragments, received in units]

    def fits(self, costs: UnitCosts) -> bool:
        """Whether every unit has memory for its tokens."""
        return all(held <= most for held, most in zip(self.tokens, costs.most_tokens, strict=True))

    def with_padding(self, tokens: Sequence[int], costs: UnitCosts) -> Loads:
        """The loads if every unit has so many more tokens, which no attention looks at."""
        held = tuple(a + b for a, b in zip(self.tokens, tokens, strict=True))
        linear_s = tuple(count * s for count, s in zip(held, costs.token_s, strict=True))
        return replace(self, tokens=held, linear_s=linear_s)


def ideal_s(lengths: Sequence[int], costs: UnitCosts, padding: int = 0) -> float:
    """The least time in which the units do all work, divisible at will over units that are always busy, links free.

    With a_d and b_d the times that unit d alone needs outside attention and in it, the linear program
    min T,  sum x = sum y = 1,  x_d a_d + y_d b_d <= T  has the dual  max over r of (1 + r) / sum_d max(1/a_d, r/b_d),
    which peaks where r is the ratio b_d / a_d of some unit. With equal ratios this is work over the sum of speeds.
    """
    tokens, squares = sum(lengths) + padding, sum(map(mul, lengths, lengths))
    outside, within = 0.0, 0.0  # sums of 1 / a over units of a ratio of r or more, of 1 / b over the others
    by_ratio = []
    for token_s, square_s, most in zip(costs.token_s, costs.square_s, costs.most_tokens, strict=True):
        if most:
            alone_s, attention_s = tokens * token_s, squares * square_s
            by_ratio.append((attention_s / alone_s, 1 / alone_s, 1 / attention_s))
            outside += 1 / alone_s
    best_s = 0.0
    for ratio, speed, attention_speed in sorted(by_ratio):
        best_s = max(best_s, (1 + ratio) / (outside + ratio * within))
        outside -= speed
        within += attention_speed
    return best_s


def loads_of(lengths: Sequence[int], pieces: Iterable[Pieces], costs: UnitCosts) -> Loads:
    """The loads of a placement: ``pieces[j]`` are the units of document j with their tokens."""
    units, node_of = len(costs.token_s), costs.node
    tokens, token_squares, cut_lengths, received = [0] * units, [0] * units, [0] * units, [0] * units
    crossed, entering = [0] * costs.num_nodes, [0.0] * units
    for length, ring in zip(lengths, pieces, strict=True):
        if len(ring) == 1:
            unit = ring[0][0]
            tokens[unit] += length
            token_squares[unit] += length * length
            continue
        of_node: dict[int, int] = {}
        for unit, count in ring:
            tokens[unit] += count
            token_squares[unit] += count * length
            cut_lengths[unit] += length
            received[unit] += length - count
            of_node[node_of[unit]] = of_node.get(node_of[unit], 0) + count
        if len(of_node) > 1:
            for node, count in of_node.items():
                crossed[node] += length - count
            for unit, entered in crossing_of(in_order(ring, costs), costs).entering.items():
                entering[unit] += entered
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
    """Seconds, by node, until KV of other nodes arrives: ``crossed`` tokens [node], ``entering`` [unit] thereof."""
    times = [tokens * s for tokens, s in zip(crossed, costs.cross_s, strict=True)]
    if costs.link_s:
        for tokens, node in zip(entering, costs.node, strict=True):
            times[node] = max(times[node], tokens * costs.link_s[node])
    return times
