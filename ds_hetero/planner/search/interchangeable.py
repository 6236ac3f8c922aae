"""Ranks that could trade names without a change: partitions are tried once for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from ds_hetero.common.arrays import Ints
from ds_hetero.planner.search.problem import Problem

T = TypeVar("T")


def interchangeable(problem: Problem) -> Ints:
    """A number for every rank; equal devices of one node share theirs."""
    num_nodes = int(problem.node.max()) + 1
    return problem.kind * num_nodes + problem.node


def makeup_of(name: Ints, group: Ints | Sequence[int]) -> tuple[int, ...]:
    """The names of a group's ranks, sorted; groups of one makeup are interchangeable."""
    return tuple(np.sort(name[group]).tolist())


def once(items: Iterable[T], key: Callable[[T], object]) -> Iterator[T]:
    """The first item of every key."""
    seen = set()
    for item in items:
        item_key = key(item)
        if item_key not in seen:
            seen.add(item_key)
            yield item


def distinct_partitions(problem: Problem, ranks: Ints) -> Iterator[list[Ints]]:
    """All partitions of some ranks that differ in more than the names of interchangeable ranks."""
    name = interchangeable(problem)
    partitions = ([ranks[block] for block in blocks] for blocks in _set_partitions(len(ranks)))
    yield from once(partitions, lambda groups: tuple(sorted(makeup_of(name, group) for group in groups)))


def _set_partitions(num: int) -> Iterator[list[list[int]]]:
    """Every partition of ``range(num)``, by restricted growth strings."""

    def grow(i: int, blocks: list[list[int]]) -> Iterator[list[list[int]]]:
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
