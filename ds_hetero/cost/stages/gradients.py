"""Times of gradients and parameters between the pipelines of a plan, as `AsymmetricGradientSync` moves them.

An element of a layer is held, summed and wanted by C ranks: one of a ``tensor`` stage, every rank of a ``sequence``
stage. Of the optimizer state a rank r owns the share s_r = w_r / sum of the holders' w, evenly 1 / C. When gradients
are reduced, a rank sends all but its own share of what it holds, to every other holder its share, and receives its own
share from C - 1 others; when parameters are gathered, the same goes the other way. Bytes add up at a rank's port in its
node, at its port towards other nodes and at the node's NIC. Embedding and head are layers of their own.

What a rank does itself is reading and writing of its memory, by parameter that it holds or owns, with e bytes on the
wire and 4 where sums are kept:

    pack     2 e          of what it holds, under the last backward but by the same device
    add up   4 + C (e + 8) of what it owns, likewise: zeros, then every holder's gradients; nothing has to be added if
                          C = 1, and only e + 4 read and written if e is not 4
    update   norm 4, gradient 4, value and optimizer state twice, of what it owns
    return   4 + e of what it owns, its copies for C holders 2 e C, and 2 e of what it holds as it arrives; buckets
             travel while others are copied, so the longer of both counts

Dimension key: N nodes, Q places of nodes in the network, J parts of stages of all pipelines, L layers with the
embedding before and the head after them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.arrays import Floats, Ints
from ds_hetero.cost.stages.stage import DeviceBlock, PlacedPipeline, SyncTimes
from ds_hetero.cost.stages.stage_memory import GRADIENT_SUM_BYTES
from ds_hetero.cost.workload import Workload
from ds_hetero.models.shapes import ModelSpec

# Rows of `_Held`: places of the first layer and of the one after the last in a flat array of nodes by layers, the two
# layers, the node; ranks that cut a layer, that add to one gradient, all; seconds of memory per byte; parameters.
_FIRST, _AFTER, _NODE = 0, 1, 4
_IN_NODES, _LAYERS = slice(0, 2), slice(2, 4)
_CUT, _COPIES, _RANKS, _MEMORY_S, _PARAMETERS = range(5)
# Of fitting owners to memory. Chosen, never measured.
ROUNDS = 60
LEAST_WEIGHT = 1e-6  # of an owner over the largest; below, memory counts as too small
ALMOST = 0.999  # of what a rank may own, which a round aims at, so that rounding leaves it below


class GradientTimes:
    """Times of the synchronization of plans, and its owners; ``memory_s_per_byte`` of each kind of device."""

    def __init__(
        self, cluster: Cluster, model: ModelSpec, workload: Workload, memory_s_per_byte: Sequence[float]
    ) -> None:
        self._cluster, self._workload, self._memory_s_per_byte = cluster, workload, memory_s_per_byte
        self._held = cache(self._held_uncached)
        between_QQ = cluster.node_p2p_s_per_byte[cluster.place_nodes]
        self._place_N = cluster.place
        self._between_QN = between_QQ[:, cluster.place]
        self._beside_N1 = between_QQ.diagonal()[cluster.place][:, None]
        self._inner_N1 = cluster.node_p2p_s_per_byte.diagonal()[:, None]
        self._nic_s_per_byte_N = 1 / cluster.nic_bytes_per_s if np.isfinite(cluster.nic_bytes_per_s).any() else None
        table = model.vocab_size * model.hidden_size
        layers = [model.layer_parameters] * model.num_layers
        self._parameters_L = np.array([table, *layers, table + model.hidden_size], dtype=np.float64)

    def times(self, pipelines: Sequence[PlacedPipeline], weights_J: Floats | None = None) -> SyncTimes:
        """Reduce gradients to owners, step, gather; ``weights_J``: of every rank of a part as an owner, if unlike."""
        shares = self._shares(pipelines, weights_J)
        wire_s = self._wire_s(shares, weights_J) / 2  # the way back is the way there, with the roles swapped
        summing_s, update_s, back_s = (self._own_bytes(shares) * shares.held.numbers[_MEMORY_S]).max(axis=1).tolist()
        return SyncTimes(wire_s, summing_s + update_s + max(wire_s, back_s))

    def _own_bytes(self, shares: _Shares) -> Floats:
        """Bytes that a rank of every part moves to pack and add up, to update, for the way back: ``[3, J]``."""
        wire, total_L = self._workload.element_bytes, shares.count_NL.sum(axis=0)
        shared_L = total_L > 1
        converted = wire + GRADIENT_SUM_BYTES if wire != GRADIENT_SUM_BYTES else 0
        of_owned_3L = np.empty((3, len(total_L)))
        of_owned_3L[0] = np.where(shared_L, GRADIENT_SUM_BYTES + total_L * (wire + 2 * GRADIENT_SUM_BYTES), converted)
        of_owned_3L[1] = 2 * self._workload.optimizer_bytes + 2 * GRADIENT_SUM_BYTES
        of_owned_3L[2] = GRADIENT_SUM_BYTES + wire + np.where(shared_L, 2 * wire * total_L, 0)
        bytes_3J = shares.owned_J(of_owned_3L)
        bytes_3J[::2] += 2 * wire * shares.held.numbers[_PARAMETERS]
        return bytes_3J

    def _wire_s(self, shares: _Shares, weights_J: Floats | None) -> float:
        """Gradients to their owners and parameters back, at the busiest port."""
        held, weights = shares.held, shares.weights_J
        inner_J, outer_J = shares.of_parts(
            (shares.count_NL - 1) * self._inner_N1, self._outer_s_per_byte(shares.count_NL)
        )
        worst = max((weights * inner_J).max(), (weights * outer_J).max())
        if weights_J is not None:  # else every rank receives as much as it sends
            inner_J, outer_J, own_J = shares.of_parts(
                shares.weight_NL * self._inner_N1, self._outer_s_per_byte(shares.weight_NL), self._inner_N1
            )
            worst = max(worst, (inner_J - weights * own_J).max(), outer_J.max())
        if self._nic_s_per_byte_N is not None:
            arriving_J, leaving_J = shares.of_parts(
                shares.count_NL.sum(axis=0) - shares.count_NL, shares.weight_NL.sum(axis=0) - shares.weight_NL
            )
            for bytes_J in (weights * arriving_J, leaving_J)[: 1 if weights_J is None else 2]:
                at_node_N = np.bincount(held.places[_NODE], held.numbers[_RANKS] * bytes_J, len(self._place_N))
                worst = max(worst, (at_node_N * self._nic_s_per_byte_N).max())
        return float(worst)

    def owned_parameters(self, pipelines: Sequence[PlacedPipeline], weights_J: Floats) -> Floats:
        """Parameters that every rank of a part owns, ``[J]``."""
        shares = self._shares(pipelines, weights_J)
        return np.asarray(shares.owned_J(np.ones((1, len(self._parameters_L))))[0])

    def fit(self, pipelines: Sequence[PlacedPipeline], most_J: Floats) -> Floats | None:
        """Return weights under which no rank owns more than it may, as even as that allows; None if there are none.

        Ranks that own too much get less, and the others more, in rounds.

        Args:
            most_J: parameters that a rank of every part may own.
        """
        weights_J = np.ones(len(most_J))
        if (most_J <= 0).any():
            return None
        for _ in range(ROUNDS):
            owned_J = self.owned_parameters(pipelines, weights_J)
            over_J = owned_J > most_J
            if not over_J.any():
                return np.asarray(weights_J / weights_J.max())
            weights_J[over_J] *= ALMOST * most_J[over_J] / owned_J[over_J]
            if weights_J.min() < LEAST_WEIGHT * weights_J.max():
                return None
        return None

    def _shares(self, pipelines: Sequence[PlacedPipeline], weights_J: Floats | None) -> _Shares:
        held = _Held.joined([self._held(pipeline.blocks, pipeline.layers) for pipeline in pipelines])
        shape = len(self._place_N), len(self._parameters_L) + 1

        def holders(of_one_J: Floats) -> Floats:
            change = np.bincount(held.places[_FIRST], of_one_J, shape[0] * shape[1])
            change -= np.bincount(held.places[_AFTER], of_one_J, shape[0] * shape[1])
            return np.asarray(change.reshape(shape).cumsum(axis=1)[:, :-1])

        count_NL = holders(held.numbers[_COPIES])
        weight_NL = count_NL if weights_J is None else holders(held.numbers[_COPIES] * weights_J)
        own_J = np.ones(1) if weights_J is None else weights_J
        share_L = self._parameters_L / weight_NL.sum(axis=0)
        return _Shares(held, own_J, count_NL, weight_NL, share_L, 2 * self._workload.element_bytes)

    def _outer_s_per_byte(self, count_NL: Floats) -> Floats:
        """Seconds that a rank of every node takes for one byte to all holders on other nodes, ``[N, L]``."""
        everywhere_QL = np.einsum("qn,nl->ql", self._between_QN, count_NL)  # too small for a BLAS with threads
        return np.asarray(everywhere_QL[self._place_N] - self._beside_N1 * count_NL)

    def _held_uncached(self, blocks: tuple[DeviceBlock, ...], layers: tuple[int, ...]) -> _Held:
        """Stages as intervals of layers, the embedding before the first layer and the head after the last."""
        stops = np.cumsum(layers) + 1
        starts = np.concatenate([[0], stops[:-1]])
        stops[-1] += 1
        row, places, numbers = len(self._parameters_L) + 1, [], []
        for block, start, stop in zip(blocks, starts.tolist(), stops.tolist(), strict=True):
            parameters = self._parameters_L[start:stop].sum()
            for part in block.parts:
                places.append((part.node * row + start, part.node * row + stop, start, stop, part.node))
                cut, copies = (1, part.size) if block.inner == "sequence" else (part.size, 1)
                numbers.append((cut, copies, part.size, self._memory_s_per_byte[part.kind], parameters / cut))
        return _Held(np.array(places).T, np.array(numbers, dtype=np.float64).T)


class _Held(NamedTuple):
    """Parameters in the stages of a pipeline, of a stage on several pools once for each."""

    places: Ints  # by `_FIRST` ... `_NODE`, ``[5, J]``
    numbers: Floats  # by `_CUT` ... `_PARAMETERS`, ``[5, J]``

    @classmethod
    def joined(cls, held: Sequence[_Held]) -> _Held:
        """The holdings of several pipelines together."""
        return cls(*(np.concatenate(arrays, axis=1) for arrays in zip(*held, strict=True)))


class _Shares(NamedTuple):
    """Holders of every layer by node, and what an owner of weight 1 gets of it."""

    held: _Held
    weights_J: Floats
    count_NL: Floats
    weight_NL: Floats
    share_L: Floats  # parameters that an owner of weight 1 owns
    bytes_both_ways: int  # of a parameter

    def of_parts(self, *per_layer_NL: Floats) -> Floats:
        """Sums, by part, of bytes both ways of an owner of weight 1, ``[K, J]``; ``per_layer_NL`` of one rank."""
        num_nodes, num_layers = self.count_NL.shape
        part_L = self.bytes_both_ways * self.share_L
        sums_KNL = np.zeros((len(per_layer_NL), num_nodes, num_layers + 1))
        for sums_NL, each_NL in zip(sums_KNL, per_layer_NL, strict=True):
            np.multiply(part_L, each_NL, out=sums_NL[:, 1:])
        ends_K2J = sums_KNL.cumsum(axis=2).reshape(len(per_layer_NL), -1).take(self.held.places[_IN_NODES], axis=1)
        return np.asarray((ends_K2J[:, 1] - ends_K2J[:, 0]) / self.held.numbers[_CUT])

    def owned_J(self, per_parameter_KL: Floats) -> Floats:
        """Sums of ``per_parameter_KL`` over the parameters that a rank of every part owns, ``[K, J]``."""
        sums_KL = np.zeros((len(per_parameter_KL), len(self.share_L) + 1))
        np.multiply(self.share_L, per_parameter_KL, out=sums_KL[:, 1:])
        ends_K2J = sums_KL.cumsum(axis=1).take(self.held.places[_LAYERS], axis=1)
        return np.asarray(self.weights_J * (ends_K2J[:, 1] - ends_K2J[:, 0]) / self.held.numbers[_CUT])
