"""Activations on their way from one stage to the next, and gradients on their way back.

Every receiver takes its part of the activations once, and receivers take from the senders by turns: a device of a
``tensor`` stage holds and wants all tokens of a micro-batch, one of a ``sequence`` stage its share of them. What that
takes of the hosts' time, which no transfer hides, is part of their stages (`StageOption.side_s`).
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from ds_hetero.cluster.topology import Cluster
from ds_hetero.cost.stages.sequence import SequenceStages
from ds_hetero.cost.stages.stage import DeviceBlock, Pools


class HopTimes:
    """Times of hops between blocks.

    Args:
        cluster: all devices.
        token_bytes: activations of one token.
        seq_len: tokens of a sequence.
        pools: of the cluster.
        sequence: says which shares of a sequence the devices of a block have.
    """

    def __init__(
        self, cluster: Cluster, token_bytes: int, seq_len: int, pools: Pools, sequence: SequenceStages
    ) -> None:
        self._cluster, self._token_bytes, self._seq_len = cluster, token_bytes, seq_len
        self._pools, self._sequence = pools, sequence
        self._of_ends = cache(self._of_ends_uncached)

    def seconds(self, link: int, source: DeviceBlock, target: DeviceBlock, micro_batch_size: int) -> float:
        """One direction: latency and the busiest port, of a sender, a receiver or the node.

        Args:
            link: its class.
            source: sends.
            target: receives.
            micro_batch_size: samples.
        """
        ends = self._end(source, micro_batch_size), self._end(target, micro_batch_size)
        return self._of_ends(link, *ends, micro_batch_size)

    def _end(self, block: DeviceBlock, micro_batch_size: int) -> _End:
        kinds = (block.kind, *(part.kind for part in block.others))
        if block.inner != "sequence":
            return _End(kinds, block.size, None)
        if not block.others:
            return _End(kinds, block.size, 1 / block.size)
        shared = self._sequence.passes(block.parts, micro_batch_size)
        assert shared is not None, "a stage that cannot run has no hops"
        return _End(kinds, block.size, max(shared.tokens) / (micro_batch_size * self._seq_len))

    def _of_ends_uncached(self, link: int, source: _End, target: _End, samples: int) -> float:
        wire = self._cluster.link_classes[link]
        volume = samples * self._seq_len * self._token_bytes
        received = volume if target.share is None else volume * target.share
        total = volume * target.size if target.share is None else volume
        sent = -(-target.size // source.size) * received if source.share is None else total * source.share
        busiest_s = max(received, sent) / (wire.bytes_per_s * wire.p2p_efficiency)
        kinds = [self._pools.kinds[kind] for kind in (*source.kinds, *target.kinds)]
        inside = any(wire == each.link for each in kinds)
        shared = [each.switch_bytes_per_s if inside else each.nic_bytes_per_s for each in kinds]
        return wire.latency_s + max([busiest_s, *(total / rate for rate in shared if rate)])


class _End(NamedTuple):
    """One side of a hop."""

    kinds: tuple[int, ...]
    size: int
    share: float | None  # of the tokens that the device with most of them has; None if every device has all
