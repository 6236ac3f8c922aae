"""A new plan when devices are lost or added, from the parts of the old one, and what it takes to move to it.

Pipelines that lost nothing keep their layers and take over the batch: this plan is there in milliseconds. Blocks that
lost devices shrink to powers of two, in pipelines of their own or at the end of another one, and the search goes on
from these plans for the rest of its effort.

Ranks of the new plan are those of the devices that are left, in their old order, with added ones behind.
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
from ds_hetero.planner.pipeline_search.blocks import cut_pool
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
FIRST_SHAPES = 3  # plans that the search begins at; chosen, never measured
NOTHING = 1e-12  # of a layer; less is rounding
OPTIMIZER_BYTES = 12  # per parameter: master weight and two moments


@dataclass(frozen=True, kw_only=True, slots=True)
class Replanned:
    """A new plan for the devices that are left."""

    plan: Plan  # in new ranks
    finished: Finished  # the same as the search sees it
    rank_before: tuple[int | None, ...]  # old rank of every new one; None for added devices
    first_s: float  # step of the plan that was there first
    first_after_s: float  # time until it was there
    search_s: float  # time in all
    moved_bytes: dict[str, float]  # states to fetch by link; ``checkpoint`` where all that held them are lost

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
    """Plan again for the devices that are left. Raises `PlanError`: nothing fits, or ranks are unknown.

    Args:
        make_costs: cost models for a cluster, the plan's own first; others recompute where it does not, or the like.
    """
    started = time.perf_counter()
    survivors = _survivors(cluster, lost)
    models = make_costs(_joined(cluster.without(lost), added))
    check_given_plan(plan, cluster, models[0].model)
    old, samples = _old_shapes(plan, models[0].pools, survivors)
    shapes = tuple(pipeline.shape for pipeline in old)
    goal = models[0].time_objective()
    first: tuple[float, float] | None = None
    finalists: list[tuple[StageCosts, Finished]] = []
    if effort_s is None:
        effort_s = EFFORT_OF_MANY_S if len(survivors) > MANY_SURVIVORS else EFFORT_S
    for costs in models:
        evaluate = Evaluator(costs, samples, goal)
        quick = Evaluator(costs, samples, goal, _old_layers(costs, old))
        warm = next((found for found in map(quick, _shrunken(old)) if found is not None), None)
        if warm is not None and first is None:
            first = warm.step_s, time.perf_counter() - started
        start = [] if warm is None else [warm.shapes, *itertools.islice(_shrunken(old), FIRST_SHAPES)]
        result = _search(evaluate, shapes, start, effort_s / len(models), progress)
        if result is not None:
            first = first or (result.first.step_s, time.perf_counter() - started)
            finalists.append((costs, finish(costs, result.best)))
    if first is None:
        raise PlanError(nothing_fits(models, None))
    costs, finished = min(finalists, key=lambda one: value_of(goal, one[1].candidate, one[1].step_s))
    new_plan = to_plan(costs, finished)
    rank_before: tuple[int | None, ...] = (*survivors, *[None] * (0 if added is None else added.num_ranks))
    return Replanned(
        plan=new_plan,
        finished=finished,
        rank_before=rank_before,
        first_s=first[0],
        first_after_s=first[1],
        search_s=time.perf_counter() - started,
        moved_bytes=moved_bytes(plan, new_plan, rank_before, costs),
    )


def _search(
    evaluate: Evaluator, shapes: Shapes, warm: Sequence[Shapes], effort_s: float, progress: Progress | None
) -> SearchResult | None:
    blocks = itertools.chain.from_iterable(shape.blocks for shape in shapes)
    used = {block.inner for block in blocks if block.size > 1}
    inners = ("tensor", "sequence") if "sequence" in used else ("tensor",)
    sizes = sorted({1, *(shape.micro_batch_size for shape in shapes)})
    return Search(evaluate, sizes, inners, effort_s, progress, last_word=2).run(warm)


def _survivors(cluster: Cluster, lost: Sequence[int]) -> list[int]:
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


def _joined(cluster: Cluster, added: Cluster | None) -> Cluster:
    if added is None:
        return cluster
    first_added = len(cluster.nodes)
    added_links = [((a + first_added, b + first_added), link) for (a, b), link in added.links]
    nodes = (*cluster.nodes, *added.nodes)
    return Cluster(nodes=nodes, network=cluster.network, links=(*cluster.links, *added_links))


def _old_shapes(plan: Plan, pools: Pools, survivors: Sequence[int]) -> tuple[list[_Old], int]:
    """The old pipelines on devices that are left, without stages that span kinds or nodes, and the global batch."""
    new_rank = {old: new for new, old in enumerate(survivors)}
    shapes, samples = [], 0
    for pipeline in plan.pipelines:
        if not pipeline.micro_batch_size or not pipeline.micro_batches:
            raise PlanError(
                "the plan does not say micro_batch_size and micro_batches of its pipelines. Add them to the plan file, "
                "as ds-hetero plan --parallel full --out writes them."
            )
        samples += pipeline.micro_batch_size * pipeline.micro_batches
        blocks: list[DeviceBlock] = []
        for stage in pipeline.stages:
            survivors_by_pool = Counter(pools.of_rank[new_rank[rank]] for rank in stage.ranks if rank in new_rank)
            inner = stage.inner if stage.inner != "one" and len(survivors_by_pool) == 1 else "tensor"
            for pool, devices in survivors_by_pool.items():
                # A stage that lost nothing stays one block; the rest of another one is cut into powers of two.
                size = devices if devices == len(stage.ranks) else _power(devices)
                blocks += cut_pool(pool, devices, size, inner)
        if not blocks:
            continue
        num_devices = sum(block.size for block in blocks)
        is_whole = num_devices == len(pipeline.ranks) and len(blocks) == len(pipeline.stages)
        layers = tuple(stage.num_layers or 0 for stage in pipeline.stages) if is_whole else ()
        shapes.append(_Old(Shape(tuple(blocks), pipeline.micro_batch_size), layers))
    return shapes, samples


class _Old(NamedTuple):
    """Remains of an old pipeline."""

    shape: Shape  # its blocks
    layers: tuple[int, ...]  # of every stage; empty where it lost devices


def _old_layers(costs: StageCosts, pipelines: Sequence[_Old]) -> LayerCuts:
    """Cuts that keep the layers of pipelines which lost nothing, so that the first plan is there at once."""
    cuts = LayerCuts(costs)
    num_whole = sum(bool(layers) for _, layers in pipelines)
    for shape, layers in pipelines:
        if layers and all(layers):
            cuts.keep(shape.blocks, shape.micro_batch_size, num_whole, layers)
    return cuts


def _power(devices: int) -> int:
    """The largest power of two that fits."""
    return 1 << (devices.bit_length() - 1)


def _shrunken(pipelines: Sequence[_Old]) -> Iterator[Shapes]:
    """Plans that may still fit: at once those that need no new cut, then others, then fewer and fewer pipelines."""
    whole = [shape for shape, layers in pipelines if layers]
    damaged = [shape for shape, layers in pipelines if not layers]
    if whole:
        yield tuple(whole)  # the devices of the others stay idle until the search finds them a place
    if damaged:
        yield (*whole, *damaged)
        if whole:
            spare = itertools.chain.from_iterable(shape.blocks for shape in damaged)
            yield (*whole[:-1], whole[-1]._replace(blocks=(*whole[-1].blocks, *spare)))
    shapes = [*whole, *damaged]
    count = len(shapes) // 2
    while count:
        groups: list[list[DeviceBlock]] = [[] for _ in range(count)]
        for number, shape in enumerate(shapes):
            groups[number % count] += shape.blocks
        yield tuple(Shape(tuple(group), 1) for group in groups)
        count //= 2


def moved_bytes(old: Plan, new: Plan, rank_before: Sequence[int | None], costs: StageCosts) -> dict[str, float]:
    """Parameters and owned optimizer state that ranks need and do not hold yet, by the link they come over.

    A rank of a tensor-parallel stage holds its n-th part of a layer. What several ranks can send comes from one on the
    same node if there is one.
    """
    new_rank = {before: rank for rank, before in enumerate(rank_before) if before is not None}
    layer_bytes = costs.model.layer_parameters * (2 + OPTIMIZER_BYTES / len(new.pipelines))
    cluster, moved = costs.cluster, defaultdict[str, float](float)
    node = cluster.node_of_rank.tolist()
    num_layers = costs.model.num_layers
    for parts_before, parts_after in zip(_holders(old, num_layers), _holders(new, num_layers), strict=True):
        holders = {new_rank[before]: part for before, part in parts_before.items() if before in new_rank}
        on_node: dict[int, list[int]] = {}
        for rank in holders:
            on_node.setdefault(node[rank], []).append(rank)
        for rank, part in parts_after.items():
            present = _overlap(part, holders[rank]) if rank in holders else 0.0
            missing = part[1] - part[0] - present
            if missing <= NOTHING:
                continue
            near_first = itertools.chain(on_node.get(node[rank], ()), holders)
            sender = next((other for other in near_first if _overlap(part, holders[other]) > NOTHING), None)
            link = "checkpoint" if sender is None else cluster.link(sender, rank).name
            moved[link] += missing * layer_bytes
    return dict(moved)


Part = tuple[float, float]


def _holders(plan: Plan, num_layers: int) -> list[dict[int, Part]]:
    """Which part of a layer every rank holds, by layer."""
    layers: list[dict[int, Part]] = [{} for _ in range(num_layers)]
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            start, stop = stage.layers or (0, num_layers)
            parts = len(stage.ranks) if stage.inner == "tensor" else 1
            for index, rank in enumerate(stage.ranks):
                number = index if parts > 1 else 0
                for layer in range(start, stop):
                    layers[layer][rank] = number / parts, (number + 1) / parts
    return layers


def _overlap(a: Part, b: Part) -> float:
    return max(0.0, min(a[1], b[1]) - max(a[0], b[0]))
