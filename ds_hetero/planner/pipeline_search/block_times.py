"""Look up the costs of a pipeline's blocks in the cost model: stages, and sends between neighbouring stages.

Dimension key: S stages.
"""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np

from ds_hetero.common.arrays import Floats
from ds_hetero.cost.stages.stage import DeviceBlock, StageCosts, StageOption


def stage_options(
    costs: StageCosts, blocks: tuple[DeviceBlock, ...], micro_batch_size: int, pipelines: int
) -> list[StageOption] | None:
    """Return times and memory of every stage of a pipeline; None if a block cannot run a stage."""
    options = []
    for block in blocks:
        option = costs.of_block(block, micro_batch_size, pipelines)
        if option is None:
            return None
        options.append(option)
    return options


def links_between(costs: StageCosts, blocks: tuple[DeviceBlock, ...]) -> tuple[int, ...]:
    """Return the slowest link class between every two neighbouring stages, as S - 1 indices of link classes."""
    return tuple(_link_between(costs, a, b) for a, b in pairwise(blocks))


def _link_between(costs: StageCosts, a: DeviceBlock, b: DeviceBlock) -> int:
    """Return the index into `Cluster.link_classes` of the slowest link between two blocks."""
    cluster = costs.cluster
    if not (a.others or b.others):
        return int(cluster.link_class[a.node, b.node])
    classes = {int(cluster.link_class[part_a.node, part_b.node]) for part_a, part_b in product(a.parts, b.parts)}
    return min(classes, key=lambda link_class: cluster.link_classes[link_class].bytes_per_s)


def hops_s(costs: StageCosts, blocks: tuple[DeviceBlock, ...], links: tuple[int, ...], micro_batch_size: int) -> Floats:
    """Return the seconds of one send between every two neighbouring stages, ``[S - 1]``; see `StageCosts.hop_s`."""
    neighbours = zip(links, blocks, blocks[1:], strict=False)
    seconds = [costs.hop_s(link, source, target, micro_batch_size) for link, source, target in neighbours]
    return np.array(seconds, dtype=np.float64)
