"""The schedule whose memory is shown: the fastest that fits, or the one that is nearest to fitting; and the limits.

Imports no torch.
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
from ds_hetero.planner.search.memory_fit import fits_somehow
from ds_hetero.planner.strategies import strategy
from ds_hetero.values.schedule import Schedule

# Of memory, when the nearest schedule is looked for: the most, and between two sizes. Chosen, never measured.
MAX_GROWTH, _GROWTH_STEP = 2**20, 1.1
LONGEST = 2**24  # tokens of a sequence; longer ones are not tried
_LENGTH_UNIT, _UNITS_TO_ROUND = 256, 32  # a longest sequence is a multiple of 256 tokens beyond 8,192


@dataclass(frozen=True, slots=True)
class Fitted:
    """A schedule, its cost model and its prediction."""

    cost: CostModel  # bound to cluster, model and workload
    schedule: Schedule  # of the fastest that fits, or of the nearest to fitting
    prediction: Prediction  # of the schedule; says whether it fits

    @property
    def fits(self) -> bool:
        """Every rank has the memory that it needs."""
        return self.prediction.feasible

    @property
    def iteration_s(self) -> float:
        """Predicted time of an optimizer step."""
        return self.prediction.iteration_s


def with_workload(cost: CostModel, workload: Workload) -> CostModel:
    """The same cost model for another workload."""
    return make_cost_model(cost.name, cost.cluster, cost.model, workload)


def best_schedule(cost: CostModel, source: str | Schedule = "plan") -> Fitted:
    """The schedule to be judged.

    Args:
        source: a schedule, or the name of a strategy; ``plan`` is the fastest schedule that fits, and where none fits
            the fastest one on cards that are all larger by the same factor, the least that makes one fit.

    Raises:
        PlanError: the strategy has no schedule for this cluster, or none is near to fitting.
    """
    if source != "plan":
        schedule = source if isinstance(source, Schedule) else strategy(source, cost)
        return Fitted(cost, schedule, cost.predict(schedule))
    best = _fastest(cost) or _nearest(cost)
    return Fitted(cost, best.schedule, cost.predict(best.schedule))


def longest_sequence(cost: CostModel, source: str | Schedule = "plan") -> int:
    """The longest sequence that fits, to about 1 % and a multiple of 256 tokens beyond 8,192; 0 if none does.

    By bisection: each length is planned anew, since longer sequences want other shares.
    """

    def fits(seq_len: int) -> bool:
        at = with_workload(cost, replace(cost.workload, seq_len=seq_len))
        if source == "plan":
            return fits_somehow(at) or _fastest(at) is not None
        return best_schedule(at, source).fits

    least = cost.cluster.num_ranks
    if not fits(least):
        return 0
    low, high = least, max(cost.workload.seq_len, 2 * least)
    while high < LONGEST and fits(high):
        low, high = high, 2 * high
    return _bisect(fits, low, min(high, LONGEST))


def _bisect(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest length that fits, between one that does and one that does not, to 1 %."""
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
    return fastest(searched_candidates(cost), Baselines.under(cost).candidates)


def _with_memory(cost: CostModel, factor: float) -> CostModel:
    """The same cost model for cards with ``factor`` times as much memory for tensors, in machines without limit."""

    def larger(device: DeviceSpec) -> DeviceSpec:
        left = factor * (device.memory_bytes - device.reserved_bytes)
        return replace(device, memory_bytes=device.reserved_bytes + int(left))

    cluster = cost.cluster.with_devices(larger)
    cluster = replace(cluster, nodes=tuple(replace(node, host_memory_bytes=None) for node in cluster.nodes))
    return make_cost_model(cost.name, cluster, cost.model, cost.workload)


def _nearest(cost: CostModel) -> ScheduleCandidate:
    """The fastest schedule on cards that are all larger by about the least factor with which there is one.

    Raises:
        PlanError: no factor up to `MAX_GROWTH` is enough.
    """
    factor = 1.0
    while factor < MAX_GROWTH and not fits_somehow(_with_memory(cost, 2 * factor)):
        factor *= 2
    while factor < MAX_GROWTH:
        larger = _with_memory(cost, factor)
        if fits_somehow(larger) and (best := _fastest(larger)) is not None:
            return best
        factor *= _GROWTH_STEP
    raise PlanError(
        f"{cost.model.name} needs more than {MAX_GROWTH:,} times the memory of these cards. Give a smaller model, "
        "shorter sequences, or more cards."
    )
