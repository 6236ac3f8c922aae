"""Make the schedule of a strategy by its name: the planner's search, a baseline, or a published planner."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_hetero.common.reading import shortened
from ds_hetero.cost.model import CostModel
from ds_hetero.errors import PlanError
from ds_hetero.planner.planning import plan
from ds_hetero.planner.results.candidates import Baselines, ScheduleCandidate
from ds_hetero.values.baselines import COMPARED, STRATEGIES, even, proportional
from ds_hetero.values.schedule import Schedule

if TYPE_CHECKING:
    from ds_hetero.planner.published.profile_table import ProfileTable


def strategy(name: str, cost: CostModel, table: ProfileTable | None = None) -> Schedule:
    """Return the schedule of the strategy ``name``; for ``usp``, that of the fastest mesh that fits into memory.

    Args:
        table: measured times for ``lut`` and ``formula``; left out, `hetero_ring.table_of`: measured on the
            ranks, or predicted.

    Raises:
        PlanError: the name is unknown, or the strategy has no schedule for this model and cluster.
    """
    heads = (cost.model.num_heads, cost.model.num_kv_heads)
    if name == "plan":
        return plan(cost.cluster, cost.model, cost.workload, cost_model=cost.name).schedule
    if name in COMPARED:
        baselines = Baselines.under(cost)
        if not baselines.of_kind(name):
            raise PlanError(f"{name}: {baselines.missing[name]}.")

        def preference(candidate: ScheduleCandidate) -> tuple[bool, float]:
            return not candidate.prediction.feasible, candidate.prediction.iteration_s

        return min(baselines.of_kind(name), key=preference).schedule
    if name == "even":
        return even(cost.cluster.num_ranks, *heads)
    if name == "proportional":
        return proportional(cost.attention_speeds, *heads)
    from ds_hetero.planner.published.registry import expect_describable, planners_of

    published = {planner.name: planner for planner in planners_of("schedule")}
    if name not in published:
        names = dict.fromkeys((*STRATEGIES, *published))
        raise PlanError(f"strategy {shortened(name)} is unknown; it is one of {', '.join(names)}.")
    expect_describable(published[name], cost.cluster, cost.model)
    make_schedule = published[name].schedule
    assert make_schedule is not None
    return make_schedule(cost, table)
