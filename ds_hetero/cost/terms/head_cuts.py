"""Transfers of KV heads in one ring step, when neighbouring groups split the query heads at different places.

A table lists the owner of every head in every group. Head h travels from its owner in one group to its owner in the
next. Adjacent heads with the same sender and receiver are one edge. An edge may join several sub-ring tasks of HexiSeq
(arXiv:2605.07569, section 3.2), which also end where any other group splits the heads.

Two groups of ranks 0, 1 and 2, 3 that cut four heads at 3 and at 1:

    head                   0  1  2  3
    owner in group 0       0  0  0  1
    owner in group 1       2  3  3  3
    edges into group 1     0->2, 0->3 (two heads), 1->3
    edges into group 0     2->0, 3->0 (two heads), 3->1

Dimension key: B assignments, D ranks, K groups in ring order, N query heads, E edges.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ds_hetero.common.arrays import Bools, Floats, Ints
from ds_hetero.cost.terms.grouping import Grouping


class Edges(NamedTuple):
    """Transfers of one ring step, sorted by (assignment, receiving position)."""

    sender: Ints  # global rank, ``[E]``
    receiver: Ints  # global rank, ``[E]``
    heads: Floats  # number of query heads, or of KV heads, that travel along the edge, ``[E]``; see `ring_edges`
    starts: Ints  # first edge of every (assignment, position), ``[B * K]``; each has at least one


def ring_edges(grouping: Grouping, heads_BD: Ints, queries_per_kv_head: int | None = None) -> Edges:
    """Return the edges from every group to the next one in the ring.

    Args:
        queries_per_kv_head: count KV heads. Where *any* group splits the query heads of one KV head between ranks, the
            KV head travels once for each part, as in the runtime, whose sub-ring tasks are the common refinement of
            all groups' splits. None: count query heads, as HexiSeq does.
    """
    num_sets, num_groups = len(heads_BD), grouping.num_groups
    owner_BKN = _owners(grouping, heads_BD)
    previous_K = np.arange(-1, num_groups - 1)  # position -1 is the last group: the ring is closed
    sender_BKN = owner_BKN[:, previous_K]
    is_cut_BKN = owner_BKN[:, :, 1:] != owner_BKN[:, :, :-1]  # between a head and the one before, in this group
    # An edge begins at the first head, and wherever the receiver or the sender changes.
    begins_edge_BKN = np.ones(owner_BKN.shape, dtype=bool)
    begins_edge_BKN[:, :, 1:] = is_cut_BKN | is_cut_BKN[:, previous_K]
    first_head_E = np.flatnonzero(begins_edge_BKN)  # as an index into the flat table
    if queries_per_kv_head is None:
        next_edge_E = np.append(first_head_E[1:], owner_BKN.size)
        heads_E = (next_edge_E - first_head_E).astype(np.float64)
    else:
        heads_E = _kv_heads_of_edges(is_cut_BKN, first_head_E, queries_per_kv_head)
    row_E = first_head_E // owner_BKN.shape[-1]  # number of the (assignment, position)
    return Edges(
        sender=sender_BKN.ravel()[first_head_E],
        receiver=owner_BKN.ravel()[first_head_E],
        heads=heads_E,
        starts=np.searchsorted(row_E, np.arange(num_sets * num_groups)),
    )


def _owners(grouping: Grouping, heads_BD: Ints) -> Ints:
    """Return the rank that owns every head in every group, ``[B, K, N]``."""
    num_sets, num_groups = len(heads_BD), grouping.num_groups
    heads_in_order_BD = heads_BD[:, grouping.order]
    ranks_BD = np.full(heads_in_order_BD.shape, grouping.order)
    counts = heads_in_order_BD.ravel().astype(np.intp, copy=False)
    # Repeat every rank as often as it has heads. Each group has N heads, so the result is a table.
    return ranks_BD.ravel().repeat(counts).reshape(num_sets, num_groups, -1)


def _kv_heads_of_edges(is_cut_BKN: Bools, first_head_E: Ints, queries_per_kv_head: int) -> Floats:
    """Count the KV heads that travel along every edge, ``[E]``.

    Args:
        is_cut_BKN: whether two adjacent query heads have different owners, ``[B, K, N - 1]``.
        first_head_E: first head of every edge, as an index into the flat table ``[B, K, N]``.
    """
    num_sets, num_groups, num_heads = is_cut_BKN.shape[0], is_cut_BKN.shape[1], is_cut_BKN.shape[2] + 1
    begins_kv_head_N = np.arange(num_heads) % queries_per_kv_head == 0
    begins_task_BN = np.repeat(begins_kv_head_N[None], num_sets, axis=0)
    begins_task_BN[:, 1:] |= is_cut_BKN.any(axis=1)
    shape = num_sets, num_groups, num_heads
    task_BKN = np.broadcast_to(begins_task_BN[:, None], shape).astype(np.float64)
    return np.asarray(np.add.reduceat(task_BKN.ravel(), first_head_E))


def kv_heads_of_ranks(grouping: Grouping, heads_BD: Ints, queries_per_kv_head: int) -> Ints:
    """Count the KV heads that every rank needs for its query heads, ``[B, D]``.

    A KV head whose query heads are on two ranks counts on both. With 2 query heads per KV head, a rank with query heads
    3 to 7 needs KV heads 1 to 3: ceil(8 / 2) - floor(3 / 2) = 3.
    """
    if queries_per_kv_head == 1:
        return heads_BD
    in_order_BD = heads_BD[:, grouping.order]
    # One running sum over all groups does: each group adds N heads, a multiple of the query heads per KV head.
    stop_BD = np.cumsum(in_order_BD, axis=1)
    start_BD = stop_BD - in_order_BD
    kv_stop_BD = -(-stop_BD // queries_per_kv_head)
    kv_start_BD = start_BD // queries_per_kv_head
    kv_in_order_BD = np.where(in_order_BD > 0, kv_stop_BD - kv_start_BD, 0)
    kv_BD = np.empty_like(kv_in_order_BD)
    kv_BD[:, grouping.order] = kv_in_order_BD
    return kv_BD
