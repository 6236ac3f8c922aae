"""Time of a stage-to-stage send (a hop): activations to the next stage, or their gradients back.

Every activation crosses the boundary once. A device of a ``sequence`` stage sends its share of the tokens of a
micro-batch, each of the n devices of a ``tensor`` stage 1 / n of them. A hop takes the latency and the time at the
busiest port: a sender's, a receiver's, or a NIC or switch that all devices of a node share. Example: 8 MB from a stage
of two devices to one of four. The two senders are the busiest devices, with 4 MB each; if a node's devices share a NIC,
all 8 MB pass this NIC.

The hosts' time, and the all-gather of what arrived on the devices of a ``tensor`` stage, count as part of the stages
(`StageOption.side_s`), since no transfer hides them.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from ds_hetero.cluster.topology import Cluster
from ds_hetero.cost.stages.stage import Pools
from ds_hetero.cost.workload import Workload
from ds_hetero.models.shapes import ModelSpec


class BoundarySide(NamedTuple):
    """The sending or the receiving devices of a stage-to-stage send."""

    kinds: tuple[int, ...]  # kinds of the devices, as indices into `Pools.kinds`
    share: float  # largest share of a micro-batch's tokens that any device sends or receives


class HopTimes:
    """Computes the times of hops on a cluster, and caches them."""

    def __init__(self, cluster: Cluster, model: ModelSpec, workload: Workload, pools: Pools) -> None:
        self._cluster, self._pools = cluster, pools
        self._sample_bytes = workload.seq_len * workload.element_bytes * model.hidden_size
        self.hop_s = cache(self._hop_s)

    def _hop_s(self, link: int, source: BoundarySide, target: BoundarySide, samples: int) -> float:
        """Return the seconds of a hop in one direction; ``link`` is an index into `link_classes`."""
        wire = self._cluster.link_classes[link]
        volume_bytes = samples * self._sample_bytes
        largest_part_bytes = volume_bytes * max(source.share, target.share)
        device_s = largest_part_bytes / (wire.bytes_per_s * wire.p2p_efficiency)
        kinds = [self._pools.kinds[kind] for kind in (*source.kinds, *target.kinds)]
        inside = link in self._cluster.link_classes_inside
        shared_bytes_per_s = [kind.switch_bytes_per_s if inside else kind.nic_bytes_per_s for kind in kinds]
        shared_s = [volume_bytes / rate for rate in shared_bytes_per_s if rate]
        return wire.latency_s + max([device_s, *shared_s])
