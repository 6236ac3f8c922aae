"""The planner of documents: from the documents of a batch to its placement, on every rank alike.

A few candidates are judged by their predicted time. They differ in how much more than the ideal time a unit or a node
may take before a document is cut: slow networks get unequal nodes rather than crossings, fast ones the reverse.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ds_hetero.common.text import listed
from ds_hetero.errors import BatchError
from ds_hetero.placement import Placement, Range, Rows, stream_placement
from ds_hetero.planner.documents.baselines import everywhere
from ds_hetero.planner.documents.bins import LEAST_FRAGMENT_TOKENS, Pieces
from ds_hetero.planner.documents.costs import UnitCosts
from ds_hetero.planner.documents.lanes import make_placement
from ds_hetero.planner.documents.score import Loads, ideal_s, loads_of
from ds_hetero.planner.documents.two_level import Effort, two_level
from ds_hetero.schedule import Schedule

__all__ = ["DocumentPlacer", "place_documents"]

EFFORTS = (
    Effort(0.0, 0.0),
    Effort(0.02, 0.02),
    Effort(0.0, 0.08),
    Effort(0.08, 0.08, widen=2),
    Effort(0.02, 0.25),
    Effort(0.02, 0.6),
    Effort(0.02, 1.2),
    Effort(0.08, 3.0),
)
GOOD = 1.02  # over the ideal time; a candidate within it ends the search


@dataclass(frozen=True, slots=True)
class DocumentPlacer:
    """Place every batch by its documents.

    Batches whose documents are not known, or whose rows have different ones, are cut by their length alone.

    Args:
        costs: of the units of the schedule that batches are placed for.
        min_cut_tokens: shorter documents are never cut.
    """

    costs: UnitCosts
    min_cut_tokens: int = 2 * LEAST_FRAGMENT_TOKENS

    def __call__(self, schedule: Schedule, length: int, rows: tuple[Rows, ...] = ()) -> Placement:
        """Place one batch.

        Raises:
            BatchError: the documents do not fit into the units' memory.
            ScheduleError: fewer tokens than ranks that are to hold some.
        """
        if len(rows) != 1:
            return stream_placement(schedule, length, rows)
        placement = place_documents(schedule, rows[0].documents, length, self.costs, min_cut_tokens=self.min_cut_tokens)
        return placement.with_rows(rows)


def place_documents(
    schedule: Schedule,
    documents: Sequence[Range],
    length: int,
    costs: UnitCosts,
    *,
    min_cut_tokens: int = 2 * LEAST_FRAGMENT_TOKENS,
) -> Placement:
    """Place the documents of one batch row on the units of a schedule.

    Positions outside every document are padding. They are placed too, as they are computed outside attention.

    Args:
        schedule: the replica's schedule.
        documents: intervals of the row, ascending and disjoint.
        length: tokens of the row.
        costs: of the schedule's units.
        min_cut_tokens: shorter documents are never cut.

    Raises:
        BatchError: documents that overlap or leave the row, or that do not fit into the units' memory.
    """
    assert len(costs.token_s) == schedule.ring_size, (costs.token_s, schedule.ring_size)
    check_documents(documents, length)
    check_memory(length, costs)
    lengths = [stop - start for start, stop in documents]
    pieces = _place(lengths, costs, max(min_cut_tokens // 2, 1)) if lengths else []
    return make_placement(schedule, documents, length, pieces, costs)


def check_documents(documents: Sequence[Range], length: int) -> None:
    """Refuse documents that are no intervals of a row.

    Raises:
        BatchError: the first one that is not.
    """
    end = 0
    for start, stop in documents:
        if not end <= start < stop <= length:
            raise BatchError(
                f"documents must be disjoint, ascending and inside a row of {length} tokens; "
                f"[{start}, {stop}) follows one that ends at {end}."
            )
        end = stop


def check_memory(length: int, costs: UnitCosts) -> None:
    """Refuse a row that has more tokens than all units together have room for.

    Raises:
        BatchError: its tokens and the limits.
    """
    if length > sum(costs.most_tokens):
        limits = listed((f"{most:,}" for most in costs.most_tokens), 16)
        raise BatchError(
            f"a batch row of {length:,} tokens does not fit: memory beside the model has room for "
            f"{sum(costs.most_tokens):,} tokens, by unit {limits}. Use shorter rows, more ranks, or activation "
            "checkpointing."
        )


def _place(lengths: Sequence[int], costs: UnitCosts, least_tokens: int) -> list[Pieces]:
    """The candidate that is predicted to be fastest; the first within `GOOD` of the ideal time ends the search."""
    bound_s = ideal_s(lengths, costs)
    best: tuple[Loads, list[Pieces]] | None = None
    for pieces in _candidates(lengths, costs, bound_s, least_tokens):
        loads = loads_of(lengths, pieces, costs)
        if best is None or loads.predicted_s < best[0].predicted_s:
            best = loads, pieces
        if best[0].predicted_s <= GOOD * bound_s:
            break
    return best[1] if best is not None else everywhere(lengths, costs)


def _candidates(lengths: Sequence[int], costs: UnitCosts, bound_s: float, least_tokens: int) -> Iterator[list[Pieces]]:
    order = sorted(range(len(lengths)), key=lambda j: (-lengths[j], j))
    for effort in EFFORTS:
        if effort.node_slack > effort.unit_slack and costs.num_nodes == 1:
            continue
        pieces = two_level(lengths, order, costs, bound_s, effort, least_tokens)
        if pieces is not None:
            yield pieces
