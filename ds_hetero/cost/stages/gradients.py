"""Gradients and parameters of pipelines between their holders, as `AsymmetricGradientSync` sends them.

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
import numpy.typing as npt

from ds_hetero.cluster.topology import Cluster
from ds_hetero.cost.stages.stage import Block, PlacedPipeline, SyncTimes
from ds_hetero.cost.workload import Workload
from ds_hetero.models import ModelSpec

__all__ = ["BUCKET_BYTES", "GRADIENT_SUM_BYTES", "GradientTimes"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

GRADIENT_SUM_BYTES = 4  # micro-batches' gradients add up in fp32
BUCKET_BYTES = 25 * 2**20  # of `AsymmetricGradientSync`; the first is made while all gradients are still there
ROUNDS = 60  # of fitting owners to memory
LEAST_WEIGHT = 1e-6
ALMOST = 0.999  # of what a rank may own, which a round aims at


class GradientTimes:
    """What the synchronization of plans takes, and who owns what.

    Args:
        cluster: all devices.
        model: what is trained.
        workload: bytes of an element and of optimizer state per parameter.
        memory_s_per_byte: of each kind of device.
    """

    def __init__(
        self, cluster: Cluster, model: ModelSpec, workload: Workload, memory_s_per_byte: Sequence[float]
    ) -> None:
        self._cluster, self._workload, self._memory_s_per_byte = cluster, workload, memory_s_per_byte
        self._held = cache(self._held_uncached)
        self._inner_s_per_byte_N = cluster.node_p2p_s_per_byte.diagonal()
        self._nic_s_per_byte_N = 1 / cluster.nic_bytes_per_s
        table = model.vocab_size * model.hidden_size
        layers = [model.layer_parameters] * model.num_layers
        self._parameters_L = np.array([table, *layers, table + model.hidden_size], dtype=np.float64)

    def times(self, pipelines: Sequence[PlacedPipeline], weights_J: Floats | None = None) -> SyncTimes:
        """Reduce gradients to their owners, step the optimizer, gather the parameters from them.

        Args:
            pipelines: the plan.
            weights_J: of every rank of a part as an owner; left out, all own alike.
        """
        shares = self._shares(pipelines, weights_J)
        wire_s = self._wire_s(shares, weights_J) / 2  # the way back is the way there, with the roles swapped
        summing, update, back = (float((bytes_J * shares.held.memory_s_J).max()) for bytes_J in self._own_bytes(shares))
        return SyncTimes(wire_s, summing + update + max(wire_s, back))

    def _own_bytes(self, shares: _Shares) -> tuple[Floats, Floats, Floats]:
        """What a rank of every part reads and writes to pack and add up, to update, and for the way back, ``[J]``."""
        work = self._workload
        wire, total_L = work.element_bytes, shares.count_NL.sum(axis=0)
        ones_L, shared_L = np.ones_like(total_L), total_L > 1
        converted = wire + GRADIENT_SUM_BYTES if wire != GRADIENT_SUM_BYTES else 0
        added_L = np.where(shared_L, GRADIENT_SUM_BYTES + total_L * (wire + 2 * GRADIENT_SUM_BYTES), converted)
        copied_L = GRADIENT_SUM_BYTES + wire + np.where(shared_L, 2 * wire * total_L, 0)
        held_J = shares.held_J(ones_L) * 2 * wire
        update_J = shares.owned_J(ones_L) * (2 * work.optimizer_bytes + 2 * GRADIENT_SUM_BYTES)
        return held_J + shares.owned_J(added_L), update_J, held_J + shares.owned_J(copied_L)

    def _wire_s(self, shares: _Shares, weights_J: Floats | None) -> float:
        """Gradients to their owners and parameters back, at the busiest port."""
        held, inner_N1 = shares.held, self._inner_s_per_byte_N[:, None]
        received = max(
            (shares.weights_J * shares.of_parts((shares.count_NL - 1) * inner_N1)).max(),
            (shares.weights_J * shares.of_parts(self._outer_s_per_byte(shares.count_NL))).max(),
        )
        worst = received
        if weights_J is not None:  # else every rank receives as much as it sends
            own_J = shares.weights_J * shares.of_parts(inner_N1 * np.ones_like(shares.weight_NL))
            worst = max(
                worst,
                (shares.of_parts(shares.weight_NL * inner_N1) - own_J).max(),
                shares.of_parts(self._outer_s_per_byte(shares.weight_NL)).max(),
            )
        if np.isfinite(self._cluster.nic_bytes_per_s).any():
            total_L = shares.count_NL.sum(axis=0)
            arriving_J = shares.weights_J * shares.of_parts(total_L - shares.count_NL)
            leaving_J = shares.of_parts(shares.weight_NL.sum(axis=0) - shares.weight_NL)
            for bytes_J in (arriving_J, leaving_J)[: 1 if weights_J is None else 2]:
                at_node_N = np.zeros(len(self._cluster.nodes))
                np.add.at(at_node_N, held.node_J, held.ranks_J * bytes_J)
                worst = max(worst, (at_node_N * self._nic_s_per_byte_N).max())
        return float(worst)

    def owned_parameters(self, pipelines: Sequence[PlacedPipeline], weights_J: Floats) -> Floats:
        """Parameters that every rank of a part owns, ``[J]``."""
        shares = self._shares(pipelines, weights_J)
        return shares.owned_J(np.ones(len(self._parameters_L)))

    def fit(self, pipelines: Sequence[PlacedPipeline], most_J: Floats) -> Floats | None:
        """Return weights under which no rank owns more than it may, as even as that allows; None if there are none.

        Those who own too much get less, and the others more, in turns.

        Args:
            pipelines: the plan.
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
        num_nodes, num_layers = len(self._cluster.nodes), len(self._parameters_L)

        def holders(of_one_J: Floats) -> Floats:
            change_NL = np.zeros((num_nodes, num_layers + 1))
            np.add.at(change_NL, (held.node_J, held.start_J), of_one_J)
            np.add.at(change_NL, (held.node_J, held.stop_J), -of_one_J)
            return np.asarray(change_NL.cumsum(axis=1)[:, :num_layers])

        count_NL = holders(held.copies_J)
        weight_NL = count_NL if weights_J is None else holders(held.copies_J * weights_J)
        part_L = 2 * self._parameters_L * self._workload.element_bytes / weight_NL.sum(axis=0)
        own_J = np.ones(1) if weights_J is None else weights_J
        return _Shares(held, own_J, count_NL, weight_NL, part_L, self._parameters_L)

    def _outer_s_per_byte(self, count_NL: Floats) -> Floats:
        """Seconds that a rank of every node takes for one byte to all holders on other nodes, ``[N, L]``."""
        place_N = self._cluster.place
        s_per_byte_QQ = self._cluster.node_p2p_s_per_byte[self._cluster.place_nodes]
        count_QL = np.zeros((len(s_per_byte_QQ), count_NL.shape[1]))
        np.add.at(count_QL, place_N, count_NL)
        everywhere_QL = np.einsum("pq,ql->pl", s_per_byte_QQ, count_QL)  # too small for a BLAS with threads
        return np.asarray(everywhere_QL[place_N] - s_per_byte_QQ.diagonal()[place_N][:, None] * count_NL)

    def _held_uncached(self, blocks: tuple[Block, ...], layers: tuple[int, ...]) -> _Held:
        """Stages as intervals of layers, the embedding before the first layer and the head after the last."""
        stops = np.cumsum(layers) + 1
        starts = np.concatenate([[0], stops[:-1]])
        stops[-1] += 1
        places, numbers = [], []
        for block, start, stop in zip(blocks, starts.tolist(), stops.tolist(), strict=True):
            for part in block.parts:
                places.append((part.node, start, stop))
                cut, copies = (1, part.size) if block.inner == "sequence" else (part.size, 1)
                numbers.append((cut, copies, part.size, self._memory_s_per_byte[part.kind]))
        return _Held(*np.array(places).T, *np.array(numbers, dtype=np.float64).T)


class _Held(NamedTuple):
    """What the stages of a pipeline hold, a stage on several pools once for each."""

    node_J: Ints
    start_J: Ints  # first layer
    stop_J: Ints  # layer after the last
    cut_J: Floats  # ranks that cut a layer
    copies_J: Floats  # ranks that add to one gradient
    ranks_J: Floats
    memory_s_J: Floats  # per byte

    @classmethod
    def joined(cls, held: Sequence[_Held]) -> _Held:
        """Of several pipelines."""
        return cls(*(np.concatenate(columns) for columns in zip(*held, strict=True)))


class _Shares(NamedTuple):
    """Holders of every layer by node, and what an owner of weight 1 gets of it."""

    held: _Held
    weights_J: Floats
    count_NL: Floats
    weight_NL: Floats
    part_L: Floats  # bytes both ways
    parameters_L: Floats

    def of_parts(self, per_layer_NL: Floats) -> Floats:
        """Sum of ``part_L * per_layer_NL`` over the layers of every part, for what one of its ranks holds."""
        held, sums_NL = self.held, np.zeros((len(per_layer_NL), per_layer_NL.shape[1] + 1))
        (self.part_L * per_layer_NL).cumsum(axis=1, out=sums_NL[:, 1:])
        node_J = held.node_J if len(per_layer_NL) > 1 else np.zeros_like(held.node_J)
        return np.asarray((sums_NL[node_J, held.stop_J] - sums_NL[node_J, held.start_J]) / held.cut_J)

    def held_J(self, per_layer_L: Floats) -> Floats:
        """Sum of ``per_layer_L`` over the parameters that a rank of every part holds."""
        sums_L = np.concatenate([[0.0], (self.parameters_L * per_layer_L).cumsum()])
        return np.asarray((sums_L[self.held.stop_J] - sums_L[self.held.start_J]) / self.held.cut_J)

    def owned_J(self, per_layer_L: Floats) -> Floats:
        """Sum of ``per_layer_L`` over the parameters that a rank of every part owns."""
        return self.weights_J * self.held_J(per_layer_L / self.weight_NL.sum(axis=0))
