"""Stage I: which ranks exchange by all-to-all.

HexiSeq merges the fastest links first (arXiv:2605.07569, section 4.3). That alone finds groups of one kind
of device; mixes that waste fewer heads, groups of equal speed and the meshes of USP are added, and starts in which some
devices stay idle: over slow links the optimum drops devices.

A grouping is a list of arrays of canonical ranks, in ring order; heads are cut in the order of an array.

Covering heads with devices: which mixes of equal devices make the fewest wasted heads.

If every group must be done with its share of attention in the same time, a device of speed c takes at most
``floor(tau * c)`` heads for some common tau, and a group must cover all heads of the model: bin covering over
classes of equal devices. A head cannot be cut, so mixes of fast and slow devices often fit where groups
of one kind waste part of a device.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, product
from typing import TypeVar

import numpy as np

from ds_hetero.common.arrays import Bools, Floats, Ints, distinct
from ds_hetero.planner.search.problem import EXHAUSTIVE_RANKS, Problem

MAX_PATTERNS = 20_000
THRIFT = (0.05, 0.0, 0.5)


def best_levels(speed_C: Floats, count_C: Ints, num_heads: int, keep: int) -> Iterator[tuple[float, list[Ints], Ints]]:
    """The most promising levels tau and their covers, best first.

    tau runs over the values at which some class gains a head. With b groups at level tau attention takes
    time in proportion to ``tau / b``, so that is the order.

    Args:
        speed_C: speed of each class, count_C: devices of each class.
        num_heads: heads to cover, in units of the head granularity.
        keep: how many covers to yield.

    Yields:
        tau, the groups as counts by class, and the counts left over.
    """
    levels = distinct(np.concatenate([np.arange(1, num_heads + 1) / speed for speed in speed_C]))
    heads_TC = np.minimum(np.floor(levels[:, None] * speed_C + 1e-9), num_heads)
    bins = (heads_TC @ count_C) // num_heads
    possible = np.flatnonzero(bins >= 1)
    possible = possible[np.argsort(levels[possible] / bins[possible], kind="stable")][: 3 * keep]
    covers: list[tuple[float, int, float, list[Ints], Ints]] = []
    for i in possible.tolist():
        if sum(each[0] < levels[i] / bins[i] for each in covers) >= keep:
            break  # no cover of this level or of a later one is among the best
        heads_C = heads_TC[i].astype(np.int64)
        patterns = minimal_covers(heads_C, count_C, num_heads)
        for thrift in THRIFT:
            groups, left = cover(patterns, heads_C, count_C, num_heads, thrift)
            if groups:
                covers.append((float(levels[i]) / len(groups), i, thrift, groups, left))
    covers.sort(key=lambda item: item[:3])
    for _, i, _, groups, left in covers[:keep]:
        yield float(levels[i]), groups, left


def cover(patterns: Ints, heads_C: Ints, count_C: Ints, num_heads: int, thrift: float) -> tuple[list[Ints], Ints]:
    """Groups, as counts by class, that cover ``num_heads`` with little waste and keep the mix; and what is left.

    Greedy: always the pattern of least waste plus ``thrift`` times its deviation from the mix of the devices still
    free, a few times over before the mix is looked at again.
    """
    left = count_C.copy()
    groups: list[Ints] = []
    while len(patterns):
        patterns = patterns[(patterns <= left).all(axis=1)]
        if not len(patterns):
            break
        waste = patterns @ heads_C - num_heads
        even = left * (num_heads / (left @ heads_C))
        deviation = np.abs(patterns - even) @ heads_C
        best = patterns[np.argmin(np.round(waste + thrift * deviation, 9))]  # ties are ties on every machine
        uses = best > 0
        times = int((left[uses] // best[uses]).min())
        if deviation.min() > 1e-9:
            times = max(1, times // 4)
        groups += [best] * times
        left = left - times * best
    return groups, left


def minimal_covers(heads_C: Ints, count_C: Ints, num_heads: int) -> Ints:
    """Counts by class that cover all heads with no device to spare, ``[patterns, C]``.

    Every count but the last class's is free, the last one fills up what is missing.
    """
    useful = np.flatnonzero(heads_C)
    order = useful[np.argsort(-heads_C[useful], kind="stable")]
    limits = [int(min(count_C[c], -(-num_heads // heads_C[c]))) + 1 for c in order[:-1]]
    while np.log(limits).sum() > np.log(MAX_PATTERNS) + 1e-9:
        limits[int(np.argmax(limits))] -= 1
    counted = [i for i, limit in enumerate(limits) if limit > 1]  # few; of unlike devices there are many classes
    size = [limits[i] for i in counted]
    grid = np.indices(size).reshape(len(size), int(np.prod(size))).T
    free, last = order[counted], order[-1]
    missing = num_heads - grid @ heads_C[free]
    fill = np.maximum(-(-missing // heads_C[last]), 0)
    patterns = np.zeros((len(grid), len(heads_C)), dtype=np.int64)
    patterns[:, free] = grid
    patterns[:, last] = fill
    # A cover from which a device can be taken away is not minimal.
    covered = patterns @ heads_C
    smallest = np.where(patterns[:, order] > 0, heads_C[order], np.iinfo(np.int64).max).min(axis=1)
    return np.asarray(patterns[(covered - smallest < num_heads) & (fill <= count_C[last])])


T = TypeVar("T")
Mask = Bools

M1 = 64  # partitions kept by stage I, HexiSeq's value


def groupings(problem: Problem, active: Mask, keep: int = M1) -> Iterator[list[Ints]]:
    """At most ``keep`` partitions of the active ranks, without repeats; idle ranks are left out."""
    candidates = _candidates(problem, np.flatnonzero(active))
    yield from islice(_once(candidates, lambda groups: b"|".join(group.tobytes() for group in groups)), keep)


def _candidates(problem: Problem, ranks: Ints) -> Iterator[list[Ints]]:
    node = problem.node[ranks]
    yield [ranks]
    yield list(ranks[:, None])
    if len(ranks) <= EXHAUSTIVE_RANKS:
        yield from distinct_partitions(problem, ranks)
        return
    yield from _meshes(problem, ranks)
    for pieces in (1, 2, 4, 8):
        yield _pieces_of_nodes(ranks, node, pieces)
    yield from _agglomerated(problem, ranks)
    yield from _covers(problem, ranks)
    for num_groups in _ladder(len(ranks)):
        yield _balanced(problem, ranks, num_groups)


def _ladder(limit: int) -> list[int]:
    """Group counts worth trying: all small ones, then about three per octave."""
    steps = [*range(1, 9), *range(10, 17, 2), *range(20, 33, 4), *range(40, 65, 8), *range(80, 129, 16), 160, 192, 256]
    return [k for k in (*steps, 384, 512) if k <= limit]


def _meshes(problem: Problem, ranks: Ints) -> Iterator[list[Ints]]:
    """USP's meshes: equal groups of neighbours, and of ranks at equal distance (all-to-all across nodes)."""
    num = len(ranks)
    for size in range(2, num):
        if num % size == 0 and size <= problem.num_heads:
            yield list(ranks.reshape(-1, size))
    for size in range(2, num):
        if num % size == 0 and size <= min(problem.num_heads, 16):
            yield list(np.ascontiguousarray(ranks.reshape(size, -1).T))


def _pieces_of_nodes(ranks: Ints, node: Ints, pieces: int) -> list[Ints]:
    """Every node cut into ``pieces`` groups of neighbours."""
    groups = []
    for n in distinct(node):
        inside = ranks[node == n]
        groups += np.array_split(inside, min(pieces, len(inside)))
    return groups


def _agglomerated(problem: Problem, ranks: Ints) -> Iterator[list[Ints]]:
    """Merge nodes, whose own links come first, along ever slower links: a partition after the first and last merges."""
    node = problem.node[ranks]
    present = [int(n) for n in distinct(node)]
    cost = problem.inverse_bandwidth
    edges = sorted((float(cost[a, b]), a, b) for i, a in enumerate(present) for b in present[i + 1 :])
    parent = {n: n for n in present}

    def root(n: int) -> int:
        while parent[n] != n:
            n = parent[n]
        return n

    merges = 0
    for _, a, b in edges if len(present) <= 64 else []:
        if root(a) != root(b):
            parent[max(root(a), root(b))] = min(root(a), root(b))
            merges += 1
            if merges <= 8 or merges >= len(present) - 4:
                label = np.array([root(int(n)) for n in node])
                yield [ranks[label == r] for r in distinct(label)]


def _covers(problem: Problem, ranks: Ints) -> Iterator[list[Ints]]:
    """Bin covers of the heads, turned into ranks; what is left over joins the weakest groups or makes a group."""
    speed = problem.speed[ranks]
    speeds, kind = np.unique(-speed, return_inverse=True)
    count = np.bincount(kind)
    keep = 10 if len(ranks) <= 256 else 6
    for unit in problem.head_units:
        for _, mixes, left in best_levels(-speeds, count, problem.num_heads // unit, keep):
            for spread in (False, True):
                groups, rest = _deal(problem, ranks, kind, mixes, spread)
                yield _give_to_weakest(problem, groups, rest)
                if len(rest) and left @ -speeds > 0.5 * -(speeds @ count) / len(mixes):
                    yield groups + [rest]


def _deal(problem: Problem, ranks: Ints, kind: Ints, mixes: Sequence[Ints], spread: bool) -> tuple[list[Ints], Ints]:
    """Fill the mixes with ranks of their classes: from one node after the other, or from all nodes in turn."""
    pools = []
    for c in range(int(kind.max()) + 1):
        pool = ranks[kind == c]
        if spread:
            place = np.arange(len(pool)) - np.searchsorted(problem.node[pool], problem.node[pool])
            pool = pool[np.lexsort((problem.node[pool], place))]
        pools.append(pool)
    used = np.zeros(len(pools), dtype=np.int64)
    groups = []
    for mix in mixes:
        groups.append(np.sort(np.concatenate([pool[u : u + m] for pool, u, m in zip(pools, used, mix, strict=True)])))
        used = used + mix
    return groups, np.sort(np.concatenate([pool[u:] for pool, u in zip(pools, used, strict=True)]))


def _give_to_weakest(problem: Problem, groups: Sequence[Ints], rest: Ints) -> list[Ints]:
    groups = list(groups)
    power = np.array([problem.speed[group].sum() for group in groups])
    for rank in rest[np.argsort(-problem.speed[rest], kind="stable")]:
        k = int(np.argmin(power))
        groups[k] = np.sort(np.append(groups[k], rank))
        power[k] += problem.speed[rank]
    return groups


def _balanced(problem: Problem, ranks: Ints, num_groups: int) -> list[Ints]:
    """Groups of nearly equal speed: fastest rank first, always to the weakest group (LPT)."""
    weakest = [(0.0, k) for k in range(num_groups)]
    members: list[list[int]] = [[] for _ in range(num_groups)]
    for rank in ranks[np.argsort(-problem.speed[ranks], kind="stable")].tolist():
        power, k = heapq.heappop(weakest)
        members[k].append(rank)
        heapq.heappush(weakest, (power + float(problem.speed[rank]), k))
    return [np.sort(np.array(group)) for group in members]


def active_sets(problem: Problem) -> list[Mask]:
    """Sets of ranks that work: all, without the slowest classes, single nodes, all but one node, the best nodes."""
    num_nodes = int(problem.node.max()) + 1
    sets: list[Mask] = [np.ones(problem.num_ranks, dtype=bool)]
    sets += [problem.speed >= threshold for threshold in distinct(problem.speed)[1:][:8]]
    power = np.bincount(problem.node, weights=problem.speed)
    by_power = np.lexsort((np.arange(num_nodes), -power))
    few = range(num_nodes) if num_nodes <= 8 else []
    sets += [problem.node == n for n in few] + [problem.node != n for n in few]
    if problem.num_ranks <= EXHAUSTIVE_RANKS:
        sets += _distinct_sets(problem)
    sizes = [n for n in _ladder(num_nodes - 1) if n >= 1]
    sets += [np.isin(problem.node, by_power[:size]) for size in sizes]
    sets += [_near(problem, int(by_power[0]), size) for size in sizes]
    unique: dict[bytes, Mask] = {}
    for active in sets:
        if active.any():
            unique.setdefault(active.tobytes(), active)
    return list(unique.values())


def _distinct_sets(problem: Problem) -> list[Mask]:
    """All sets of ranks that differ in more than the names of interchangeable ranks, the most powerful first."""
    masks = [np.array(bits, dtype=bool) for bits in product((True, False), repeat=problem.num_ranks)][:-1]
    masks.sort(key=lambda active: -problem.speed[active].sum())
    name = interchangeable(problem)
    return list(_once(masks, lambda active: tuple(sorted(name[active].tolist()))))


def _near(problem: Problem, center: int, size: int) -> Mask:
    """The ``size`` nodes with the fastest links to ``center``, itself included."""
    distance = problem.inverse_bandwidth[center].copy()
    distance[center] = -1.0
    chosen = np.lexsort((np.arange(len(distance)), distance))[:size]
    return np.isin(problem.node, chosen)


def with_idle(problem: Problem, groups: Sequence[Ints], active: Mask) -> list[Ints]:
    """Put idle ranks, which get neither tokens nor heads, into the group with the fastest link to them."""
    groups = list(groups)
    if active.all():
        return groups
    idle = np.flatnonzero(~active)
    idle = idle[np.argsort(problem.node[idle], kind="stable")]
    first = problem.node[np.array([group[0] for group in groups])]
    # At once: one by one takes a quarter of the search where hundreds of nodes are one rank each.
    nearest = problem.inverse_bandwidth[np.ix_(problem.node[idle], first)].argmin(axis=1)
    for k in distinct(nearest):
        groups[k] = np.append(groups[k], idle[nearest == k])
    return groups


def neighbours(problem: Problem, groups: Sequence[Ints]) -> Iterator[list[Ints]]:
    """Partitions one step away: a rank changes its group, two ranks trade places, two groups merge, a group is split.

    Interchangeable ranks (equal devices of one node) and groups of equal make-up are tried once.
    """
    name = interchangeable(problem)
    makeup = [tuple(np.sort(name[group]).tolist()) for group in groups]
    kinds = [dict(zip(name[group].tolist()[::-1], group.tolist()[::-1], strict=True)) for group in groups]
    seen = {tuple(sorted(makeup))}

    def fresh(changed: dict[int, list[int]], added: Sequence[list[int]] = ()) -> list[Ints] | None:
        new = [np.array(sorted(changed.get(k, group))) for k, group in enumerate(groups) if changed.get(k, [0])]
        new += [np.array(group) for group in added]
        key = tuple(sorted(tuple(np.sort(name[group]).tolist()) for group in new))
        if key in seen:
            return None
        seen.add(key)
        return new

    members = [group.tolist() for group in groups]
    pairs = [(i, j) for i in range(len(groups)) for j in range(len(groups)) if i != j]
    for i, j in _once(pairs, lambda pair: (makeup[pair[0]], makeup[pair[1]])):
        for rank in kinds[i].values():
            left = [r for r in members[i] if r != rank]
            yield from _given(fresh({i: left, j: members[j] + [rank]}))
            for other in kinds[j].values():
                if i < j and name[other] != name[rank]:
                    right = [r for r in members[j] if r != other]
                    yield from _given(fresh({i: left + [other], j: right + [rank]}))
        if i < j:
            yield from _given(fresh({i: members[i] + members[j], j: []}))
    for i in _once(range(len(groups)), lambda k: makeup[k]):
        if len(members[i]) > 1:
            halves = _balanced(problem, groups[i], 2)
            yield from _given(fresh({i: halves[0].tolist()}, [halves[1].tolist()]))
            for rank in kinds[i].values():
                yield from _given(fresh({i: [r for r in members[i] if r != rank]}, [[rank]]))


def _once(items: Iterable[T], key: Callable[[T], object]) -> Iterator[T]:
    seen = set()
    for item in items:
        if key(item) not in seen:
            seen.add(key(item))
            yield item


def _given(groups: list[Ints] | None) -> Iterator[list[Ints]]:
    if groups is not None:
        yield groups


def distinct_partitions(problem: Problem, ranks: Ints) -> Iterator[list[Ints]]:
    """All partitions of some ranks that differ in more than the names of interchangeable ranks."""
    name = interchangeable(problem)
    partitions = ([ranks[block] for block in blocks] for blocks in _set_partitions(len(ranks)))
    yield from _once(partitions, lambda groups: tuple(sorted(tuple(np.sort(name[g]).tolist()) for g in groups)))


def interchangeable(problem: Problem) -> Ints:
    """A number for every rank; equal devices of one node share theirs."""
    return problem.kind * (int(problem.node.max()) + 1) + problem.node


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
