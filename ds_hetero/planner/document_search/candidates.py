"""The search for a placement: from lengths and costs to units and tokens of every document.

A few candidates are judged by their predicted time. They differ in how much more than the ideal time a unit or a node
may take before a document is cut: slow networks get unequal nodes rather than crossings, fast ones the reverse.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ds_hetero.errors import BatchError
from ds_hetero.planner.document_search.bins import LEAST_FRAGMENT_TOKENS, Bins, water_fill
from ds_hetero.planner.document_search.loads import Loads, ideal_s, loads_of
from ds_hetero.planner.document_search.simple_placements import (
    over_all_units,
    over_all_units_s,
    over_one_node,
    over_one_node_at_least_s,
    over_one_node_s,
    split_evenly_at_least_s,
    split_evenly_over_all,
    whole,
)
from ds_hetero.planner.document_search.two_level import GOOD, Effort, node_bins, two_level
from ds_hetero.planner.document_search.unit_costs import Pieces, UnitCosts

# From tight budgets to wide ones. Chosen, never measured alone; `python -m benchmarks.documents plan` says how far
# the best of them is from the ideal.
EFFORTS = (
    Effort(0.0, 0.0),
    Effort(0.02, 0.02),
    Effort(0.0, 0.06),
    Effort(0.06, 0.06, widen=2),
    Effort(0.02, 0.15),
    Effort(0.02, 0.4),
    Effort(0.02, 0.9),
    Effort(0.08, 3.0),
)
# Computing of the slowest unit over the ideal time, within which no further candidate is made. Chosen, never measured.
BALANCED = 1.04
# Units and documents, times candidates. Chosen so that planning takes milliseconds: 1,000 documents take 4.0 to 5.4
# ms on 64 ranks and 28 to 45 ms on 1,024 (`python -m benchmarks.documents plan`).
MOST_WORK = 3072


@dataclass(frozen=True, slots=True)
class PlacedLengths:
    """Where the documents of a batch row go."""

    pieces: list[Pieces]  # units of every document, with their tokens
    padding: list[int]  # tokens outside every document that every unit takes
    loads: Loads  # what units and nodes do, padding included

    @property
    def predicted_s(self) -> float:
        """Time of the block."""
        return self.loads.predicted_s

    @property
    def members(self) -> int:
        """Units of documents that are cut, in all."""
        return sum(len(ring) for ring in self.pieces if len(ring) > 1)


def place_lengths(
    lengths: Sequence[int], costs: UnitCosts, *, padding: int = 0, min_cut_tokens: int = 2 * LEAST_FRAGMENT_TOKENS
) -> PlacedLengths:
    """Place documents of these lengths, wherever they lie in a row. Raises `BatchError`: too little memory.

    Among candidates within 2 % of the fastest, those that balance computing within 4 % if there are any, the one with
    the fewest fragments wins, and of several the fastest: every cut makes its units wait for one another where one is
    slower than planned.

    Args:
        min_cut_tokens: shorter documents are not cut.
    """
    if not lengths:
        return with_padding([], [], costs, padding)
    bound_s = ideal_s(lengths, costs, padding)
    placed: list[PlacedLengths] = []
    for pieces in _candidates(lengths, costs, bound_s, max(min_cut_tokens // 2, 1)):
        placed.append(with_padding(lengths, pieces, costs, padding))
        if placed[-1].predicted_s <= GOOD * bound_s:
            break
    if not placed:
        placed.append(with_padding(lengths, _where_memory_is(lengths, costs), costs, padding))
    fastest_s = min(each.predicted_s for each in placed)
    baselines = [
        with_padding(lengths, pieces, costs, padding) for pieces in _faster_baselines(lengths, costs, fastest_s)
    ]
    limit_s = min([GOOD * fastest_s, *(each.predicted_s for each in baselines)])
    close = (each for each in (*placed, *baselines) if each.predicted_s <= limit_s)
    return min(close, key=lambda each: (each.loads.compute_s > BALANCED * bound_s, each.members, each.predicted_s))


def place_everywhere(lengths: Sequence[int], costs: UnitCosts, length: int) -> PlacedLengths:
    """Every document over all units, in a row of ``length`` tokens."""
    return with_padding(lengths, over_all_units(lengths, costs), costs, length - sum(lengths))


def _candidates(lengths: Sequence[int], costs: UnitCosts, bound_s: float, least_tokens: int) -> Iterator[list[Pieces]]:
    """Placements of the two-level partitioner, those of least effort first."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)  # stable: ties by index
    most = max(1, MOST_WORK // (len(lengths) + len(costs.token_s)))
    for effort in EFFORTS[:most]:
        if effort.node_slack > effort.unit_slack and costs.num_nodes == 1:
            continue
        pieces = two_level(lengths, order, costs, bound_s, effort, least_tokens)
        if pieces is not None:
            yield pieces


def _faster_baselines(lengths: Sequence[int], costs: UnitCosts, limit_s: float) -> Iterator[list[Pieces]]:
    """The simple placements that are predicted to take less than ``limit_s``."""
    if over_all_units_s(lengths, costs) < limit_s:
        yield over_all_units(lengths, costs)
    if costs.num_nodes > 1 and over_one_node_at_least_s(lengths, costs) < limit_s:
        predicted_s, by_node = over_one_node_s(lengths, node_bins(costs), costs)
        if predicted_s < limit_s:
            yield over_one_node(lengths, by_node, costs)
    whole_s, pieces = whole(lengths, costs)
    if whole_s < limit_s:
        yield pieces
    if split_evenly_at_least_s(lengths, costs) < limit_s and len(lengths) * len(costs.token_s) <= MOST_WORK:
        pieces = split_evenly_over_all(lengths, costs)
        loads = loads_of(lengths, pieces, costs)
        if loads.fits(costs) and loads.predicted_s < limit_s:
            yield pieces


def _where_memory_is(lengths: Sequence[int], costs: UnitCosts) -> list[Pieces]:
    """Every document over all units that have room for some of it: what remains if nothing else fits."""
    bins = Bins(list(costs.token_s), list(costs.square_s), list(costs.most_tokens))
    placed = []
    for length in lengths:
        pieces = bins.fill(range(len(costs.token_s)), length, length)
        if pieces is None:
            raise BatchError(
                f"a document of {length:,} tokens does not fit beside the others: units have room for "
                f"{', '.join(f'{room:,}' for room in bins.room)} tokens. Use shorter rows, more ranks, or "
                "activation checkpointing."
            )
        placed.append(pieces)
    return placed


def with_padding(lengths: Sequence[int], pieces: list[Pieces], costs: UnitCosts, padding: int) -> PlacedLengths:
    """A placement of documents in ``pieces`` with ``padding`` tokens on the units that would end first."""
    loads = loads_of(lengths, pieces, costs)
    shares = [0] * len(costs.token_s)
    if padding:
        room = [most - held for most, held in zip(costs.most_tokens, loads.tokens, strict=True)]
        filled = water_fill(loads.units_s, costs.token_s, room, padding)
        assert filled is not None, (padding, room)  # the row fits into all units together
        shares = filled
        loads = loads.with_padding(shares, costs)
    return PlacedLengths(pieces, shares, loads)
