"""Form islands: groups of similar nodes, for a parallelizer that plans equal devices (Tangram, Algorithm 1).

    clustering  two nodes are connected if their compute, memory and memory bandwidth differ by at most tau of the
                largest; islands are the connected components
    merging     two islands become one as long as the estimated bottleneck of the pipeline over all islands grows by
                at most a factor; the cheapest pair first

An island is planned as if all its devices were as slow as its slowest device and had as little memory as its smallest,
so merging loses speed and memory of the other devices. The bottleneck is estimated at perfect balance, with layers in
proportion to compute, to memory, or to memory bandwidth. Of these three metrics, the one whose sum over all islands
shrinks most decides.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ds_hetero.cluster.topology import DeviceSpec
from ds_hetero.cost.stages.stage import Pool, Pools

TAU = 0.2  # difference of connected nodes, relative to the largest value of a metric
MERGE = 1.0  # growth of the bottleneck up to which islands are merged; not in the paper; with 1 only equal ones merge


@dataclass(frozen=True, slots=True)
class Island:
    """Devices that are planned as if they were equal."""

    pools: tuple[Pool, ...]  # devices of one kind on one node each
    weakest: int  # kind of the device with the least memory, then speed; all devices are planned as of this kind
    totals: tuple[float, float, float]  # number of devices times the smallest FLOP/s, memory and memory bytes/s

    @classmethod
    def of(cls, pools: Pools, members: Iterable[Pool]) -> Island:
        """Return the island of these pools."""
        island_pools = tuple(sorted(members, key=lambda pool: (pool.node, pool.kind)))
        devices = {pool.kind: pools.kinds[pool.kind].device for pool in island_pools}  # by kind
        weakest = min(devices, key=lambda kind: (devices[kind].memory_bytes, devices[kind].peak_flops_per_s, kind))
        num_devices = sum(len(pool.ranks) for pool in island_pools)
        flops_per_s, memory_bytes, bytes_per_s = map(min, zip(*map(_metrics, devices.values()), strict=True))
        totals = (num_devices * flops_per_s, num_devices * memory_bytes, num_devices * bytes_per_s)
        return cls(island_pools, weakest, totals)

    @property
    def flops_per_s(self) -> float:
        """FLOP/s of all devices, each at the speed of the slowest."""
        return self.totals[0]

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return sum(len(pool.ranks) for pool in self.pools)


def form_islands(pools: Pools, tau: float = TAU, merge: float = MERGE) -> list[Island]:
    """Return the islands of a cluster, fastest first.

    Args:
        tau: largest difference of two connected nodes in any metric, relative to the metric's largest value.
        merge: factor by which the bottleneck may grow when two islands become one.
    """
    islands = [Island.of(pools, members) for members in _components(pools, tau)]
    while len(islands) > 1:
        sums = [sum(totals) for totals in zip(*(island.totals for island in islands), strict=True)]
        pairs = list(itertools.combinations(islands, 2))
        merged = [Island.of(pools, one.pools + other.pools) for one, other in pairs]
        growths = [_growth(sums, *pair, merged_pair) for pair, merged_pair in zip(pairs, merged, strict=True)]
        cheapest = min(range(len(pairs)), key=growths.__getitem__)
        if growths[cheapest] > merge:
            break
        islands = [island for island in islands if island not in pairs[cheapest]] + [merged[cheapest]]
    return sorted(islands, key=lambda island: (-island.flops_per_s, island.pools[0].node))


def _growth(sums: Sequence[float], one: Island, other: Island, merged: Island) -> float:
    """Return the factor by which the bottleneck grows if two islands become one.

    Example: islands of 4 and 2 PFLOP/s, of 10 PFLOP/s in all, have 3 PFLOP/s as one, since all devices count as the
    weakest. The bottleneck then takes 10 / (10 - 4 - 2 + 3) = 1.43 times as long.

    Args:
        sums: totals of all islands.
    """
    totals = zip(sums, one.totals, other.totals, merged.totals, strict=True)
    return max(
        total / (total - one_total - other_total + merged_total)
        for total, one_total, other_total, merged_total in totals
    )


def _metrics(device: DeviceSpec) -> tuple[float, float, float]:
    """Return the metrics by which nodes are compared: FLOP/s, bytes of memory, and bytes/s of memory."""
    return device.peak_flops_per_s, device.memory_bytes, device.memory_bytes_per_s


def _components(pools: Pools, tau: float) -> list[list[Pool]]:
    """Return the connected components of pools; two are connected if no metric differs by more than ``tau``.

    The difference is relative to the largest value of the metric in the cluster.
    """
    metrics = [_metrics(kind.device) for kind in pools.kinds]
    largest = [max(column) for column in zip(*metrics, strict=True)]

    def are_similar(a: int, b: int) -> bool:
        """Whether two kinds of devices are connected."""
        values = zip(metrics[a], metrics[b], largest, strict=True)
        return all(abs(value_a - value_b) <= tau * largest_value for value_a, value_b, largest_value in values)

    components: list[set[int]] = []  # kinds of devices
    for kind in range(len(metrics)):
        component, separate = {kind}, []
        for other in components:
            if any(are_similar(kind, member) for member in other):
                component |= other
            else:
                separate.append(other)
        components = [*separate, component]
    return [[pool for pool in pools.pools if pool.kind in component] for component in components]
