"""Find the best plan of a small cluster by trying every set of blocks, every grouping into pipelines and every order.

Layers and micro-batches of each are those of `cuts` and `batches`, which are checked separately. Equal blocks are
interchangeable, so multisets are enumerated; idle devices are allowed. All orders of a grouping are skipped at once if
pipelines with the least fill and the least period over their orders are too slow. It works for up to about six devices.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from math import inf

from ds_hetero.cost.stages.stage import NO_SYNC, DeviceBlock, Pool
from ds_hetero.errors import PlanError
from ds_hetero.planner.pipeline_search.batches import batch_bound_s
from ds_hetero.planner.pipeline_search.blocks import block_of, sizes_up_to
from ds_hetero.planner.pipeline_search.evaluate import Evaluator, PlanCandidate, Shape

MAX_DEVICES = 8


def solve_pipelines_exact(
    evaluate: Evaluator, sizes: Sequence[int] = (1, 2), max_size: int = 2, below: float = inf
) -> PlanCandidate | None:
    """Return the best plan with one micro-batch size for all pipelines; None if no plan fits.

    Args:
        evaluate: judges plans.
        sizes: of micro-batches.
        max_size: largest number of devices of a block.
        below: value that a plan must be below; None is returned if no plan is.

    Raises:
        PlanError: the cluster has too many devices.
    """
    pools = evaluate.costs.pools
    if evaluate.costs.cluster.num_ranks > MAX_DEVICES:
        raise PlanError(f"the exact reference takes up to {MAX_DEVICES} devices.")
    orders_of = cache(lambda group: sorted(set(itertools.permutations(group))))
    fastest = cache(lambda group, size, count: _fastest(evaluate, orders_of(group), size, count))
    best: PlanCandidate | None = None
    for chosen in itertools.product(*(list(_blocks_of(pool, max_size)) for pool in pools.pools)):
        blocks = Counter(block for of_pool in chosen for block in of_pool)
        rate = sum(block.total(evaluate.objective.per_s) * number for block, number in blocks.items())
        for groups in _partitions(tuple(blocks.items())):
            for size in sizes:
                times = [fastest(group, size, len(groups)) for group in groups]
                fitting = [each for each in times if each is not None]
                if len(fitting) < len(times):
                    continue
                fill_s, period_s = zip(*fitting, strict=True)
                bound_s = batch_bound_s(fill_s, period_s, [size] * len(groups), evaluate.samples)
                if evaluate.objective.value(evaluate.costs.step_s(bound_s, NO_SYNC, 0.0), rate, 0.0) >= below:
                    continue
                for pipelines in itertools.product(*map(orders_of, groups)):
                    candidate = evaluate(tuple(Shape(of_pipeline, size) for of_pipeline in pipelines), below)
                    if candidate is not None and candidate.value < below:
                        best, below = candidate, candidate.value
    return best


def _fastest(
    evaluate: Evaluator, orders: Sequence[tuple[DeviceBlock, ...]], size: int, count: int
) -> tuple[float, float] | None:
    """Return the least fill and the least period over all cuts and orders of a pipeline's blocks; None if none fits."""
    cuts = [cut for blocks in orders for cut in evaluate.cuts(blocks, size, count)]
    return (min(cut.fill_s for cut in cuts), min(cut.period_s for cut in cuts)) if cuts else None


def _blocks_of(pool: Pool, max_size: int) -> Iterator[tuple[DeviceBlock, ...]]:
    """Yield every multiset of blocks of a pool; devices may stay idle."""
    allowed = sizes_up_to(len(pool.ranks), max_size)
    for count in range(len(pool.ranks) + 1):
        for chosen in itertools.combinations_with_replacement(allowed, count):
            if sum(chosen) <= len(pool.ranks):
                yield tuple(block_of(pool, size) for size in chosen)


def _partitions(items: tuple[tuple[DeviceBlock, int], ...]) -> Iterator[list[tuple[DeviceBlock, ...]]]:
    """Yield every way to divide a multiset of blocks among interchangeable pipelines."""
    blocks = [block for block, _ in items]

    def parts(left: tuple[int, ...], top: tuple[int, ...]) -> Iterator[list[tuple[int, ...]]]:
        if not any(left):
            yield []
            return
        for part in itertools.product(*(range(count + 1) for count in left)):
            if any(part) and part <= top:
                for rest in parts(tuple(a - b for a, b in zip(left, part, strict=True)), part):
                    yield [part, *rest]

    counts = tuple(count for _, count in items)
    if counts:
        for partition in parts(counts, counts):
            yield [tuple(b for b, n in zip(blocks, part, strict=True) for _ in range(n)) for part in partition]
