"""Search a placement of documents: choose among a few candidates by their predicted time.

The candidates differ in how much more than the ideal time a unit or a node may take before a document is cut. Over slow
links it is better to let nodes end at different times than to cut documents over them; over fast links it is better to
cut.
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
    place_whole,
    split_evenly_at_least_s,
    split_evenly_over_all,
)
from ds_hetero.planner.document_search.two_level import GOOD_ENOUGH, Effort, node_bins, two_level
from ds_hetero.planner.document_search.unit_costs import Pieces, UnitCosts

# From tight budgets to wide ones. Chosen, never measured alone; `python -m benchmarks.documents plan` says how far
# the best of them is from the ideal.
EFFORTS = (  # (slack of a unit's budget, slack of a node's budget)
    Effort(0.0, 0.0),
    Effort(0.02, 0.02),
    Effort(0.0, 0.06),
    Effort(0.06, 0.06, widen=2),
    Effort(0.02, 0.15),
    Effort(0.02, 0.4),
    Effort(0.02, 0.9),
    Effort(0.08, 3.0),
)
# Ratio of the slowest unit's computing to the ideal time up to which a placement counts as balanced. Chosen, never
# measured.
BALANCED = 1.04
# Limit on (units + documents) times candidates, and on units times documents of a placement that cuts all of them.
# Chosen so that planning takes milliseconds: 1,000 documents take 4.0 to 5.4 ms on 64 ranks and 28 to 45 ms on 1,024
# (`python -m benchmarks.documents plan`).
MAX_WORK = 3072


@dataclass(frozen=True, slots=True)
class PlacedLengths:
    """A placement of the documents of a batch row, and its loads."""

    pieces: list[Pieces]  # units of every document, with their tokens
    padding: list[int]  # tokens outside every document, by unit
    loads: Loads  # loads of the units, padding included

    @property
    def predicted_s(self) -> float:
        """Predicted time of a layer."""
        return self.loads.predicted_s

    @property
    def num_fragments(self) -> int:
        """Number of fragments of all documents that are cut."""
        return sum(len(ring) for ring in self.pieces if len(ring) > 1)


def place_lengths(
    lengths: Sequence[int], costs: UnitCosts, *, padding: int = 0, min_cut_tokens: int = 2 * LEAST_FRAGMENT_TOKENS
) -> PlacedLengths:
    """Choose the placement of documents of these lengths.

    Candidates of the two-level partitioner are made until one is within 2 % of the ideal time (`GOOD_ENOUGH`). Simple
    placements that are predicted to be faster than all of them join them. Of those within 2 % of the fastest, a
    balanced one is preferred (see `BALANCED`), then the one with the fewest fragments, then the fastest. Fragments are
    avoided because the units of a document that is cut wait for each other if one of them is slower than predicted.

    Args:
        padding: tokens of the row outside every document.
        min_cut_tokens: shorter documents are not cut.

    Raises:
        BatchError: the units have too little memory.
    """
    if not lengths:
        return with_padding([], [], costs, padding)
    bound_s = ideal_s(lengths, costs, padding)
    candidates: list[PlacedLengths] = []
    for pieces in _candidates(lengths, costs, bound_s, max(min_cut_tokens // 2, 1)):
        candidate = with_padding(lengths, pieces, costs, padding)
        candidates.append(candidate)
        if candidate.predicted_s <= GOOD_ENOUGH * bound_s:
            break
    if not candidates:
        candidates.append(with_padding(lengths, _where_memory_allows(lengths, costs), costs, padding))
    fastest_s = min(candidate.predicted_s for candidate in candidates)
    baselines = [
        with_padding(lengths, pieces, costs, padding) for pieces in _faster_baselines(lengths, costs, fastest_s)
    ]
    limit_s = min([GOOD_ENOUGH * fastest_s, *(baseline.predicted_s for baseline in baselines)])
    near_best = [candidate for candidate in (*candidates, *baselines) if candidate.predicted_s <= limit_s]

    def preference(candidate: PlacedLengths) -> tuple[bool, int, float]:
        """Sort key: the smallest is preferred."""
        is_unbalanced = candidate.loads.compute_s > BALANCED * bound_s
        return is_unbalanced, candidate.num_fragments, candidate.predicted_s

    return min(near_best, key=preference)


def place_everywhere(lengths: Sequence[int], costs: UnitCosts, length: int) -> PlacedLengths:
    """Return the placement in which every document is cut over all units, in a row of ``length`` tokens."""
    return with_padding(lengths, over_all_units(lengths, costs), costs, length - sum(lengths))


def _candidates(lengths: Sequence[int], costs: UnitCosts, bound_s: float, least_tokens: int) -> Iterator[list[Pieces]]:
    """Yield placements of the two-level partitioner, in the order of `EFFORTS`; efforts that do not fit are left out.

    Args:
        bound_s: ideal time.
        least_tokens: fragments are at least this long where possible.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)  # stable: ties by index
    num_candidates = max(1, MAX_WORK // (len(lengths) + len(costs.token_s)))
    for effort in EFFORTS[:num_candidates]:
        if effort.node_slack > effort.unit_slack and costs.num_nodes == 1:
            continue
        pieces = two_level(lengths, order, costs, bound_s, effort, least_tokens)
        if pieces is not None:
            yield pieces


def _faster_baselines(lengths: Sequence[int], costs: UnitCosts, limit_s: float) -> Iterator[list[Pieces]]:
    """Yield the simple placements that are predicted to take less than ``limit_s``."""
    if over_all_units_s(lengths, costs) < limit_s:
        yield over_all_units(lengths, costs)
    if costs.num_nodes > 1 and over_one_node_at_least_s(lengths, costs) < limit_s:
        predicted_s, by_node = over_one_node_s(lengths, node_bins(costs), costs)
        if predicted_s < limit_s:
            yield over_one_node(lengths, by_node, costs)
    uncut_s, uncut_pieces = place_whole(lengths, costs)
    if uncut_s < limit_s:
        yield uncut_pieces
    if split_evenly_at_least_s(lengths, costs) < limit_s and len(lengths) * len(costs.token_s) <= MAX_WORK:
        even_pieces = split_evenly_over_all(lengths, costs)
        loads = loads_of(lengths, even_pieces, costs)
        if loads.fits(costs) and loads.predicted_s < limit_s:
            yield even_pieces


def _where_memory_allows(lengths: Sequence[int], costs: UnitCosts) -> list[Pieces]:
    """Cut every document over all units with free memory; used if no other placement fits.

    Raises:
        BatchError: a document does not fit even over all units with free memory.
    """
    bins = Bins(list(costs.token_s), list(costs.square_s), list(costs.most_tokens))
    pieces_by_document = []
    for length in lengths:
        pieces = bins.fill(range(len(costs.token_s)), length, length)
        if pieces is None:
            raise BatchError(
                f"a document of {length:,} tokens does not fit next to the others: the groups of ranks have room for "
                f"{', '.join(f'{room:,}' for room in bins.room)} more tokens. Use shorter rows, more ranks, or "
                "activation checkpointing."
            )
        pieces_by_document.append(pieces)
    return pieces_by_document


def with_padding(lengths: Sequence[int], pieces: list[Pieces], costs: UnitCosts, padding: int) -> PlacedLengths:
    """Make a placement from the pieces of documents, with ``padding`` tokens on the units that would end first.

    Args:
        pieces: units of every document with their tokens.
    """
    loads = loads_of(lengths, pieces, costs)
    padding_by_unit = [0] * len(costs.token_s)
    if padding:
        room = [limit - tokens for limit, tokens in zip(costs.most_tokens, loads.tokens, strict=True)]
        shares = water_fill(loads.units_s, costs.token_s, room, padding)
        assert shares is not None, (padding, room)  # the row fits into all units together
        padding_by_unit = shares
        loads = loads.with_padding(padding_by_unit, costs)
    return PlacedLengths(pieces, padding_by_unit, loads)
