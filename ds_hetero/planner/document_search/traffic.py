"""Count the bytes that one layer sends under a placement, by kind of link, with the engine's own table of messages."""

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

    forward: float  # sent in the forward; twice as much with recomputation, which sends them again
    backward: float  # sent once more in the backward
    gradients: float  # their gradients, sent in the backward


def ring_bytes(
    placement: Placement, node_of_rank: Sequence[int], kv_bytes: KVBytes, *, window: int | None = None
) -> dict[str, float]:
    """Return the bytes that the rings of one layer send, forward and backward, on all ranks, by `LINK_KINDS`.

    Args:
        node_of_rank: index of every rank's node.
        window: keys that a query sees, with sliding-window attention; None if queries see all earlier keys.
    """
    batch_size = placement.rows[-1].stop
    bytes_by_kind: Counter[str] = Counter()
    lanes = ((part.placement, lane) for part in placement.parts for lane in part.placement.lanes)
    for part_placement, lane in lanes:
        if len(lane.members) == 1:
            continue
        schedule = part_placement.schedule
        hops = _hop_bytes(RingTable(part_placement, lane, True, window), kv_bytes)
        for task in schedule.sub_ring_tasks(lane.members):
            first_head, end_head = schedule.kv_heads(task.start, task.stop)
            for (sender, receiver), num_bytes in hops.items():
                is_between = node_of_rank[task.owners[sender]] != node_of_rank[task.owners[receiver]]
                bytes_by_kind[LINK_KINDS[is_between]] += batch_size * (end_head - first_head) * num_bytes
    return {kind: float(bytes_by_kind[kind]) for kind in LINK_KINDS}


def exchange_bytes(placement: Placement, node_of_rank: Sequence[int], kv_bytes: KVBytes) -> dict[str, float]:
    """Return the bytes that the all-to-alls of one layer send, forward and backward, on all ranks, by `LINK_KINDS`.

    For each of its tokens a rank sends q, k and v of another rank's heads, and the other rank returns the output of
    these heads. The backward does the same with gradients, of the same size. A token that attention computes on another
    rank (`Placement.moves`) is sent with all heads.

    Args:
        node_of_rank: index of every rank's node.
    """
    head_bytes = (kv_bytes.forward + kv_bytes.backward) / 2  # of one query, key or value head, in all passes
    row_bytes: Counter[str] = Counter()  # of one batch row, by kind of link
    for part in placement.parts:
        schedule = part.placement.schedule
        for group in schedule.groups:
            for receiver in group.ranks:
                start, stop = group.head_range(receiver)
                kv_start, kv_stop = schedule.kv_heads(start, stop)
                num_heads = 2 * (stop - start) + 2 * (kv_stop - kv_start)  # of q and the output, of k and v
                for sender in group.ranks:
                    if sender != receiver:
                        is_between = node_of_rank[sender] != node_of_rank[receiver]
                        row_bytes[LINK_KINDS[is_between]] += part.placement.tokens(sender) * num_heads * head_bytes  # type: ignore[assignment]
    for move in placement.moves:
        num_heads = 2 * (placement.schedule.num_heads + placement.schedule.num_kv_heads)
        is_between = node_of_rank[move.attention_rank] != node_of_rank[move.holder]
        row_bytes[LINK_KINDS[is_between]] += move.tokens * num_heads * head_bytes  # type: ignore[assignment]
    batch_size = placement.rows[-1].stop
    return {kind: batch_size * float(row_bytes[kind]) for kind in LINK_KINDS}


def _hop_bytes(table: RingTable, kv_bytes: KVBytes) -> Counter[tuple[int, int]]:
    """Return the bytes of one KV head and batch row, by (sender, receiver), both as positions in the lane's ring."""
    hop_bytes: Counter[tuple[int, int]] = Counter()
    for position in range(table.size):
        for rounds, bytes_per_token in (
            (table.forward_rounds(position), kv_bytes.forward),
            (table.backward_kv_rounds(position), kv_bytes.backward),
            (table.backward_grad_rounds(position), kv_bytes.gradients),
        ):
            for round_ in rounds:
                for transfer in round_.sends:
                    hop_bytes[transfer.sender, transfer.receiver] += table.num_keys_of(transfer) * bytes_per_token  # type: ignore[assignment]
    return hop_bytes
