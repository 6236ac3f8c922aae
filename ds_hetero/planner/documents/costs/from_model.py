"""Costs of documents for the units of a schedule, from the calibrated cost model."""

from __future__ import annotations

import numpy as np

from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.reading import MAX_SEQ_LEN
from ds_hetero.cost.calibrated import CalibratedCostModel
from ds_hetero.planner.documents.costs.crossing import routed_s_per_byte
from ds_hetero.planner.documents.costs.units import TILE_ROWS, UnitCosts
from ds_hetero.planner.documents.traffic import KVBytes
from ds_hetero.values.schedule import Schedule

GRADIENT_ELEMENT_BYTES = 4  # partial dK and dV travel in fp32


def unit_costs(cost: CalibratedCostModel, schedule: Schedule) -> UnitCosts:
    """Costs of documents for the units of ``schedule``.

    A unit is as slow as its slowest rank, whose share of the unit's tokens and heads is the schedule's. Short keys and
    the tiles on a document's diagonal are linear in its length and count per token, as do the all-to-alls of a unit.

    Args:
        cost: the cost model of the replica that the schedule is for; its ranks begin at 0.
        schedule: gives units, heads and token weights.

    Raises:
        PlanError: the schedule's ranks or heads are not those of the cluster and the model.
        ScheduleError: the workload's sequence is too short for the schedule.
    """
    grouping, tokens_D, heads_D = cost.arrays(schedule)
    tokens_K = grouping.by_group(np.add, tokens_D)
    share_D = tokens_D / np.maximum(tokens_K, 1)[grouping.group_of]
    linear_D = share_D * cost.non_attention_s_per_token_D + heads_D * cost.attention_edge_s_D
    token_s_K = grouping.by_group(np.maximum, linear_D) + cost.exchange_s_K(schedule) / np.maximum(tokens_K, 1)
    square_s_K = grouping.by_group(np.maximum, heads_D * cost.least_attention_s_D)
    idle_K = tokens_K == 0
    token_s_K[idle_K] = token_s_K.max()
    nodes = _nodes(cost.cluster, schedule)
    receive_s, cross_s, link_s = _link_s(cost, schedule, nodes)
    bytes_there, bytes_back = _kv_bytes_per_token(cost)
    model = cost.model
    exchanged = (1 + model.num_heads / model.num_kv_heads) * bytes_there  # q, k, v and the output
    return UnitCosts(
        token_s=tuple(token_s_K.tolist()),
        square_s=tuple(square_s_K.tolist()),
        most_tokens=_most_tokens(cost, schedule),
        node=nodes,
        receive_s=receive_s,
        cross_s=cross_s,
        link_s=link_s,
        exchange_per_receive=exchanged / (bytes_there + bytes_back),
        fragment_rows=_fragment_rows(cost.cluster),
    )


def _fragment_rows(cluster: Cluster) -> float:
    """A tile of query rows. Half of one is what a causal square takes more keys per query, where that was measured."""
    return max(2 * device.efficiency.attention_edge_keys or TILE_ROWS for device in cluster.devices)


def _nodes(cluster: Cluster, schedule: Schedule) -> tuple[int, ...]:
    """Node of every unit, numbered in order of first use; a unit over several nodes is one of its own."""
    numbers: dict[tuple[int, ...], int] = {}
    nodes = []
    for position, group in enumerate(schedule.ring_groups):
        where = sorted({int(cluster.node_of_rank[rank]) for rank in group.ranks})
        key = tuple(where) if len(where) == 1 else (*where, -1 - position)
        nodes.append(numbers.setdefault(key, len(numbers)))
    return tuple(nodes)


def kv_bytes(cost: CalibratedCostModel) -> KVBytes:
    """Bytes of the keys and values of one token and KV head in the passes of a block."""
    work, elements = cost.workload, 2 * cost.model.head_dim
    forwards = 2 if work.activation_checkpointing else 1
    once = elements * work.element_bytes
    return KVBytes(forward=forwards * once, backward=once, gradients=elements * GRADIENT_ELEMENT_BYTES)


def _kv_bytes_per_token(cost: CalibratedCostModel) -> tuple[float, float]:
    """Bytes of the keys and values of one token in all passes of a block, and of their gradients."""
    heads, of_head = cost.workload.micro_batch * cost.model.num_kv_heads, kv_bytes(cost)
    return heads * (of_head.forward + of_head.backward), heads * of_head.gradients


def _link_s(
    cost: CalibratedCostModel, schedule: Schedule, nodes: tuple[int, ...]
) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    """Seconds per token received, by node: from another unit of the node, from other nodes, and thence by one unit.

    Inside a node every rank receives the keys and values of its own heads; a switch that they share carries what all of
    them receive. What comes from other nodes enters over the links of all units, see `routed_s_per_byte`; what the
    ranks of a node share towards others bounds it too.
    """
    cluster, token_bytes = cost.cluster, sum(_kv_bytes_per_token(cost))
    p2p = cluster.node_p2p_s_per_byte
    receive_s, cross_s, link_s = ([0.0] * (max(nodes) + 1) for _ in range(3))
    widest, ranks_on = [0.0] * len(receive_s), [0] * len(receive_s)
    places: list[set[int]] = [set() for _ in receive_s]
    for group, node in zip(schedule.ring_groups, nodes, strict=True):
        widest[node] = max(widest[node], max(group.heads) / schedule.num_heads)
        ranks_on[node] += len(group.ranks)
        places[node] |= {int(cluster.node_of_rank[rank]) for rank in group.ranks}
    for node, where in enumerate(places):
        inside = max(float(p2p[place, place]) for place in where)
        shared = max(ranks_on[node] * widest[node] / float(cluster.switch_bytes_per_s[place]) for place in where)
        receive_s[node] = token_bytes * max(inside * widest[node], shared)
        between = [float(p2p[place, other]) for place in where for other in range(len(p2p)) if other not in where]
        link_s[node] = token_bytes * max(between, default=0.0) * widest[node]
        routed = max(
            routed_s_per_byte(inside, max(between, default=0.0), others, ranks_on[node]) for others in ranks_on
        )
        nic = float(sum(cluster.nic_bytes_per_s[place] for place in where))
        cross_s[node] = token_bytes * max(routed, 1 / nic)
    return tuple(receive_s), tuple(cross_s), tuple(link_s)


def _most_tokens(cost: CalibratedCostModel, schedule: Schedule) -> tuple[int, ...]:
    """Tokens that every unit has memory for: what the model and the ring's buffers leave, at the cost of its tokens.

    The buffers are those of the stream at the workload's length. A unit that the schedule gives no tokens gets none.
    """
    grouping, tokens_D, heads_D = cost.arrays(schedule)
    times_D = np.full(len(tokens_D), np.inf)
    for parts in cost.memory_moments(grouping, tokens_D, heads_D).values():
        grows_D = parts.activations + parts.layer + parts.exchange_buffers
        grows_D = grows_D + (0.0 if cost.workload.tiled_logits else parts.logits)
        left_D = cost.capacity_bytes_D - (parts.total - grows_D)
        fixed_fits_D = np.where(left_D < 0, 0.0, np.inf)
        of_moment_D = np.where(grows_D > 0, left_D / np.where(grows_D > 0, grows_D, 1.0), fixed_fits_D)
        times_D = np.minimum(times_D, of_moment_D)
    tokens_K = grouping.by_group(np.add, tokens_D)
    most_K = np.clip(grouping.by_group(np.minimum, times_D) * tokens_K, 0, MAX_SEQ_LEN)
    return tuple(int(most) for most in np.nan_to_num(most_K, nan=0.0))
