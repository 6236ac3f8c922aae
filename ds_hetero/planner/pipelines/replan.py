"""Plan again after devices were lost or added, starting from the old plan, and count the bytes that have to move.

In the first plan, the pipelines that lost no device keep their layers and share the global batch; it is made within
milliseconds. In others, stages that lost devices shrink to powers of two; they stay in their pipeline, or continue
another one. The search begins at these plans and goes on until its effort is spent.

The new plan numbers the remaining devices in their old order, then the added devices. Example: of ranks 0 to 3, rank 1
is lost and one device is added: the old ranks 0, 2 and 3 are 0, 1 and 2 now, and the added device is rank 3.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.reading import JsonDict
from ds_hetero.cost.stages.stage import DeviceBlock, Pools, StageCosts
from ds_hetero.errors import PlanError
from ds_hetero.planner.pipeline_search.blocks import block_of, cut_pool
from ds_hetero.planner.pipeline_search.cuts import LayerCuts
from ds_hetero.planner.pipeline_search.evaluate import Evaluator, Shape, Shapes, value_of
from ds_hetero.planner.pipeline_search.finish import Finished, finish, to_plan
from ds_hetero.planner.pipeline_search.search import Progress, Search, SearchResult
from ds_hetero.planner.pipelines.explain import nothing_fits
from ds_hetero.planner.pipelines.given import check_given_plan
from ds_hetero.values.plans import Plan

# Effort of the search. Chosen so that the last plan comes within a second and within 2 % of a search from nothing,
# which `python -m benchmarks.pipelines_planner growth` checks.
EFFORT_S = 0.25
EFFORT_OF_MANY_S = 0.6  # with more devices than `MANY_SURVIVORS`
MANY_SURVIVORS = 512
MAX_FIRST_PLANS = 3  # most plans from remains of the old plan at which the search begins; chosen, never measured
LEAST_PART = 1e-12  # fraction of a layer; less is rounding
OPTIMIZER_BYTES = 12  # per parameter: master weight and two moments


@dataclass(frozen=True, kw_only=True, slots=True)
class Replanned:
    """A new plan for the remaining devices, and the bytes that have to move for it.

    Args:
        moved_bytes: bytes of model states that ranks have to fetch, by the name of the link; under ``checkpoint`` those
            of which every holder is lost.
    """

    plan: Plan  # the new plan, with new ranks
    finished: Finished  # the plan as the search sees it
    rank_before: tuple[int | None, ...]  # old rank of every new rank; None for added devices
    first_s: float  # predicted time of a step under the first plan
    first_after_s: float  # time until the first plan was found
    search_s: float  # time of the search
    moved_bytes: dict[str, float]

    def to_dict(self) -> JsonDict:
        """Plain data for ``--json``."""
        return {
            "plan": self.plan.to_dict(),
            "predicted": self.plan.predicted,
            "rank_before": list(self.rank_before),
            "first_s": self.first_s,
            "first_after_s": self.first_after_s,
            "search_s": self.search_s,
            "moved_bytes": self.moved_bytes,
        }


def replan(
    plan: Plan,
    cluster: Cluster,
    make_costs: Callable[[Cluster], Sequence[StageCosts]],
    *,
    lost: Sequence[int] = (),
    added: Cluster | None = None,
    effort_s: float | None = None,
    progress: Progress | None = None,
) -> Replanned:
    """Plan again for the devices that remain.

    Args:
        cluster: the cluster of the old plan.
        make_costs: returns cost models for a cluster, for example with and without recomputation; that of the old plan
            comes first.
        lost: ranks of the old plan whose devices are gone.
        added: devices that are new; None for none.
        effort_s: effort of the search, counted as `Evaluator.spent_s`.
        progress: called with every better plan.

    Raises:
        PlanError: nothing fits, a lost rank does not exist, or the plan is not for this cluster and model.
    """
    started = time.perf_counter()
    survivors = _survivors(cluster, lost)
    models = make_costs(_join_clusters(cluster.without(lost), added))
    check_given_plan(plan, cluster, models[0].model)
    remains, samples = _remains(plan, models[0].pools, survivors)
    shapes = tuple(pipeline.shape for pipeline in remains)
    objective = models[0].time_objective()
    first: _FirstPlan | None = None
    finalists: list[_Finalist] = []
    if effort_s is None:
        effort_s = EFFORT_OF_MANY_S if len(survivors) > MANY_SURVIVORS else EFFORT_S
    for costs in models:
        evaluate = Evaluator(costs, samples, objective)
        evaluate_old_layers = Evaluator(costs, samples, objective, _old_layers(costs, remains))
        candidates = map(evaluate_old_layers, _first_plans(remains))
        first_that_fits = next((candidate for candidate in candidates if candidate is not None), None)
        starts: list[Shapes] = []
        if first_that_fits is not None:
            first = first or _FirstPlan(first_that_fits.step_s, time.perf_counter() - started)
            starts = [first_that_fits.shapes, *itertools.islice(_first_plans(remains), MAX_FIRST_PLANS)]
        result = _search(evaluate, shapes, starts, effort_s / len(models), progress)
        if result is not None:
            first = first or _FirstPlan(result.first.step_s, time.perf_counter() - started)
            finished = finish(costs, result.best)
            finalists.append(_Finalist(costs, finished, value_of(objective, finished.candidate, finished.step_s)))
    if first is None:
        raise PlanError(nothing_fits(models, None))
    best = min(finalists, key=lambda finalist: finalist.value)
    new_plan = to_plan(best.costs, best.finished)
    rank_before: tuple[int | None, ...] = (*survivors, *[None] * (0 if added is None else added.num_ranks))
    return Replanned(
        plan=new_plan,
        finished=best.finished,
        rank_before=rank_before,
        first_s=first.step_s,
        first_after_s=first.after_s,
        search_s=time.perf_counter() - started,
        moved_bytes=moved_bytes(plan, new_plan, rank_before, best.costs),
    )


class _FirstPlan(NamedTuple):
    """Predicted step of the first plan, and the time that it took to find this plan."""

    step_s: float  # predicted time of its step
    after_s: float  # time from the call until it was found


class _Finalist(NamedTuple):
    """The best plan under one cost model."""

    costs: StageCosts
    finished: Finished
    value: float  # value of the objective


def _search(
    evaluate: Evaluator, shapes: Shapes, warm: Sequence[Shapes], effort_s: float, progress: Progress | None
) -> SearchResult | None:
    """Search from the plans ``warm``, with the inner parallelism and batch sizes of the old pipelines ``shapes``."""
    blocks = itertools.chain.from_iterable(shape.blocks for shape in shapes)
    old_inners = {block.inner for block in blocks if block.size > 1}
    inners = ("tensor", "sequence") if "sequence" in old_inners else ("tensor",)
    sizes = sorted({1, *(shape.micro_batch_size for shape in shapes)})
    return Search(evaluate, sizes, inners, effort_s, progress, num_finalists=2).run(warm)


def _survivors(cluster: Cluster, lost: Sequence[int]) -> list[int]:
    """Return the ranks that remain. Raises `PlanError` if a lost rank does not exist, or if none remains."""
    unknown = sorted(rank for rank in set(lost) if not 0 <= rank < cluster.num_ranks)
    if unknown:
        raise PlanError(
            f"lost ranks {unknown} do not exist; "
            f"the cluster has ranks 0 to {cluster.num_ranks - 1}. Give ranks of the cluster before the loss."
        )
    survivors = [rank for rank in range(cluster.num_ranks) if rank not in set(lost)]
    if not survivors:
        raise PlanError(
            f"all {cluster.num_ranks} ranks are lost; nothing is left to plan for. "
            "Plan for other devices: ds-hetero plan --parallel full."
        )
    return survivors


def _join_clusters(cluster: Cluster, added: Cluster | None) -> Cluster:
    """Return the cluster with the nodes of ``added`` after its other nodes."""
    if added is None:
        return cluster
    first_added = len(cluster.nodes)
    added_links = [((a + first_added, b + first_added), link) for (a, b), link in added.links]
    nodes = (*cluster.nodes, *added.nodes)
    return Cluster(nodes=nodes, network=cluster.network, links=(*cluster.links, *added_links))


def _remains(plan: Plan, pools: Pools, survivors: Sequence[int]) -> tuple[list[_PipelineRemains], int]:
    """Return the remains of the old pipelines, and the global batch of the old plan.

    A stage over several kinds or nodes is divided into a stage for each. Pipelines without any remaining device are
    left out.

    Raises:
        PlanError: the plan lacks micro-batches.
    """
    new_rank = {old: new for new, old in enumerate(survivors)}
    remains, samples = [], 0
    for pipeline in plan.pipelines:
        if not pipeline.micro_batch_size or not pipeline.micro_batches:
            raise PlanError(
                "the plan lacks micro_batch_size or micro_batches of its pipelines. Add them to the plan file, as "
                "ds-hetero plan --parallel full --out writes them."
            )
        samples += pipeline.micro_batch_size * pipeline.micro_batches
        blocks: list[DeviceBlock] = []
        for stage in pipeline.stages:
            survivors_by_pool = Counter(pools.of_rank[new_rank[rank]] for rank in stage.ranks if rank in new_rank)
            inner = stage.inner if stage.inner != "one" and len(survivors_by_pool) == 1 else "tensor"
            for pool, devices in survivors_by_pool.items():
                # A stage that lost no device stays one block; other stages are cut into powers of two.
                if devices == len(stage.ranks):
                    blocks.append(block_of(pool, devices, inner)._replace(tensor_size=stage.tensor_size))
                else:
                    blocks += cut_pool(pool, devices, _power(devices), inner)
        if not blocks:
            continue
        num_devices = sum(block.size for block in blocks)
        is_undamaged = num_devices == len(pipeline.ranks) and len(blocks) == len(pipeline.stages)
        layers = tuple(stage.num_layers or 0 for stage in pipeline.stages) if is_undamaged else ()
        remains.append(_PipelineRemains(Shape(tuple(blocks), pipeline.micro_batch_size), layers))
    return remains, samples


class _PipelineRemains(NamedTuple):
    """The part of an old pipeline on remaining devices."""

    shape: Shape  # blocks of remaining devices
    layers: tuple[int, ...]  # layers of every stage; empty if the pipeline lost devices


def _old_layers(costs: StageCosts, pipelines: Sequence[_PipelineRemains]) -> LayerCuts:
    """Return cuts with the old layers of undamaged pipelines, so that the first plan needs no search for cuts."""
    cuts = LayerCuts(costs)
    num_undamaged = sum(bool(layers) for _, layers in pipelines)
    for shape, layers in pipelines:
        if layers and all(layers):
            cuts.keep(shape.blocks, shape.micro_batch_size, num_undamaged, layers)
    return cuts


def _power(devices: int) -> int:
    """Return the largest power of two up to ``devices``."""
    return 1 << (devices.bit_length() - 1)


def _first_plans(pipelines: Sequence[_PipelineRemains]) -> Iterator[Shapes]:
    """Yield plans made of the remains, in this order.

    1. The pipelines that lost no device, which need no new cut of their layers.
    2. All pipelines.
    3. The undamaged pipelines, with the blocks of damaged ones as further stages at the end of the last one.
    4. All blocks dealt out to half as many pipelines, to a quarter, and so on down to one.
    """
    undamaged = [shape for shape, layers in pipelines if layers]
    damaged = [shape for shape, layers in pipelines if not layers]
    if undamaged:
        yield tuple(undamaged)  # other devices are idle until the search gives them work
    if damaged:
        yield (*undamaged, *damaged)
        if undamaged:
            damaged_blocks = itertools.chain.from_iterable(shape.blocks for shape in damaged)
            longer = undamaged[-1]._replace(blocks=(*undamaged[-1].blocks, *damaged_blocks))
            yield (*undamaged[:-1], longer)
    shapes = [*undamaged, *damaged]
    num_pipelines = len(shapes) // 2
    while num_pipelines:
        groups: list[list[DeviceBlock]] = [[] for _ in range(num_pipelines)]
        for i, shape in enumerate(shapes):
            groups[i % num_pipelines] += shape.blocks
        yield tuple(Shape(tuple(group), 1) for group in groups)
        num_pipelines //= 2


def moved_bytes(old: Plan, new: Plan, rank_before: Sequence[int | None], costs: StageCosts) -> dict[str, float]:
    """Return the bytes of parameters and optimizer state that ranks need and do not have yet, by name of the link.

    Rank i of n in a tensor-parallel stage has the i-th of n equal parts of a layer. If several ranks can send a part,
    one on the same node does. Bytes of which every holder is lost count under ``checkpoint``.

    Args:
        rank_before: old rank of every new rank; None for added devices.
    """
    new_rank = {before: rank for rank, before in enumerate(rank_before) if before is not None}
    layer_bytes = costs.model.layer_parameters * (2 + OPTIMIZER_BYTES / len(new.pipelines))
    cluster, bytes_by_link = costs.cluster, defaultdict[str, float](float)
    node = cluster.node_of_rank.tolist()
    num_layers = costs.model.num_layers
    # Layer by layer: who has which part now, who needs which part, and who is the nearest holder of a missing part.
    for old_parts, new_parts in zip(_parts_by_layer(old, num_layers), _parts_by_layer(new, num_layers), strict=True):
        holders = {new_rank[before]: part for before, part in old_parts.items() if before in new_rank}
        holders_by_node: dict[int, list[int]] = {}
        for rank in holders:
            holders_by_node.setdefault(node[rank], []).append(rank)
        for rank, part in new_parts.items():
            present = _overlap(part, holders[rank]) if rank in holders else 0.0
            missing = part.stop - part.start - present
            if missing <= LEAST_PART:
                continue
            near_first = itertools.chain(holders_by_node.get(node[rank], ()), holders)
            sender = next((other for other in near_first if _overlap(part, holders[other]) > LEAST_PART), None)
            link = "checkpoint" if sender is None else cluster.link(sender, rank).name
            bytes_by_link[link] += missing * layer_bytes
    return dict(bytes_by_link)


class _LayerPart(NamedTuple):
    """Part of a layer, as fractions of its parameters: (0.5, 1.0) is the second half."""

    start: float
    stop: float


def _parts_by_layer(plan: Plan, num_layers: int) -> list[dict[int, _LayerPart]]:
    """Return for every layer the ranks that have it, each with its part of the layer."""
    parts: list[dict[int, _LayerPart]] = [{} for _ in range(num_layers)]
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            start, stop = stage.layers or (0, num_layers)
            for rank in stage.ranks:
                sharers = stage.holders_with(rank) if stage.is_tensor_parallel else (rank,)
                index, num_parts = sharers.index(rank), len(sharers)
                for layer in range(start, stop):
                    parts[layer][rank] = _LayerPart(index / num_parts, (index + 1) / num_parts)
    return parts


def _overlap(a: _LayerPart, b: _LayerPart) -> float:
    """Return the fraction of a layer that both parts have."""
    return max(0.0, min(a.stop, b.stop) - max(a.start, b.start))
