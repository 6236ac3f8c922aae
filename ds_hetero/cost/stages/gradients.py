"""Time of gradient synchronization between pipelines, as `AsymmetricGradientSync` does it: reduce, step, gather.

The holders of an element of a layer are the C ranks that have it: one rank of every ``tensor`` stage with the layer,
and all ranks of every ``sequence`` stage. Every holder r owns the optimizer state of a share s_r of the layer. Shares
are s_r = w_r / (sum of the holders' weights w), or 1 / C if owners are even. Embedding and head count as layers.

To reduce gradients, a holder sends to every other holder the gradients that the other one owns, and receives the
gradients of its own share from the C - 1 others. To gather new parameters, the same bytes travel the other way. Three
ports may be the busiest: a rank's port to its own node, its port to other nodes, and the NIC that a node shares.

Example: three ranks hold 800 MB of gradients, with the weights 2, 1, 1. Rank 0 owns 400 MB, the others 200 MB each.
Rank 0 receives 2 x 400 MB and sends 2 x 200 MB; rank 1 receives 2 x 200 MB and sends 400 + 200 MB.

A rank also reads and writes its memory. The table counts bytes per parameter that the rank holds or owns; an element
has e bytes on the wire, and 4 bytes in a sum of gradients:

    step      counts per       bytes
    pack      held parameter   2 e
    add up    owned parameter  4 + C (e + 8): zeros, then every holder's gradients. If C = 1 nothing is added: e + 4 to
                               convert, or 0 if e is 4
    update    owned parameter  4 for the norm, 4 for the gradient, and twice the optimizer state
    return    owned parameter  4 + e to convert, 2 e C to copy for C holders
              held parameter   2 e for what arrives

Packing and adding run during the last backward but take time of the same device. New parameters are sent in buckets,
and a bucket travels while the next one is copied, so the longer of both counts.

Experts that the devices of a stage divide are on one rank of the stage each, like the slices of a ``tensor`` stage. A
second `GradientTimes` counts them alone; both times add up.

Dimension key: N nodes, Q places of nodes in the network (`Cluster.place`), J parts of stages of all pipelines (a part
is the devices of a stage in one pool), L layers with the embedding before and the head after them, K quantities that
are summed at once.
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
from ds_hetero.cost.terms.expert_shares import divided_of_layer
from ds_hetero.cost.terms.trained import trained_of_ends, trained_of_layer
from ds_hetero.cost.workload import Workload
from ds_hetero.models.shapes import ModelSpec

# Limits of fitting owners to memory (`GradientTimes.fit`). Chosen, never measured.
MAX_FIT_ROUNDS = 60
MIN_WEIGHT = 1e-6  # smallest weight of an owner over the largest; below it, memory counts as too small
TARGET_FRACTION = 0.999  # fraction of what a rank may own that a round aims at, so that rounding leaves it below


class GradientTimes:
    """Times of gradient synchronization on a cluster, and owners of optimizer state that fit into memory.

    Args:
        workload: with ``experts``, the divided experts are left out.
        memory_s_per_byte: seconds to read or write a byte of memory, by kind of device.
        experts_alone: whether to count the divided experts, and nothing else.
    """

    def __init__(
        self,
        cluster: Cluster,
        model: ModelSpec,
        workload: Workload,
        memory_s_per_byte: Sequence[float],
        *,
        experts_alone: bool = False,
    ) -> None:
        self._workload, self._memory_s_per_byte, self._experts_alone = workload, memory_s_per_byte, experts_alone
        self._parts = cache(self._parts_uncached)
        # Seconds per byte between ranks: of two places, of a place and a node, of two nodes of a place, inside a node.
        between_QQ = cluster.node_p2p_s_per_byte[cluster.place_nodes]
        self._place_N = cluster.place
        self._between_QN = between_QQ[:, cluster.place]
        self._same_place_N1 = between_QQ.diagonal()[cluster.place][:, None]
        self._inside_N1 = cluster.node_p2p_s_per_byte.diagonal()[:, None]
        has_shared_nics = np.isfinite(cluster.nic_bytes_per_s).any()
        self._nic_s_per_byte_N = 1 / cluster.nic_bytes_per_s if has_shared_nics else None
        of_layer: float = divided_of_layer(model, workload) if experts_alone else trained_of_layer(model, workload)
        layers = [of_layer] * model.num_layers
        first = last = 0
        if trained_of_ends(model, workload) and not experts_alone:
            first = model.vocab_size * model.hidden_size
            final_norm = 0 if workload.adapter_rank else model.hidden_size  # frozen beside adapters
            last = first + final_norm
        self._parameters_L = np.array([first, *layers, last], dtype=np.float64)

    def times(self, pipelines: Sequence[PlacedPipeline], weights_J: Floats | None = None) -> SyncTimes:
        """Return the time to reduce gradients to their owners, to step, and to gather parameters.

        Args:
            weights_J: weight as an owner of every rank of a part; None if owners are even.
        """
        ownership = self._ownership(pipelines, weights_J)
        one_way_s = self._wire_s(ownership, weights_J) / 2  # reducing and gathering take equally long
        memory_3J = self._memory_bytes(ownership) * ownership.parts.memory_s_per_byte_J
        summing_s, update_s, return_s = memory_3J.max(axis=1).tolist()
        return SyncTimes(one_way_s, summing_s + update_s + max(one_way_s, return_s))

    def _memory_bytes(self, ownership: _Ownership) -> Floats:
        """Return the bytes that a rank of every part reads and writes in its memory, ``[3, J]``.

        The three rows are the rows of the module's table: pack and add up, update, return.
        """
        element_bytes, num_holders_L = self._workload.element_bytes, ownership.num_holders_NL.sum(axis=0)
        is_shared_L = num_holders_L > 1  # whether there is anything to add up
        add_up_L = GRADIENT_SUM_BYTES + num_holders_L * (element_bytes + 2 * GRADIENT_SUM_BYTES)
        convert = element_bytes + GRADIENT_SUM_BYTES if element_bytes != GRADIENT_SUM_BYTES else 0
        per_owned_3L = np.empty((3, len(num_holders_L)))
        per_owned_3L[0] = np.where(is_shared_L, add_up_L, convert)
        per_owned_3L[1] = 2 * self._workload.optimizer_bytes + 2 * GRADIENT_SUM_BYTES
        per_owned_3L[2] = (
            GRADIENT_SUM_BYTES + element_bytes + np.where(is_shared_L, 2 * element_bytes * num_holders_L, 0)
        )
        bytes_3J = ownership.sum_over_owned(per_owned_3L)
        bytes_3J[0] += 2 * element_bytes * ownership.parts.parameters_J  # pack
        bytes_3J[2] += 2 * element_bytes * ownership.parts.parameters_J  # parameters that arrive
        return bytes_3J

    def _wire_s(self, ownership: _Ownership, weights_J: Floats | None) -> float:
        """Return the time at the busiest port to send gradients to their owners and to send parameters back."""
        parts, rank_weight_J = ownership.parts, ownership.rank_weight_J
        num_holders_NL, weight_NL = ownership.num_holders_NL, ownership.weight_NL

        # A rank receives its own share from every other holder.
        inside_J, outside_J = ownership.sum_over_layers(
            (num_holders_NL - 1) * self._inside_N1, self._outside_s_per_byte(num_holders_NL)
        )
        busiest_s = max((rank_weight_J * inside_J).max(), (rank_weight_J * outside_J).max())

        # It sends the shares of all other holders. With even owners these are as many bytes as it receives.
        if weights_J is not None:
            inside_J, outside_J, own_J = ownership.sum_over_layers(
                weight_NL * self._inside_N1, self._outside_s_per_byte(weight_NL), self._inside_N1
            )
            busiest_s = max(busiest_s, (inside_J - rank_weight_J * own_J).max(), outside_J.max())

        # What all ranks of a node exchange with other nodes shares the node's NIC, if the node has such a NIC.
        if self._nic_s_per_byte_N is not None:
            arriving_J, leaving_J = ownership.sum_over_layers(
                num_holders_NL.sum(axis=0) - num_holders_NL, weight_NL.sum(axis=0) - weight_NL
            )
            rank_bytes = [rank_weight_J * arriving_J]
            if weights_J is not None:
                rank_bytes.append(leaving_J)
            for bytes_J in rank_bytes:
                bytes_N = np.bincount(parts.node_J, parts.num_ranks_J * bytes_J, len(self._place_N))
                busiest_s = max(busiest_s, (bytes_N * self._nic_s_per_byte_N).max())
        return float(busiest_s)

    def owned_parameters(self, pipelines: Sequence[PlacedPipeline], weights_J: Floats) -> Floats:
        """Count the parameters whose optimizer state a rank of every part owns, ``[J]``."""
        ownership = self._ownership(pipelines, weights_J)
        return np.asarray(ownership.sum_over_owned(np.ones((1, len(self._parameters_L))))[0])

    def fit(self, pipelines: Sequence[PlacedPipeline], max_owned_J: Floats) -> Floats | None:
        """Find owner weights under which no rank owns more than it may, by lowering only the weights that must fall.

        All weights begin at 1. Each round lowers the weights of ranks that own too much, so that the others own more.

        Args:
            max_owned_J: parameters whose optimizer state a rank of every part may own.

        Returns:
            Weight of every part, the largest of them 1; None if no such weights were found.
        """
        weights_J = np.ones(len(max_owned_J))
        if (max_owned_J <= 0).any():
            return None
        for _ in range(MAX_FIT_ROUNDS):
            owned_J = self.owned_parameters(pipelines, weights_J)
            owns_too_much_J = owned_J > max_owned_J
            if not owns_too_much_J.any():
                return np.asarray(weights_J / weights_J.max())
            weights_J[owns_too_much_J] *= TARGET_FRACTION * max_owned_J[owns_too_much_J] / owned_J[owns_too_much_J]
            if weights_J.min() < MIN_WEIGHT * weights_J.max():
                return None
        return None

    def _ownership(self, pipelines: Sequence[PlacedPipeline], weights_J: Floats | None) -> _Ownership:
        """Count the holders of every layer on every node, and divide the layer's parameters by their weights."""
        parts = _StageParts.joined([self._parts(pipeline.blocks, pipeline.layers) for pipeline in pipelines])
        num_nodes, num_bounds = len(self._place_N), len(self._parameters_L) + 1

        def sum_over_parts(value_J: Floats) -> Floats:
            """Sum ``value_J`` over the parts that hold a layer, by node and layer, ``[N, L]``.

            Each part adds its value at its first layer and takes it away after its last; a running sum does the rest.
            A part with layers 1 and 2 of four and the value 5 gives the changes 0 5 0 -5 0 and the sums 0 5 5 0.
            """
            first_J, stop_J = parts.bounds_on_node_2J
            change = np.bincount(first_J, value_J, num_nodes * num_bounds)
            change -= np.bincount(stop_J, value_J, num_nodes * num_bounds)
            return np.asarray(change.reshape(num_nodes, num_bounds).cumsum(axis=1)[:, :-1])

        num_holders_NL = sum_over_parts(parts.num_holders_J)
        weight_NL = num_holders_NL if weights_J is None else sum_over_parts(parts.num_holders_J * weights_J)
        return _Ownership(
            parts=parts,
            rank_weight_J=np.ones(1) if weights_J is None else weights_J,
            num_holders_NL=num_holders_NL,
            weight_NL=weight_NL,
            parameters_per_weight_L=self._parameters_L / weight_NL.sum(axis=0),
            bytes_both_ways=2 * self._workload.element_bytes,
        )

    def _outside_s_per_byte(self, num_holders_NL: Floats) -> Floats:
        """Return ``[N, L]`` the seconds in which a rank of a node sends one byte to each holder on other nodes."""
        # Holders of the rank's own node are counted as if on another node of its place, and then taken away again.
        to_all_QL = np.einsum("qn,nl->ql", self._between_QN, num_holders_NL)  # too small for a BLAS with threads
        return np.asarray(to_all_QL[self._place_N] - self._same_place_N1 * num_holders_NL)

    def _parts_uncached(self, blocks: tuple[DeviceBlock, ...], layers: tuple[int, ...]) -> _StageParts:
        """List the parts of one pipeline's stages with their layers: first the embedding, last the head.

        Stages of 2 and 2 layers have the layers 0 to 2 (layer 0 is the embedding) and 3 to 5 (layer 5 is the head).
        """
        stops = np.cumsum(layers) + 1
        starts = np.concatenate([[0], stops[:-1]])
        stops[-1] += 1
        num_bounds, integers, numbers = len(self._parameters_L) + 1, [], []
        for block, start, stop in zip(blocks, starts.tolist(), stops.tolist(), strict=True):
            parameters = self._parameters_L[start:stop].sum()
            is_cut = block.inner == "tensor" or self._experts_alone
            num_slices = block.size if is_cut else block.tensor_size
            for part in block.parts:
                row = part.node * num_bounds
                integers.append((row + start, row + stop, start, stop, part.node))
                num_holders = part.size // num_slices
                s_per_byte = self._memory_s_per_byte[part.kind]
                numbers.append((num_slices, num_holders, part.size, s_per_byte, parameters / num_slices))
        return _StageParts(np.array(integers).T, np.array(numbers, dtype=np.float64).T)


class _StageParts(NamedTuple):
    """Parts of stages with their layers, one column per part.

    Two arrays instead of an object per part, since a search joins and sums them for many plans. The properties name the
    rows. Layers are given by bounds: the first layer, and the one after the last.
    """

    integers: Ints  # ``[5, J]``
    numbers: Floats  # ``[5, J]``

    @classmethod
    def joined(cls, pipelines: Sequence[_StageParts]) -> _StageParts:
        """Join the parts of several pipelines."""
        return cls(*(np.concatenate(arrays, axis=1) for arrays in zip(*pipelines, strict=True)))

    @property
    def bounds_on_node_2J(self) -> Ints:
        """Bounds of the layers as indices into a flat table ``[N, L + 1]``, in the row of the part's node."""
        return np.asarray(self.integers[:2])

    @property
    def bounds_2J(self) -> Ints:
        """Bounds of the layers, from 0 to L."""
        return np.asarray(self.integers[2:4])

    @property
    def node_J(self) -> Ints:
        """Node of the part, an index into `Cluster.nodes`."""
        return np.asarray(self.integers[4])

    @property
    def num_slices_J(self) -> Floats:
        """Number of slices into which tensor parallelism cuts a layer; a rank holds one slice."""
        return np.asarray(self.numbers[0])

    @property
    def num_holders_J(self) -> Floats:
        """Number of the part's ranks that hold an element: 1 in a ``tensor`` stage, all in a ``sequence`` stage."""
        return np.asarray(self.numbers[1])

    @property
    def num_ranks_J(self) -> Floats:
        """Number of ranks."""
        return np.asarray(self.numbers[2])

    @property
    def memory_s_per_byte_J(self) -> Floats:
        """Seconds in which a rank reads or writes a byte of its memory."""
        return np.asarray(self.numbers[3])

    @property
    def parameters_J(self) -> Floats:
        """Number of parameters that a rank holds."""
        return np.asarray(self.numbers[4])


class _Ownership(NamedTuple):
    """Holders of every layer by node, and the parameters that they own per unit of weight."""

    parts: _StageParts
    rank_weight_J: Floats  # weight as an owner of a rank of every part; ``[1]`` if owners are even
    num_holders_NL: Floats  # holders of an element of the layer on the node
    weight_NL: Floats  # sum of the holders' weights
    parameters_per_weight_L: Floats  # parameters of the uncut layer that an owner of weight 1 owns
    bytes_both_ways: int  # bytes of a parameter's gradient and of its new value, on the wire

    def sum_over_layers(self, *factor_NL: Floats) -> Floats:
        """Sum over the layers of every part the bytes that an owner of weight 1 owns, times a factor.

        The bytes are those on the wire: a gradient and a new value for every parameter that is owned.

        Args:
            factor_NL: K factors, each for a rank of every node, by layer.

        Returns:
            The K sums of every part, ``[K, J]``.
        """
        num_nodes, num_layers = self.num_holders_NL.shape
        bytes_L = self.bytes_both_ways * self.parameters_per_weight_L
        products_KNL = np.zeros((len(factor_NL), num_nodes, num_layers + 1))
        for products_NL, factor in zip(products_KNL, factor_NL, strict=True):
            np.multiply(bytes_L, factor, out=products_NL[:, 1:])
        # A sum over layers first to stop - 1 is the difference of two running sums, which start with 0.
        running_sums = products_KNL.cumsum(axis=2).reshape(len(factor_NL), -1)
        ends_K2J = running_sums.take(self.parts.bounds_on_node_2J, axis=1)
        return np.asarray((ends_K2J[:, 1] - ends_K2J[:, 0]) / self.parts.num_slices_J)

    def sum_over_owned(self, per_parameter_KL: Floats) -> Floats:
        """Sum ``per_parameter_KL`` over the parameters that a rank of every part owns, ``[K, J]``."""
        running_KL = np.zeros((len(per_parameter_KL), len(self.parameters_per_weight_L) + 1))
        np.multiply(self.parameters_per_weight_L, per_parameter_KL, out=running_KL[:, 1:])
        ends_K2J = running_KL.cumsum(axis=1).take(self.parts.bounds_2J, axis=1)
        return np.asarray(self.rank_weight_J * (ends_K2J[:, 1] - ends_K2J[:, 0]) / self.parts.num_slices_J)
