"""One candidate: documents to nodes, then to the units of every node.

Zeppelin's two-level partitioner (EuroSys 2026, section 3.1) in seconds: its zones come out of what fits whole. A
document stays whole on a node if the node ends within the budget, and whole on a unit likewise; what does not fit is
cut over as few nodes, or units, as can hold it.

Simple placements of documents: every one over all units, and every one over the units of one node.

The planner is never predicted to be slower than these two and the stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import fsum
from operator import mul
from typing import NamedTuple

from ds_hetero.planner.document_search.bins import LEAST_FRAGMENT_TOKENS, Bins, DocumentPart, deal, water_fill
from ds_hetero.planner.document_search.unit_costs import Pieces, UnitCosts
from ds_hetero.values.splits import share

MOST_MOVES = 16


MOST_WHOLE = 4  # whole parts of the slowest bin that are tried, longest first


def over_all_units(lengths: Sequence[int], costs: UnitCosts) -> list[Pieces]:
    """Every document over all units in proportion to their speed: context parallelism as usual, but by speed."""
    return [_over(range(len(costs.token_s)), length, costs) for length in lengths]


def over_all_units_s(lengths: Sequence[int], costs: UnitCosts) -> float:
    """Predicted time of `over_all_units`, without its rounding to whole tokens."""
    return _shared_s(range(len(costs.token_s)), lengths, costs, crossing=costs.num_nodes > 1)


def over_all_alike(lengths: Sequence[int], costs: UnitCosts) -> list[Pieces]:
    """Every document over all units in equal parts, the shortest ones whole: the best where receiving decides."""
    count = len(costs.token_s)
    held, placed = [0] * count, list[Pieces]()
    for length in lengths:
        least = min(range(count), key=held.__getitem__)
        is_short = length < count * LEAST_FRAGMENT_TOKENS
        tokens = [length * (unit == least) for unit in range(count)] if is_short else share(length, [1.0] * count)
        held = [before + more for before, more in zip(held, tokens, strict=True)]
        placed.append([(unit, more) for unit, more in enumerate(tokens) if more])
    return placed


def over_all_alike_at_least_s(lengths: Sequence[int], costs: UnitCosts) -> float:
    """A bound below `over_all_alike`: its documents that are cut, links between nodes free, less their rounding."""
    part = 1 / len(costs.token_s)
    cut = [length for length in lengths if length * part >= LEAST_FRAGMENT_TOKENS]
    tokens, squares = sum(cut), sum(map(mul, cut, cut))
    own_squares = squares * part + (costs.fragment_rows * tokens if part < 1 else 0)
    slowest_s: float = max(
        tokens * part * token_s + max(own_squares * square_s, tokens * (1 - part) * costs.receive_s[node])
        for token_s, square_s, node in zip(costs.token_s, costs.square_s, costs.node, strict=True)
    )
    return slowest_s * (1 - 1 / LEAST_FRAGMENT_TOKENS)


def whole(lengths: Sequence[int], costs: UnitCosts) -> tuple[float, list[Pieces]]:
    """Every document on one unit, longest first on the one that ends first with it; infinity where none has room."""
    bins = Bins(list(costs.token_s), list(costs.square_s), list(costs.most_tokens))
    units = _dealt_whole(lengths, bins)
    if units is None:
        return float("inf"), []
    return max(bins.load_s), [[(unit, length)] for unit, length in zip(units, lengths, strict=True)]


def _dealt_whole(lengths: Sequence[int], bins: Bins) -> list[int] | None:
    """The bin of every document, dealt whole, longest first; None where that is not possible."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)  # stable: ties by index
    dealt = deal([DocumentPart(j, lengths[j], lengths[j]) for j in order], bins, float("inf"))
    if dealt is None or any(len(pieces) > 1 for pieces in dealt):
        return None
    bin_of = {j: pieces[0][0] for j, pieces in zip(order, dealt, strict=True)}
    return [bin_of[j] for j in range(len(lengths))]


def over_one_node(lengths: Sequence[int], by_node: Sequence[Sequence[int]], costs: UnitCosts) -> list[Pieces]:
    """Every document, by its length, over all units of its node."""
    placed: list[Pieces] = [[] for _ in lengths]
    for units, documents in zip(costs.units_by_node, by_node, strict=True):
        for j in documents:
            placed[j] = _over(units, lengths[j], costs)
    return placed


def over_one_node_s(lengths: Sequence[int], nodes: Bins, costs: UnitCosts) -> tuple[float, list[list[int]]]:
    """Documents dealt whole to nodes, longest first: the time of `over_one_node` (or infinity), and who holds what.

    Args:
        nodes: empty bins, one per node, with the speed of all its units.
    """
    node_of = _dealt_whole(lengths, nodes)
    if node_of is None:
        return float("inf"), []
    by_node: list[list[int]] = [[] for _ in range(costs.num_nodes)]
    for j, node in enumerate(node_of):
        by_node[node].append(j)
    times = (
        _shared_s(units, [lengths[j] for j in documents], costs, crossing=False)
        for units, documents in zip(costs.units_by_node, by_node, strict=True)
    )
    return max(times), by_node


def over_one_node_at_least_s(lengths: Sequence[int], costs: UnitCosts) -> float:
    """A bound below every `over_one_node_s`: perfect balance, and what cutting every document adds on average."""
    tokens, squares = sum(lengths), sum(map(mul, lengths, lengths))
    speed, added = 0.0, float("inf")
    for units in costs.units_by_node:
        speeds = [1 / (tokens * costs.token_s[unit] + squares * costs.square_s[unit]) for unit in units]
        cut_s = (v * costs.square_s[unit] for v, unit in zip(speeds, units, strict=True))
        added = min(added, costs.fragment_rows * tokens * fsum(cut_s) if len(units) > 1 else 0.0)
        speed += fsum(speeds)
    return (1 + added) / speed


def _shares(units: Sequence[int], costs: UnitCosts) -> list[float]:
    """Share of every unit in a document: in proportion to its speed outside attention, 0 without memory."""
    speeds = [1 / costs.token_s[unit] if costs.most_tokens[unit] else 0.0 for unit in units]
    whole = fsum(speeds)
    return [speed / whole for speed in speeds]


def _over(units: Sequence[int], length: int, costs: UnitCosts) -> Pieces:
    tokens = share(length, _shares(units, costs))
    return [(unit, count) for unit, count in zip(units, tokens, strict=True) if count]


def _shared_s(units: Sequence[int], lengths: Sequence[int], costs: UnitCosts, *, crossing: bool) -> float:
    """Predicted time if ``units`` share all of these documents; infinity where a unit's memory does not suffice."""
    if not any(costs.most_tokens[unit] for unit in units):
        return float("inf") if lengths else 0.0
    tokens, squares = sum(lengths), sum(map(mul, lengths, lengths))
    shares = _shares(units, costs)
    of_node = [0.0] * costs.num_nodes
    for unit, part in zip(units, shares, strict=True):
        of_node[costs.node[unit]] += part
    slowest_s = 0.0
    for unit, part in zip(units, shares, strict=True):
        node = costs.node[unit]
        if part and tokens * part + len(lengths) > costs.most_tokens[unit]:  # every document is rounded by itself
            return float("inf")
        attention_s = (squares * part + (costs.fragment_rows * tokens if 0 < part < 1 else 0)) * costs.square_s[unit]
        received_s = tokens * (1 - part) * costs.receive_s[node] if part else 0.0
        if crossing:
            received_s = max(received_s, tokens * (1 - of_node[node]) * costs.cross_s[node])
        block_s = tokens * part * costs.token_s[unit] + (attention_s if attention_s > received_s else received_s)
        if block_s > slowest_s:
            slowest_s = block_s
    return slowest_s


GOOD = 1.02  # over the ideal time: a placement within it is not made better


class Effort(NamedTuple):
    """How far a candidate goes for balance."""

    unit_slack: float  # share by which the budget of a unit exceeds the ideal time
    node_slack: float  # the same of a node
    widen: int = 1  # rings have so many times the units that they need


def two_level(
    lengths: Sequence[int], order: Sequence[int], costs: UnitCosts, bound_s: float, effort: Effort, least_tokens: int
) -> list[Pieces] | None:
    """Units of every document with their tokens; None if the memory of a node or a unit does not suffice.

    Args:
        order: their indices, longest first.
        effort: how much more than the ideal time a unit and a node may take.
        least_tokens: fragments are this long where possible.
    """
    units = costs.units_by_node
    nodes = node_bins(costs)
    longest_first = [lengths[j] for j in order]
    parts = list(map(DocumentPart, order, longest_first, longest_first))
    if len(units) == 1:
        by_node: list[Pieces] | None = [[(0, tokens)] for tokens in longest_first]
    else:
        fragment = max(least_tokens, min(4 * least_tokens, sum(lengths) // len(units) // 64))
        by_node = deal(parts, nodes, bound_s * (1 + effort.node_slack), fragment)
    if by_node is None:
        return None
    if len(units) > 1:
        # Attention of a node is that of its units together, so what it receives counts per unit.
        rebalance(parts, by_node, nodes, costs.cross_s, bound_s * GOOD)
    inside, across = _parts_by_node(parts, by_node, len(units))
    placed: list[Pieces] = [[] for _ in lengths]
    for node, of_node in enumerate(units):
        bins = Bins(
            token_s=[costs.token_s[unit] for unit in of_node],
            square_s=[costs.square_s[unit] for unit in of_node],
            room=[costs.most_tokens[unit] for unit in of_node],
        )
        budget_s = bound_s * (1 + effort.unit_slack)
        of_parts = _inside(bins, across[node], inside[node], budget_s, least_tokens, effort.widen)
        if of_parts is None:
            return None
        for (document, _, _), pieces in zip((*across[node], *inside[node]), of_parts, strict=True):
            of_document = placed[document]
            for i, tokens in pieces:
                of_document.append((of_node[i], tokens))
    return placed


def _parts_by_node(
    parts: Sequence[DocumentPart], by_node: Sequence[Pieces], num_nodes: int
) -> tuple[list[list[DocumentPart]], list[list[DocumentPart]]]:
    """Documents that lie in one node, and parts of those that lie in several, by node."""
    inside: list[list[DocumentPart]] = [[] for _ in range(num_nodes)]
    across: list[list[DocumentPart]] = [[] for _ in range(num_nodes)]
    for part, pieces in zip(parts, by_node, strict=True):
        if len(pieces) == 1:
            inside[pieces[0][0]].append(part)
        else:
            for node, tokens in pieces:
                across[node].append(DocumentPart(part.document, part.length, tokens))
    return inside, across


def node_bins(costs: UnitCosts) -> Bins:
    """One empty bin per node, with the speed and the room of all its units."""
    units = costs.units_by_node
    return Bins(
        token_s=[_together(costs.token_s, of_node) for of_node in units],
        square_s=[_together(costs.square_s, of_node) for of_node in units],
        room=[sum(costs.most_tokens[unit] for unit in of_node) for of_node in units],
    )


def _inside(
    bins: Bins,
    across: Sequence[DocumentPart],
    inside: Sequence[DocumentPart],
    budget_s: float,
    least_tokens: int,
    widen: int,
) -> list[Pieces] | None:
    """Place what one node holds on its units.

    Shares of documents over several nodes come first and go over all units, so that every network interface works.

    Args:
        bins: the units of the node, empty.
        across: shares of documents over several nodes.
        inside: whole documents, longest first.
        budget_s: time that a unit may take; more where the node has more to do.
        least_tokens: fragments are this long where possible.
        widen: rings have so many times the units that they need.
    """
    ring = range(len(bins.token_s))
    placed = []
    for _, length, tokens in across:
        pieces = bins.fill(ring, length, tokens)
        if pieces is None:
            return None
        placed.append(pieces)
    per_token, per_square = 1 / fsum(1 / s for s in bins.token_s), 1 / fsum(1 / s for s in bins.square_s)
    tokens, squares = 0, 0
    for _, length, held in (*across, *inside):
        tokens += held
        squares += held * length
    work_s = tokens * per_token + squares * per_square
    dealt = deal(inside, bins, max(budget_s, work_s), least_tokens, widen)
    return None if dealt is None else placed + dealt


def _together(seconds: Sequence[float], units: Sequence[int]) -> float:
    """Seconds of one unit of work if all units share it by speed."""
    return 1 / fsum(1 / seconds[unit] for unit in units)


class _Times:
    """Time of every bin: outside attention, in it, and receiving, which hides under attention."""

    def __init__(
        self, parts: Sequence[DocumentPart], placed: list[Pieces], bins: Bins, receive_s: Sequence[float]
    ) -> None:
        self.parts, self.placed, self.bins, self.receive_s = parts, placed, bins, receive_s
        self.received_s = [0.0] * len(receive_s)
        for part, pieces in zip(parts, placed, strict=True):
            if len(pieces) > 1:
                self._count(part, pieces, 1)

    def of(self, i: int) -> float:
        """Time of a bin."""
        linear_s = self.bins.tokens[i] * self.bins.token_s[i]
        return linear_s + max(self.bins.load_s[i] - linear_s, self.received_s[i])

    def put(self, index: int, pieces: Pieces, sign: int = 1) -> None:
        """Add pieces of a part to its bins, or take them away."""
        part = self.parts[index]
        for i, tokens in pieces:
            self.bins.put(i, part.length, sign * tokens)
        self._count(part, pieces, sign)

    def _count(self, part: DocumentPart, pieces: Pieces, sign: int) -> None:
        if len(pieces) > 1:
            for i, tokens in pieces:
                self.received_s[i] += sign * (part.length - tokens) * self.receive_s[i]


def rebalance(
    parts: Sequence[DocumentPart], placed: list[Pieces], bins: Bins, receive_s: Sequence[float], good_s: float
) -> None:
    """Change the pieces of parts on the slowest bin while all bins that a change concerns become faster than it was.

    A part may leave the slowest bin, gain the fastest bin, or both.

    Args:
        placed: bins of every part with their tokens; changed in place.
        bins: hold the parts; changed in place.
        receive_s: seconds per token that a bin receives, ``[bin]``.
        good_s: no bin has to be faster than this.
    """
    times = _Times(parts, placed, bins, receive_s)
    for _ in range(MOST_MOVES):
        by_time = sorted((times.of(i), i) for i in range(len(receive_s)))
        slowest_s, slowest = by_time[-1]
        if slowest_s <= good_s:
            return
        best_s, best = slowest_s, None
        for index in _parts_on(placed, slowest):
            before = placed[index]
            times.put(index, before, -1)
            for ring in _other_rings(before, slowest, [i for _, i in by_time]):
                pieces = _shared(times, index, ring)
                if pieces is None:
                    continue
                times.put(index, pieces)
                now_s = max(times.of(i) for i in {*ring, slowest, *(i for i, _ in before)})
                times.put(index, pieces, -1)
                if now_s < best_s:
                    best_s, best = now_s, (index, pieces)
            times.put(index, before)
        if best is None:
            return
        index, pieces = best
        times.put(index, placed[index], -1)
        times.put(index, pieces)
        placed[index] = pieces


def _parts_on(placed: Sequence[Pieces], i: int) -> list[int]:
    """Parts that are cut and have a piece on a bin, and the longest whole ones."""
    cut: list[int] = []
    whole: list[int] = []
    for index, pieces in enumerate(placed):
        if len(pieces) > 1:
            if any(held == i for held, _ in pieces):
                cut.append(index)
        elif pieces[0][0] == i and len(whole) < MOST_WHOLE:
            whole.append(index)
    return cut + whole


def _other_rings(pieces: Pieces, slowest: int, by_time: Sequence[int]) -> Iterator[list[int]]:
    """Bins over which a part on the slowest bin could lie instead."""
    ring = [i for i, _ in pieces]
    fastest = next((i for i in by_time if i not in ring), None)
    without = [i for i in ring if i != slowest]
    if without:
        yield without
    if fastest is not None:
        yield sorted([*ring, fastest])
        yield sorted([*without, fastest])


def _shared(times: _Times, index: int, ring: Sequence[int]) -> Pieces | None:
    """A part shared over bins so that they end together; None without room."""
    part, bins = times.parts[index], times.bins
    per_s = [bins.token_s[i] + part.length * bins.square_s[i] for i in ring]
    shares = water_fill([times.of(i) for i in ring], per_s, [bins.room[i] for i in ring], part.tokens)
    if shares is None:
        return None
    return [(i, tokens) for i, tokens in zip(ring, shares, strict=True) if tokens]
