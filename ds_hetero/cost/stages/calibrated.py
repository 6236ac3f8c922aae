"""Stages, hops and gradients as the runtime runs them, at the rates that devices and links achieve.

    one, tensor  products and attention cut by n at the efficiency of narrower ones, norms and residuals by every rank,
                 two all-reduces of b S H elements in the forward and two in the backward of a layer
    sequence     a block of `CalibratedCostModel` on the devices, Ulysses, ring or mesh, whichever is fastest
    hop          every receiver takes its part of the activations once, receivers take from the senders by turns
    gradients    what `AsymmetricGradientSync` sends: each element once per holder to its owner, and back from it
    memory       parameters, fp32 gradient sums and owned optimizer state of the slice; what micro-batches in flight
                 keep; the working set of one layer; buffers of hops; logits on the last stage

Dimension key: N nodes, Q places of nodes in the network, J stages of all pipelines, L layers with the embedding before
and the head after them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ds_hetero.baselines import usp_meshes
from ds_hetero.cluster.topology import Cluster
from ds_hetero.cost.calibrated import CalibratedCostModel
from ds_hetero.cost.stages.pipeline_time import PipelineTimes, closed_form, run_pipeline
from ds_hetero.cost.stages.stage import Block, DeviceKind, PlacedPipeline, Pools, StageOption
from ds_hetero.cost.terms import flops
from ds_hetero.cost.terms.memory import LOGIT_TILE_TOKENS, WIDE
from ds_hetero.cost.terms.zero_time import Collective
from ds_hetero.cost.workload import Workload
from ds_hetero.models import ModelSpec
from ds_hetero.schedule import Schedule

__all__ = ["INNERS", "CalibratedStageCosts"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

INNERS = ("tensor", "sequence")  # ways in which several ranks share the work of a stage
GRADIENT_SUM_BYTES = 4  # micro-batches' gradients add up in fp32


class _Pass(NamedTuple):
    """Forward or backward of one layer, without what it repeats."""

    products: int
    attention: str
    operations: int


_FORWARD = _Pass(1, "attention_forward", flops.ATTENTION_FORWARD_FLOPS)
_BACKWARD = _Pass(flops.MATMUL_BACKWARD, "attention_backward", flops.ATTENTION_BACKWARD_FLOPS)


class CalibratedStageCosts:
    """`ds_hetero.cost.stages.stage.StageCosts` of what the runtime does.

    Args:
        cluster: all devices.
        model: what is trained.
        workload: length, attention, checkpointing, loss and bytes; its batches and ZeRO stage take no part, since
            `AsymmetricGradientSync` partitions optimizer state over the holders of every element.
        inners: those of `INNERS` that the model can run.
    """

    name = "calibrated"
    hop_in_step = False

    def __init__(self, cluster: Cluster, model: ModelSpec, workload: Workload, inners: Sequence[str] = INNERS) -> None:
        self._inners = (*inners, "one")
        self.cluster = cluster
        self.model = model
        self.workload = workload
        self.seq_len = workload.seq_len
        self.pools = Pools(cluster)
        self.stage = cache(self._stage)
        self.sequence_schedule = cache(self._sequence_schedule)
        self._hop = cache(self._hop_uncached)
        self._held = cache(self._held_uncached)
        self._inner_s_per_byte_N = cluster.node_p2p_s_per_byte.diagonal()
        self._nic_s_per_byte_N = 1 / cluster.nic_bytes_per_s
        table = model.vocab_size * model.hidden_size
        layers = [model.layer_parameters] * model.num_layers
        self._parameters_L = np.array([table, *layers, table + model.hidden_size], dtype=np.float64)

    # --- stages

    def _stage(self, kind: int, size: int, inner: str, micro_batch_size: int, pipelines: int) -> StageOption | None:
        if inner not in self._inners:
            return None
        if inner == "sequence":
            return self._sequence_stage(kind, size, micro_batch_size, pipelines)
        if self.model.num_heads % size or self.model.num_kv_heads % size:
            return None
        model, work, device = self.model, self.workload, self.pools.kinds[kind].device
        tokens = micro_batch_size * self.seq_len
        forward_s, backward_s = (self._layer_s(kind, size, micro_batch_size, each) for each in (_FORWARD, _BACKWARD))
        all_reduce_s = 0.0
        if size > 1:
            collective = Collective.over(self._devices(kind, size))
            all_reduce_s = 2 * 2 * collective(tokens * model.hidden_size * work.element_bytes)
        forward_s, backward_s = forward_s + all_reduce_s, backward_s + all_reduce_s
        if work.activation_checkpointing:
            backward_s += forward_s
        s_per_flop = 1 / (device.peak_flops_per_s * device.efficiency.matmul)
        logits_s = flops.logit_flops(model, tiled=work.tiled_logits) * s_per_flop
        loss_s = logits_s * (tokens / size + device.efficiency.matmul_half_tokens)
        loss_s += tokens / size * flops.logit_elements(model) * WIDE * self._memory_s_per_byte(kind)
        kept, layer = self._activation_bytes(tokens, size)
        state = self._state_bytes(size, pipelines)
        return StageOption(
            forward_s=forward_s,
            backward_s=backward_s,
            last_s=loss_s,
            capacity_bytes=device.memory_bytes - device.reserved_bytes,
            layer_bytes=model.layer_parameters / size * state,
            kept_bytes=kept,
            fixed_bytes=layer + self._hop_buffer_bytes(tokens),
            first_bytes=model.vocab_size * model.hidden_size / size * state,
            last_bytes=self._head_bytes(tokens, size, state / size),
        )

    def _layer_s(self, kind: int, size: int, micro_batch_size: int, each: _Pass) -> float:
        """One pass of a layer on one of ``size`` devices that cut it by heads and columns, without communication."""
        model, device = self.model, self.pools.kinds[kind].device
        share, seq_len = device.efficiency, self.seq_len
        tokens = micro_batch_size * seq_len
        product_s = flops.matmul_flops(model) / (device.peak_flops_per_s * share.matmul)
        whole = 10 * model.hidden_size  # norms and residuals, which every rank computes
        elements = whole + (flops.elementwise_elements(model) - whole) / size
        element_s = elements * self.workload.element_bytes * self._memory_s_per_byte(kind)
        linear_s = product_s * (tokens / size + share.matmul_half_tokens) + tokens * element_s + share.kernel_overhead_s
        achieved: float = getattr(share, each.attention)
        key_s = each.operations * model.head_dim / (device.peak_flops_per_s * achieved)
        rows = tokens * model.num_heads / size
        causal = 0.5 if self.workload.causal else 1.0
        edge = share.attention_edge_keys if self.workload.causal else 0.0
        attention_s = causal * key_s * (rows + share.attention_half_rows) * (seq_len + share.attention_half_kv)
        return each.products * linear_s + attention_s + share.attention_overhead_s + rows * key_s * edge

    def _sequence_stage(self, kind: int, size: int, micro_batch_size: int, pipelines: int) -> StageOption | None:
        if size < 2 or self.seq_len < size:
            return None
        model, device = self.model, self.pools.kinds[kind].device
        schedule = self.sequence_schedule(kind, size, micro_batch_size)
        again, once = (self._sequence_cost(kind, size, micro_batch_size, repeat) for repeat in (True, False))
        flat = again.arrays(schedule)
        forward_s = again.block_s(*flat) - once.block_s(*flat)
        chosen = again if self.workload.activation_checkpointing else once
        parts = {name: float(part.max()) for name, part in chosen.memory_parts(*flat).items()}
        state = self._state_bytes(1, pipelines, copies=size)
        tokens = micro_batch_size * self.seq_len / size
        return StageOption(
            forward_s=forward_s,
            backward_s=chosen.block_s(*flat) - forward_s,
            last_s=chosen.outside_blocks_s(flat[1])["loss_s"],
            capacity_bytes=device.memory_bytes - device.reserved_bytes,
            layer_bytes=model.layer_parameters * state,
            kept_bytes=parts["activations"] / model.num_layers,
            fixed_bytes=parts["layer"]
            + parts["ring_buffers"]
            + parts["exchange_buffers"]
            + self._hop_buffer_bytes(tokens),
            first_bytes=model.vocab_size * model.hidden_size * state,
            last_bytes=self._head_bytes(tokens, 1, state),
        )

    def _sequence_schedule(self, kind: int, size: int, micro_batch_size: int) -> Schedule:
        """The fastest mesh of equal groups on ``size`` devices of a kind, ranks from 0."""
        cost = self._sequence_cost(kind, size, micro_batch_size, True)
        meshes = usp_meshes(size, self.model.num_heads, self.model.num_kv_heads)
        return min(meshes, key=lambda schedule: cost.block_s(*cost.arrays(schedule)))

    def _sequence_cost(self, kind: int, size: int, micro_batch_size: int, checkpointing: bool) -> CalibratedCostModel:
        work = self.workload
        own = Workload(
            seq_len=self.seq_len,
            micro_batch=micro_batch_size,
            causal=work.causal,
            zero_stage=1,
            activation_checkpointing=checkpointing,
            tiled_logits=work.tiled_logits,
            element_bytes=work.element_bytes,
        )
        return CalibratedCostModel(self._devices(kind, size), self.model, own)

    def _devices(self, kind: int, size: int) -> Cluster:
        return self.cluster.subset(self.pools.largest[kind].ranks[:size])

    def _memory_s_per_byte(self, kind: int) -> float:
        device = self.pools.kinds[kind].device
        return 1 / (device.memory_bytes_per_s * device.efficiency.memory)

    # --- memory

    def _state_bytes(self, size: int, pipelines: int, copies: int = 1) -> float:
        """Model states per parameter that a rank holds: owners of an element are those who add to its gradient."""
        owned = self.workload.optimizer_bytes / (copies + pipelines - 1)
        return self.workload.element_bytes + GRADIENT_SUM_BYTES + owned

    def _activation_bytes(self, tokens: int, size: int) -> tuple[float, float]:
        """What a layer keeps of a micro-batch, and the working set of a layer's backward: see `memory_parts`."""
        model, element = self.model, self.workload.element_bytes
        mlp_width = (3 if model.gated_mlp else 2) * model.mlp_size * max(model.experts_per_token, 1) / size
        heads, kv_heads = model.num_heads / size, max(model.num_kv_heads / size, 1)
        kept = element * tokens * (4 * model.hidden_size + heads * model.head_dim + mlp_width)
        kept += tokens * (element * model.head_dim * 2 * (heads + kv_heads) + WIDE * heads)
        widest = element * tokens * (mlp_width + model.hidden_size)
        if self.workload.activation_checkpointing:
            return element * tokens * model.hidden_size, kept + widest
        return kept, widest

    def _hop_buffer_bytes(self, tokens: float) -> float:
        """Two inputs and two outputs, so that a transfer runs while the next one is computed."""
        return 4 * tokens * self.model.hidden_size * self.workload.element_bytes

    def _head_bytes(self, tokens: float, size: int, state_bytes: float) -> float:
        tile = min(tokens, LOGIT_TILE_TOKENS) if self.workload.tiled_logits else tokens
        logits = tile * self.model.vocab_size / size * (self.workload.element_bytes + 2 * WIDE)
        return self.model.vocab_size * self.model.hidden_size * state_bytes + logits

    def kept_in_flight(self, stage: int, stages: int) -> int:
        """Micro-batches whose activations a stage keeps under 1F1B."""
        return stages - stage

    # --- hops and pipelines

    def hop_s(self, link: int, source: Block, target: Block, micro_batch_size: int) -> float:
        """One direction: latency and the busiest port, of a sender, a receiver or the node."""
        return self._hop(link, source.kind, source.size, source.inner, *target[:1], *target[2:], micro_batch_size)

    def _hop_uncached(
        self, link: int, kind: int, size: int, inner: str, to_kind: int, to_size: int, to_inner: str, samples: int
    ) -> float:
        wire = self.cluster.link_classes[link]
        volume = samples * self.seq_len * self.model.hidden_size * self.workload.element_bytes
        received = volume / to_size if to_inner == "sequence" else volume
        total = received * to_size
        sent = total / size if inner == "sequence" else -(-to_size // size) * received
        busiest_s = max(received, sent) / (wire.bytes_per_s * wire.p2p_efficiency)
        kinds: tuple[DeviceKind, ...] = (self.pools.kinds[kind], self.pools.kinds[to_kind])
        inside = any(wire == each.link for each in kinds)
        shared = [each.switch_bytes_per_s if inside else each.nic_bytes_per_s for each in kinds]
        return wire.latency_s + max([busiest_s, *(total / rate for rate in shared if rate)])

    def pipeline_times(self, forward_s: Floats, backward_s: Floats, hop_s: Floats) -> PipelineTimes:
        """See `ds_hetero.cost.stages.pipeline_time.closed_form`."""
        return closed_form(forward_s, backward_s, hop_s)

    def pipeline_s(self, forward_s: Floats, backward_s: Floats, hop_s: Floats, micro_batches: int) -> float:
        """See `ds_hetero.cost.stages.pipeline_time.run_pipeline`."""
        return run_pipeline(forward_s.tolist(), backward_s.tolist(), hop_s.tolist(), micro_batches).total_s

    # --- gradients

    def gradients_s(self, pipelines: Sequence[PlacedPipeline]) -> float:
        """Reduce gradients to their owners, step the optimizer, gather the parameters from them.

        An element of a layer is held, summed and wanted by C ranks: one of a ``tensor`` stage, every rank of a
        ``sequence`` stage. A rank sends all but 1 / C of what it holds, an equal part to every other one, and as much
        again when the values come back. Bytes add up at a rank's port in its node, at its port towards other nodes and
        at the node's NIC. Embedding and head are layers of their own.
        """
        held = [self._held(pipeline.blocks, pipeline.layers) for pipeline in pipelines]
        node_J, start_J, stop_J = np.concatenate([each.place_3J for each in held], axis=1)
        cut_J, copies_J, ranks_J, memory_s_J = np.concatenate([each.numbers_4J for each in held], axis=1)
        num_nodes, num_layers = len(self.cluster.nodes), self.model.num_layers + 2
        change_NL = np.zeros((num_nodes, num_layers + 1))
        np.add.at(change_NL, (node_J, start_J), copies_J)
        np.add.at(change_NL, (node_J, stop_J), -copies_J)
        count_NL = change_NL.cumsum(axis=1)[:, :num_layers]
        total_L = count_NL.sum(axis=0)
        part_L = 2 * self._parameters_L * self.workload.element_bytes / total_L

        def of_stages(per_layer_NL: Floats) -> Floats:
            """Sum of ``part_L * per_layer_NL`` over the layers of every stage, for what one of its ranks holds."""
            sums_NL = np.zeros((len(per_layer_NL), num_layers + 1))
            (part_L * per_layer_NL).cumsum(axis=1, out=sums_NL[:, 1:])
            node = node_J if len(per_layer_NL) > 1 else np.zeros_like(node_J)
            return np.asarray((sums_NL[node, stop_J] - sums_NL[node, start_J]) / cut_J)

        inner_NL = (count_NL - 1) * self._inner_s_per_byte_N[:, None]
        worst = max(of_stages(inner_NL).max(), of_stages(self._outer_s_per_byte(count_NL)).max())
        if np.isfinite(self.cluster.nic_bytes_per_s).any():
            leaving_N = np.zeros(num_nodes)
            np.add.at(leaving_N, node_J, ranks_J * of_stages(total_L - count_NL))
            worst = max(worst, (leaving_N * self._nic_s_per_byte_N).max())
        work = self.workload
        per_parameter = 2 * work.optimizer_bytes + GRADIENT_SUM_BYTES + work.element_bytes
        owned_J = of_stages(np.ones((1, num_layers))) / (2 * work.element_bytes)
        return float(worst) + float((owned_J * per_parameter * memory_s_J).max())

    def _outer_s_per_byte(self, count_NL: Floats) -> Floats:
        """Seconds that a rank of every node takes for one byte to all holders on other nodes, ``[N, L]``."""
        place_N = self.cluster.place
        s_per_byte_QQ = self.cluster.node_p2p_s_per_byte[self.cluster.place_nodes]
        count_QL = np.zeros((len(s_per_byte_QQ), count_NL.shape[1]))
        np.add.at(count_QL, place_N, count_NL)
        everywhere_QL = np.einsum("pq,ql->pl", s_per_byte_QQ, count_QL)  # too small for a BLAS with threads
        return np.asarray(everywhere_QL[place_N] - s_per_byte_QQ.diagonal()[place_N][:, None] * count_NL)

    def _held_uncached(self, blocks: tuple[Block, ...], layers: tuple[int, ...]) -> _Held:
        """Stages as intervals of layers, the embedding before the first layer and the head after the last."""
        stops = np.cumsum(layers) + 1
        starts = np.concatenate([[0], stops[:-1]])
        stops[-1] += 1
        sequence = [block.inner == "sequence" for block in blocks]
        return _Held(
            place_3J=np.array([[block.node for block in blocks], starts, stops]),
            numbers_4J=np.array(
                [
                    [1 if whole else block.size for whole, block in zip(sequence, blocks, strict=True)],
                    [block.size if whole else 1 for whole, block in zip(sequence, blocks, strict=True)],
                    [block.size for block in blocks],
                    [self._memory_s_per_byte(block.kind) for block in blocks],
                ],
                dtype=np.float64,
            ),
        )

    def step_s(self, pipelines_s: float, gradients_s: float, overlap_s: float) -> float:
        """Gradients leave while the last micro-batch goes backward, as far as they are ready."""
        return pipelines_s + max(0.0, gradients_s - overlap_s)


class _Held(NamedTuple):
    """What the stages of a pipeline hold."""

    place_3J: Ints  # node, first layer, layer after the last
    numbers_4J: Floats  # ranks that cut a layer, ranks that add to one gradient, all ranks, seconds per byte of memory
