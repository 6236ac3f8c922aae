"""Plans whose stages share sequences between tensor groups: made from plans that were found without them.

The search for pipelines has no moves to tensor groups. They pay where machines are fast inside, and where memory for
activations allows to do without recomputation, which both depends on all devices of a stage; so a few whole plans are
tried at the end:

    every good plan, in which all stages that share sequences get tensor groups of 2, 4 or 8 devices
    one stage of all devices
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ds_hetero.cost.stages.stage import DeviceBlock, PoolPart, Pools, StageCosts
from ds_hetero.planner.pipeline_search.blocks import MAX_SIZE, sizes_up_to
from ds_hetero.planner.pipeline_search.evaluate import PlanCandidate, Shape

Shapes = tuple[Shape, ...]


def shapes_with_tensor_groups(
    costs: StageCosts, plans: Sequence[PlanCandidate], micro_batch_sizes: Sequence[int]
) -> Iterator[Shapes]:
    """Yield the shapes of plans with tensor groups, each once; none if the model cannot run them.

    Args:
        plans: good plans.
        micro_batch_sizes: samples of a micro-batch, for the stage of all devices.
    """
    if not {"tensor", "sequence"} <= set(costs.inners):
        return
    bases = [plan.shapes for plan in plans]
    all_devices = _all_devices(costs.pools)
    bases += [(Shape((all_devices,), size),) for size in micro_batch_sizes]
    for shapes in dict.fromkeys(bases):
        for size in sizes_up_to(MAX_SIZE)[1:]:
            grouped = tuple(_with_groups(shape, size) for shape in shapes)
            if grouped != shapes:
                yield grouped


def _all_devices(pools: Pools) -> DeviceBlock:
    """Return the block of all devices, which share sequences."""
    return DeviceBlock.of_parts([PoolPart(pool.kind, pool.node, len(pool.ranks)) for pool in pools.pools])


def _with_groups(shape: Shape, size: int) -> Shape:
    """Return the pipeline with tensor groups of ``size`` devices in every block that can have them."""
    return shape._replace(blocks=tuple(_grouped(block, size) for block in shape.blocks))


def _grouped(block: DeviceBlock, size: int) -> DeviceBlock:
    """Return the block with tensor groups; itself if its parts are no whole groups, or if they are a single one."""
    if block.inner != "sequence" or block.size == size or any(part.size % size for part in block.parts):
        return block
    return block._replace(tensor_size=size)
