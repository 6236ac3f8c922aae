"""Times of a pipeline's blocks: stages, and sends between neighbouring ones."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np

from ds_hetero.common.arrays import Floats
from ds_hetero.cost.stages.stage import DeviceBlock, StageCosts, StageOption


def stage_options(
    costs: StageCosts, blocks: tuple[DeviceBlock, ...], micro_batch_size: int, pipelines: int
) -> list[StageOption] | None:
    """Return the times of a pipeline's stages; None if some block cannot run one."""
    options = []
    for block in blocks:
        option = costs.of_block(block, micro_batch_size, pipelines)
        if option is None:
            return None
        options.append(option)
    return options


def links_between(costs: StageCosts, blocks: tuple[DeviceBlock, ...]) -> tuple[int, ...]:
    """Class of the link between neighbouring stages, ``[S - 1]``; of several links the slowest."""
    return tuple(_link_between(costs, a, b) for a, b in pairwise(blocks))


def _link_between(costs: StageCosts, a: DeviceBlock, b: DeviceBlock) -> int:
    cluster = costs.cluster
    if not (a.others or b.others):
        return int(cluster.link_class[a.node, b.node])
    classes = {int(cluster.link_class[of_a.node, of_b.node]) for of_a, of_b in product(a.parts, b.parts)}
    return min(classes, key=lambda link_class: cluster.link_classes[link_class].bytes_per_s)


def hops_s(costs: StageCosts, blocks: tuple[DeviceBlock, ...], links: tuple[int, ...], micro_batch_size: int) -> Floats:
    """Seconds of sends between neighbouring stages, ``[S - 1]``."""
    neighbours = zip(links, blocks, blocks[1:], strict=False)
    return np.array([costs.hop_s(link, a, b, micro_batch_size) for link, a, b in neighbours], dtype=np.float64)
