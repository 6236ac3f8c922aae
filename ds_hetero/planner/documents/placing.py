"""The planner of documents: from the documents of a batch to its placement, on every rank alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf, sqrt

from ds_hetero.common.text import listed
from ds_hetero.errors import BatchError, ScheduleError
from ds_hetero.planner.document_search.bins import LEAST_FRAGMENT_TOKENS
from ds_hetero.planner.document_search.by_heads import WORTH_EXCHANGING, place_by_heads
from ds_hetero.planner.document_search.candidates import place_everywhere, place_lengths, with_padding
from ds_hetero.planner.document_search.crossing import crossing_of, in_order
from ds_hetero.planner.document_search.lanes import make_placement
from ds_hetero.planner.document_search.loads import loads_of
from ds_hetero.planner.document_search.placement_loads import placement_loads, stream_loads
from ds_hetero.planner.document_search.remapping import (
    WORTH_MOVING,
    least_remapped_s,
    place_remapped,
    remapped,
    with_held_tokens,
)
from ds_hetero.planner.document_search.unit_costs import Pieces, UnitCosts
from ds_hetero.planner.published.registry import find_planner
from ds_hetero.values.placement import Placement, Range, RemapWish, Rows, TokenMove, stream_placement
from ds_hetero.values.schedule import Schedule


@dataclass(frozen=True, slots=True)
class DocumentPlacer:
    """Place every batch by its documents.

    Batches whose documents are not known, or whose rows have different ones, are cut by their length alone.

    Args:
        least_gain: share of the time of the stream that must be saved, as predicted, or a batch stays one; such a
            placer refuses no batch. None where documents were asked for: then any gain will do.
    """

    costs: UnitCosts  # of the units of the schedule that batches are placed for
    min_cut_tokens: int = 2 * LEAST_FRAGMENT_TOKENS  # shorter documents are never cut
    planner: str | None = None  # a published planner of documents in our place, which knows no ``min_cut_tokens``
    least_gain: float | None = None
    remap: RemapWish = "where_faster"  # whether tokens move before and after attention, see `place_documents`

    def __call__(self, schedule: Schedule, length: int, rows: tuple[Rows, ...] = ()) -> Placement:
        """Place one batch. Raises `BatchError`: no memory for it. `ScheduleError`: too few tokens."""
        if len(rows) != 1:
            return routed_stream(schedule, length, self.costs).with_rows(rows)
        documents = rows[0].documents
        if self.least_gain is not None:
            placed = self._if_worth_it(schedule, documents, length) if len(documents) > 1 else None
            return (placed or routed_stream(schedule, length, self.costs)).with_rows(rows)
        if self.planner is None:
            return self._placed(schedule, documents, length).with_rows(rows)
        placed = place_by_published(self.planner, schedule, documents, length, self.costs, self.remap)
        return placed.with_rows(rows)

    def _placed(self, schedule: Schedule, documents: Sequence[Range], length: int) -> Placement:
        return place_documents(
            schedule, documents, length, self.costs, min_cut_tokens=self.min_cut_tokens, remap=self.remap
        )

    def _if_worth_it(self, schedule: Schedule, documents: Sequence[Range], length: int) -> Placement | None:
        """The placement by documents; None where it is predicted to save too little, or is not possible."""
        assert self.least_gain is not None
        try:
            placed = self._placed(schedule, documents, length)
            stream = stream_placement(schedule, length)
        except (BatchError, ScheduleError):  # too little memory, as predicted; fewer tokens than ranks
            return None
        if placed.is_stream:
            return None
        placed_s, stream_s = (
            placement_loads(placement, documents, self.costs).predicted_s + self.costs.step_s
            for placement in (placed, stream)
        )
        return placed if placed_s < (1 - self.least_gain) * stream_s else None

    def everywhere(self, schedule: Schedule, length: int, rows: tuple[Rows, ...] = ()) -> Placement:
        """Place one batch row with every document over all units, for a check that is to see each of them cut.

        Where tokens may move, half of every other rank's do.

        Raises:
            BatchError: the documents do not fit into the units' memory, and were asked to be placed.
        """
        (row,) = rows
        if self.least_gain is not None and (len(row.documents) < 2 or length > sum(self.costs.most_tokens)):
            return self(schedule, length, rows)
        check_documents(row.documents, length)
        check_memory(length, self.costs)
        placed = place_everywhere([stop - start for start, stop in row.documents], self.costs, length)
        placement = make_placement(schedule, row.documents, length, placed, self.costs).with_rows(rows)
        if self.remap == "never" or (self.remap == "where_faster" and not self.costs.exchange_per_receive):
            return placement
        pairs = zip(schedule.ranks[::2], schedule.ranks[1::2], strict=False)
        moves = (TokenMove(rank, other, placement.tokens(rank) // 2) for rank, other in pairs)
        return placement.with_moves([move for move in moves if move.tokens])


def least_gain(error: float) -> float:
    """Share of the stream's time that a placement has to save, as predicted, to be taken without being asked for.

    Both times are predicted, and the error of their quotient is that of two independent errors.
    """
    return sqrt(2) * error


def place_documents(
    schedule: Schedule,
    documents: Sequence[Range],
    length: int,
    costs: UnitCosts,
    *,
    min_cut_tokens: int = 2 * LEAST_FRAGMENT_TOKENS,
    remap: RemapWish = "where_faster",
) -> Placement:
    """Place a row's documents on a schedule's units. Raises `BatchError`: they overlap, leave it, or do not fit.

    Unless tokens always move, the result is never predicted to be slower than the stream, than every document over all
    units, and than every document over one node. Positions outside every document are padding: they are placed too, as
    they are computed outside attention.

    Args:
        min_cut_tokens: shorter documents are never cut.
        remap: whether tokens move between attention and linear layers. ``"where_faster"``: where the block is predicted
            to take at most `WORTH_MOVING` of the time, and the costs of moving are known.
    """
    assert len(costs.token_s) == schedule.ring_size, (costs.token_s, schedule.ring_size)
    check_documents(documents, length)
    check_memory(length, costs)
    lengths = [stop - start for start, stop in documents]
    padding = length - sum(lengths)
    best = passed_on = place_lengths(lengths, costs, padding=padding, min_cut_tokens=min_cut_tokens)
    heads: tuple[int, ...] = ()
    if all(len(group.ranks) == 1 for group in schedule.groups):
        by_heads = place_by_heads(lengths, best, costs, schedule.num_heads, padding)
        if by_heads is not None and by_heads.placed.predicted_s < WORTH_EXCHANGING * best.predicted_s:
            best, heads = by_heads
    stream = _stream(schedule, documents, length, costs)
    fastest_s = best.predicted_s if stream is None else min(stream[0], best.predicted_s)
    limit_s = _remap_limit_s(remap, fastest_s, costs)
    if least_remapped_s(lengths, costs, padding) <= limit_s:
        moved = place_remapped(lengths, passed_on, costs, padding=padding, min_cut_tokens=min_cut_tokens)
        if moved.predicted_s <= limit_s:
            placement = make_placement(schedule, documents, length, moved.placed, costs)
            return with_held_tokens(placement, moved.held, costs)
    if stream is not None and stream[0] < best.predicted_s:
        return routed_stream(schedule, length, costs)
    return make_placement(schedule, documents, length, best, costs, heads)


def _remap_limit_s(remap: RemapWish, without_s: float, costs: UnitCosts) -> float:
    """The longest predicted time of a block for which tokens move; below 0 where they never do."""
    if remap == "always":
        return inf
    if remap == "never" or not costs.exchange_per_receive:
        return -inf
    return WORTH_MOVING * (without_s + costs.step_s) - costs.step_s


def expect_places(planner: str, costs: UnitCosts) -> None:
    """Refuse a published planner that cannot place documents on these units. Raises `PlanError`."""
    _published(planner)((len(costs.token_s),), costs)


def place_by_published(
    planner: str,
    schedule: Schedule,
    documents: Sequence[Range],
    length: int,
    costs: UnitCosts,
    remap: RemapWish = "never",
) -> Placement:
    """Place the documents of one batch row as a published planner says; padding goes where time is left.

    Args:
        remap: as in `place_documents`.

    Raises:
        PlanError: the planner of documents is unknown, or its paper cannot describe the units.
        BatchError: see `place_documents`; or the planner overfills a unit.
    """
    check_documents(documents, length)
    check_memory(length, costs)
    lengths = [stop - start for start, stop in documents]
    pieces = _published(planner)(lengths, costs)
    own = loads_of(lengths, pieces, costs).tokens
    for unit, (tokens, most) in enumerate(zip(own, costs.most_tokens, strict=True)):
        if tokens > most:
            raise BatchError(
                f"planner {planner} gives unit {unit} {tokens:,} tokens of a batch row, its memory has room for "
                f"{most:,}. Use shorter rows, or leave the planner out."
            )
    placed = with_padding(lengths, pieces, costs, length - sum(lengths))
    placement = make_placement(schedule, documents, length, placed, costs)
    moved = remapped(placed, costs)
    if moved.predicted_s <= _remap_limit_s(remap, placed.predicted_s, costs):
        placement = with_held_tokens(placement, moved.held, costs)
    return placement


def _published(planner: str) -> Callable[[Sequence[int], UnitCosts], list[Pieces]]:
    place = find_planner(planner, "documents").documents
    assert place is not None
    return place


def _stream(
    schedule: Schedule, documents: Sequence[Range], length: int, costs: UnitCosts
) -> tuple[float, Placement] | None:
    """Today's cut and its predicted time; None where it is not possible or a unit's memory does not suffice."""
    try:
        placement = stream_placement(schedule, length)
    except ScheduleError:  # fewer tokens than ranks
        return None
    loads = stream_loads(placement.lanes[0], documents, costs)
    if any(count > most for count, most in zip(loads.tokens, costs.most_tokens, strict=True)):
        return None
    return loads.predicted_s, placement


@lru_cache(maxsize=64)
def routed_stream(schedule: Schedule, length: int, costs: UnitCosts) -> Placement:
    """The stream, whose keys and values go from node to node and round inside them, over all network interfaces.

    Where every node has one unit, or there is one node, that is the ring which the stream is anyway.

    Raises:
        ScheduleError: fewer tokens than ranks that are to hold some.
    """
    stream = stream_placement(schedule, length)
    if costs.num_nodes == 1 or costs.num_nodes == len(costs.node):
        return stream
    (lane,) = stream.lanes
    held = in_order(list(zip(lane.members, lane.tokens[0], strict=True)), costs)
    nodes, proxies = tuple(costs.node[unit] for unit in lane.members), crossing_of(held, costs).proxies
    return replace(stream, lanes=(replace(lane, nodes=nodes, proxies=proxies),))


def check_documents(documents: Sequence[Range], length: int) -> None:
    """Refuse documents that are not intervals of a row. Raises `BatchError`: names the first of them."""
    end = 0
    for start, stop in documents:
        if not end <= start < stop <= length:
            raise BatchError(
                f"documents must be disjoint, ascending and inside a row of {length} tokens; "
                f"[{start}, {stop}) follows one that ends at {end}."
            )
        end = stop


def check_memory(length: int, costs: UnitCosts) -> None:
    """Refuse a row that has more tokens than all units have room for. Raises `BatchError`: both numbers."""
    if length > sum(costs.most_tokens):
        limits = listed((f"{most:,}" for most in costs.most_tokens), 16)
        raise BatchError(
            f"a batch row of {length:,} tokens does not fit: memory beside the model has room for "
            f"{sum(costs.most_tokens):,} tokens, by unit {limits}. Use shorter rows, more ranks, or activation "
            "checkpointing."
        )
