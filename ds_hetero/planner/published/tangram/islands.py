"""Islands: nodes that are alike enough for a parallelizer that knows equal devices only (Tangram, Algorithm 1).

    clustering  nodes are connected whose compute, memory and memory bandwidth differ by at most tau of the largest;
                islands are the connected components
    merging     two islands become one as long as the estimated bottleneck of the pipeline over all islands grows by
                at most a factor; the cheapest pair first

An island is planned as if all its devices were its slowest and had its smallest memory, so merging costs what its
other devices could have done more. The bottleneck is estimated at perfect balance, where layers go by compute, by
memory or by its bandwidth: of the sums of each over all islands, the one of which merging takes most decides.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ds_hetero.cluster.topology import DeviceSpec
from ds_hetero.cost.stages.stage import Pool, Pools

TAU = 0.2  # of the largest value of a metric
MERGE = 1.0  # growth of the bottleneck up to which islands are merged; not printed, and at 1 only equal ones are


@dataclass(frozen=True, slots=True)
class Island:
    """Devices that are planned as equal ones."""

    pools: tuple[Pool, ...]  # its nodes, as pools of devices of one kind
    weakest: int  # kind of its slowest device with the least memory, which stands for all of them
    totals: tuple[float, float, float]  # of all its devices, at the least of any: FLOP/s, memory and its bytes/s

    @classmethod
    def of(cls, pools: Pools, members: Iterable[Pool]) -> Island:
        """Return the island of some pools."""
        chosen = tuple(sorted(members, key=lambda pool: (pool.node, pool.kind)))
        devices = {pool.kind: pools.kinds[pool.kind].device for pool in chosen}
        weakest = min(devices, key=lambda kind: (devices[kind].memory_bytes, devices[kind].peak_flops_per_s, kind))
        count = sum(len(pool.ranks) for pool in chosen)
        flops, memory, bandwidth = map(min, zip(*map(_metrics, devices.values()), strict=True))
        return cls(chosen, weakest, (count * flops, count * memory, count * bandwidth))

    @property
    def flops_per_s(self) -> float:
        """FLOP/s of all its devices, each counted at the speed of the slowest."""
        return self.totals[0]

    @property
    def num_devices(self) -> int:
        """Devices of all its nodes."""
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
        growths = [_growth(sums, *pair, together) for pair, together in zip(pairs, merged, strict=True)]
        cheapest = min(range(len(pairs)), key=growths.__getitem__)
        if growths[cheapest] > merge:
            break
        islands = [island for island in islands if island not in pairs[cheapest]] + [merged[cheapest]]
    return sorted(islands, key=lambda island: (-island.flops_per_s, island.pools[0].node))


def _growth(sums: Sequence[float], one: Island, other: Island, merged: Island) -> float:
    """How many times as long the bottleneck takes once two islands are one; ``sums``: totals of all islands.

    Islands of 4 and 2 PFLOP/s, of 10 in all, have 3 as one, whose devices all count as its weakest. The bottleneck then
    takes 10 / (10 - 4 - 2 + 3) = 1.43 times as long.
    """
    totals = zip(sums, one.totals, other.totals, merged.totals, strict=True)
    return max(total / (total - of_one - of_other + of_merged) for total, of_one, of_other, of_merged in totals)


def _metrics(device: DeviceSpec) -> tuple[float, float, float]:
    """FLOP/s, memory and its bytes/s, by which nodes are alike."""
    return device.peak_flops_per_s, device.memory_bytes, device.memory_bytes_per_s


def _components(pools: Pools, tau: float) -> list[list[Pool]]:
    """Connected components of the nodes whose metrics differ by at most ``tau``."""
    metrics = [_metrics(kind.device) for kind in pools.kinds]
    largest = [max(column) for column in zip(*metrics, strict=True)]

    def alike(a: int, b: int) -> bool:
        pairs = zip(metrics[a], metrics[b], largest, strict=True)
        return all(abs(x - y) <= tau * most for x, y, most in pairs)

    components: list[set[int]] = []
    for kind in range(len(metrics)):
        component, apart = {kind}, []
        for other in components:
            if any(alike(kind, member) for member in other):
                component |= other
            else:
                apart.append(other)
        components = [*apart, component]
    members = []
    for component in components:
        members.append([pool for pool in pools.pools if pool.kind in component])
    return members
