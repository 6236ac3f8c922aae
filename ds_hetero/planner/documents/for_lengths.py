"""The schedule for batches of documents: which units are best where every batch is placed by its documents.

A schedule for one long sequence may group all ranks, and then every document goes over all of them. So candidates are
judged by the mean predicted time of batches that are placed on their units: the search's schedule for one sequence,
every rank a unit of its own, and all uniform meshes.
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

# A candidate that is not faster by more than this loses to one before it. Chosen, never measured.
SAME = 1.001


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthsCandidate:
    """A schedule under batches of documents."""

    name: str  # what it is, for people
    schedule: Schedule  # its units
    block_s: float | None  # mean predicted time of a block with documents placed; None where a batch does not fit
    stream_s: float | None  # the same if batches are cut by their length alone; None where a batch does not fit
    ideal_s: float  # mean time of a block at perfect balance with free communication
    reason: str | None = None  # why ``block_s`` is None

    def to_dict(self) -> JsonDict:
        """Plain data for JSON, without the schedule."""
        fields = ("name", "block_s", "stream_s", "ideal_s", "reason")
        return {field: getattr(self, field) for field in fields}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedForLengths:
    """The best schedule for batches of documents."""

    best: LengthsCandidate  # the fastest candidate that fits
    candidates: tuple[LengthsCandidate, ...]  # all of them, in the order in which they were tried
    batches: int  # batches that they were judged by


def plan_for_lengths(cost: CalibratedCostModel, batches: Sequence[Sequence[int]]) -> PlannedForLengths:
    """The schedule whose units place these batches fastest. Raises `PlanError`: none has room for them."""
    candidates = tuple(_judge(name, schedule, cost, batches) for name, schedule in _schedules(cost))
    best: LengthsCandidate | None = None
    for each in candidates:
        if each.block_s is not None and (best is None or best.block_s is None or each.block_s * SAME < best.block_s):
            best = each
    if best is None:
        reasons = "; ".join(dict.fromkeys(str(each.reason) for each in candidates))
        raise PlanError(f"no schedule has room for these batches: {reasons}")
    return PlannedForLengths(best=best, candidates=candidates, batches=len(batches))


def _schedules(cost: CalibratedCostModel) -> Iterator[tuple[str, Schedule]]:
    """Candidates by name, each schedule once: every rank alone comes first."""
    alone = strategy("proportional", cost)
    yield "every rank a unit, tokens by speed", alone
    seen = {alone}
    for candidate in Baselines.under(cost).candidates:
        if candidate.prediction.feasible and candidate.schedule not in seen:
            seen.add(candidate.schedule)
            yield candidate.name, candidate.schedule
    try:
        searched = strategy("plan", cost)
    except PlanError:  # one long sequence does not fit; documents may
        return
    if searched not in seen:
        yield f"for one sequence: {describe(searched, cost.cluster)}", searched


def _judge(
    name: str, schedule: Schedule, cost: CalibratedCostModel, batches: Sequence[Sequence[int]]
) -> LengthsCandidate:
    """Place all batches on the units of a schedule."""
    length, costs = cost.workload.seq_len, unit_costs(cost, schedule)
    placed_s = streamed_s = ideal = 0.0
    reason = None
    for lengths in batches:
        documents = documents_of(lengths, length)
        ideal += ideal_s(lengths, costs, length - sum(lengths)) if any(costs.most_tokens) else 0.0
        try:
            placement = place_documents(schedule, documents, length, costs)
        except BatchError as error:
            reason = str(error)
            break
        placed_s += placement_loads(placement, documents, costs).predicted_s
        streamed_s += stream_loads(stream_placement(schedule, length).lanes[0], documents, costs).predicted_s
    count = len(batches)
    return LengthsCandidate(
        name=name,
        schedule=schedule,
        block_s=None if reason else placed_s / count,
        stream_s=None if reason else streamed_s / count,
        ideal_s=ideal / count,
        reason=reason,
    )
