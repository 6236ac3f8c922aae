"""Schedules by the rules of other systems: equal shares on every rank, or shares in proportion to speed.

This is the one list of baselines and of the names of strategies. The planner compares with the baselines, the
configuration accepts all strategies by name, and the benchmarks and tests run them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from ds_hetero.errors import ScheduleError
from ds_hetero.values.schedule import Group, Schedule
from ds_hetero.values.splits import share

COMPARED = ("ulysses", "ring", "usp")  # kinds of baselines that a planned schedule is compared with
FROM_DEVICES = ("proportional",)  # strategies that need the speeds of the devices
FROM_PLANNER = ("plan", "lut", "formula")  # strategies that `ds_hetero.planner` computes under a cost model


def ulysses(num_ranks: int, num_heads: int, num_kv_heads: int) -> Schedule:
    """DeepSpeed-Ulysses (arXiv:2309.14509): one group, equal tokens, heads as equal as whole heads allow.

    The layout is contiguous: inside one group it does not matter, and shards stay contiguous.
    """
    return _even_groups([range(num_ranks)], num_heads, num_kv_heads, "contiguous")


def ring(num_ranks: int, num_heads: int, num_kv_heads: int) -> Schedule:
    """Ring attention (arXiv:2310.01889): every rank a group of its own, equal tokens, zigzag."""
    return _even_groups([[rank] for rank in range(num_ranks)], num_heads, num_kv_heads, "zigzag")


def usp(num_ranks: int, num_heads: int, num_kv_heads: int, ulysses_size: int | None = None) -> Schedule:
    """USP (arXiv:2405.07719): equal groups of neighbours in a ring. Raises `ScheduleError`: sizes do not divide.

    Left out, ``ulysses_size`` is the largest divisor of ``num_ranks`` that also divides the KV heads.
    """
    size = ulysses_size or gcd(num_ranks, num_kv_heads)
    if num_ranks % size:
        raise ScheduleError(f"ulysses_size {size} does not divide {num_ranks} ranks. Give a divisor.")
    groups = [range(first, first + size) for first in range(0, num_ranks, size)]
    return _even_groups(groups, num_heads, num_kv_heads, "contiguous" if size == num_ranks else "zigzag")


def usp_meshes(num_ranks: int, num_heads: int, num_kv_heads: int) -> tuple[Schedule, ...]:
    """Every USP mesh that other systems accept, from Ring to Ulysses.

    They need whole heads, equal on all ranks, so ``ulysses_size`` divides the ranks and the query heads.
    """
    common = gcd(num_ranks, num_heads)
    ulysses_sizes = [size for size in range(1, common + 1) if common % size == 0]
    return tuple(usp(num_ranks, num_heads, num_kv_heads, size) for size in ulysses_sizes)


def even(num_ranks: int, num_heads: int, num_kv_heads: int) -> Schedule:
    """Return the hetero-ring paper's even split, which equals `ring`; the counterpart of `proportional`."""
    return ring(num_ranks, num_heads, num_kv_heads)


def proportional(speeds: Sequence[float], num_heads: int, num_kv_heads: int) -> Schedule:
    """The hetero-ring paper's proportional split: a zigzag ring with tokens in proportion to ``speeds``.

    In the zigzag layout a rank's causal work is in proportion to its tokens.
    """
    groups = tuple(Group(ranks=(rank,), tokens=(speed,), heads=(num_heads,)) for rank, speed in enumerate(speeds))
    return Schedule(num_heads=num_heads, num_kv_heads=num_kv_heads, groups=groups, layout="zigzag")


UNIFORM = {"ulysses": ulysses, "ring": ring, "usp": usp, "even": even}  # strategies that need numbers only
STRATEGIES = ("plan", *UNIFORM, *FROM_DEVICES, "lut", "formula")  # all that a configuration and the commands take


def all_baselines(num_ranks: int, num_heads: int, num_kv_heads: int) -> tuple[dict[str, Schedule], dict[str, str]]:
    """Ulysses, Ring and USP meshes that other systems accept, by name (``usp 4x2``), and why others do not exist."""
    schedules, missing = {}, {}
    if num_heads % num_ranks:
        missing["ulysses"] = f"num_heads={num_heads} is not a multiple of {num_ranks} ranks"
    else:
        schedules["ulysses"] = ulysses(num_ranks, num_heads, num_kv_heads)
    schedules["ring"] = ring(num_ranks, num_heads, num_kv_heads)
    between = [mesh for mesh in usp_meshes(num_ranks, num_heads, num_kv_heads) if 1 < mesh.ring_size < num_ranks]
    for mesh in between:
        schedules[f"usp {mesh.ring_size}x{num_ranks // mesh.ring_size}"] = mesh
    if not between:
        missing["usp"] = f"no number between 1 and {num_ranks} divides both {num_ranks} ranks and {num_heads} heads"
    return schedules, missing


def _even_groups(groups: Sequence[Sequence[int]], num_heads: int, num_kv_heads: int, layout: str) -> Schedule:
    """A schedule of these groups, with equal tokens on all ranks and heads as equal as whole heads allow."""
    even_groups = []
    for ranks in groups:
        weights = (1,) * len(ranks)
        even_groups.append(Group(ranks=tuple(ranks), tokens=weights, heads=share(num_heads, weights)))
    return Schedule(num_heads=num_heads, num_kv_heads=num_kv_heads, layout=layout, groups=tuple(even_groups))
