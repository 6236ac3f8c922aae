"""Both phases of HexiScale again and again (arXiv:2409.01143, section 4.4), the best plan of all rounds.

A round has a number of pipelines, a number of groups, and an objective for the first phase. The text enumerates the
numbers, with groups of their own for every pipeline (k_i): a round judges the plan whose pipelines all have the round's
number, and the one whose pipelines have whichever number up to it is fastest. The objective follows from the history:
where gradients took longer than pipelines on the moving average, links between pipelines get as much bandwidth as
possible, and as little otherwise.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter

import numpy as np

from ds_hetero.cost.objective import Objective
from ds_hetero.cost.stages.stage import StageCosts
from ds_hetero.planner.pipeline_search.evaluate import Evaluator, PlanCandidate, Shape
from ds_hetero.planner.pipeline_search.search import FEW_RANKS
from ds_hetero.planner.published.hexiscale.partition import partition
from ds_hetero.planner.published.hexiscale.pipelines import PipelineMaker
from ds_hetero.planner.published.interface import PublishedPlanner, no_recurrence

ROUNDS = 50  # the paper's, at which its search has usually converged
# Left open by the paper: chosen, never measured alone.
MAX_GROUPS = 4  # of a pipeline
EVERY_COUNT = 8  # pipelines up to which every number is tried; powers of two above
DEVICES_PER_PIPELINE = 4  # in large clusters
DECAY = 0.8  # of the moving averages


def plan_hexiscale(
    costs: StageCosts,
    objective: Objective,
    samples: int,
    sizes: Sequence[int] = (1, 2),
    rounds: int = ROUNDS,
    *,
    divide: Callable[..., list[list[int]]] = partition,
) -> PlanCandidate | None:
    """Return HexiScale's plan, judged by the last word of the cost model; None if no round has one that fits.

    Args:
        rounds: of both phases.
        divide: the first phase, for comparison with another one.
    """
    evaluate = Evaluator(costs, samples, objective)
    speed_V = np.array([device.peak_flops_per_s for device in costs.cluster.devices])
    node_V = costs.cluster.node_of_rank
    bandwidth_VV = costs.cluster.node_bytes_per_s[np.ix_(node_V, node_V)]
    makers = {size: PipelineMaker(evaluate.cuts, speed_V, bandwidth_VV, size) for size in sizes}
    best: PlanCandidate | None = None
    pipelines_s = gradients_s = 0.0
    tried = set[tuple[int, int, bool]]()
    for count, groups in itertools.islice(_rounds(costs.cluster.num_ranks, samples), rounds):
        maximize = gradients_s > pipelines_s
        if (count, groups, maximize) in tried:
            continue
        tried.add((count, groups, maximize))
        members = divide(speed_V, bandwidth_VV, count, maximize=maximize)
        for size, make in makers.items():
            for shapes in _choices(make, members, groups, samples / count / size):
                plan = evaluate(shapes)
                if plan is None:
                    continue
                pipelines_s = DECAY * pipelines_s + (1 - DECAY) * plan.pipelines_s
                gradients_s = DECAY * gradients_s + (1 - DECAY) * plan.gradients_s
                if best is None or plan.value < best.value:
                    best = plan
    return None if best is None else evaluate.exact(best)


def _choices(
    make: PipelineMaker, members: Sequence[Sequence[int]], groups: int, micro_batches: float
) -> Iterator[tuple[Shape, ...]]:
    """Pipelines of ``groups`` groups, and those with the fastest number of groups up to it for every one of them."""
    pipelines = len(members)
    options = [[make(ranks, k, pipelines, micro_batches) for k in range(1, groups + 1)] for ranks in members]
    equal = [of_pipeline[-1] for of_pipeline in options]
    own = [min(filter(None, of_pipeline), key=itemgetter(0), default=None) for of_pipeline in options]
    for made in (equal, own) if own != equal else (equal,):
        shapes = tuple(each[1] for each in made if each is not None)
        if len(shapes) == pipelines:
            yield shapes


def _rounds(devices: int, samples: int) -> Iterator[tuple[int, int]]:
    """Numbers of pipelines and of groups per pipeline, over and over."""
    most = min(samples, devices if devices <= EVERY_COUNT else devices // DEVICES_PER_PIPELINE)
    counts = [count for count in range(1, most + 1) if count <= EVERY_COUNT or count & (count - 1) == 0]
    return itertools.cycle([(count, groups) for groups in range(1, MAX_GROUPS + 1) for count in counts])


def _first(costs: StageCosts, objective: Objective, samples: int, sizes: Sequence[int]) -> PlanCandidate | None:
    """HexiScale's plan where few devices make it cheap."""
    return plan_hexiscale(costs, objective, samples, sizes) if costs.cluster.num_ranks <= FEW_RANKS else None


HEXISCALE = PublishedPlanner(
    name="hexiscale",
    title="HexiScale",
    source="arXiv:2409.01143",
    pipelines=plan_hexiscale,
    first_pipelines=_first,
    forbids=no_recurrence(
        "its stages are numbers of layers that are alike (appendix A, Eq. 8), and those of {model} are not"
    ),
)
