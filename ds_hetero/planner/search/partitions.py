"""Stage I: propose partitions of the ranks into groups; the ranks of a group exchange tokens for heads by all-to-all.

HexiSeq merges nodes along the fastest links first (arXiv:2605.07569, section 4.3). That alone finds groups of one kind
of device. So this module adds mixes that waste fewer heads (`covers`), groups of equal speed, and the meshes of USP.
Some ranks may be idle; `working_sets` proposes which.

A partition is a list of groups in ring order. A group is an array of canonical ranks, in whose order heads are divided.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import combinations, islice, permutations

import numpy as np

from ds_hetero.common.arrays import Bools, Ints, distinct
from ds_hetero.planner.search.budget import EXHAUSTIVE_RANKS
from ds_hetero.planner.search.covers import best_levels
from ds_hetero.planner.search.interchangeable import device_labels, distinct_partitions, group_makeup, unique_by
from ds_hetero.planner.search.ladder import ladder
from ds_hetero.planner.search.problem import Problem

M1 = 64  # partitions kept by stage I; HexiSeq's value

# Chosen, never measured alone; `python -m benchmarks.planner growth` says what all of these together find.
_PIECES_OF_A_NODE = (1, 2, 4, 8)  # groups that a node is divided into
_MAX_STRIDED_GROUP = 16  # most ranks of a group at equal distance; larger groups wait for too many links
_MAX_MERGED_NODES = 64  # most nodes with which nodes are merged one by one
_FIRST_MERGES, _LAST_MERGES = 8, 4  # number of first and of last merges after which the partition is tried
_COVERS, _COVERS_OF_MANY = 10, 6  # number of covers that are tried for each granularity of heads
_MANY_TO_COVER = 256  # number of ranks above which `_COVERS_OF_MANY` covers are tried


def groupings(problem: Problem, active: Bools, keep: int = M1) -> Iterator[list[Ints]]:
    """Yield at most ``keep`` different partitions of the active ranks; idle ranks are in none of their groups."""
    candidates = _candidates(problem, np.flatnonzero(active))
    yield from islice(unique_by(candidates, _key), keep)


def _key(groups: Sequence[Ints]) -> bytes:
    """Return the partition as bytes; equal partitions give equal bytes."""
    return b"|".join(group.tobytes() for group in groups)


def _candidates(problem: Problem, ranks: Ints) -> Iterator[list[Ints]]:
    """Yield partitions, the likeliest first; all partitions if there are few ranks."""
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
    """Yield USP's meshes: equal groups of consecutive ranks, and of ranks at equal distance (all-to-all across nodes).

    For six ranks: 01 23 45, 012 345, and 03 14 25, 024 135.
    """
    num_ranks = len(ranks)
    sizes = [size for size in range(2, num_ranks) if num_ranks % size == 0 and size <= problem.num_heads]
    for size in sizes:
        yield list(ranks.reshape(-1, size))
    for size in sizes:
        if size <= _MAX_STRIDED_GROUP:
            yield list(np.ascontiguousarray(ranks.reshape(size, -1).T))


def _pieces_of_nodes(ranks: Ints, node: Ints, pieces: int) -> list[Ints]:
    """Divide every node into ``pieces`` groups of consecutive ranks."""
    groups = []
    for n in distinct(node):
        ranks_of_node = ranks[node == n]
        groups += np.array_split(ranks_of_node, min(pieces, len(ranks_of_node)))
    return groups


def _agglomerated(problem: Problem, ranks: Ints) -> Iterator[list[Ints]]:
    """Merge nodes one by one along the fastest links between them; yield a partition after the first and last merges.

    Every node begins as one group. With many nodes nothing is yielded. Example: nodes a, b, c with fast links a-b, slow
    links b-c and a-c give the groups {a, b} {c}, and then {a, b, c}.
    """
    node = problem.node[ranks]
    nodes = [int(n) for n in distinct(node)]
    if len(nodes) > _MAX_MERGED_NODES:
        return
    s_per_byte = problem.inverse_bandwidth
    links = sorted((float(s_per_byte[a, b]), a, b) for a, b in combinations(nodes, 2))
    parent = {n: n for n in nodes}  # union-find over nodes

    def root(n: int) -> int:
        """Return the lowest node of the group of node ``n``."""
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
    """Yield groups that cover the heads with little waste (`covers`), with ranks in place of counts.

    Ranks that are in no group join the slowest groups. If they are fast enough together, a partition in which they form
    a group of their own is yielded as well.
    """
    speed = problem.speed[ranks]
    negative_speeds, kind = np.unique(-speed, return_inverse=True)  # kinds from the fastest on
    speed_of_kind, count_of_kind = -negative_speeds, np.bincount(kind)
    keep = _COVERS if len(ranks) <= _MANY_TO_COVER else _COVERS_OF_MANY
    for unit in problem.head_units:
        for _, mixes, unused in best_levels(speed_of_kind, count_of_kind, problem.num_heads // unit, keep):
            mean_group_speed = speed_of_kind @ count_of_kind / len(mixes)
            can_be_a_group = unused @ speed_of_kind > 0.5 * mean_group_speed
            for over_nodes in (False, True):
                groups, unused_ranks = _deal(problem, ranks, kind, mixes, over_nodes)
                yield _give_to_weakest(problem, groups, unused_ranks)
                if len(unused_ranks) and can_be_a_group:
                    yield groups + [unused_ranks]


def _deal(
    problem: Problem, ranks: Ints, kind: Ints, mixes: Sequence[Ints], over_nodes: bool
) -> tuple[list[Ints], Ints]:
    """Choose ranks for every mix of devices; return these groups, and the ranks that are in no group.

    Args:
        kind: index of the kind of every rank of ``ranks``.
        mixes: devices of every group, as counts by kind.
        over_nodes: whether the ranks of a kind are taken from all nodes in turn, and not from one node after the other.
    """
    pools = []  # ranks of every kind, in the order in which they are used
    for c in range(int(kind.max()) + 1):
        pool = ranks[kind == c]
        if over_nodes:
            node = problem.node[pool]  # ascending
            place_on_node = np.arange(len(pool)) - np.searchsorted(node, node)
            pool = pool[np.lexsort((node, place_on_node))]
        pools.append(pool)
    num_dealt = np.zeros(len(pools), dtype=np.int64)
    groups = []
    for mix in mixes:
        parts = [pool[first : first + count] for pool, first, count in zip(pools, num_dealt, mix, strict=True)]
        groups.append(np.sort(np.concatenate(parts)))
        num_dealt = num_dealt + mix
    undealt = [pool[first:] for pool, first in zip(pools, num_dealt, strict=True)]
    return groups, np.sort(np.concatenate(undealt))


def _give_to_weakest(problem: Problem, groups: Sequence[Ints], unused_ranks: Ints) -> list[Ints]:
    """Add ``unused_ranks`` to the groups, the fastest rank first, each to the group that is slowest so far."""
    groups = list(groups)
    group_speed = np.array([problem.speed[group].sum() for group in groups])
    for rank in unused_ranks[np.argsort(-problem.speed[unused_ranks], kind="stable")]:
        k = int(np.argmin(group_speed))
        groups[k] = np.sort(np.append(groups[k], rank))
        group_speed[k] += problem.speed[rank]
    return groups


def _balanced(problem: Problem, ranks: Ints, num_groups: int) -> list[Ints]:
    """Form groups of nearly equal speed: fastest rank first, each to the slowest group so far.

    This is scheduling by longest processing time (LPT). Speeds 4, 3, 2 and 2 give the groups 4, 2 and 3, 2.
    """
    slowest_first = [(0.0, k) for k in range(num_groups)]  # heap of (speed, group)
    members: list[list[int]] = [[] for _ in range(num_groups)]
    for rank in ranks[np.argsort(-problem.speed[ranks], kind="stable")].tolist():
        group_speed, k = heapq.heappop(slowest_first)
        members[k].append(rank)
        heapq.heappush(slowest_first, (group_speed + float(problem.speed[rank]), k))
    return [np.sort(np.array(group)) for group in members]


def with_idle(problem: Problem, groups: Sequence[Ints], active: Bools) -> list[Ints]:
    """Put every idle rank into the group to which it has the fastest link, since a schedule lists all ranks.

    Idle ranks get neither tokens nor heads.

    Args:
        groups: a partition of the active ranks.
        active: mask of the ranks that work, ``[D]``.
    """
    groups = list(groups)
    if active.all():
        return groups
    idle = np.flatnonzero(~active)
    idle = idle[np.argsort(problem.node[idle], kind="stable")]
    node_of_group = problem.node[np.array([group[0] for group in groups])]
    # All idle ranks at once: with hundreds of nodes of one rank, one by one would take a quarter of the search.
    nearest = problem.inverse_bandwidth[np.ix_(problem.node[idle], node_of_group)].argmin(axis=1)
    for k in distinct(nearest):
        groups[k] = np.append(groups[k], idle[nearest == k])
    return groups


def neighbours(problem: Problem, groups: Sequence[Ints]) -> Iterator[list[Ints]]:
    """Yield partitions one step away: a rank changes its group, two ranks swap, two groups merge, or a group is split.

    Partitions that differ only in interchangeable ranks (equal devices of a node) are yielded once.
    """
    labels = device_labels(problem)
    makeup = [group_makeup(labels, group) for group in groups]
    members = [group.tolist() for group in groups]
    representatives = [_one_of_each_label(labels, ranks) for ranks in members]
    makeups_so_far = {tuple(sorted(makeup))}

    def if_new(changed: dict[int, list[int]], added: Sequence[list[int]] = ()) -> Iterator[list[Ints]]:
        """Yield the partition after changes, without empty groups, unless an equivalent one was yielded.

        Args:
            changed: new ranks of groups, by group.
            added: ranks of new groups.
        """
        ranks_by_group = [changed.get(k, ranks) for k, ranks in enumerate(members)]
        partition = [np.array(sorted(ranks)) for ranks in ranks_by_group if ranks]
        partition += [np.array(ranks) for ranks in added]
        key = tuple(sorted(group_makeup(labels, group) for group in partition))
        if key not in makeups_so_far:
            makeups_so_far.add(key)
            yield partition

    def makeups_of_pair(pair: tuple[int, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        i, j = pair
        return makeup[i], makeup[j]

    for i, j in unique_by(permutations(range(len(groups)), 2), makeups_of_pair):
        for rank in representatives[i]:
            without_rank = [r for r in members[i] if r != rank]
            yield from if_new({i: without_rank, j: members[j] + [rank]})
            for other in representatives[j]:
                if i < j and labels[other] != labels[rank]:
                    without_other = [r for r in members[j] if r != other]
                    yield from if_new({i: without_rank + [other], j: without_other + [rank]})
        if i < j:
            yield from if_new({i: members[i] + members[j], j: []})
    for i in unique_by(range(len(groups)), lambda k: makeup[k]):
        if len(members[i]) > 1:
            one_half, other_half = _balanced(problem, groups[i], 2)
            yield from if_new({i: one_half.tolist()}, [other_half.tolist()])
            for rank in representatives[i]:
                yield from if_new({i: [r for r in members[i] if r != rank]}, [[rank]])


def _one_of_each_label(labels: Ints, ranks: Sequence[int]) -> list[int]:
    """Return the first rank of every label; labels are ordered by their last rank, the last first.

    Ranks 3, 4, 5 with the labels a, b, a give 3 (label a, whose last rank is 5) and 4.
    """
    first: dict[int, int] = {}
    for rank in reversed(ranks):
        first[int(labels[rank])] = rank
    return list(first.values())
