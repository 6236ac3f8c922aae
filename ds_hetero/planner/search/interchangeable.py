"""Find interchangeable ranks, and skip partitions that differ only by swaps of such ranks.

Equal devices of a node are interchangeable: they have the same speed, memory and links. With two of them, a and b, and
a third rank c, the partitions {a, c} {b} and {b, c} {a} take the same time, so only the first is yielded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from ds_hetero.common.arrays import Ints
from ds_hetero.planner.search.problem import Problem

T = TypeVar("T")


def device_labels(problem: Problem) -> Ints:
    """Return a number by rank, ``[D]``; equal devices of a node have the same number and are interchangeable."""
    num_nodes = int(problem.node.max()) + 1
    return problem.kind * num_nodes + problem.node


def group_makeup(labels: Ints, group: Ints | Sequence[int]) -> tuple[int, ...]:
    """Return the sorted labels of a group's ranks; groups with the same makeup are interchangeable."""
    return tuple(np.sort(labels[group]).tolist())


def unique_by(items: Iterable[T], key: Callable[[T], object]) -> Iterator[T]:
    """Yield the first item of every key, in order."""
    keys_so_far = set()
    for item in items:
        item_key = key(item)
        if item_key not in keys_so_far:
            keys_so_far.add(item_key)
            yield item


def distinct_partitions(problem: Problem, ranks: Ints) -> Iterator[list[Ints]]:
    """Yield all partitions of ``ranks`` into groups, without those that only swap interchangeable ranks."""
    labels = device_labels(problem)
    partitions = ([ranks[block] for block in blocks] for blocks in _set_partitions(len(ranks)))
    yield from unique_by(partitions, lambda groups: tuple(sorted(group_makeup(labels, group) for group in groups)))


def _set_partitions(num: int) -> Iterator[list[list[int]]]:
    """Yield every partition of ``range(num)`` into sets, here called blocks: of 2, [[0, 1]] and [[0], [1]].

    A number joins every block of the smaller numbers in turn, and then begins a new block. So no partition comes twice.
    """

    def grow(i: int, blocks: list[list[int]]) -> Iterator[list[list[int]]]:
        """Yield all partitions in which the numbers below ``i`` are in ``blocks``."""
        if i == num:
            yield [list(block) for block in blocks]
            return
        for block in blocks:
            block.append(i)
            yield from grow(i + 1, blocks)
            block.pop()
        blocks.append([i])
        yield from grow(i + 1, blocks)
        blocks.pop()

    yield from grow(0, [])
