"""Find the schedule whose memory is reported, and the longest sequence that fits.

The schedule is the fastest one that fits, or if none fits, the one that is nearest to fitting. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ds_hetero.cluster.topology import DeviceSpec
from ds_hetero.cost import make_cost_model
from ds_hetero.cost.model import CostModel, Prediction
from ds_hetero.cost.workload import Workload
from ds_hetero.errors import PlanError
from ds_hetero.planner.planning import searched_candidates
from ds_hetero.planner.results.candidates import Baselines, ScheduleCandidate, fastest
from ds_hetero.planner.search.memory_fit import fits_in_a_simple_grouping
from ds_hetero.planner.strategies import strategy
from ds_hetero.values.schedule import Schedule

# The search for the nearest schedule enlarges all memories by a factor: the largest factor, and the ratio from one
# factor to the next. Chosen, never measured.
MAX_GROWTH, _GROWTH_STEP = 2**20, 1.1
LONGEST = 2**24  # tokens of the longest sequence that is tried
_LENGTH_UNIT, _UNITS_TO_ROUND = 256, 32  # beyond 32 * 256 = 8,192 tokens, the result is a multiple of 256


@dataclass(frozen=True, slots=True)
class Fitted:
    """A schedule with its cost model and its prediction."""

    cost: CostModel  # cost model of the cluster, model and workload
    schedule: Schedule  # the fastest schedule that fits, or the nearest to fitting
    prediction: Prediction  # prediction of the schedule; says whether it fits

    @property
    def fits(self) -> bool:
        """Whether every rank has enough memory."""
        return self.prediction.feasible

    @property
    def iteration_s(self) -> float:
        """Predicted time of an optimizer step."""
        return self.prediction.iteration_s


def with_workload(cost: CostModel, workload: Workload) -> CostModel:
    """Return the same cost model for another workload."""
    return make_cost_model(cost.name, cost.cluster, cost.model, workload)


def best_schedule(cost: CostModel, source: str | Schedule = "plan") -> Fitted:
    """Return the schedule whose memory is reported, with its prediction.

    Args:
        source: a schedule, or the name of a strategy. ``plan`` is the fastest schedule that fits. If none fits, all
            cards are given more memory, by the smallest factor with which a schedule fits, and the fastest schedule on
            these cards is returned.

    Raises:
        PlanError: the strategy has no schedule for this cluster, or none fits even on much larger cards.
    """
    if source != "plan":
        schedule = source if isinstance(source, Schedule) else strategy(source, cost)
        return Fitted(cost, schedule, cost.predict(schedule))
    best = _fastest(cost) or _nearest(cost)
    return Fitted(cost, best.schedule, cost.predict(best.schedule))


def longest_sequence(cost: CostModel, source: str | Schedule = "plan") -> int:
    """Return the longest sequence that fits, to about 1 %, by bisection; 0 if none fits.

    Beyond 8,192 tokens it is a multiple of 256. Every length is planned anew, since longer sequences need other shares.
    """

    def fits(seq_len: int) -> bool:
        cost_at_length = with_workload(cost, replace(cost.workload, seq_len=seq_len))
        if source == "plan":
            return fits_in_a_simple_grouping(cost_at_length) or _fastest(cost_at_length) is not None
        return best_schedule(cost_at_length, source).fits

    least = cost.cluster.num_ranks
    if not fits(least):
        return 0
    low, high = least, max(cost.workload.seq_len, 2 * least)
    while high < LONGEST and fits(high):
        low, high = high, 2 * high
    return _bisect(fits, low, min(high, LONGEST))


def _bisect(fits: Callable[[int], bool], low: int, high: int) -> int:
    """Return the longest length that fits, to 1 %, between ``low``, which fits, and ``high``, which does not."""
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        if middle > _UNITS_TO_ROUND * _LENGTH_UNIT:
            rounded_up = -(-middle // _LENGTH_UNIT) * _LENGTH_UNIT
            rounded_down = middle // _LENGTH_UNIT * _LENGTH_UNIT
            middle = rounded_up if rounded_up < high else rounded_down
        if middle <= low:
            break
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def _fastest(cost: CostModel) -> ScheduleCandidate | None:
    """Return the fastest schedule of the search and of the baselines; None if none fits."""
    return fastest(searched_candidates(cost), Baselines.under(cost).candidates)


def _with_memory(cost: CostModel, factor: float) -> CostModel:
    """Return the cost model with ``factor`` times the memory for tensors on every card, and unlimited host memory."""

    def larger(device: DeviceSpec) -> DeviceSpec:
        tensor_bytes = factor * (device.memory_bytes - device.reserved_bytes)
        return replace(device, memory_bytes=device.reserved_bytes + int(tensor_bytes))

    cluster = cost.cluster.with_devices(larger)
    cluster = replace(cluster, nodes=tuple(replace(node, host_memory_bytes=None) for node in cluster.nodes))
    return make_cost_model(cost.name, cluster, cost.model, cost.workload)


def _nearest(cost: CostModel) -> ScheduleCandidate:
    """Return the fastest schedule on cards with more memory, all by the same factor, with which a schedule fits.

    The factor is about the smallest: within 10 %.

    Raises:
        PlanError: no factor up to `MAX_GROWTH` is enough.
    """
    factor = 1.0
    while factor < MAX_GROWTH and not fits_in_a_simple_grouping(_with_memory(cost, 2 * factor)):
        factor *= 2
    while factor < MAX_GROWTH:
        larger_cards = _with_memory(cost, factor)
        if fits_in_a_simple_grouping(larger_cards) and (best := _fastest(larger_cards)) is not None:
            return best
        factor *= _GROWTH_STEP
    raise PlanError(
        f"{cost.model.name} needs more than {MAX_GROWTH:,} times the memory of these cards. Give a smaller model, "
        "shorter sequences, or more cards."
    )
