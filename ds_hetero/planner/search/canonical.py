"""Translate a cost model into a search problem with ranks in canonical order, and an assignment back into a schedule.

In canonical order nodes are sorted by their devices and links, fastest first, instead of by their place in the cluster
file, and so are the devices inside a node. The search breaks ties by this order. So a cluster file with the same nodes
in another order gives the same plan, with ranks renumbered.

Example: node 0 has two T4, node 1 has an A100 and a V100. The canonical ranks 0 to 3 are the cluster's ranks 2, 3, 0
and 1, and `rank_of` is (2, 3, 0, 1).

Dimension key: D ranks (canonical).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from ds_hetero.cluster.topology import Cluster, Node
from ds_hetero.common.arrays import Ints
from ds_hetero.cost import make_cost_model
from ds_hetero.cost.model import CostModel
from ds_hetero.cost.terms.expert_shares import experts_of_ranks
from ds_hetero.cost.workload import Workload
from ds_hetero.planner.search.problem import Assignment, Problem
from ds_hetero.planner.search.shares import whole_shares
from ds_hetero.values.schedule import Group, Schedule


def make_problem(
    cost: CostModel, *, layout: str | None = None, token_unit: int = 1, head_units: tuple[int, ...] = ()
) -> tuple[Problem, Ints]:
    """Return the search problem of a cost model, and the rank of the cluster for every canonical rank, ``[D]``.

    Args:
        layout: ``"contiguous"``; any other value, None included, means zigzag.
        token_unit: every rank gets a multiple of so many tokens.
        head_units: granularities in which heads are divided; left out, the query heads of a whole KV head, which is
            then sent once, and single query heads.
    """
    workload = cost.workload
    if workload.experts is not None:  # by a rule, ranks of equal weight would get other numbers in another order
        workload = replace(workload, experts=experts_of_ranks(cost.model, workload, cost.cluster))
    cluster, workload, rank_of = canonical(cost.cluster, workload)
    canonical_cost = make_cost_model(cost.name, cluster, cost.model, workload)
    queries_per_kv_head = cost.model.num_heads // cost.model.num_kv_heads
    units = head_units or tuple(sorted({queries_per_kv_head, 1}, reverse=True))
    zigzag = layout != "contiguous"
    return Problem(cost=canonical_cost, token_unit=token_unit, head_units=units, zigzag=zigzag), rank_of


def canonical(cluster: Cluster, workload: Workload) -> tuple[Cluster, Workload, Ints]:
    """Sort the ranks of a cluster into canonical order.

    Nodes are sorted by descending speed, then by memory, links and name; devices inside a node likewise.

    Returns:
        The sorted cluster; the workload with its ZeRO weights and those of experts sorted alike, while the order of
        ranks in ZeRO's rings and among owners stays that of the original ranks; and the original rank of every
        canonical rank, ``[D]``.
    """
    bandwidths = np.sort(cluster.node_bytes_per_s, axis=1)[:, ::-1]  # of a node to all nodes, the fastest first

    def device_key(node: Node, i: int) -> tuple[object, ...]:
        device = node.devices[i]
        return (-device.peak_flops_per_s, -device.memory_bytes, -device.memory_bytes_per_s, device.name, i)

    device_order = [sorted(range(len(node.devices)), key=partial(device_key, node)) for node in cluster.nodes]

    def node_key(n: int) -> tuple[object, ...]:
        node = cluster.nodes[n]
        devices = tuple(device_key(node, i)[:-1] for i in device_order[n])
        return (devices, -node.link.bytes_per_s, node.link.latency_s, tuple(-bandwidths[n]), node.name, n)

    node_order = sorted(range(len(cluster.nodes)), key=node_key)
    place_of_node = {n: place for place, n in enumerate(node_order)}
    first_rank = np.concatenate([[0], np.cumsum([len(node.devices) for node in cluster.nodes])])
    rank_of = np.array([first_rank[n] + i for n in node_order for i in device_order[n]], dtype=np.int64)

    def with_sorted_devices(n: int) -> Node:
        node = cluster.nodes[n]
        return replace(node, devices=tuple(node.devices[i] for i in device_order[n]))

    links = []
    for (a, b), link in cluster.links:
        pair = sorted((place_of_node[a], place_of_node[b]))
        links.append(((pair[0], pair[1]), link))
    links.sort(key=lambda item: item[0])
    sorted_cluster = Cluster(
        nodes=tuple(with_sorted_devices(n) for n in node_order),
        network=cluster.network,
        links=tuple(links),
    )
    weights = workload.zero_weights
    if weights is not None:
        workload = replace(workload, zero_weights=tuple(weights[rank] for rank in rank_of))
    if isinstance(workload.experts, tuple):
        workload = replace(workload, experts=tuple(workload.experts[rank] for rank in rank_of))
    if workload.zero_stage:
        # ZeRO's rings follow the job's rank numbers, whatever order the search uses: so their order is kept.
        zero_places = workload.zero_order or range(len(rank_of))
        workload = replace(
            workload,
            zero_order=tuple(int(zero_places[rank]) for rank in rank_of),
            zero_cluster=workload.zero_cluster or cluster,
        )
    return sorted_cluster, workload, rank_of


def schedule_of(problem: Problem, assignment: Assignment, rank_of: Ints) -> Schedule:
    """Return an assignment as a schedule with the ranks of the cluster and whole tokens.

    Args:
        rank_of: rank of the cluster for every canonical rank, as `make_problem` returns it.
    """
    tokens = _fit_whole_tokens(
        problem, assignment, whole_shares(assignment.tokens, problem.seq_len, problem.token_unit)
    )
    groups = tuple(
        Group(
            ranks=tuple(rank_of[group].tolist()),
            tokens=tuple(tokens[group].tolist()),
            heads=tuple(assignment.heads[group].tolist()),
        )
        for group in assignment.groups
    )
    return Schedule(
        num_heads=problem.num_heads,
        num_kv_heads=problem.cost.model.num_kv_heads,
        groups=groups,
        layout="zigzag" if problem.zigzag and len(groups) > 1 else "contiguous",
    )


def _fit_whole_tokens(problem: Problem, assignment: Assignment, tokens: Ints) -> Ints:
    """Return tokens with which ranks fit into memory: rounding to whole tokens may have overfilled some.

    While a rank is overfilled, one of its token units moves to the rank with most free memory.
    """
    grouping, tokens = problem.grouping(assignment.groups), tokens.copy()
    for _ in range(len(tokens)):
        need_D = problem.cost.memory_bytes(grouping, tokens.astype(np.float64), assignment.heads)
        free_bytes_D = np.where(tokens > 0, problem.cost.capacity_bytes_D - need_D, 0.0)
        fullest, emptiest = int(free_bytes_D.argmin()), int(free_bytes_D.argmax())
        if free_bytes_D[fullest] >= 0 or free_bytes_D[emptiest] <= 0:
            break
        tokens[fullest] -= problem.token_unit
        tokens[emptiest] += problem.token_unit
    return tokens
