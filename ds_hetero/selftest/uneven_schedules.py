"""Uneven schedules over all ranks, and odd sequence lengths for them."""

from __future__ import annotations

from ds_hetero.selftest.session import Session
from ds_hetero.values.schedule import Group, Schedule
from ds_hetero.values.splits import share

NUM_HEADS, NUM_KV_HEADS = 8, 4


def uneven_schedules(size: int) -> dict[str, Schedule]:
    """Return schedules by name: one Ulysses group; a ring of single ranks; from 3 ranks on, a ring of 2 groups."""
    ranks = tuple(range(size))
    schedules = {"ragged exchange": _schedule([ranks]), "ring": _schedule([(rank,) for rank in ranks])}
    if size >= 3:
        schedules["sub-rings"] = _schedule([ranks[: size // 2], ranks[size // 2 :]])
    return schedules


def length_for(size: int) -> int:
    """Return a short sequence length, in tokens, that gives every rank some; it is odd."""
    return 24 * size + 7


def long_length_for(session: Session) -> int:
    """Return a long sequence length, in tokens, that gives every rank several blocks of every kernel and a remainder.

    The reference attention of the whole sequence is computed in float64. On GPUs, 8 heads of size 64 at 8,259 tokens
    are 0.5 TFLOP: 2 s on the slowest GPU, a T4, by its datasheet (not measured).
    """
    return max(8259 if session.is_on_gpu else 601, length_for(session.size))


def _schedule(groups: list[tuple[int, ...]]) -> Schedule:
    """Return a schedule in which a group's ranks have heads as 1 : 2 : 3 : 1 ..., and tokens in the reverse order."""
    uneven_groups = []
    for index, ranks in enumerate(groups):
        weights = [1 + (rank + index) % 3 for rank in ranks]
        uneven_groups.append(Group(ranks=ranks, tokens=tuple(weights[::-1]), heads=share(NUM_HEADS, weights)))
    return Schedule(num_heads=NUM_HEADS, num_kv_heads=NUM_KV_HEADS, groups=tuple(uneven_groups), layout="zigzag")
