"""Schedules by a short search, and the time of a step without the parts of a prediction that only people read."""

from __future__ import annotations

from math import inf

import numpy as np

from ds_hetero.common.arrays import Floats, Ints
from ds_hetero.cost.model import CostModel, once_s
from ds_hetero.cost.terms.grouping import Grouping
from ds_hetero.planner.search.budget import EvaluationBudget
from ds_hetero.planner.search.canonical import make_problem, schedule_of
from ds_hetero.planner.search.search import first_look
from ds_hetero.values.baselines import even
from ds_hetero.values.schedule import Schedule

# Budgets of a short and of a longer search, in seconds of `EvaluationBudget`. Chosen, never measured.
PROBE_S, LONG_PROBE_S = 0.01, 0.03


def short_search(cost: CostModel, budget_s: float = PROBE_S) -> Schedule | None:
    """Return a good schedule of all ranks that fits into memory; None if a search with this budget finds none."""
    if cost.cluster.num_ranks == 1:
        return even(1, cost.model.num_heads, cost.model.num_kv_heads)
    problem, rank_of = make_problem(cost)
    assignment = first_look(problem, EvaluationBudget(budget_s))
    return None if assignment is None else schedule_of(problem, assignment, rank_of)


def quick_step_s(cost: CostModel, schedule: Schedule) -> float:
    """Return the time of a step as `CostModel.predict` has it; infinite if the schedule does not fit into memory."""
    grouping, tokens_D, heads_D = cost.arrays(schedule)
    if (cost.memory_bytes(grouping, tokens_D, heads_D) > cost.capacity_bytes_D).any():
        return inf
    if not cost.host_has_room(tokens_D):
        return inf
    micro_batch_s, shared_s = micro_batch_and_shared_s(cost, grouping, tokens_D, heads_D)
    return micro_batch_s * cost.workload.micro_batches + shared_s


def micro_batch_and_shared_s(
    cost: CostModel, grouping: Grouping, tokens_D: Floats, heads_D: Ints
) -> tuple[float, float]:
    """Return the seconds of a micro-batch, and those that a step takes once, however many micro-batches it has.

    The arguments are those of `CostModel.block_s`.
    """
    outside = cost.outside_blocks_s(tokens_D)
    block_s = cost.block_s(grouping, tokens_D, heads_D)
    return block_s * cost.model.num_layers + outside.get("loss_s", 0.0), once_s(outside)


def step_lower_bound_s(cost: CostModel) -> float:
    """Return a lower bound of a step under any schedule: perfect balance, and only ZeRO's communication."""
    work, loss_s_D = cost.workload, cost.loss_s_per_token_D
    outside = cost.outside_blocks_s(np.zeros(cost.cluster.num_ranks))
    balanced_loss_s = work.seq_len / np.sum(1 / loss_s_D) if loss_s_D.all() else 0.0
    loss_s = max(outside.get("loss_s", 0.0), float(balanced_loss_s))
    return work.micro_batches * (cost.model.num_layers * cost.least_block_s + loss_s) + once_s(outside)
