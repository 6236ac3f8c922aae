"""Choose the schedule under which batches of documents are predicted to run fastest.

A schedule for one long sequence may have all ranks in one group; then all ranks compute every document together. So
schedules are compared by the mean predicted time of batches whose documents are placed on their units. The candidates
are every rank as a separate unit, all uniform meshes, and the schedule that the search finds for one sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ds_hetero.common.reading import JsonDict
from ds_hetero.cost.calibrated import CalibratedCostModel
from ds_hetero.errors import BatchError, PlanError
from ds_hetero.planner.document_search.calibrated_costs import unit_costs
from ds_hetero.planner.document_search.loads import ideal_s
from ds_hetero.planner.document_search.placement_loads import placement_loads, stream_loads
from ds_hetero.planner.documents.placing import place_documents
from ds_hetero.planner.documents.summary import documents_of
from ds_hetero.planner.results.candidates import Baselines
from ds_hetero.planner.results.sentences import describe
from ds_hetero.planner.strategies import strategy
from ds_hetero.values.placement import stream_placement
from ds_hetero.values.schedule import Schedule

# A later candidate is chosen only if it is faster than an earlier one by more than this ratio. Chosen, never measured.
SAME_TIME_RATIO = 1.001


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthsCandidate:
    """A schedule, and the predicted times of batches of documents on its units."""

    name: str  # description for people
    schedule: Schedule
    block_s: float | None  # mean predicted time of a layer with placed documents; None if a batch does not fit
    stream_s: float | None  # the same if batches are cut by length alone; None if a batch does not fit
    ideal_s: float  # mean time of a layer at perfect balance with free communication
    reason: str | None = None  # why a batch does not fit

    def to_dict(self) -> JsonDict:
        """Plain data for JSON, without the schedule."""
        fields = ("name", "block_s", "stream_s", "ideal_s", "reason")
        return {field: getattr(self, field) for field in fields}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedForLengths:
    """The best schedule for batches of documents."""

    best: LengthsCandidate  # the fastest candidate that fits
    candidates: tuple[LengthsCandidate, ...]  # all candidates, in the order in which they were tried
    batches: int  # number of batches that were placed


def plan_for_lengths(cost: CalibratedCostModel, batches: Sequence[Sequence[int]]) -> PlannedForLengths:
    """Return the schedule under which these batches are predicted to run fastest, and all candidates.

    Args:
        batches: lengths of the documents of every batch.

    Raises:
        PlanError: under every candidate some batch does not fit into memory; or a batch is longer than the row.
    """
    candidates = tuple(_candidate(name, schedule, cost, batches) for name, schedule in _schedules(cost))
    best: LengthsCandidate | None = None
    for candidate in candidates:
        if candidate.block_s is None:
            continue
        if best is None or best.block_s is None or candidate.block_s * SAME_TIME_RATIO < best.block_s:
            best = candidate
    if best is None:
        reasons = "; ".join(dict.fromkeys(str(candidate.reason) for candidate in candidates))
        raise PlanError(f"no schedule has room for these batches: {reasons}")  # reasons say what to change
    return PlannedForLengths(best=best, candidates=candidates, batches=len(batches))


def _schedules(cost: CalibratedCostModel) -> Iterator[tuple[str, Schedule]]:
    """Yield names and schedules of the candidates, every schedule once; every rank as a separate unit comes first."""
    ring_by_speed = strategy("proportional", cost)
    yield "every rank a unit, tokens by speed", ring_by_speed
    schedules_so_far = {ring_by_speed}
    for candidate in Baselines.under(cost).candidates:
        if candidate.prediction.feasible and candidate.schedule not in schedules_so_far:
            schedules_so_far.add(candidate.schedule)
            yield candidate.name, candidate.schedule
    try:
        planned = strategy("plan", cost)
    except PlanError:  # one long sequence does not fit; documents may
        return
    if planned not in schedules_so_far:
        yield f"for one sequence: {describe(planned, cost.cluster)}", planned


def _candidate(
    name: str, schedule: Schedule, cost: CalibratedCostModel, batches: Sequence[Sequence[int]]
) -> LengthsCandidate:
    """Place all batches on the units of a schedule, and predict their mean times; stop at a batch that does not fit."""
    length, costs = cost.workload.seq_len, unit_costs(cost, schedule)
    placed_sum_s = stream_sum_s = ideal_sum_s = 0.0
    reason = None
    for lengths in batches:
        documents = documents_of(lengths, length)
        ideal_sum_s += ideal_s(lengths, costs, length - sum(lengths)) if any(costs.most_tokens) else 0.0
        try:
            placement = place_documents(schedule, documents, length, costs)
        except BatchError as error:
            reason = str(error)
            break
        placed_sum_s += placement_loads(placement, documents, costs).predicted_s
        stream_sum_s += stream_loads(stream_placement(schedule, length).lanes[0], documents, costs).predicted_s
    num_batches = len(batches)
    return LengthsCandidate(
        name=name,
        schedule=schedule,
        block_s=None if reason else placed_sum_s / num_batches,
        stream_s=None if reason else stream_sum_s / num_batches,
        ideal_s=ideal_sum_s / num_batches,
        reason=reason,
    )
