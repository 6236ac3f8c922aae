"""Words for schedules: what one is, and how much slower another one is."""

from __future__ import annotations

from ds_hetero.cluster.topology import Cluster
from ds_hetero.values.schedule import Schedule

AS_FAST = 1.0005  # times this close print alike: half of the last of three digits


def idle_ranks(schedule: Schedule) -> tuple[int, ...]:
    """Ranks that get neither tokens nor heads, group after group."""
    return tuple(
        rank
        for group in schedule.groups
        for rank, tokens, heads in zip(group.ranks, group.tokens, group.heads, strict=True)
        if not tokens + heads
    )


def describe(schedule: Schedule, cluster: Cluster) -> str:
    """A schedule in a line: ``ring of 3 groups: 2 x (1 H100-SXM-80GB + 3 L40S), 8 A100-SXM-80GB``."""
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
    """How a candidate that takes ``times`` the time of the best one compares with it."""
    if times < AS_FAST:
        return "as fast"
    return f"{100 * (times - 1):.1f} % slower" if times < 2 else f"takes {times:.1f} times as long"
