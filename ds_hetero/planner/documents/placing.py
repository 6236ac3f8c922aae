"""Place the documents of a batch on ranks; every rank computes the same placement.

The *stream* is the alternative: the row is cut by length alone, whatever its documents. `place_documents` compares four
ways by prediction: documents cut over units with keys and values sent round (`place_everywhere`), heads exchanged
between nodes (`place_by_heads`), tokens moved between attention and linear layers (`place_remapped`), and the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf, sqrt

from ds_hetero.common.text import listed
from ds_hetero.errors import BatchError, ScheduleError
from ds_hetero.planner.document_search.bins import LEAST_FRAGMENT_TOKENS
from ds_hetero.planner.document_search.by_heads import MAX_EXCHANGE_RATIO, place_by_heads
from ds_hetero.planner.document_search.candidates import place_everywhere, place_lengths, with_padding
from ds_hetero.planner.document_search.crossing import crossing_of, in_order
from ds_hetero.planner.document_search.lanes import make_placement
from ds_hetero.planner.document_search.loads import Loads, loads_of
from ds_hetero.planner.document_search.placement_loads import placement_loads, stream_loads
from ds_hetero.planner.document_search.remapping import (
    MAX_MOVING_RATIO,
    least_remapped_s,
    place_remapped,
    remapped,
    with_linear_tokens,
)
from ds_hetero.planner.document_search.unit_costs import Pieces, UnitCosts
from ds_hetero.planner.published.registry import find_planner
from ds_hetero.values.placement import Placement, Range, RemapWish, Rows, TokenMove, stream_placement
from ds_hetero.values.schedule import Schedule


@dataclass(frozen=True, slots=True)
class DocumentPlacer:
    """Places every batch by its documents.

    A batch is cut by length alone (the stream) if its documents are not known or its rows have different documents.

    Args:
        costs: costs on the units of the schedule.
        least_gain: share of the stream's time that a placement has to save, as predicted; if it does not, or the batch
            does not fit, the batch is cut by length. None if the user asked for placement by documents: then batches
            are placed with any gain, and refused if they do not fit.
    """

    costs: UnitCosts
    min_cut_tokens: int = 2 * LEAST_FRAGMENT_TOKENS  # shorter documents are never cut
    planner: str | None = None  # name of a published planner of documents to use; it ignores ``min_cut_tokens``
    least_gain: float | None = None
    remap: RemapWish = "where_faster"  # whether tokens move before and after attention, see `place_documents`

    def __call__(self, schedule: Schedule, length: int, rows: tuple[Rows, ...] = ()) -> Placement:
        """Place one batch.

        Args:
            length: tokens of a row.
            rows: groups of rows with the same documents; empty if the documents are not known.

        Raises:
            BatchError: the batch does not fit into memory.
            ScheduleError: a row has fewer tokens than there are ranks.
        """
        if len(rows) != 1:
            return routed_stream(schedule, length, self.costs).with_rows(rows)
        documents = rows[0].documents
        if self.least_gain is not None:
            placement = self._place_if_worth_it(schedule, documents, length) if len(documents) > 1 else None
            return (placement or routed_stream(schedule, length, self.costs)).with_rows(rows)
        if self.planner is None:
            return self._place(schedule, documents, length).with_rows(rows)
        placement = place_by_published(self.planner, schedule, documents, length, self.costs, self.remap)
        return placement.with_rows(rows)

    def _place(self, schedule: Schedule, documents: Sequence[Range], length: int) -> Placement:
        """Return the placement by documents, see `place_documents`."""
        return place_documents(
            schedule, documents, length, self.costs, min_cut_tokens=self.min_cut_tokens, remap=self.remap
        )

    def _place_if_worth_it(self, schedule: Schedule, documents: Sequence[Range], length: int) -> Placement | None:
        """Return the placement by documents; None if it is predicted to save less than ``least_gain``.

        The result is also None if no such placement is possible, or if it is the stream itself.
        """
        assert self.least_gain is not None
        try:
            by_documents = self._place(schedule, documents, length)
            stream = stream_placement(schedule, length)
        except (BatchError, ScheduleError):  # too little memory by the prediction, or fewer tokens than ranks
            return None
        if by_documents.is_stream:
            return None
        by_documents_s, stream_s = (
            placement_loads(placement, documents, self.costs).predicted_s + self.costs.step_s
            for placement in (by_documents, stream)
        )
        return by_documents if by_documents_s < (1 - self.least_gain) * stream_s else None

    def everywhere(self, schedule: Schedule, length: int, rows: tuple[Rows, ...] = ()) -> Placement:
        """Place one batch with every document over all units, for a check that needs all documents cut.

        If tokens may move between attention and linear layers, half the tokens of every second rank move to the next
        rank. By default (``least_gain`` is set), a batch of one document, or one that does not fit, is placed as usual.

        Args:
            rows: the only group of rows.

        Raises:
            BatchError: the documents do not fit into memory, and the user asked for placement by documents.
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
        moves = (TokenMove(sender, receiver, placement.tokens(sender) // 2) for sender, receiver in pairs)
        return placement.with_moves([move for move in moves if move.tokens])


def least_gain(error: float) -> float:
    """Return the share of the stream's time that a placement has to save to be used by default.

    Both times are predictions with independent errors, so the error of their ratio is sqrt(2) times larger: with an
    error of 5 %, a placement has to save 7 %.

    Args:
        error: relative error of a prediction.
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
    """Place the documents of a row on the units of a schedule.

    The result is never predicted to be slower than the stream, than every document over all units, or than every
    document over one node; unless ``remap`` is ``"always"``. Positions outside every document are padding; they are
    placed, too, since linear layers compute them.

    Args:
        documents: intervals of the row, ascending and disjoint.
        length: tokens of the row.
        min_cut_tokens: shorter documents are never cut.
        remap: whether tokens move between attention and linear layers. With ``"where_faster"`` they do if the layer is
            then predicted to take at most `MAX_MOVING_RATIO` of the time, and the costs of moving are known.

    Raises:
        BatchError: documents overlap, are not inside the row, or do not fit into memory.
    """
    assert len(costs.token_s) == schedule.ring_size, (costs.token_s, schedule.ring_size)
    check_documents(documents, length)
    check_memory(length, costs)
    lengths = [stop - start for start, stop in documents]
    padding = length - sum(lengths)
    without_exchange = place_lengths(lengths, costs, padding=padding, min_cut_tokens=min_cut_tokens)
    best = without_exchange
    heads: tuple[int, ...] = ()
    # Units of several ranks divide the heads among their ranks already.
    if all(len(group.ranks) == 1 for group in schedule.groups):
        by_heads = place_by_heads(lengths, best, costs, schedule.num_heads, padding)
        if by_heads is not None and by_heads.placed.predicted_s < MAX_EXCHANGE_RATIO * best.predicted_s:
            best, heads = by_heads
    loads_of_stream = _loads_of_stream(schedule, documents, length, costs)
    fastest_s = best.predicted_s if loads_of_stream is None else min(loads_of_stream.predicted_s, best.predicted_s)
    limit_s = _remap_limit_s(remap, fastest_s, costs)
    if least_remapped_s(lengths, costs, padding) <= limit_s:
        moved = place_remapped(lengths, without_exchange, costs, padding=padding, min_cut_tokens=min_cut_tokens)
        if moved.predicted_s <= limit_s:
            placement = make_placement(schedule, documents, length, moved.placed, costs)
            return with_linear_tokens(placement, moved.linear_tokens, costs)
    if loads_of_stream is not None and loads_of_stream.predicted_s < best.predicted_s:
        return routed_stream(schedule, length, costs)
    return make_placement(schedule, documents, length, best, costs, heads)


def _remap_limit_s(remap: RemapWish, unmoved_s: float, costs: UnitCosts) -> float:
    """Return the longest predicted time of a layer with moved tokens for which tokens move.

    Args:
        unmoved_s: predicted time of the layer without moves.

    Returns:
        Seconds; plus infinity if tokens always move, minus infinity if they never do.
    """
    if remap == "always":
        return inf
    if remap == "never" or not costs.exchange_per_receive:
        return -inf
    # The ratio applies to a layer's share of the step, `step_s` included.
    return MAX_MOVING_RATIO * (unmoved_s + costs.step_s) - costs.step_s


def expect_places(planner: str, costs: UnitCosts) -> None:
    """Check that a published planner can place documents on these units. Raises `PlanError` if it cannot."""
    _published(planner)((len(costs.token_s),), costs)


def place_by_published(
    planner: str,
    schedule: Schedule,
    documents: Sequence[Range],
    length: int,
    costs: UnitCosts,
    remap: RemapWish = "never",
) -> Placement:
    """Place the documents of one batch row by a published planner; padding goes to the units that would end first.

    Args:
        planner: its name.
        remap: as in `place_documents`.

    Raises:
        PlanError: the planner is unknown, or its paper does not describe such units.
        BatchError: see `place_documents`; or the planner gives a unit more tokens than fit.
    """
    check_documents(documents, length)
    check_memory(length, costs)
    lengths = [stop - start for start, stop in documents]
    pieces = _published(planner)(lengths, costs)
    unit_tokens = loads_of(lengths, pieces, costs).tokens
    for unit, (tokens, limit) in enumerate(zip(unit_tokens, costs.most_tokens, strict=True)):
        if tokens > limit:
            raise BatchError(
                f"planner {planner} gives unit {unit} {tokens:,} tokens of a batch row, its memory has room for "
                f"{limit:,}. Use shorter rows, or leave the planner out."
            )
    placed = with_padding(lengths, pieces, costs, length - sum(lengths))
    placement = make_placement(schedule, documents, length, placed, costs)
    moved = remapped(placed, costs)
    if moved.predicted_s <= _remap_limit_s(remap, placed.predicted_s, costs):
        placement = with_linear_tokens(placement, moved.linear_tokens, costs)
    return placement


def _published(planner: str) -> Callable[[Sequence[int], UnitCosts], list[Pieces]]:
    """Return the function by which a published planner places documents. Raises `PlanError`: it is unknown."""
    place = find_planner(planner, "documents").documents
    assert place is not None
    return place


def _loads_of_stream(schedule: Schedule, documents: Sequence[Range], length: int, costs: UnitCosts) -> Loads | None:
    """Return the loads of the row cut by length alone; None if it has too few tokens, or a unit too little memory."""
    try:
        placement = stream_placement(schedule, length)
    except ScheduleError:  # fewer tokens than ranks
        return None
    loads = stream_loads(placement.lanes[0], documents, costs)
    return loads if loads.fits(costs) else None


@lru_cache(maxsize=64)
def routed_stream(schedule: Schedule, length: int, costs: UnitCosts) -> Placement:
    """Return the stream, in which keys and values cross from node to node over all NICs, and circulate inside nodes.

    With one node, or one unit on every node, keys and values travel in the plain ring over all units.

    Raises:
        ScheduleError: the row has fewer tokens than there are ranks that should get some.
    """
    stream = stream_placement(schedule, length)
    if costs.num_nodes == 1 or costs.num_nodes == len(costs.node):
        return stream
    (lane,) = stream.lanes
    ring = in_order(list(zip(lane.members, lane.tokens[0], strict=True)), costs)
    nodes = tuple(costs.node[unit] for unit in lane.members)
    has_proxies = crossing_of(ring, costs).proxies
    return replace(stream, lanes=(replace(lane, nodes=nodes, proxies=has_proxies),))


def check_documents(documents: Sequence[Range], length: int) -> None:
    """Check that documents are ascending, disjoint intervals of a row. Raises `BatchError` if one is not."""
    end = 0
    for start, stop in documents:
        if not end <= start < stop <= length:
            raise BatchError(
                f"documents must be disjoint, ascending and inside a row of {length} tokens; "
                f"[{start}, {stop}) follows one that ends at {end}."
            )
        end = stop


def check_memory(length: int, costs: UnitCosts) -> None:
    """Check that a row fits into the memory of all units together. Raises `BatchError` with both numbers if not."""
    if length > sum(costs.most_tokens):
        limits = listed((f"{limit:,}" for limit in costs.most_tokens), 16)
        raise BatchError(
            f"a batch row of {length:,} tokens does not fit: memory beside the model has room for "
            f"{sum(costs.most_tokens):,} tokens, by unit {limits}. Use shorter rows, more ranks, or activation "
            "checkpointing."
        )
