"""The best plan of a small cluster, by trying every set of blocks, every grouping into pipelines and every order.

Layers and micro-batches of each are those of `cuts` and `batches`, which are checked apart. Equal blocks are
interchangeable, so multisets are enumerated; idle devices are allowed. For up to about six devices.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from math import inf

from ds_hetero.cost.stages.stage import Block, Pool
from ds_hetero.errors import PlanError
from ds_hetero.planner.outer.blocks import block_of, sizes_up_to
from ds_hetero.planner.outer.search.evaluate import Candidate, Evaluator, Shape

__all__ = ["solve_exact"]

MAX_DEVICES = 8


def solve_exact(evaluate: Evaluator, sizes: Sequence[int] = (1, 2), max_size: int = 2) -> Candidate | None:
    """Return the best plan with one micro-batch size for all pipelines; None if nothing fits.

    Args:
        evaluate: judges plans.
        sizes: of micro-batches.
        max_size: devices of a block.

    Raises:
        PlanError: the cluster has too many devices for this.
    """
    pools = evaluate.costs.pools
    if evaluate.costs.cluster.num_ranks > MAX_DEVICES:
        raise PlanError(f"the exact reference takes up to {MAX_DEVICES} devices.")
    best: Candidate | None = None
    for chosen in itertools.product(*(list(_blocks_of(pool, max_size)) for pool in pools.pools)):
        blocks = Counter(block for of_pool in chosen for block in of_pool)
        for groups in _partitions(tuple(blocks.items())):
            orders = [sorted(set(itertools.permutations(group))) for group in groups]
            for size, pipelines in itertools.product(sizes, itertools.product(*orders)):
                shapes = tuple(Shape(of_pipeline, size) for of_pipeline in pipelines)
                candidate = evaluate(shapes, inf if best is None else best.value)
                if candidate is not None and (best is None or candidate.value < best.value):
                    best = candidate
    return best


def _blocks_of(pool: Pool, max_size: int) -> Iterator[tuple[Block, ...]]:
    """Every multiset of blocks of a pool, idle devices allowed."""
    allowed = sizes_up_to(len(pool.ranks), max_size)
    for count in range(len(pool.ranks) + 1):
        for chosen in itertools.combinations_with_replacement(allowed, count):
            if sum(chosen) <= len(pool.ranks):
                yield tuple(block_of(pool, size) for size in chosen)


def _partitions(items: tuple[tuple[Block, int], ...]) -> Iterator[list[tuple[Block, ...]]]:
    """Every way to share a multiset of blocks among pipelines; pipelines are interchangeable."""
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
