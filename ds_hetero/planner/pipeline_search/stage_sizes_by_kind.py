"""Starting plans of the pipeline search on many devices: every pipeline chooses stage sizes by kind of device.

The size of a stage is its number of devices, a power of two. `first_plans` gives one kind the same size in all
pipelines, and tries combinations of sizes, of which there are too many here. This module gives every pipeline the sizes
with which it is fastest, whatever the others have. Example: of two pipelines, one over H100s and A100s, the other over
A100s alone, the first may have stages of 4 H100s and of 2 A100s, the second one stages of 8 A100s.

The time of a pipeline is estimated as if its layers could be cut anywhere: ``(m - 1 + S) L / sum(1 / t)`` for m
micro-batches, S stages and L layers of t seconds each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
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


def plans_with_sizes_by_kind(costs: StageCosts, samples: int, size: int, inner: str = "tensor") -> Iterator[Shapes]:
    """Yield plans over all devices, those of few pipelines first; every pipeline has the fastest stage sizes by kind.

    Every division of the devices is tried with three orders of the stages, see `_STAGE_ORDERS`.

    Args:
        samples: global batch.
        size: samples of a micro-batch.
        inner: how the devices of a stage share its work.
    """
    pools = costs.pools
    chooser = _SizeChooser(costs, inner, size)
    for division, stage_order in itertools.product(_divisions(pools), _STAGE_ORDERS):
        num_pipelines = division.lanes * len(division.groups)
        if samples < size * num_pipelines:
            continue
        all_flops_per_s = division.lanes * sum(_peak_flops_per_s(pools, group) for group in division.groups)
        shapes: list[Shape] = []
        for group in division.groups:
            micro_batches = max(1, round(samples / size * _peak_flops_per_s(pools, group) / all_flops_per_s))
            parts = sorted(group, key=lambda part: stage_order(pools, part))
            size_of_kind = chooser.fastest_sizes(parts, num_pipelines, micro_batches)
            if size_of_kind is None:
                break
            blocks = [cut_pool(pool, devices, size_of_kind[pool.kind], inner) for pool, devices in parts]
            lane = Shape(tuple(itertools.chain.from_iterable(blocks)), size)
            shapes += [lane] * division.lanes
        if len(shapes) == num_pipelines:  # every group has sizes with which its layers fit
            yield tuple(shapes)


class _PoolShare(NamedTuple):
    """Devices of one pool that one pipeline uses."""

    pool: Pool
    devices: int


def _peak_flops_per_s(pools: Pools, parts: Sequence[_PoolShare]) -> float:
    """Return the peak FLOP/s of all devices of these parts together."""
    return sum(pools.kinds[part.pool.kind].device.peak_flops_per_s * part.devices for part in parts)


def _slowest_first(pools: Pools, part: _PoolShare) -> tuple[float, ...]:
    """Sort key: the slowest devices run the first stages, since the last stage has the head's work on top."""
    return pools.kinds[part.pool.kind].device.peak_flops_per_s, part.pool.kind, part.pool.node


def _most_memory_first(pools: Pools, part: _PoolShare) -> tuple[float, ...]:
    """Sort key: the devices with most memory run the first stages, which have most micro-batches in flight."""
    return -pools.kinds[part.pool.kind].device.memory_bytes, *_slowest_first(pools, part)


def _in_node_order(pools: Pools, part: _PoolShare) -> tuple[float, ...]:
    """Sort key: stages stay in the order of the nodes."""
    return part.pool.node, part.pool.kind


_STAGE_ORDERS: tuple[Callable[[Pools, _PoolShare], tuple[float, ...]], ...] = (
    _slowest_first,
    _most_memory_first,
    _in_node_order,
)


class _Division(NamedTuple):
    """All devices, divided into groups of equal pipelines."""

    lanes: int  # equal pipelines of every group
    groups: list[list[_PoolShare]]  # by group, the devices of one of its pipelines


def _divisions(pools: Pools) -> Iterator[_Division]:
    """Yield divisions of all devices, few groups first.

    For every number of groups, every kind is first dealt out device by device. Then whole pools are divided, once into
    groups of equal speed and once with devices of like speed together, each with one or more equal pipelines per group.
    """
    speed, all_lanes = pool_speeds(pools, pools.pools), lane_counts(pools.pools)
    for count in pipeline_counts(len(speed)):
        yield _Division(1, _deal_out(pools, count))
        if count == 1:
            continue
        for groups in balanced_groups(speed, count), _by_speed(speed, count):
            for lanes in all_lanes if count <= MAX_GROUPS else LANES[:1]:
                yield _Division(lanes, [_one_lane(group, lanes) for group in groups])


def _one_lane(group: Sequence[Pool], lanes: int) -> list[_PoolShare]:
    """Return the devices of one of ``lanes`` equal pipelines through a group of pools."""
    return [_PoolShare(pool, len(pool.ranks) // lanes) for pool in group]


def _deal_out(pools: Pools, count: int) -> list[list[_PoolShare]]:
    """Deal the devices of every kind out to ``count`` groups one by one, node by node; return the groups with devices.

    So the stages of equal devices are on the same nodes, or on neighbouring ones, in all groups.
    """
    groups: list[list[_PoolShare]] = [[] for _ in range(count)]
    num_dealt = [0] * len(pools.kinds)  # devices of each kind so far
    for pool in sorted(pools.pools, key=lambda pool: (pool.kind, pool.node)):
        for i, parts in enumerate(groups):
            # Of 2 groups and 3 devices dealt before, the pool's devices 0, 2, ... go to group 1, the others to group 0.
            first = (i - num_dealt[pool.kind]) % count
            devices = len(range(first, len(pool.ranks), count))
            if devices:
                parts.append(_PoolShare(pool, devices))
        num_dealt[pool.kind] += len(pool.ranks)
    return [parts for parts in groups if parts]


@dataclass(frozen=True, slots=True)
class _PipelineDevices:
    """One pipeline before its stage sizes are chosen, with all values that its time depends on."""

    devices: tuple[tuple[int, int], ...]  # in the order of its stages: index of a kind, and number of devices
    num_pipelines: int  # of the plan
    micro_batches: int  # of this pipeline


class _SizeChooser:
    """Chooses the stage size of every kind with which one pipeline is fastest alone, by `_period_s`.

    Args:
        inner: how the devices of a stage share its work.
        micro_batch_size: samples of a micro-batch.
    """

    def __init__(self, costs: StageCosts, inner: str, micro_batch_size: int) -> None:
        self._costs, self._inner, self._micro_batch_size = costs, inner, micro_batch_size
        self._stage = cache(self._stage_uncached)
        self._fastest = cache(self._fastest_uncached)

    def fastest_sizes(
        self, parts: Sequence[_PoolShare], num_pipelines: int, micro_batches: int
    ) -> Mapping[int, int] | None:
        """Return the stage size of every kind, by the kind's index; None if the layers fit with none of the sizes.

        Args:
            num_pipelines: pipelines of the plan.
            micro_batches: micro-batches of this pipeline.
        """
        devices = tuple((part.pool.kind, part.devices) for part in parts)
        return self._fastest(_PipelineDevices(devices, num_pipelines, micro_batches))

    def _fastest_uncached(self, pipeline: _PipelineDevices) -> Mapping[int, int] | None:
        """Compute `fastest_sizes`: first the best size for all kinds alike, then the best size kind by kind."""
        kinds = sorted({kind for kind, _ in pipeline.devices})
        choices = sizes_up_to(max(number for _, number in pipeline.devices))

        def time_s(size_of_kind: Mapping[int, int]) -> float:
            return self._time_s(pipeline, size_of_kind)

        fastest = min((dict.fromkeys(kinds, choice) for choice in choices), key=time_s)
        if len(kinds) > 1:
            for kind in kinds:
                fastest = min(({**fastest, kind: choice} for choice in choices), key=time_s)
        return fastest if time_s(fastest) < inf else None

    def _time_s(self, pipeline: _PipelineDevices, size_of_kind: Mapping[int, int]) -> float:
        """Estimate the time of a pipeline with stages of these sizes; infinite with more stages than layers."""
        num_layers = self._costs.model.num_layers
        num_stages, stages = 0, list[_EqualStages]()
        for kind, number in pipeline.devices:
            largest = 1 << (number.bit_length() - 1)  # power of two that fits
            stage_size = min(size_of_kind[kind], largest)
            layer_s, max_layers = self._stage(kind, stage_size, pipeline.num_pipelines)
            num_equal = number // stage_size
            stages.append(_EqualStages(layer_s * max_layers, num_equal / layer_s, num_equal * max_layers))
            num_stages += num_equal
        if num_stages > num_layers:
            return inf
        return (pipeline.micro_batches - 1 + num_stages) * _period_s(stages, num_layers)

    def _stage_uncached(self, kind: int, devices: int, num_pipelines: int) -> tuple[float, int]:
        """Return the seconds of one layer on a stage of ``devices``, and the number of layers that fit, 0 if none."""
        inner = "one" if devices == 1 else self._inner
        option = self._costs.stage(kind, devices, inner, self._micro_batch_size, num_pipelines)
        if option is None:
            return 1.0, 0
        return option.layer_s, option.max_layers(False, False, 1)


class _EqualStages(NamedTuple):
    """Stages of one kind and size. In a list they sort by the period at which they are full."""

    full_period_s: float  # period at which each stage has all layers that fit into its memory
    layers_per_s: float  # speed of all stages together
    max_layers: int  # layers that fit into all stages together


def _period_s(stages: Sequence[_EqualStages], num_layers: int) -> float:
    """Return the least period of stages whose layers are cut anywhere; infinite if not all layers fit into memory.

    With a growing period the stages fill up, one kind after the other. A full stage keeps its layers, and the other
    stages share the remaining layers by speed. Example: 9 layers over one stage of 2 layers per second with room for 4
    layers, and one of 1 layer per second with room for 10. At 9 / 3 = 3 s the first stage would have 6 layers, more
    than fit: it is full at 4 / 2 = 2 s. The second stage has the remaining 5 layers, so the period is 5 s.
    """
    layers_per_s = sum(group.layers_per_s for group in stages)  # of stages that are not full
    remaining_layers = float(num_layers)
    for full_period_s, group_layers_per_s, max_layers in sorted(stages):
        if remaining_layers <= full_period_s * layers_per_s * (1 + TOLERANCE):
            return remaining_layers / layers_per_s
        remaining_layers -= max_layers
        layers_per_s -= group_layers_per_s
    return inf


def _by_speed(speed: Mapping[Pool, float], count: int) -> list[list[Pool]]:
    """Divide pools into up to ``count`` groups of about equal speed, with devices of like speed together.

    Pools, sorted by the speed of a device, are laid end to end on a line; a pool is as long as it is fast. The line is
    cut into equal parts, and a pool joins the group of the part in which its middle is.

    Args:
        speed: FLOP/s of all devices of a pool together, by pool.
    """
    pools = sorted(speed, key=lambda pool: (speed[pool] / len(pool.ranks), pool.kind, pool.node))
    groups_per_speed = count / sum(speed.values())
    groups: list[list[Pool]] = [[] for _ in range(count)]
    pool_start = 0.0  # sum of the speeds of the earlier pools
    for pool in pools:
        pool_middle = pool_start + speed[pool] / 2
        groups[min(count - 1, int(pool_middle * groups_per_speed))].append(pool)
        pool_start += speed[pool]
    return [group for group in groups if group]
