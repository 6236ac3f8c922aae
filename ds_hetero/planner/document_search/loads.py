"""Costs of documents for the units of a schedule, from the calibrated cost model.

Predicted time of one block for a batch whose documents are placed.

    predicted = max over units of (outside attention + max(attention + fragments, received))

Where tokens move before attention and after it, all units wait for that, and the maxima of both are added.

No barrier separates attention from the rest, so it is sums that units have to balance; what a unit receives hides under
all of its attention. A unit of a ring receives the keys and values of every token of a document that it does not hold,
and a node those that none of its units holds, as fast as the link of its busiest unit allows. A document that is cut
costs each of its units the tiles that its last query rows do not fill.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import mul

import numpy as np

from ds_hetero.batch.ring_table import RingTable
from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.arrays import Floats
from ds_hetero.common.reading import MAX_SEQ_LEN
from ds_hetero.cost.calibrated import CalibratedCostModel
from ds_hetero.cost.model import once_s
from ds_hetero.planner.document_search.unit_costs import (
    TILE_ROWS,
    Pieces,
    UnitCosts,
    crossing_of,
    in_order,
    routed_s_per_byte,
)
from ds_hetero.values.placement import Placement
from ds_hetero.values.schedule import Schedule

LINK_KINDS = ("inside_nodes", "between_nodes")


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
    """Time of a step besides its blocks and the tokens' part of the loss, over blocks and micro-batches."""
    once, work = once_s(cost.outside_blocks_s(tokens_D)), cost.workload
    loss_s = cost.outside_blocks_s(np.zeros_like(tokens_D))["loss_s"]
    return (loss_s + once / work.micro_batches) / cost.model.num_layers


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
    for parts in cost.memory_phases(grouping, tokens_D, heads_D).values():
        grows_D = parts.activations + parts.layer + parts.exchange_buffers
        grows_D = grows_D + (0.0 if cost.workload.tiled_logits else parts.logits)
        left_D = cost.capacity_bytes_D - (parts.total - grows_D)
        fixed_fits_D = np.where(left_D < 0, 0.0, np.inf)
        of_moment_D = np.where(grows_D > 0, left_D / np.where(grows_D > 0, grows_D, 1.0), fixed_fits_D)
        times_D = np.minimum(times_D, of_moment_D)
    tokens_K = grouping.by_group(np.add, tokens_D)
    most_K = np.clip(grouping.by_group(np.minimum, times_D) * tokens_K, 0, MAX_SEQ_LEN)
    return tuple(int(most) for most in np.nan_to_num(most_K, nan=0.0))


@dataclass(frozen=True, slots=True)
class Loads:
    """Loads of units and nodes in one block."""

    tokens: tuple[int, ...]  # of every unit
    linear_s: tuple[float, ...]  # outside attention, of every unit
    attention_s: tuple[float, ...]  # of every unit
    fragments_s: tuple[float, ...]  # what cutting adds to that
    received_s: tuple[float, ...]  # receiving keys and values and their gradients, of every unit
    exchange_s: float = 0.0  # exchanging heads between nodes, for which all wait
    moved_s: float | None = None  # moving tokens before and after attention, for which all wait; None where none move

    @property
    def compute_s(self) -> float:
        """Time of the unit that computes the longest, whatever its documents are cut into."""
        if self.moved_s is not None:
            return max(self.linear_s) + max(self.attention_s)
        return max(map(sum, zip(self.linear_s, self.attention_s, strict=True)))

    @property
    def predicted_s(self) -> float:
        """Time of the block."""
        if self.moved_s is not None:
            inside_s = (s - linear_s for s, linear_s in zip(self.units_s, self.linear_s, strict=True))
            return self.exchange_s + self.moved_s + max(self.linear_s) + max(inside_s)
        return self.exchange_s + max(self.units_s)

    @property
    def units_s(self) -> list[float]:
        """Time of every unit."""
        units = zip(self.linear_s, self.attention_s, self.fragments_s, self.received_s, strict=True)
        return [linear + max(attention + fragments, received) for linear, attention, fragments, received in units]

    def fits(self, costs: UnitCosts) -> bool:
        """Whether every unit has memory for its tokens."""
        return all(held <= most for held, most in zip(self.tokens, costs.most_tokens, strict=True))

    def with_padding(self, tokens: Sequence[int], costs: UnitCosts) -> Loads:
        """The loads if every unit has so many more tokens, which no attention looks at."""
        held = tuple(a + b for a, b in zip(self.tokens, tokens, strict=True))
        linear_s = tuple(count * s for count, s in zip(held, costs.token_s, strict=True))
        return replace(self, tokens=held, linear_s=linear_s)


def ideal_s(lengths: Sequence[int], costs: UnitCosts, padding: int = 0) -> float:
    """The least time in which the units do all work, divisible at will over units that are always busy, links free.

    With a_d and b_d the times that unit d alone needs outside attention and in it, the linear program
    min T,  sum x = sum y = 1,  x_d a_d + y_d b_d <= T  has the dual  max over r of (1 + r) / sum_d max(1/a_d, r/b_d),
    which peaks where r is the ratio b_d / a_d of some unit. With equal ratios this is work over the sum of speeds.
    """
    tokens, squares = sum(lengths) + padding, sum(map(mul, lengths, lengths))
    outside, within = 0.0, 0.0  # sums of 1 / a over units of a ratio of r or more, of 1 / b over the others
    by_ratio = []
    for token_s, square_s, most in zip(costs.token_s, costs.square_s, costs.most_tokens, strict=True):
        if most:
            alone_s, attention_s = tokens * token_s, squares * square_s
            by_ratio.append((attention_s / alone_s, 1 / alone_s, 1 / attention_s))
            outside += 1 / alone_s
    best_s = 0.0
    for ratio, speed, attention_speed in sorted(by_ratio):
        best_s = max(best_s, (1 + ratio) / (outside + ratio * within))
        outside -= speed
        within += attention_speed
    return best_s


def loads_of(lengths: Sequence[int], pieces: Iterable[Pieces], costs: UnitCosts) -> Loads:
    """The loads of a placement: ``pieces[j]`` are the units of document j with their tokens."""
    units, node_of = len(costs.token_s), costs.node
    tokens, token_squares, cut_lengths, received = [0] * units, [0] * units, [0] * units, [0] * units
    crossed, entering = [0] * costs.num_nodes, [0.0] * units
    for length, ring in zip(lengths, pieces, strict=True):
        if len(ring) == 1:
            unit = ring[0][0]
            tokens[unit] += length
            token_squares[unit] += length * length
            continue
        of_node: dict[int, int] = {}
        for unit, count in ring:
            tokens[unit] += count
            token_squares[unit] += count * length
            cut_lengths[unit] += length
            received[unit] += length - count
            of_node[node_of[unit]] = of_node.get(node_of[unit], 0) + count
        if len(of_node) > 1:
            for node, count in of_node.items():
                crossed[node] += length - count
            for unit, entered in crossing_of(in_order(ring, costs), costs).entering.items():
                entering[unit] += entered
    inside_s = (count * costs.receive_s[node] for count, node in zip(received, node_of, strict=True))
    entered_s = crossing_s(crossed, entering, costs)
    return Loads(
        tokens=tuple(tokens),
        linear_s=tuple(count * s for count, s in zip(tokens, costs.token_s, strict=True)),
        attention_s=tuple(square * s for square, s in zip(token_squares, costs.square_s, strict=True)),
        fragments_s=tuple(costs.fragment_rows * n * s for n, s in zip(cut_lengths, costs.square_s, strict=True)),
        received_s=tuple(max(s, entered_s[node]) for s, node in zip(inside_s, node_of, strict=True)),
    )


def crossing_s(crossed: Sequence[int], entering: Sequence[float], costs: UnitCosts) -> list[float]:
    """Seconds, by node, until KV of other nodes arrives: ``crossed`` tokens [node], ``entering`` [unit] thereof."""
    times = [tokens * s for tokens, s in zip(crossed, costs.cross_s, strict=True)]
    if costs.link_s:
        for tokens, node in zip(entering, costs.node, strict=True):
            times[node] = max(times[node], tokens * costs.link_s[node])
    return times


@dataclass(frozen=True, slots=True)
class KVBytes:
    """Bytes of the keys and values of one token and one KV head."""

    forward: float  # in all forwards of a step; twice as many where activations are recomputed
    backward: float  # of the keys and values that the backward sends once more
    gradients: float  # of their gradients


def ring_bytes(
    placement: Placement, node_of_rank: Sequence[int], kv_bytes: KVBytes, *, window: int | None = None
) -> dict[str, float]:
    """Bytes of all messages of the rings of one layer, forward and backward, by `LINK_KINDS`; over all ranks."""
    batch_size = placement.rows[-1].stop
    total: Counter[str] = Counter()
    lanes = ((part.placement, lane) for part in placement.parts for lane in part.placement.lanes)
    for of_part, lane in lanes:
        if len(lane.members) == 1:
            continue
        schedule, hops = of_part.schedule, _hop_bytes(RingTable(of_part, lane, True, window), kv_bytes)
        for piece in schedule.sub_ring_tasks(lane.members):
            first, last = schedule.kv_heads(piece.start, piece.stop)
            for (sender, receiver), count in hops.items():
                is_between = node_of_rank[piece.owners[sender]] != node_of_rank[piece.owners[receiver]]
                total[LINK_KINDS[is_between]] += batch_size * (last - first) * count
    return {kind: float(total[kind]) for kind in LINK_KINDS}


def exchange_bytes(placement: Placement, node_of_rank: Sequence[int], kv_bytes: KVBytes) -> dict[str, float]:
    """Bytes of the all-to-alls of one layer, forward and backward, by `LINK_KINDS`; over all ranks.

    For each of its tokens a rank sends q, k and v of another rank's heads and gets these heads of the output back; the
    backward does the same with gradients, of the same size. A token that moves does so with all heads.
    """
    of_head = (kv_bytes.forward + kv_bytes.backward) / 2  # of one query or key or value head, in all passes
    total: Counter[str] = Counter()
    for part in placement.parts:
        schedule = part.placement.schedule
        for group in schedule.groups:
            for other in group.ranks:
                start, stop = group.head_range(other)
                first, last = schedule.kv_heads(start, stop)
                heads = 2 * (stop - start) + 2 * (last - first)
                for rank in group.ranks:
                    if rank != other:
                        is_between = node_of_rank[rank] != node_of_rank[other]
                        total[LINK_KINDS[is_between]] += part.placement.tokens(rank) * heads * of_head  # type: ignore[assignment]
    for move in placement.moves:
        heads = 2 * (placement.schedule.num_heads + placement.schedule.num_kv_heads)
        is_between = node_of_rank[move.attends] != node_of_rank[move.holds]
        total[LINK_KINDS[is_between]] += move.tokens * heads * of_head  # type: ignore[assignment]
    return {kind: placement.rows[-1].stop * float(total[kind]) for kind in LINK_KINDS}


def _hop_bytes(table: RingTable, kv_bytes: KVBytes) -> Counter[tuple[int, int]]:
    """Bytes of one KV head and batch row by sender and receiver, which are positions in the lane's ring."""
    hops: Counter[tuple[int, int]] = Counter()
    for position in range(table.size):
        for rounds, bytes_per_token in (
            (table.forward_rounds(position), kv_bytes.forward),
            (table.backward_kv_rounds(position), kv_bytes.backward),
            (table.backward_grad_rounds(position), kv_bytes.gradients),
        ):
            for round_ in rounds:
                for transfer in round_.sends:
                    hops[transfer.sender, transfer.receiver] += table.num_columns(transfer) * bytes_per_token  # type: ignore[assignment]
    return hops
