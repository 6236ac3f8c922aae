"""Stage I: which ranks exchange by all-to-all.

HexiSeq merges the fastest links first (arXiv:2605.07569, section 4.3). That alone finds groups of one kind of device;
mixes that waste fewer heads (`covers`), groups of equal speed and the meshes of USP are added. Which ranks work at all
says `working_sets`.

A grouping is a list of arrays of canonical ranks, in ring order; heads are cut in the order of an array.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import combinations, islice, permutations

import numpy as np

from ds_hetero.common.arrays import Bools, Ints, distinct
from ds_hetero.planner.search.budget import EXHAUSTIVE_RANKS
from ds_hetero.planner.search.covers import best_levels
from ds_hetero.planner.search.interchangeable import distinct_partitions, interchangeable, makeup_of, once
from ds_hetero.planner.search.ladder import ladder
from ds_hetero.planner.search.problem import Problem

M1 = 64  # partitions kept by stage I; HexiSeq's value

# What follows is chosen, never measured alone; benchmarks.planner growth says what all of it together finds.
_PIECES_OF_A_NODE = (1, 2, 4, 8)
_WIDEST_ACROSS = 16  # ranks of a group across nodes; wider ones wait for too many links
_MOST_MERGED_NODES = 64  # that are merged one by one
_FIRST_MERGES, _LAST_MERGES = 8, 4  # whose partitions are tried
_COVERS, _COVERS_OF_MANY, _MANY_TO_COVER = 10, 6, 256  # covers tried per granularity of heads, and above so many ranks


def groupings(problem: Problem, active: Bools, keep: int = M1) -> Iterator[list[Ints]]:
    """At most ``keep`` partitions of the active ranks, without repeats; idle ranks are left out."""
    candidates = _candidates(problem, np.flatnonzero(active))
    yield from islice(once(candidates, _key), keep)


def _key(groups: Sequence[Ints]) -> bytes:
    return b"|".join(group.tobytes() for group in groups)


def _candidates(problem: Problem, ranks: Ints) -> Iterator[list[Ints]]:
    """Partitions, the likeliest first; of a few ranks all."""
    yield [ranks]  # Ulysses
    yield list(ranks[:, None])  # Ring
    if len(ranks) <= EXHAUSTIVE_RANKS:
        yield from distinct_partitions(problem, ranks)
        return
    yield from _meshes(problem, ranks)
    for pieces in _PIECES_OF_A_NODE:
        yield _pieces_of_nodes(ranks, problem.node[ranks], pieces)
    yield from _agglomerated(problem, ranks)
    yield from _covers(problem, ranks)
    for num_groups in ladder(len(ranks)):
        yield _balanced(problem, ranks, num_groups)


def _meshes(problem: Problem, ranks: Ints) -> Iterator[list[Ints]]:
    """USP's meshes: equal groups of neighbours, and of ranks at equal distance (all-to-all across nodes).

    Of six ranks: 01 23 45, 012 345, and 03 14 25, 024 135.
    """
    num_ranks = len(ranks)
    sizes = [size for size in range(2, num_ranks) if num_ranks % size == 0 and size <= problem.num_heads]
    for size in sizes:
        yield list(ranks.reshape(-1, size))
    for size in sizes:
        if size <= _WIDEST_ACROSS:
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
    nodes = [int(n) for n in distinct(node)]
    if len(nodes) > _MOST_MERGED_NODES:
        return
    s_per_byte = problem.inverse_bandwidth
    links = sorted((float(s_per_byte[a, b]), a, b) for a, b in combinations(nodes, 2))
    parent = {n: n for n in nodes}  # union-find over nodes

    def root(n: int) -> int:
        while parent[n] != n:
            n = parent[n]
        return n

    num_merges = 0
    for _, a, b in links:
        if root(a) == root(b):
            continue
        parent[max(root(a), root(b))] = min(root(a), root(b))
        num_merges += 1
        if num_merges <= _FIRST_MERGES or num_merges >= len(nodes) - _LAST_MERGES:
            label = np.array([root(int(n)) for n in node])
            yield [ranks[label == r] for r in distinct(label)]


def _covers(problem: Problem, ranks: Ints) -> Iterator[list[Ints]]:
    """Bin covers of the heads, turned into ranks; ranks left over join the weakest groups or make a group."""
    speed = problem.speed[ranks]
    negative_speeds, kind = np.unique(-speed, return_inverse=True)  # kinds from the fastest on
    speed_of_kind, count_of_kind = -negative_speeds, np.bincount(kind)
    keep = _COVERS if len(ranks) <= _MANY_TO_COVER else _COVERS_OF_MANY
    for unit in problem.head_units:
        for _, mixes, left in best_levels(speed_of_kind, count_of_kind, problem.num_heads // unit, keep):
            mean_speed_of_group = speed_of_kind @ count_of_kind / len(mixes)
            is_left_a_group = left @ speed_of_kind > 0.5 * mean_speed_of_group
            for spread in (False, True):
                groups, rest = _deal(problem, ranks, kind, mixes, spread)
                yield _give_to_weakest(problem, groups, rest)
                if len(rest) and is_left_a_group:
                    yield groups + [rest]


def _deal(problem: Problem, ranks: Ints, kind: Ints, mixes: Sequence[Ints], spread: bool) -> tuple[list[Ints], Ints]:
    """Fill the mixes with ranks of their classes: from one node after the other, or from all nodes in turn."""
    pools = []  # ranks of every kind, in the order in which they are dealt
    for c in range(int(kind.max()) + 1):
        pool = ranks[kind == c]
        if spread:
            node = problem.node[pool]  # ascending
            place_on_node = np.arange(len(pool)) - np.searchsorted(node, node)
            pool = pool[np.lexsort((node, place_on_node))]
        pools.append(pool)
    num_dealt = np.zeros(len(pools), dtype=np.int64)
    groups = []
    for mix in mixes:
        hands = [pool[first : first + count] for pool, first, count in zip(pools, num_dealt, mix, strict=True)]
        groups.append(np.sort(np.concatenate(hands)))
        num_dealt = num_dealt + mix
    rest = [pool[first:] for pool, first in zip(pools, num_dealt, strict=True)]
    return groups, np.sort(np.concatenate(rest))


def _give_to_weakest(problem: Problem, groups: Sequence[Ints], rest: Ints) -> list[Ints]:
    """The fastest of the rest first, each to the group that is slowest by then."""
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


def with_idle(problem: Problem, groups: Sequence[Ints], active: Bools) -> list[Ints]:
    """Put idle ranks, which get neither tokens nor heads, into the group with the fastest link to them."""
    groups = list(groups)
    if active.all():
        return groups
    idle = np.flatnonzero(~active)
    idle = idle[np.argsort(problem.node[idle], kind="stable")]
    node_of_group = problem.node[np.array([group[0] for group in groups])]
    # At once: one by one takes a quarter of the search where hundreds of nodes are one rank each.
    nearest = problem.inverse_bandwidth[np.ix_(problem.node[idle], node_of_group)].argmin(axis=1)
    for k in distinct(nearest):
        groups[k] = np.append(groups[k], idle[nearest == k])
    return groups


def neighbours(problem: Problem, groups: Sequence[Ints]) -> Iterator[list[Ints]]:
    """Partitions one step away: a rank changes its group, two ranks trade places, two groups merge, a group is split.

    Interchangeable ranks (equal devices of one node) and groups of equal make-up are tried once.
    """
    name = interchangeable(problem)
    makeup = [makeup_of(name, group) for group in groups]
    members = [group.tolist() for group in groups]
    representatives = [_one_of_each_name(name, ranks) for ranks in members]
    seen = {tuple(sorted(makeup))}

    def if_new(changed: dict[int, list[int]], added: Sequence[list[int]] = ()) -> Iterator[list[Ints]]:
        """The partition with some groups changed and others added, unless its like was yielded; empty groups go."""
        ranks_by_group = [changed.get(k, ranks) for k, ranks in enumerate(members)]
        partition = [np.array(sorted(ranks)) for ranks in ranks_by_group if ranks]
        partition += [np.array(ranks) for ranks in added]
        key = tuple(sorted(makeup_of(name, group) for group in partition))
        if key not in seen:
            seen.add(key)
            yield partition

    for i, j in once(permutations(range(len(groups)), 2), lambda pair: (makeup[pair[0]], makeup[pair[1]])):
        for rank in representatives[i]:
            without_rank = [r for r in members[i] if r != rank]
            yield from if_new({i: without_rank, j: members[j] + [rank]})
            for other in representatives[j]:
                if i < j and name[other] != name[rank]:
                    without_other = [r for r in members[j] if r != other]
                    yield from if_new({i: without_rank + [other], j: without_other + [rank]})
        if i < j:
            yield from if_new({i: members[i] + members[j], j: []})
    for i in once(range(len(groups)), lambda k: makeup[k]):
        if len(members[i]) > 1:
            one_half, other_half = _balanced(problem, groups[i], 2)
            yield from if_new({i: one_half.tolist()}, [other_half.tolist()])
            for rank in representatives[i]:
                yield from if_new({i: [r for r in members[i] if r != rank]}, [[rank]])


def _one_of_each_name(name: Ints, ranks: Sequence[int]) -> list[int]:
    """The first rank of every name, names that end a group first."""
    first: dict[int, int] = {}
    for rank in reversed(ranks):
        first[int(name[rank])] = rank
    return list(first.values())
