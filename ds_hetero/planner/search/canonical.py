"""From a cost model to a search problem with ranks in canonical order, and from its solution back to a schedule.

Nodes are sorted by what they are and not by where the cluster file lists them, and so are the devices inside a node.
The search breaks every tie by this order, so relabelling the ranks of a cluster relabels the plan.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from ds_hetero.cluster.topology import Cluster, Node
from ds_hetero.common.arrays import Ints
from ds_hetero.cost import make_cost_model
from ds_hetero.cost.model import CostModel
from ds_hetero.cost.workload import Workload
from ds_hetero.planner.search.problem import Assignment, Problem
from ds_hetero.planner.search.shares import whole_shares
from ds_hetero.values.schedule import Group, Schedule


def make_problem(
    cost: CostModel, *, layout: str | None = None, token_unit: int = 1, head_units: tuple[int, ...] = ()
) -> tuple[Problem, Ints]:
    """The search problem of a cost model in canonical order, and the rank of every canonical index.

    Args:
        layout: ``"contiguous"``, or zigzag for anything else.
        token_unit: tokens are handed out in multiples of this.
        head_units: granularities of head cuts; left out, whole KV heads, which then travel once, and single heads.
    """
    cluster, workload, rank_of = canonical(cost.cluster, cost.workload)
    moved = make_cost_model(cost.name, cluster, cost.model, workload)
    per_kv_head = cost.model.num_heads // cost.model.num_kv_heads
    units = head_units or tuple(sorted({per_kv_head, 1}, reverse=True))
    return Problem(cost=moved, token_unit=token_unit, head_units=units, zigzag=layout != "contiguous"), rank_of


def canonical(cluster: Cluster, workload: Workload) -> tuple[Cluster, Workload, Ints]:
    """The same cluster with its ranks in canonical order.

    Nodes are sorted by descending speed, then by memory, links and name; devices inside a node likewise.

    Returns:
        cluster, workload (whose weights move along, while ZeRO's rings and owners keep the order of the ranks), and the
        original rank of each canonical one, ``[D]``.
    """
    reach = np.sort(cluster.node_bytes_per_s, axis=1)[:, ::-1]

    def device_key(node: Node, i: int) -> tuple[object, ...]:
        device = node.devices[i]
        return (-device.peak_flops_per_s, -device.memory_bytes, -device.memory_bytes_per_s, device.name, i)

    inside = [sorted(range(len(node.devices)), key=partial(device_key, node)) for node in cluster.nodes]

    def node_key(n: int) -> tuple[object, ...]:
        node = cluster.nodes[n]
        devices = tuple(device_key(node, i)[:-1] for i in inside[n])
        return (devices, -node.link.bytes_per_s, node.link.latency_s, tuple(-reach[n]), node.name, n)

    nodes = sorted(range(len(cluster.nodes)), key=node_key)
    place_of_node = {n: place for place, n in enumerate(nodes)}
    first_rank = np.concatenate([[0], np.cumsum([len(node.devices) for node in cluster.nodes])])
    rank_of = np.array([first_rank[n] + i for n in nodes for i in inside[n]], dtype=np.int64)

    def with_sorted_devices(n: int) -> Node:
        node = cluster.nodes[n]
        return replace(node, devices=tuple(node.devices[i] for i in inside[n]))

    links = []
    for (a, b), link in cluster.links:
        pair = sorted((place_of_node[a], place_of_node[b]))
        links.append(((pair[0], pair[1]), link))
    links.sort(key=lambda item: item[0])
    moved = Cluster(
        nodes=tuple(with_sorted_devices(n) for n in nodes),
        network=cluster.network,
        links=tuple(links),
    )
    weights = workload.zero_weights
    if weights is not None:
        workload = replace(workload, zero_weights=tuple(weights[rank] for rank in rank_of))
    if workload.zero_stage:  # ranks keep their places in ZeRO's rings and among the owners
        places = workload.zero_order or range(len(rank_of))
        workload = replace(
            workload,
            zero_order=tuple(int(places[rank]) for rank in rank_of),
            zero_cluster=workload.zero_cluster or cluster,
        )
    return moved, workload, rank_of


def schedule_of(problem: Problem, assignment: Assignment, rank_of: Ints) -> Schedule:
    """An assignment as a schedule of the cluster's own ranks, with whole tokens."""
    tokens = _that_fit(problem, assignment, whole_shares(assignment.tokens, problem.seq_len, problem.token_unit))
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


def _that_fit(problem: Problem, assignment: Assignment, tokens: Ints) -> Ints:
    """Whole tokens; where rounding overfills a rank, a unit of its goes to the rank with most room."""
    grouping, tokens = problem.grouping(assignment.groups), tokens.copy()
    for _ in range(len(tokens)):
        need_D = problem.cost.memory_bytes(grouping, tokens.astype(np.float64), assignment.heads)
        room_D = np.where(tokens > 0, problem.cost.capacity_bytes_D - need_D, 0.0)
        fullest, emptiest = int(room_D.argmin()), int(room_D.argmax())
        if room_D[fullest] >= 0 or room_D[emptiest] <= 0:
            break
        tokens[fullest] -= problem.token_unit
        tokens[emptiest] += problem.token_unit
    return tokens
