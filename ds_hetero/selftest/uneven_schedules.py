"""Uneven schedules over all ranks, and lengths that divide by nothing."""

from __future__ import annotations

from ds_hetero.selftest.session import Session
from ds_hetero.values.schedule import Group, Schedule
from ds_hetero.values.splits import share

NUM_HEADS, NUM_KV_HEADS = 8, 4


def uneven_schedules(size: int) -> dict[str, Schedule]:
    """Return schedules by name: one group, a ring of single ranks, and from three ranks on a ring of two groups."""
    ranks = tuple(range(size))
    schedules = {"ragged exchange": _schedule([ranks]), "ring": _schedule([(rank,) for rank in ranks])}
    if size >= 3:
        schedules["sub-rings"] = _schedule([ranks[: size // 2], ranks[size // 2 :]])
    return schedules


def length_for(size: int) -> int:
    """Return tokens of a sequence that gives every rank some, and divides by nothing."""
    return 24 * size + 7


def long_length_for(session: Session) -> int:
    """Return tokens of a sequence that is long for its device: several blocks of every kernel a rank, unaligned.

    On GPUs the whole of it is compared in float64: 8 heads of 64 at 8,259 tokens are 0.5 TFLOP, by the datasheet 2 s
    on a T4, the slowest; never measured.
    """
    return max(8259 if session.is_on_gpu else 601, length_for(session.size))


def _schedule(groups: list[tuple[int, ...]]) -> Schedule:
    made = []
    for index, ranks in enumerate(groups):
        weights = [1 + (rank + index) % 3 for rank in ranks]
        made.append(Group(ranks=ranks, tokens=tuple(weights[::-1]), heads=share(NUM_HEADS, weights)))
    return Schedule(num_heads=NUM_HEADS, num_kv_heads=NUM_KV_HEADS, groups=tuple(made), layout="zigzag")
