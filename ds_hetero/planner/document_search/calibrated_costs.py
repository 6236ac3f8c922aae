"""Costs of documents for the units of a schedule, from the calibrated cost model."""

from __future__ import annotations

from itertools import product

import numpy as np

from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.arrays import Floats
from ds_hetero.common.reading import MAX_SEQ_LEN
from ds_hetero.cost.calibrated import CalibratedCostModel
from ds_hetero.cost.model import once_s
from ds_hetero.planner.document_search.crossing import routed_s_per_byte
from ds_hetero.planner.document_search.traffic import KVBytes
from ds_hetero.planner.document_search.unit_costs import TILE_ROWS, UnitCosts
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
    edge_s_K = token_s_K - grouping.by_group(np.maximum, share_D * cost.non_attention_s_per_token_D)
    idle_K = tokens_K == 0
    slowest = int(token_s_K.argmax())
    token_s_K[idle_K], edge_s_K[idle_K] = token_s_K[slowest], edge_s_K[slowest]
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
        # A tile of query rows. Half of one is what a causal square takes more keys per query, where that was measured.
        fragment_rows=max(2 * device.efficiency.attention_edge_keys or TILE_ROWS for device in cost.cluster.devices),
        step_s=_step_s(cost, tokens_D),
        edge_s=tuple(np.maximum(edge_s_K, 0).tolist()),
    )


def _step_s(cost: CalibratedCostModel, tokens_D: Floats) -> float:
    """A block's part of the step's time that does not depend on tokens: of the loss, and of what comes once a step."""
    loss_s = cost.outside_blocks_s(np.zeros_like(tokens_D))["loss_s"]
    once_a_step_s = once_s(cost.outside_blocks_s(tokens_D))
    return (loss_s + once_a_step_s / cost.workload.micro_batches) / cost.model.num_layers


def _nodes(cluster: Cluster, schedule: Schedule) -> tuple[int, ...]:
    """Node of every unit, numbered in order of first use; a unit over several nodes is one of its own."""
    numbers: dict[tuple[int, ...], int] = {}
    nodes = []
    for position, group in enumerate(schedule.ring_groups):
        places = sorted({int(cluster.node_of_rank[rank]) for rank in group.ranks})
        # The position, as a negative number, which no place has, makes the key of a unit over several nodes unique.
        key = tuple(places) if len(places) == 1 else (*places, -1 - position)
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
    heads = cost.workload.micro_batch * cost.model.num_kv_heads
    head_bytes = kv_bytes(cost)
    return heads * (head_bytes.forward + head_bytes.backward), heads * head_bytes.gradients


def _link_s(
    cost: CalibratedCostModel, schedule: Schedule, nodes: tuple[int, ...]
) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    """Seconds per token received, by node: from another unit of the node, from other nodes, and thence by one unit.

    Inside a node every rank receives the keys and values of its own heads; a switch that they share carries what all of
    them receive. What comes from other nodes enters over the links of all units, see `routed_s_per_byte`; what the
    ranks of a node share towards others bounds it too.
    """
    cluster, token_bytes = cost.cluster, sum(_kv_bytes_per_token(cost))
    p2p = cluster.node_p2p_s_per_byte  # seconds per byte, [place, place]
    num_nodes = max(nodes) + 1
    widest = [0.0] * num_nodes  # largest share of the heads that a rank of the node computes
    ranks_on = [0] * num_nodes
    # Nodes of the cluster on which the units of a node lie: several for units that span them.
    places: list[set[int]] = [set() for _ in range(num_nodes)]
    for group, node in zip(schedule.ring_groups, nodes, strict=True):
        widest[node] = max(widest[node], max(group.heads) / schedule.num_heads)
        ranks_on[node] += len(group.ranks)
        places[node] |= {int(cluster.node_of_rank[rank]) for rank in group.ranks}
    receive_s, cross_s, link_s = [], [], []
    for node, own in enumerate(places):
        inside = max(float(p2p[place, place]) for place in own)
        switch = max(ranks_on[node] * widest[node] / float(cluster.switch_bytes_per_s[place]) for place in own)
        receive_s.append(token_bytes * max(inside * widest[node], switch))
        others = [place for place in range(len(p2p)) if place not in own]
        between = max((float(p2p[place, other]) for place, other in product(own, others)), default=0.0)
        link_s.append(token_bytes * between * widest[node])
        routed = max(routed_s_per_byte(inside, between, senders, ranks_on[node]) for senders in ranks_on)
        nic_bytes_per_s = float(sum(cluster.nic_bytes_per_s[place] for place in own))
        cross_s.append(token_bytes * max(routed, 1 / nic_bytes_per_s))
    return tuple(receive_s), tuple(cross_s), tuple(link_s)


def _most_tokens(cost: CalibratedCostModel, schedule: Schedule) -> tuple[int, ...]:
    """Tokens that every unit has memory for: what the model and the ring's buffers leave, at the cost of its tokens.

    The buffers are those of the stream at the workload's length. A unit that the schedule gives no tokens gets none.
    """
    grouping, tokens_D, heads_D = cost.arrays(schedule)
    times_D = np.full(len(tokens_D), np.inf)  # how many times its tokens a rank has memory for
    for parts in cost.memory_phases(grouping, tokens_D, heads_D).values():
        grows_D = parts.activations + parts.layer + parts.exchange_buffers
        grows_D = grows_D + (0.0 if cost.workload.tiled_logits else parts.logits)
        left_D = cost.capacity_bytes_D - (parts.total - grows_D)
        # A rank without tokens has nothing that grows: it fits however often, or never.
        fixed_fits_D = np.where(left_D < 0, 0.0, np.inf)
        of_phase_D = np.where(grows_D > 0, left_D / np.where(grows_D > 0, grows_D, 1.0), fixed_fits_D)
        times_D = np.minimum(times_D, of_phase_D)
    tokens_K = grouping.by_group(np.add, tokens_D)
    most_K = np.clip(grouping.by_group(np.minimum, times_D) * tokens_K, 0, MAX_SEQ_LEN)
    return tuple(int(most) for most in np.nan_to_num(most_K, nan=0.0))
