"""Make `UnitCosts`, the costs of documents on the units of a schedule, from the calibrated cost model.

Dimension key: D ranks, K units (all-to-all groups of the schedule, in ring order).
"""

from __future__ import annotations

from itertools import product

import numpy as np

from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.arrays import Floats
from ds_hetero.common.reading import MAX_SEQ_LEN
from ds_hetero.cost.calibrated import CalibratedCostModel
from ds_hetero.cost.model import once_s
from ds_hetero.errors import PlanError
from ds_hetero.planner.document_search.crossing import routed_s_per_byte
from ds_hetero.planner.document_search.traffic import KVBytes
from ds_hetero.planner.document_search.unit_costs import TILE_ROWS, UnitCosts
from ds_hetero.values.schedule import Schedule


def unit_costs(cost: CalibratedCostModel, schedule: Schedule) -> UnitCosts:
    """Return the costs of documents on the units of ``schedule``.

    A unit is as slow as its slowest rank, with the shares of tokens and heads that the schedule gives. Counted per
    token are also the all-to-alls of a unit, and the part of attention that is proportional to a document's length and
    not to its square: short rows of keys, and tiles on the diagonal.

    Args:
        cost: the cost model of the schedule's replica; its ranks begin at 0.
        schedule: units, heads and token weights.

    Raises:
        PlanError: the schedule's ranks or heads are not those of the cluster and the model, or its layers see windows.
        ScheduleError: the workload's sequence is too short for the schedule.
    """
    if cost.model.window_layers:
        raise PlanError(
            f"{cost.model.name} has layers whose attention sees {cost.model.window:,} tokens, and no cost model covers "
            "documents in these. Plan for one sequence: leave --lengths out."
        )
    grouping, tokens_D, heads_D = cost.arrays(schedule)
    tokens_K = grouping.by_group(np.add, tokens_D)
    share_D = tokens_D / np.maximum(tokens_K, 1)[grouping.group_of]  # of the unit's tokens
    linear_s_D = share_D * cost.non_attention_s_per_token_D
    edge_s_D = heads_D * cost.attention_edge_s_D
    exchange_s_K = cost.exchange_s_K(schedule) / np.maximum(tokens_K, 1)
    token_s_K = grouping.by_group(np.maximum, linear_s_D + edge_s_D) + exchange_s_K
    square_s_K = grouping.by_group(np.maximum, heads_D * cost.least_attention_s_D)
    edge_s_K = token_s_K - grouping.by_group(np.maximum, linear_s_D)
    is_idle_K = tokens_K == 0  # units without tokens get the costs of the slowest unit
    slowest = int(token_s_K.argmax())
    token_s_K[is_idle_K], edge_s_K[is_idle_K] = token_s_K[slowest], edge_s_K[slowest]
    nodes = _nodes(cost.cluster, schedule)
    receive_s, cross_s, link_s = _link_s(cost, schedule, nodes)
    kv_bytes_per_token, gradient_bytes_per_token = _kv_bytes_per_token(cost)
    model = cost.model
    # An exchange sends q, k, v and the output: keys and values are 2 G heads, all four 2 G + 2 H.
    exchange_bytes = (1 + model.num_heads / model.num_kv_heads) * kv_bytes_per_token
    return UnitCosts(
        token_s=tuple(token_s_K.tolist()),
        square_s=tuple(square_s_K.tolist()),
        most_tokens=_most_tokens(cost, schedule),
        node=nodes,
        receive_s=receive_s,
        cross_s=cross_s,
        link_s=link_s,
        exchange_per_receive=exchange_bytes / (kv_bytes_per_token + gradient_bytes_per_token),
        # Query rows of a tile: twice the additional keys per query of a causal square, where these were measured.
        fragment_rows=max(2 * device.efficiency.attention_edge_keys or TILE_ROWS for device in cost.cluster.devices),
        step_s=_step_s(cost, tokens_D),
        edge_s=tuple(np.maximum(edge_s_K, 0).tolist()),
    )


def _step_s(cost: CalibratedCostModel, tokens_D: Floats) -> float:
    """Return the time of a step that does not depend on the placement, per layer and micro-batch.

    This is the constant part of the loss, and all that runs once a step: ZeRO's traffic and the optimizer.
    """
    loss_s = cost.outside_blocks_s(np.zeros_like(tokens_D))["loss_s"]
    once_a_step_s = once_s(cost.outside_blocks_s(tokens_D))
    return (loss_s + once_a_step_s / cost.workload.micro_batches) / cost.model.num_layers


def _nodes(cluster: Cluster, schedule: Schedule) -> tuple[int, ...]:
    """Number the nodes of all units in order of first use; every unit over several nodes gets a separate number."""
    numbers: dict[tuple[int, ...], int] = {}
    nodes = []
    for position, group in enumerate(schedule.ring_groups):
        unit_nodes = sorted({int(cluster.node_of_rank[rank]) for rank in group.ranks})
        # The position makes the key of a unit over several nodes unique. It is negative, as no index of a node is.
        key = tuple(unit_nodes) if len(unit_nodes) == 1 else (*unit_nodes, -1 - position)
        nodes.append(numbers.setdefault(key, len(numbers)))
    return tuple(nodes)


def kv_bytes(cost: CalibratedCostModel) -> KVBytes:
    """Return the bytes of keys and values of one token and KV head that are sent in the passes of a layer."""
    work, elements = cost.workload, 2 * cost.model.head_dim  # a key and a value
    num_forwards = 2 if work.activation_checkpointing and not work.keeps_attention else 1
    pass_bytes = elements * work.element_bytes
    gradient_bytes = elements * work.ring_gradient_bytes
    return KVBytes(forward=num_forwards * pass_bytes, backward=pass_bytes, gradients=gradient_bytes)


def _kv_bytes_per_token(cost: CalibratedCostModel) -> tuple[float, float]:
    """Return the bytes of the keys and values of one token in all passes of a layer, and the bytes of their gradients.

    A token here is a position of the row, in all sequences of the micro-batch.
    """
    heads = cost.workload.micro_batch * cost.model.num_kv_heads
    head_bytes = kv_bytes(cost)
    return heads * (head_bytes.forward + head_bytes.backward), heads * head_bytes.gradients


def _link_s(
    cost: CalibratedCostModel, schedule: Schedule, nodes: tuple[int, ...]
) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    """Return the seconds to receive a token, by node: ``receive_s``, ``cross_s`` and ``link_s`` of `UnitCosts`.

    ``receive_s``: inside a node every rank receives the keys and values of its heads; a switch that the ranks share
    carries the bytes of all ranks. ``cross_s``: keys and values from other nodes enter over the links of all units, see
    `routed_s_per_byte`; a NIC that the ranks share sets a limit, too. ``link_s``: they enter over one unit's link.

    Args:
        nodes: node of every unit, as `UnitCosts.node`.
    """
    cluster, token_bytes = cost.cluster, sum(_kv_bytes_per_token(cost))
    p2p_s = cluster.node_p2p_s_per_byte  # seconds per byte, by two nodes of the cluster
    num_nodes = max(nodes) + 1
    head_share = [0.0] * num_nodes  # largest share of the heads that a rank of the node computes
    num_ranks = [0] * num_nodes
    # Nodes of the cluster on which the units of a node are. A unit over several of them has a node of its own here.
    cluster_nodes: list[set[int]] = [set() for _ in range(num_nodes)]
    for group, node in zip(schedule.ring_groups, nodes, strict=True):
        head_share[node] = max(head_share[node], max(group.heads) / schedule.num_heads)
        num_ranks[node] += len(group.ranks)
        cluster_nodes[node] |= {int(cluster.node_of_rank[rank]) for rank in group.ranks}
    receive_s, cross_s, link_s = [], [], []
    for node, members in enumerate(cluster_nodes):
        inside_s = max(float(p2p_s[member, member]) for member in members)
        all_heads = num_ranks[node] * head_share[node]
        switch_s = max(all_heads / float(cluster.switch_bytes_per_s[member]) for member in members)
        receive_s.append(token_bytes * max(inside_s * head_share[node], switch_s))
        outside = [member for member in range(len(p2p_s)) if member not in members]
        between_s = max((float(p2p_s[member, other]) for member, other in product(members, outside)), default=0.0)
        link_s.append(token_bytes * between_s * head_share[node])
        routed_s = max(routed_s_per_byte(inside_s, between_s, senders, num_ranks[node]) for senders in num_ranks)
        nic_bytes_per_s = float(sum(cluster.nic_bytes_per_s[member] for member in members))
        cross_s.append(token_bytes * max(routed_s, 1 / nic_bytes_per_s))
    return tuple(receive_s), tuple(cross_s), tuple(link_s)


def _most_tokens(cost: CalibratedCostModel, schedule: Schedule) -> tuple[int, ...]:
    """Return for each unit the number of tokens that its memory has room for, ``[K]``.

    Model states and the ring's buffers are subtracted first; buffers are counted for a sequence of the workload's
    length. A unit without tokens in the schedule has 0.
    """
    grouping, tokens_D, heads_D = cost.arrays(schedule)
    max_growth_D = np.full(len(tokens_D), np.inf)  # factor by which the tokens of a rank may grow
    for parts in cost.memory_phases(grouping, tokens_D, heads_D).values():
        # Bytes that grow with the tokens, and bytes that are free for them.
        growing_D = parts.activations + parts.layer + parts.exchange_buffers
        growing_D = growing_D + (0.0 if cost.workload.tiled_logits else parts.logits)
        available_D = cost.capacity_bytes_D - (parts.total - growing_D)
        # The memory of a rank without tokens does not grow: it fits with any factor, or never.
        without_growth_D = np.where(available_D < 0, 0.0, np.inf)
        growth_D = available_D / np.where(growing_D > 0, growing_D, 1.0)
        max_growth_D = np.minimum(max_growth_D, np.where(growing_D > 0, growth_D, without_growth_D))
    tokens_K = grouping.by_group(np.add, tokens_D)
    most_tokens_K = np.clip(grouping.by_group(np.minimum, max_growth_D) * tokens_K, 0, MAX_SEQ_LEN)
    return tuple(int(tokens) for tokens in np.nan_to_num(most_tokens_K, nan=0.0))
