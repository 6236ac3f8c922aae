"""Costs of documents on the units of every replica, computed on rank 0 and sent to all ranks.

Rank 0 alone has read the cluster. A unit is a group of the schedule, see `UnitCosts`.
"""

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
    """Return the placer of one replica's batches by documents; None if batches are sharded by length alone.

    If the section asks for documents and the devices are unknown, the schedule's token weights stand for their speeds.
    If the section says nothing (`JobStart.places_by_default`), a batch is placed by documents only if that is predicted
    to save a larger share of the step than the predictions err, and no unit gets more tokens than its memory holds with
    the same error taken off.

    Caller: every rank of the world.
    Collectives: one `on_all_ranks`.

    Raises:
        HeteroError: the cost model cannot be asked; on every rank.
    """
    section = start.section.placement
    find = _default_costs if section.mode is None else _unit_costs

    def decide() -> tuple[float, list[list[float]]] | None:
        if world.rank != 0:
            return None
        costs = find(start)
        if not costs:
            return None
        return _prediction_error(start), [replica_costs.to_floats() for replica_costs in costs]

    decided = world.on_all_ranks(decide)[0]
    if decided is None:
        return None
    prediction_error, floats_by_replica = decided
    placer = document_placer(section, UnitCosts.from_floats(floats_by_replica[replica_id]))
    return replace(placer, least_gain=least_gain(prediction_error)) if section.mode is None else placer


def _prediction_error(start: JobStart) -> float:
    """Largest error of a step's prediction over the replicas, as a share of the step."""
    return max((forecast.prediction.error for forecast in start.forecasts), default=0.0)


def _default_costs(start: JobStart) -> Sequence[UnitCosts]:
    """Costs of every replica's units for a section that does not mention documents; empty if the model has no costs."""
    try:
        costs = _unit_costs(start)
    except HeteroError as error:
        logger.debug("documents are not placed: %s", error)
        return ()
    # Nobody asked for documents: stay clear of the memory limit by as much as the prediction may be wrong.
    safe_share = 1 - _prediction_error(start)
    limited = []
    for replica_costs in costs:
        most_tokens = tuple(int(most * safe_share) for most in replica_costs.most_tokens)
        limited.append(replace(replica_costs, most_tokens=most_tokens))
    return limited


def _unit_costs(start: JobStart) -> Sequence[UnitCosts]:
    """Costs of every replica's units, by replica; relative ones from token weights if there is no forecast."""
    if not start.forecasts:
        return [UnitCosts.from_weights(schedule) for schedule in start.plan.schedules]
    costs = []
    for forecast in start.forecasts:
        assert isinstance(forecast.cost, CalibratedCostModel)
        costs.append(unit_costs(forecast.cost, forecast.schedule.shifted(0)))
    return costs


def document_placer(section: PlacementSection, costs: UnitCosts) -> DocumentPlacer:
    """Return the placer of a replica's batches at these ``costs``. Raises `PlanError`: see `expect_places`."""
    if section.planner is not None:
        expect_places(section.planner, costs)
    limited = costs if section.max_tokens is None else costs.limited(section.max_tokens)
    return DocumentPlacer(limited, section.min_cut_tokens, section.planner, remap=section.remap)


class CostRenewal:
    """Re-planning for batches placed by documents: measured speeds become the costs of the next batches.

    The schedule stays, so no process group is made and shards that were drawn before remain valid. Costs change when
    two observations in a row predict a gain.

    Args:
        change_placer: called on every rank with the new placer of its replica's batches.
    """

    def __init__(self, start: JobStart, change_placer: Callable[[DocumentPlacer], None]) -> None:
        self._world, self._start, self._change_placer = World.current(), start, change_placer
        self._costs = list(_unit_costs(start)) if self._world.rank == 0 else []
        self._predicted_gain_before = False

    def observe(self, step: int, times: Sequence[RankTimes]) -> bool:
        """Renew the costs if the times of all ranks ask for it; return whether they did, the same on every rank.

        Collectives: one `on_all_ranks`.
        """

        def decide() -> list[list[float]] | None:
            return self._decide(step, times) if self._world.rank == 0 else None

        floats_by_replica = self._world.on_all_ranks(decide)[0]
        if floats_by_replica is None:
            return False
        place = self._start.plan.place_of(self._world.rank)
        assert place is not None
        replica_id = place[0]
        costs = UnitCosts.from_floats(floats_by_replica[replica_id])
        self._change_placer(document_placer(self._start.section.placement, costs))
        return True

    def _decide(self, step: int, times: Sequence[RankTimes]) -> list[list[float]] | None:
        """Return the new costs of all replicas; None if they stay. On rank 0."""
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
    """Return these costs with the measured times to compute.

    Causal attention over n tokens is n * n / 2 pairs of query and key per head. A pair's FLOPs count the forward, the
    recomputed forward and the backward, as the ranks counted them. A unit is as slow as its slowest rank; heads and
    tokens are divided over its ranks as in the schedule. A unit without a measurement keeps its ratio to the others.
    """
    backward_flops = sum(rank.attention_backward_flops for rank in ranks)
    flops_per_pair = 0.0
    if backward_flops:
        # A pair's backward is five matmuls over the head dimension (S, dV, dP, dQ, dK), two FLOPs a multiply-add.
        flops_per_pair = 10 * spec.head_dim * sum(rank.attention_flops for rank in ranks) / backward_flops
    times = dict(zip(schedule.ranks, ranks, strict=True))
    token_s, square_s = [], []  # by unit; 0 where nothing was measured
    for group in schedule.ring_groups:
        weight = group.weight or 1.0
        rank_token_s = []
        for rank, tokens in zip(group.ranks, group.tokens, strict=True):
            rank_token_s.append(tokens / weight * times[rank].model_s_per_token / spec.num_layers)
        rank_square_s = []
        for rank, heads in zip(group.ranks, group.heads, strict=True):
            rank_square_s.append(heads * times[rank].attention_s_per_flop * flops_per_pair / 2)
        token_s.append(max(rank_token_s))
        square_s.append(max(rank_square_s))
    return replace(
        costs,
        token_s=_filled(token_s, costs.token_s),
        square_s=_filled(square_s, costs.square_s),
        edge_s=(),  # the measured time of attention is all in the squares
    )


def _filled(measured_s: Sequence[float], before_s: Sequence[float]) -> tuple[float, ...]:
    """``measured_s``, its zeros replaced by the old time multiplied by the mean ratio of the other units.

    Measured (2, 0) and before (1, 3) give (2, 6): the measured unit takes twice its old time, so does the other.
    """
    ratios = [new_s / old_s for new_s, old_s in zip(measured_s, before_s, strict=True) if new_s]
    ratio = sum(ratios) / len(ratios) if ratios else 1.0
    return tuple(new_s or old_s * ratio for new_s, old_s in zip(measured_s, before_s, strict=True))


def predicted_gain_of_documents(old: UnitCosts, new: UnitCosts, ranks: Sequence[RankTimes]) -> float:
    """Return the share of the compute time that placing by ``new`` saves over placing by ``old``.

    Placing by ``old`` gives every unit work in proportion to its old speed, so the unit that became slowest ends last.
    Placing by ``new`` lets all units end together. Work is that of the observed steps: their tokens, and squares of
    document lengths in proportion to the time that they took.

    An example: two units took 1 s each for the work; now the first takes 2 s for it. In proportion to old speeds each
    gets half of it, and a step takes 1 s. In proportion to new ones (1/2 and 1) it takes 1 / 1.5 = 0.67 s: gain 1/3.
    """
    tokens = sum(rank.tokens for rank in ranks)
    attention_s = sum(rank.attention_s for rank in ranks)
    model_s = sum(rank.model_s for rank in ranks)
    mean_square_s = sum(new.square_s) / len(new.square_s)
    mean_token_s = sum(new.token_s) / len(new.token_s)
    squares = 1.0
    if model_s:
        squares = tokens * mean_token_s / mean_square_s * attention_s / model_s
    # Seconds of every unit for all of the work.
    before_s = [
        token_s * tokens + square_s * squares for token_s, square_s in zip(old.token_s, old.square_s, strict=True)
    ]
    after_s = [
        token_s * tokens + square_s * squares for token_s, square_s in zip(new.token_s, new.square_s, strict=True)
    ]
    slowdown = max(unit_after_s / unit_before_s for unit_before_s, unit_after_s in zip(before_s, after_s, strict=True))
    old_speed = sum(1 / unit_s for unit_s in before_s)
    new_speed = sum(1 / unit_s for unit_s in after_s)
    return 1 - old_speed / new_speed / slowdown
