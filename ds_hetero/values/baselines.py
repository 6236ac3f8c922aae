"""Baseline schedules by the rules of other systems: equal shares on every rank, or shares in proportion to speed.

All names of baselines and strategies are listed here. The planner compares its schedule with the baselines, the
configuration accepts all strategies by name, and benchmarks and tests run them.
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
    """Make DeepSpeed-Ulysses (arXiv:2309.14509): one group, equal tokens, heads as equal as whole heads allow.

    The layout is contiguous: inside one group it does not change the work, and shards stay contiguous.
    """
    return _even_groups([range(num_ranks)], num_heads, num_kv_heads, "contiguous")


def ring(num_ranks: int, num_heads: int, num_kv_heads: int) -> Schedule:
    """Make ring attention (arXiv:2310.01889): every rank is a group, with equal tokens in a zigzag layout."""
    return _even_groups([[rank] for rank in range(num_ranks)], num_heads, num_kv_heads, "zigzag")


def usp(num_ranks: int, num_heads: int, num_kv_heads: int, ulysses_size: int | None = None) -> Schedule:
    """Make a USP mesh (arXiv:2405.07719): a ring of equal groups, each of neighbouring ranks.

    Args:
        ulysses_size: ranks of a group; None: the largest divisor of ``num_ranks`` that also divides the KV heads.

    Raises:
        ScheduleError: ``ulysses_size`` does not divide the ranks.
    """
    size = ulysses_size or gcd(num_ranks, num_kv_heads)
    if num_ranks % size:
        raise ScheduleError(f"ulysses_size {size} does not divide {num_ranks} ranks. Give a divisor.")
    groups = [range(first, first + size) for first in range(0, num_ranks, size)]
    return _even_groups(groups, num_heads, num_kv_heads, "contiguous" if size == num_ranks else "zigzag")


def usp_meshes(num_ranks: int, num_heads: int, num_kv_heads: int) -> tuple[Schedule, ...]:
    """List every USP mesh that other systems accept, from ring attention to Ulysses.

    These systems need equally many whole heads on all ranks, so ``ulysses_size`` divides the ranks and the query heads.
    """
    common = gcd(num_ranks, num_heads)
    ulysses_sizes = [size for size in range(1, common + 1) if common % size == 0]
    return tuple(usp(num_ranks, num_heads, num_kv_heads, size) for size in ulysses_sizes)


def even(num_ranks: int, num_heads: int, num_kv_heads: int) -> Schedule:
    """Make the even split of the hetero-ring paper, which equals `ring`; it is the counterpart of `proportional`."""
    return ring(num_ranks, num_heads, num_kv_heads)


def proportional(speeds: Sequence[float], num_heads: int, num_kv_heads: int) -> Schedule:
    """Make the proportional split of the hetero-ring paper: a zigzag ring with tokens in proportion to ``speeds``.

    In the zigzag layout a rank's causal work is proportional to its tokens.
    """
    groups = tuple(Group(ranks=(rank,), tokens=(speed,), heads=(num_heads,)) for rank, speed in enumerate(speeds))
    return Schedule(num_heads=num_heads, num_kv_heads=num_kv_heads, groups=groups, layout="zigzag")


UNIFORM = {"ulysses": ulysses, "ring": ring, "usp": usp, "even": even}  # strategies that ignore the devices
STRATEGIES = ("plan", *UNIFORM, *FROM_DEVICES, "lut", "formula")  # all strategies of configurations and commands


def all_baselines(num_ranks: int, num_heads: int, num_kv_heads: int) -> tuple[dict[str, Schedule], dict[str, str]]:
    """Make all baselines that other systems accept, and say why the other baselines do not exist.

    Returns:
        Schedules by name: ``ulysses``, ``ring``, and USP meshes such as ``usp 4x2``; and for each missing baseline the
        reason, by name.
    """
    schedules, missing_reasons = {}, {}
    if num_heads % num_ranks:
        missing_reasons["ulysses"] = f"num_heads={num_heads} is not a multiple of {num_ranks} ranks"
    else:
        schedules["ulysses"] = ulysses(num_ranks, num_heads, num_kv_heads)
    schedules["ring"] = ring(num_ranks, num_heads, num_kv_heads)
    # A mesh with one group is Ulysses, and a mesh with groups of one rank is ring attention.
    meshes = [mesh for mesh in usp_meshes(num_ranks, num_heads, num_kv_heads) if 1 < mesh.ring_size < num_ranks]
    for mesh in meshes:
        schedules[f"usp {mesh.ring_size}x{num_ranks // mesh.ring_size}"] = mesh
    if not meshes:
        missing_reasons["usp"] = (
            f"no number between 1 and {num_ranks} divides both {num_ranks} ranks and {num_heads} heads"
        )
    return schedules, missing_reasons


def _even_groups(groups: Sequence[Sequence[int]], num_heads: int, num_kv_heads: int, layout: str) -> Schedule:
    """Make a schedule of these groups, with equal tokens on all ranks and heads as equal as whole heads allow."""
    even_groups = []
    for ranks in groups:
        weights = (1,) * len(ranks)
        even_groups.append(Group(ranks=tuple(ranks), tokens=weights, heads=share(num_heads, weights)))
    return Schedule(num_heads=num_heads, num_kv_heads=num_kv_heads, layout=layout, groups=tuple(even_groups))
