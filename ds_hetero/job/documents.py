"""Costs of documents on the units of every replica: rank 0, which has read the cluster, hands the numbers to all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from ds_hetero.common.announce import announce
from ds_hetero.cost.calibrated import CalibratedCostModel
from ds_hetero.decision.decide import JobStart
from ds_hetero.errors import HeteroError
from ds_hetero.job.rank_times import RankTimes
from ds_hetero.job.start import World
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.planner.documents import (
    DocumentPlacer,
    UnitCosts,
    expect_places,
    least_gain,
    unit_costs,
)
from ds_hetero.values.schedule import Schedule
from ds_hetero.values.section import PlacementSection

logger = logging.getLogger(__name__)


def agree_on_placer(world: World, start: JobStart, replica_id: int) -> DocumentPlacer | None:
    """Return what places the batches of one replica by their documents; None where all are cut by their length.

    Where documents were asked for and the devices are not known, the schedule's token weights stand for their speeds.
    Where the section says nothing (`JobStart.places_by_default`), they are placed if that is predicted to save more of
    a step than predictions for the device that is known least err; no unit is then given more tokens than its memory
    has room for with that error.

    Caller: every rank of the world.
    Collectives: one `on_all_ranks`.

    Raises:
        HeteroError: the cost model cannot be asked; on every rank.
    """
    section = start.section.placement
    find = _default_costs if section.mode is None else _unit_costs

    def decide() -> tuple[float, list[list[float]]] | None:
        costs = find(start) if world.rank == 0 else ()
        return (_error(start), [of_replica.to_floats() for of_replica in costs]) if costs else None

    found = world.on_all_ranks(decide)[0]
    if found is None:
        return None
    placer = document_placer(section, UnitCosts.from_floats(found[1][replica_id]))
    return replace(placer, least_gain=least_gain(found[0])) if section.mode is None else placer


def _error(start: JobStart) -> float:
    """Error of the predictions of a step, of the replica whose devices are known least."""
    return max((forecast.prediction.error for forecast in start.forecasts), default=0.0)


def _default_costs(start: JobStart) -> Sequence[UnitCosts]:
    """Costs of the units of every replica where documents were not asked for; none where the model has none."""
    try:
        costs = _unit_costs(start)
    except HeteroError as error:
        logger.debug("documents are not placed: %s", error)
        return ()
    room = 1 - _error(start)
    return [replace(c, most_tokens=tuple(int(most * room) for most in c.most_tokens)) for c in costs]


def _unit_costs(start: JobStart) -> Sequence[UnitCosts]:
    if not start.forecasts:
        return [UnitCosts.from_weights(schedule) for schedule in start.plan.schedules]
    costs = []
    for forecast in start.forecasts:
        assert isinstance(forecast.cost, CalibratedCostModel)
        costs.append(unit_costs(forecast.cost, forecast.schedule.shifted(0)))
    return costs


def document_placer(section: PlacementSection, costs: UnitCosts) -> DocumentPlacer:
    """Return what places a replica's batches at these ``costs``. Raises `PlanError`: a planner is unknown or cannot."""
    if section.planner is not None:
        expect_places(section.planner, costs)
    limited = costs if section.max_tokens is None else costs.limited(section.max_tokens)
    return DocumentPlacer(limited, section.min_cut_tokens, section.planner, remap=section.remap)


class CostRenewal:
    """Re-planning where batches are placed by documents: measured speeds are new costs from the next batch on.

    The schedule stays, so that no process group is made and shards that were drawn before remain valid. What batches
    are placed by changes when two observations in a row predict a gain.

    Args:
        change_placer: called on every rank with what places its replica's batches from now on.
    """

    def __init__(self, start: JobStart, change_placer: Callable[[DocumentPlacer], None]) -> None:
        self._world, self._start, self._change_placer = World.current(), start, change_placer
        self._costs = list(_unit_costs(start)) if self._world.rank == 0 else []
        self._predicted_gain_before = False

    def observe(self, step: int, times: Sequence[RankTimes]) -> bool:
        """Whether costs are renewed by these times of all ranks; on every rank. Collectives: one `on_all_ranks`."""
        flat = self._world.on_all_ranks(lambda: self._decide(step, times) if self._world.rank == 0 else None)[0]
        if flat is None:
            return False
        place = self._start.plan.place_of(self._world.rank)
        assert place is not None
        self._change_placer(document_placer(self._start.section.placement, UnitCosts.from_floats(flat[place[0]])))
        return True

    def _decide(self, step: int, times: Sequence[RankTimes]) -> list[list[float]] | None:
        """The costs of all replicas if they are to change; None else."""
        spec, schedules = self._start.facts.model.spec, self._start.plan.schedules
        if spec is None:
            return None
        by_replica = [[times[rank] for rank in schedule.ranks] for schedule in schedules]
        measured = [
            measured_costs(costs, schedule, ranks, spec)
            for costs, schedule, ranks in zip(self._costs, schedules, by_replica, strict=True)
        ]
        gain = max(
            predicted_gain_of_documents(old, new, ranks)
            for old, new, ranks in zip(self._costs, measured, by_replica, strict=True)
        )
        is_gain = gain >= self._start.section.replan.min_gain
        if not (is_gain and self._predicted_gain_before):
            self._predicted_gain_before = is_gain
            return None
        self._predicted_gain_before = False
        self._costs = measured
        announce(
            f"step {step}: documents are placed by the measured speeds from now on, predicted to save {gain:.1%} of "
            "the time to compute"
        )
        return [costs.to_floats() for costs in measured]


def measured_costs(costs: UnitCosts, schedule: Schedule, ranks: Sequence[RankTimes], spec: ModelSpec) -> UnitCosts:
    """The same costs with the times to compute that were measured.

    Attention of n tokens is n * n / 2 pairs of query and key a head, each of as many operations as the ranks counted
    forward, recomputed and backward. A unit is as slow as its slowest rank, whose share of heads and tokens is the
    schedule's. A unit without a measurement keeps its ratio to the others.
    """
    backward = sum(rank.attention_backward_flops for rank in ranks)
    flops_per_pair = 10 * spec.head_dim * sum(rank.attention_flops for rank in ranks) / backward if backward else 0.0
    times = dict(zip(schedule.ranks, ranks, strict=True))
    by_token, by_square = [], []
    for group in schedule.ring_groups:
        weight = group.weight or 1.0
        by_token.append(
            max(
                tokens / weight * times[rank].model_s_per_token / spec.num_layers
                for rank, tokens in zip(group.ranks, group.tokens, strict=True)
            )
        )
        by_square.append(
            max(
                heads * times[rank].attention_s_per_flop * flops_per_pair / 2
                for rank, heads in zip(group.ranks, group.heads, strict=True)
            )
        )
    token_s, square_s = _completed(by_token, costs.token_s), _completed(by_square, costs.square_s)
    return replace(costs, token_s=token_s, square_s=square_s, edge_s=())  # time in attention is all in the squares


def _completed(measured: Sequence[float], before: Sequence[float]) -> tuple[float, ...]:
    """``measured`` with a number for every unit."""
    known = [new / old for new, old in zip(measured, before, strict=True) if new]
    ratio = sum(known) / len(known) if known else 1.0
    return tuple(new or old * ratio for new, old in zip(measured, before, strict=True))


def predicted_gain_of_documents(old: UnitCosts, new: UnitCosts, ranks: Sequence[RankTimes]) -> float:
    """The share of the time to compute that placing by ``new`` saves over placing by ``old``.

    With ``old`` every unit is given work in proportion to its old speed, and the unit that has become slowest ends
    last. Work is what the ranks did: tokens, and squares of lengths in proportion to it.
    """
    tokens, attention_s = sum(rank.tokens for rank in ranks), sum(rank.attention_s for rank in ranks)
    model_s = sum(rank.model_s for rank in ranks)
    mean_square_s = sum(new.square_s) / len(new.square_s)
    mean_token_s = sum(new.token_s) / len(new.token_s)
    squares = tokens * mean_token_s / mean_square_s * attention_s / model_s if model_s else 1.0
    before = [t * tokens + q * squares for t, q in zip(old.token_s, old.square_s, strict=True)]
    after = [t * tokens + q * squares for t, q in zip(new.token_s, new.square_s, strict=True)]
    slowest = max(b / a for a, b in zip(before, after, strict=True))
    return 1 - sum(1 / a for a in before) / sum(1 / b for b in after) / slowest
