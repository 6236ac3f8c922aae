"""Traffic of one layer for a placement, by kind of link, counted by the table that the engine sends by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ds_hetero.batch.ring_table import RingTable
from ds_hetero.values.placement import Placement

LINK_KINDS = ("inside_nodes", "between_nodes")


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
