"""Describe in words a schedule, and how much slower than another schedule it is."""

from __future__ import annotations

from ds_hetero.cluster.topology import Cluster
from ds_hetero.values.schedule import Schedule

MAX_EQUAL_RATIO = 1.0005  # ratio of two times below which their texts of three digits are equal


def idle_ranks(schedule: Schedule) -> tuple[int, ...]:
    """Return the ranks that have neither tokens nor heads, group after group."""
    idle: list[int] = []
    for group in schedule.groups:
        shares = zip(group.ranks, group.tokens, group.heads, strict=True)
        idle += [rank for rank, tokens, heads in shares if not tokens + heads]
    return tuple(idle)


def describe(schedule: Schedule, cluster: Cluster) -> str:
    """Return a line on a schedule: ``ring of 3 groups: 2 x (1 H100-SXM-80GB + 3 L40S), 8 A100-SXM-80GB``."""
    idle = idle_ranks(schedule)
    makeups: dict[str, int] = {}
    for group in schedule.ring_groups:
        names = [cluster.devices[rank].name for rank in group.ranks if rank not in idle]
        counts = {name: names.count(name) for name in dict.fromkeys(names)}
        makeup = " + ".join(f"{count} {name}" for name, count in counts.items())
        makeups[makeup] = makeups.get(makeup, 0) + 1
    listed = ", ".join(f"{count} x ({makeup})" if count > 1 else makeup for makeup, count in makeups.items())
    shape = "one group" if schedule.ring_size == 1 else f"ring of {schedule.ring_size} groups"
    return f"{shape}: {listed}" + (f"; {len(idle)} idle" if idle else "")


def slower_text(times: float) -> str:
    """Describe the speed of a candidate relative to the best one: ``as fast``, ``4.0 % slower``.

    Args:
        times: the candidate's time as a multiple of the best one's.
    """
    if times < MAX_EQUAL_RATIO:
        return "as fast"
    return f"{100 * (times - 1):.1f} % slower" if times < 2 else f"takes {times:.1f} times as long"
