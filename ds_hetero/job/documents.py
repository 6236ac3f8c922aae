"""Make the placer of batches by documents on all ranks, and renew its costs while the job runs.

The placer decides by the seconds of tokens and of attention on every unit, that is on every group of the schedule
(`UnitCosts`). Rank 0 computes these costs, because it alone has read the cluster, and sends them to all ranks.
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
    to save a larger share of the step than the error of the predictions. With an error of 5 %, no unit then gets more
    than 95 % of the tokens that fit into its memory.

    Caller: every rank of the world.
    Collectives: one `on_all_ranks`.

    Raises:
        HeteroError: on every rank: the cost model cannot give costs that the section needs.
    """
    section = start.section.placement
    compute_costs = _default_costs if section.mode is None else _unit_costs

    def compute_on_rank_0() -> tuple[float, list[list[float]]] | None:
        if world.rank != 0:
            return None
        costs = compute_costs(start)
        if not costs:
            return None
        return _prediction_error(start), [replica_costs.to_floats() for replica_costs in costs]

    error_and_costs = world.on_all_ranks(compute_on_rank_0)[0]
    if error_and_costs is None:
        return None
    prediction_error, floats_by_replica = error_and_costs
    placer = document_placer(section, UnitCosts.from_floats(floats_by_replica[replica_id]))
    return replace(placer, least_gain=least_gain(prediction_error)) if section.mode is None else placer


def _prediction_error(start: JobStart) -> float:
    """Return the largest relative error of the predicted step times of the replicas; 0 without forecasts."""
    return max((forecast.prediction.error for forecast in start.forecasts), default=0.0)


def _default_costs(start: JobStart) -> Sequence[UnitCosts]:
    """Return every replica's unit costs for a section without documents; empty if the cost model cannot give them.

    The section does not ask for documents, so the limits of tokens are lowered by the error of the prediction.
    """
    try:
        costs = _unit_costs(start)
    except HeteroError as error:
        logger.debug("documents are not placed: %s", error)
        return ()
    safe_share = 1 - _prediction_error(start)
    limited_costs = []
    for replica_costs in costs:
        most_tokens = tuple(int(limit * safe_share) for limit in replica_costs.most_tokens)
        limited_costs.append(replace(replica_costs, most_tokens=most_tokens))
    return limited_costs


def _unit_costs(start: JobStart) -> Sequence[UnitCosts]:
    """Return every replica's unit costs; relative ones from the schedule's token weights if none can be predicted."""
    if not start.forecasts or start.forecasts[0].cost.model.window_layers:
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
    limited_costs = costs if section.max_tokens is None else costs.limited(section.max_tokens)
    return DocumentPlacer(limited_costs, section.min_cut_tokens, section.planner, remap=section.remap)


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
        """Renew the costs if that is predicted to save time; return whether they were renewed, the same on every rank.

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
        """Return the new costs of all replicas, on rank 0; None if the costs stay."""
        spec, schedules = self._start.facts.model.spec, self._start.plan.schedules
        if spec is None or spec.window_layers:  # the pairs that windows compute do not grow with n * n
            return None
        times_by_replica = [[times[rank] for rank in schedule.ranks] for schedule in schedules]
        new_costs = [
            measured_costs(costs, schedule, ranks, spec)
            for costs, schedule, ranks in zip(self._costs, schedules, times_by_replica, strict=True)
        ]
        gain = max(
            predicted_gain_of_documents(old, new, ranks)
            for old, new, ranks in zip(self._costs, new_costs, times_by_replica, strict=True)
        )
        is_gain = gain >= self._start.section.replan.min_gain
        if not (is_gain and self._predicted_gain_before):
            self._predicted_gain_before = is_gain
            return None
        self._predicted_gain_before = False
        self._costs = new_costs
        announce(
            f"step {step}: documents are placed by the measured speeds from now on, predicted to save {gain:.1%} of "
            "the time to compute"
        )
        return [costs.to_floats() for costs in new_costs]


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
        token_s=_fill_unmeasured(token_s, costs.token_s),
        square_s=_fill_unmeasured(square_s, costs.square_s),
        edge_s=(),  # the measured time of attention is all in the squares
    )


def _fill_unmeasured(measured_s: Sequence[float], before_s: Sequence[float]) -> tuple[float, ...]:
    """Replace zeros, which stand for unmeasured units, by the old time multiplied by the mean ratio of the others.

    Measured (2, 0) and before (1, 3) give (2, 6): the measured unit takes twice its old time, so the other does, too.
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
