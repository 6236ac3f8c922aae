"""Who passes KV to whom: the head cuts of neighbouring groups, in arrays.

Every group cuts the same N heads at its own places. Written out head by head, the owner of head h in group k
is one entry of a table, and neighbours in the ring exchange what their rows have in common; the runs of equal
pairs are the sub-ring tasks of HexiSeq (arXiv:2605.07569, section 3.2) joined where one pair holds several.

Dimension key: B assignments, D ranks, K groups in ring order, N query heads, E edges.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ds_hetero.common.arrays import Floats, Ints
from ds_hetero.cost.terms.grouping import Grouping


@dataclass(frozen=True, slots=True)
class Edges:
    """Transfers of one ring step, sorted by (assignment, receiving position).

    Attributes:
        sender: global rank, ``[E]``.
        receiver: global rank, ``[E]``.
        heads: query heads, or KV heads, that travel between the two, ``[E]``; see `ring_edges`.
        starts: first edge of every (assignment, position), ``[B * K]``; each has at least one.
    """

    sender: Ints
    receiver: Ints
    heads: Floats
    starts: Ints


def ring_edges(grouping: Grouping, heads_BD: Ints, queries_per_kv_head: int | None = None) -> Edges:
    """Edges from every group to the next one in the ring.

    With ``queries_per_kv_head`` the heads are KV heads: a KV head that a cut of *any* group divides travels once for
    each task that needs it, as in the runtime, whose tasks are the common refinement of all groups' cuts.
    Without it they are query heads (HexiSeq counts full-width KV).
    """
    num_sets, num_groups = len(heads_BD), grouping.num_groups
    ordered_BD = heads_BD[:, grouping.order]
    owner_BKN = np.repeat(np.tile(grouping.order, num_sets), ordered_BD.ravel()).reshape(num_sets, num_groups, -1)
    sender_BKN = np.roll(owner_BKN, 1, axis=1)
    new_BKN = np.ones(owner_BKN.shape, dtype=bool)  # first head of a run of one (sender, receiver)
    own_cut_BKN = owner_BKN[:, :, 1:] != owner_BKN[:, :, :-1]
    new_BKN[:, :, 1:] = own_cut_BKN | np.roll(own_cut_BKN, 1, axis=1)
    starts = np.flatnonzero(new_BKN)
    if queries_per_kv_head is None:
        heads = np.diff(np.append(starts, owner_BKN.size)).astype(np.float64)
    else:
        begins_BN = np.arange(owner_BKN.shape[-1]) % queries_per_kv_head == 0  # a KV head, or a task inside one
        begins_BN = np.repeat(begins_BN[None], num_sets, axis=0)
        begins_BN[:, 1:] |= own_cut_BKN.any(axis=1)
        weight_BKN = np.broadcast_to(begins_BN[:, None], owner_BKN.shape).astype(np.float64)
        heads = np.add.reduceat(weight_BKN.ravel(), starts)
    row = starts // owner_BKN.shape[-1]
    return Edges(
        sender=sender_BKN.ravel()[starts],
        receiver=owner_BKN.ravel()[starts],
        heads=heads,
        starts=np.searchsorted(row, np.arange(num_sets * num_groups)),
    )


def kv_heads_of_ranks(grouping: Grouping, heads_BD: Ints, queries_per_kv_head: int) -> Ints:
    """KV heads that every rank needs for its query heads, ``[B, D]``; one on a cut counts on both sides."""
    if queries_per_kv_head == 1:
        return heads_BD
    ordered = heads_BD[:, grouping.order]
    stop = np.cumsum(ordered, axis=1)
    start = stop - ordered
    kv = np.where(ordered > 0, -(-stop // queries_per_kv_head) - start // queries_per_kv_head, 0)
    out = np.empty_like(kv)
    out[:, grouping.order] = kv
    return out
