"""Starts for many devices: groups whose pipelines each have the sizes of blocks that are best for them.

The sizes are the fastest by a pipeline whose layers are cut anywhere: it takes ``(m - 1 + S) L / sum(1 / t)`` for m
micro-batches, S stages and L layers of t seconds each.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from math import inf
from typing import NamedTuple

from ds_hetero.cost.stages.stage import Pool, Pools, StageCosts
from ds_hetero.planner.pipeline_search.blocks import cut_pool, sizes_up_to
from ds_hetero.planner.pipeline_search.cuts import TOLERANCE
from ds_hetero.planner.pipeline_search.evaluate import Shape, Shapes
from ds_hetero.planner.pipeline_search.pool_groups import (
    LANES,
    MAX_GROUPS,
    balanced_groups,
    lane_counts,
    pipeline_counts,
    pool_speeds,
)


def own_degrees(costs: StageCosts, samples: int, size: int, inner: str = "tensor") -> Iterator[Shapes]:
    """Yield pipelines over all devices, few first, of which each has block sizes of its own for every kind in it.

    `first_plans` would have to try all combinations of sizes. The slowest stages come first, or those with most memory,
    where most micro-batches are in flight; the last stage has the head.

    Args:
        size: samples of a micro-batch.
    """
    kinds = costs.pools.kinds
    degrees = _Degrees(costs, inner)

    def slow_first(part: _Part) -> tuple[float, ...]:
        return kinds[part.pool.kind].device.peak_flops_per_s, part.pool.kind, part.pool.node

    def as_they_are(part: _Part) -> tuple[float, ...]:
        return part.pool.node, part.pool.kind

    def room_first(part: _Part) -> tuple[float, ...]:
        return -kinds[part.pool.kind].device.memory_bytes, *slow_first(part)

    def speed(parts: Sequence[_Part]) -> float:
        return sum(kinds[part.pool.kind].device.peak_flops_per_s * part.devices for part in parts)

    for (lanes, groups), order in itertools.product(_divisions(costs.pools), (slow_first, room_first, as_they_are)):
        pipelines, whole_speed = lanes * len(groups), lanes * sum(map(speed, groups))
        if samples < size * pipelines:
            continue
        shapes: list[Shape] = []
        for group in groups:
            micro_batches = max(1, round(samples / size * speed(group) / whole_speed))
            parts = sorted(group, key=order)
            size_of_kind = degrees(parts, size, pipelines, micro_batches)
            if size_of_kind is None:
                break
            blocks = [cut_pool(pool, number, size_of_kind[pool.kind], inner) for pool, number in parts]
            shapes += [Shape(tuple(itertools.chain.from_iterable(blocks)), size)] * lanes
        if len(shapes) == pipelines:
            yield tuple(shapes)


class _Part(NamedTuple):
    """Devices of a pool."""

    pool: Pool
    devices: int  # of it


def _divisions(pools: Pools) -> Iterator[tuple[int, list[list[_Part]]]]:
    """All devices in groups, few first: every kind dealt out; whole pools, balanced or of like speed, and in lanes.

    Yields:
        The lanes of every group, and by group the devices of one lane.
    """
    speed, all_lanes = pool_speeds(pools, pools.pools), lane_counts(pools.pools)
    for count in pipeline_counts(len(speed)):
        yield 1, _dealt_out(pools, count)
        if count == 1:
            continue
        for groups in balanced_groups(speed, count), _by_speed(speed, count):
            for lanes in all_lanes if count <= MAX_GROUPS else LANES[:1]:
                yield lanes, [[_Part(pool, len(pool.ranks) // lanes) for pool in group] for group in groups]


def _dealt_out(pools: Pools, count: int) -> list[list[_Part]]:
    """The devices of every kind dealt out one by one over its nodes, so that equal stages are neighbours."""
    groups: list[list[_Part]] = [[] for _ in range(count)]
    dealt = [0] * len(pools.kinds)  # devices of each kind so far
    for pool in sorted(pools.pools, key=lambda pool: (pool.kind, pool.node)):
        for i, parts in enumerate(groups):
            # Of 2 groups and 3 devices dealt before, the pool's devices 0, 2, ... go to group 1, the others to group 0.
            first = (i - dealt[pool.kind]) % count
            devices = len(range(first, len(pool.ranks), count))
            if devices:
                parts.append(_Part(pool, devices))
        dealt[pool.kind] += len(pool.ranks)
    return [parts for parts in groups if parts]


class _Degrees:
    """Sizes of blocks by kind that are fastest for one pipeline alone, by `_period_s`."""

    def __init__(self, costs: StageCosts, inner: str) -> None:
        self._costs, self._inner = costs, inner
        self._stage = cache(self._stage_uncached)
        self._chosen = cache(self._chosen_uncached)

    def __call__(
        self, parts: Sequence[_Part], size: int, pipelines: int, micro_batches: int
    ) -> Mapping[int, int] | None:
        """Return the size of every kind's blocks; None if no sizes hold all layers. ``size``: of a micro-batch."""
        devices = tuple((part.pool.kind, part.devices) for part in parts)
        return self._chosen(devices, size, pipelines, micro_batches)

    def _chosen_uncached(
        self, devices: tuple[tuple[int, int], ...], size: int, pipelines: int, micro_batches: int
    ) -> Mapping[int, int] | None:
        """First the fastest of sizes that are alike for all kinds, then kind by kind the fastest size of it."""
        kinds = sorted({kind for kind, _ in devices})
        choices = sizes_up_to(max(number for _, number in devices))
        time_s = partial(self._time_s, devices, size, pipelines, micro_batches)
        best = min((dict.fromkeys(kinds, choice) for choice in choices), key=time_s)
        for kind in kinds if len(kinds) > 1 else ():
            best = min(({**best, kind: choice} for choice in choices), key=time_s)
        return best if time_s(best) < inf else None

    def _time_s(
        self,
        devices: tuple[tuple[int, int], ...],
        size: int,
        pipelines: int,
        micro_batches: int,
        chosen: Mapping[int, int],
    ) -> float:
        """Time of a pipeline with blocks of the chosen sizes; infinite if it has more stages than layers."""
        num_layers = self._costs.model.num_layers
        stages, rates = 0, list[tuple[float, float, int]]()
        for kind, number in devices:
            largest = 1 << (number.bit_length() - 1)  # power of two that fits
            block_size = min(chosen[kind], largest)
            layer_s, layers = self._stage(kind, block_size, size, pipelines)
            blocks = number // block_size
            rates.append((layer_s * layers, blocks / layer_s, blocks * layers))
            stages += blocks
        if stages > num_layers:
            return inf
        return (micro_batches - 1 + stages) * _period_s(rates, num_layers)

    def _stage_uncached(self, kind: int, devices: int, size: int, pipelines: int) -> tuple[float, int]:
        """Seconds of a layer, and layers that fit; none do where the block cannot run a stage."""
        inner = "one" if devices == 1 else self._inner
        option = self._costs.stage(kind, devices, inner, size, pipelines)
        if option is None:
            return 1.0, 0
        return option.layer_s, option.max_layers(False, False, 1)


def _period_s(stages: list[tuple[float, float, int]], layers: int) -> float:
    """The least period of stages whose layers are cut anywhere, no stage with more than fit; infinite if none do.

    With a growing period stages fill up one kind after the other; a full one keeps its layers, and the others share the
    rest by speed.

    Args:
        stages: by kind: period at which they are full, layers per second, layers that fit.
    """
    layers_per_s = sum(of_kind for _, of_kind, _ in stages)  # of stages that are not full
    layers_left = float(layers)
    for full_s, of_kind, room in sorted(stages):
        if layers_left <= full_s * layers_per_s * (1 + TOLERANCE):
            return layers_left / layers_per_s
        layers_left -= room
        layers_per_s -= of_kind
    return inf


def _by_speed(speed: Mapping[Pool, float], count: int) -> list[list[Pool]]:
    """Pools in up to ``count`` groups of about equal speed, devices of like speed together."""
    pools = sorted(speed, key=lambda pool: (speed[pool] / len(pool.ranks), pool.kind, pool.node))
    share = count / sum(speed.values())
    groups: list[list[Pool]] = [[] for _ in range(count)]
    before = 0.0
    for pool in pools:
        groups[min(count - 1, int((before + speed[pool] / 2) * share))].append(pool)
        before += speed[pool]
    return [group for group in groups if group]
