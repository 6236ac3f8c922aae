"""Traffic of the asymmetric gradient synchronization, in elements.

Plain integers; no torch.
"""

from __future__ import annotations

from collections.abc import Iterable

from ds_hetero.sharding.gradient_chunks import Chunk


def reduced_elements(chunks: Iterable[Chunk], rank: int) -> int:
    """Count the elements that ``rank`` sends to other ranks so that every owner has its sums."""
    return sum(chunk.size for chunk in chunks if rank in chunk.contributors and chunk.owner != rank)


def gathered_elements(chunks: Iterable[Chunk], rank: int) -> int:
    """Count the elements that ``rank`` sends to other ranks so that every holder has the owners' values."""
    return sum(chunk.size * sum(holder != rank for holder in chunk.holders) for chunk in chunks if chunk.owner == rank)


def ring_reduce_scatter_elements(held: int, replicas: int) -> float:
    """Count what a rank sends in a ring reduce-scatter of ``held`` elements over ``replicas`` equal copies.

    (R - 1) / R of them, in R - 1 steps of 1 / R (Patarasu and Yuan, doi:10.1016/j.jpdc.2008.09.002); no algorithm
    sends fewer, summed over ranks: every copy but the owner's leaves its rank once. An all-gather sends as many, and an
    all-reduce, ring or recursive halving and doubling, is the two in turn. A binary tree all-reduce sends all ``held``
    elements up and down each edge: 2 (R - 1) of ``held`` in total, the same.
    """
    return held * (replicas - 1) / replicas
