"""Repeat both phases of HexiScale in rounds (arXiv:2409.01143, section 4.4), and return the best plan of all rounds.

A round has a number of pipelines, a number of groups per pipeline, and an objective for the first phase. The paper
enumerates both numbers, and every pipeline may have a different number of groups (k_i). So a round evaluates two plans:
in one, all pipelines have the round's number of groups; in the other, each pipeline has the fastest number of groups,
up to the round's number. The objective depends on earlier rounds: if gradients took longer than pipelines on the moving
average, the bandwidth between pipelines is maximized, otherwise minimized.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ds_hetero.cost.objective import Objective
from ds_hetero.cost.stages.stage import StageCosts
from ds_hetero.planner.pipeline_search.evaluate import Evaluator, PlanCandidate, Shape
from ds_hetero.planner.pipeline_search.search import FEW_RANKS
from ds_hetero.planner.published.hexiscale.partition import partition
from ds_hetero.planner.published.hexiscale.pipelines import PipelineMaker, TimedPipeline
from ds_hetero.planner.published.interface import PublishedPlanner, only_alike_layers

ROUNDS = 50  # number of rounds; the paper's value, at which its search has usually converged
# Left open by the paper: chosen, never measured alone.
MAX_GROUPS = 4  # most groups of a pipeline
EVERY_COUNT = 8  # number of pipelines up to which every number is tried; beyond it, powers of two
DEVICES_PER_PIPELINE = 4  # least mean number of devices of a pipeline, in clusters of more than `EVERY_COUNT` devices
DECAY = 0.8  # factor by which earlier rounds count less in the moving averages


def plan_hexiscale(
    costs: StageCosts,
    objective: Objective,
    samples: int,
    sizes: Sequence[int] = (1, 2),
    rounds: int = ROUNDS,
    *,
    divide: Callable[..., list[list[int]]] = partition,
) -> PlanCandidate | None:
    """Return HexiScale's plan, evaluated with exact times; None if no round has a plan that fits.

    Args:
        samples: global batch.
        sizes: samples of a micro-batch that are tried.
        rounds: number of rounds.
        divide: the first phase, which divides the devices into pipelines; with another function the worth of
            HexiScale's partition can be measured.
    """
    evaluate = Evaluator(costs, samples, objective)
    speed_V = np.array([device.peak_flops_per_s for device in costs.cluster.devices])
    node_V = costs.cluster.node_of_rank
    bandwidth_VV = costs.cluster.node_bytes_per_s[np.ix_(node_V, node_V)]
    makers = {size: PipelineMaker(evaluate.cuts, speed_V, bandwidth_VV, size) for size in sizes}
    best: PlanCandidate | None = None
    pipelines_s = gradients_s = 0.0
    rounds_so_far = set[tuple[int, int, bool]]()
    for num_pipelines, num_groups in itertools.islice(_rounds(costs.cluster.num_ranks, samples), rounds):
        maximize = gradients_s > pipelines_s
        if (num_pipelines, num_groups, maximize) in rounds_so_far:
            continue
        rounds_so_far.add((num_pipelines, num_groups, maximize))
        members = divide(speed_V, bandwidth_VV, num_pipelines, maximize=maximize)
        for size, make in makers.items():
            for shapes in _choices(make, members, num_groups, samples / num_pipelines / size):
                plan = evaluate(shapes)
                if plan is None:
                    continue
                pipelines_s = DECAY * pipelines_s + (1 - DECAY) * plan.slowest_pipeline_s
                gradients_s = DECAY * gradients_s + (1 - DECAY) * plan.gradients_s
                if best is None or plan.value < best.value:
                    best = plan
    return None if best is None else evaluate.exact(best)


def _choices(
    make: PipelineMaker, members: Sequence[Sequence[int]], num_groups: int, micro_batches: float
) -> Iterator[tuple[Shape, ...]]:
    """Yield the two plans of a round, see the module's docstring; a plan is left out if a pipeline does not fit.

    Args:
        members: ranks of every pipeline.
        num_groups: the round's number of groups.
        micro_batches: approximate micro-batches of a pipeline.
    """
    num_pipelines = len(members)
    equal_numbers: list[TimedPipeline | None] = []
    fastest_numbers: list[TimedPipeline | None] = []
    for ranks in members:
        options = [make(ranks, k, num_pipelines, micro_batches) for k in range(1, num_groups + 1)]
        fitting = [option for option in options if option is not None]
        equal_numbers.append(options[-1])
        fastest_numbers.append(min(fitting, key=lambda option: option.time_s, default=None))
    for pipelines in (equal_numbers, fastest_numbers) if fastest_numbers != equal_numbers else (equal_numbers,):
        shapes = tuple(pipeline.shape for pipeline in pipelines if pipeline is not None)
        if len(shapes) == num_pipelines:
            yield shapes


def _rounds(devices: int, samples: int) -> Iterator[tuple[int, int]]:
    """Yield numbers of pipelines and of groups per pipeline, without end."""
    max_pipelines = min(samples, devices if devices <= EVERY_COUNT else devices // DEVICES_PER_PIPELINE)
    counts = [count for count in range(1, max_pipelines + 1) if count <= EVERY_COUNT or count & (count - 1) == 0]
    return itertools.cycle([(count, groups) for groups in range(1, MAX_GROUPS + 1) for count in counts])


def _cheap_plan(costs: StageCosts, objective: Objective, samples: int, sizes: Sequence[int]) -> PlanCandidate | None:
    """Return HexiScale's plan if there are few devices, with which the search is cheap; else None."""
    return plan_hexiscale(costs, objective, samples, sizes) if costs.cluster.num_ranks <= FEW_RANKS else None


HEXISCALE = PublishedPlanner(
    name="hexiscale",
    title="HexiScale",
    source="arXiv:2409.01143",
    pipelines=plan_hexiscale,
    first_pipelines=_cheap_plan,
    forbids=only_alike_layers(
        "its stages are numbers of layers that are alike (appendix A, Eq. 8), and those of {model} are not"
    ),
)
