"""Time of a hop: activations from one stage to the next, or their gradients back.

An activation crosses the boundary once: a device of a ``sequence`` stage carries its share of the tokens of a
micro-batch, each of n of a ``tensor`` stage 1 / n. A hop takes the latency and the time at the busiest port: a
sender's, a receiver's, or the one that all devices of a node share. For 8 MB between a stage of two devices and one of
four, the two are the busiest, with 4 MB each; over a NIC that the devices of a node share all 8 MB go.

What neither the wire nor a pass hides is part of the stages (`StageOption.side_s`): the hosts' time, and the gather of
what arrived on the devices of a ``tensor`` stage.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from ds_hetero.cluster.topology import Cluster
from ds_hetero.cost.stages.stage import Pools
from ds_hetero.cost.workload import Workload
from ds_hetero.models.shapes import ModelSpec


class HopEnd(NamedTuple):
    """The devices on one side of a hop."""

    kinds: tuple[int, ...]  # indices into `Pools.kinds`
    share: float  # of the tokens of a micro-batch, on the device that carries most of them


class HopTimes:
    """Times of hops on a cluster, kept by their arguments."""

    def __init__(self, cluster: Cluster, model: ModelSpec, workload: Workload, pools: Pools) -> None:
        self._cluster, self._pools = cluster, pools
        self._sample_bytes = workload.seq_len * workload.element_bytes * model.hidden_size
        self.hop_s = cache(self._hop_s)

    def _hop_s(self, link: int, source: HopEnd, target: HopEnd, samples: int) -> float:
        """Seconds of one direction for a micro-batch of ``samples`` over the class of links with index ``link``."""
        wire = self._cluster.link_classes[link]
        volume_bytes = samples * self._sample_bytes
        largest_part_bytes = volume_bytes * max(source.share, target.share)
        device_s = largest_part_bytes / (wire.bytes_per_s * wire.p2p_efficiency)
        kinds = [self._pools.kinds[kind] for kind in (*source.kinds, *target.kinds)]
        inside = link in self._cluster.link_classes_inside
        shared_bytes_per_s = [kind.switch_bytes_per_s if inside else kind.nic_bytes_per_s for kind in kinds]
        shared_s = [volume_bytes / rate for rate in shared_bytes_per_s if rate]
        return wire.latency_s + max([device_s, *shared_s])
