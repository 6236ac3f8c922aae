"""The default cost model: what the runtime does, at the rates that devices and links achieve.

It differs from HexiSeq's Eqs. 2-12 (`published`, arXiv:2605.07569) in this:

    ring         no barrier between steps; KV travels one block ahead, dK/dV in fp32 come back  (`ring_time`)
    links        bytes of a device add up at its ports, a node's at its NIC or switch           (`exchange_time`)
    passes       forward and backward apart; attention 4 + 10 operations, products 1 + 2        (`flops`)
    causality    half the work in a zigzag layout; contiguous groups compute what they can see
    model        KV heads, the true width of the MLP, vocabulary and loss, the optimizer's step
    devices      achieved shares of the peaks, lower for few tokens, few heads and short keys   (`DeviceSpec`)
    ZeRO         stage 3's gathers and reductions beside the blocks, hidden as far as they fit; lower stages'
                 all-reduce after the backward and their gather after the step                  (`zero_time`)
    checkpoints  with activation checkpointing the backward begins with the layer's whole forward, its exchanges
                 included; attention's own recomputation is part of its 10 operations
    memory       per layer, by what is kept and what one layer needs at its peak                (`memory`)

A block is the time between two layers in a steady run: non-attention work and both exchanges of a group come before
its ring, and the slowest group of the ring ends the block.

Dimension key: B assignments, D ranks, K groups in ring order.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from ds_hetero.arrays import Floats, Ints
from ds_hetero.cluster.device import Efficiency
from ds_hetero.cluster.topology import Cluster
from ds_hetero.cost import flops
from ds_hetero.cost.exchange_time import exchange_latency_s, exchange_s
from ds_hetero.cost.grouping import Grouping
from ds_hetero.cost.heads import kv_heads_of_ranks, ring_edges
from ds_hetero.cost.memory import memory_parts
from ds_hetero.cost.model import BaseCostModel
from ds_hetero.cost.ring_time import RingCoefficients, ring_finish_s, ring_schedule
from ds_hetero.cost.transfer_time import ring_transfers_s
from ds_hetero.cost.workload import Bottleneck, Span, Terms, Workload
from ds_hetero.cost.zero_time import Collective
from ds_hetero.models import ModelSpec
from ds_hetero.schedule import Schedule

__all__ = ["CalibratedCostModel"]


GRADIENT_ELEMENT_BYTES = 4  # partial dK and dV travel in fp32
MERGE_BYTES = 16  # per element of a partial result: read it and the running one, write back, in fp32 with a cast


@dataclass(frozen=True, slots=True)
class _Pass:
    """Forward or backward of one block, linear in tokens and rows; arrays are ``[D]``."""

    name: str
    token_s: Floats  # outside attention, per token
    fixed_s: Floats  # outside attention, for a rank that has tokens
    attention_s: Floats  # per query row (token x head x sequence) and key, full attention


@dataclass(frozen=True, slots=True)
class _Shape:
    """What both passes need of an assignment."""

    grouping: Grouping
    tokens_BD: Floats
    heads_BD: Ints
    kv_heads_BD: Ints
    length_BK: Floats
    rows_BD: Floats  # query rows of a rank: tokens of its group x its heads x sequences
    exchange_BK: Floats  # both all-to-alls of one pass
    latency_BK: Floats  # start-up of a ring transfer into a group
    transfer_BK: Floats  # its seconds per token and byte of a KV head
    shared_BK: Floats  # its least seconds per byte of a KV head, where others use the same NIC or switch


class CalibratedCostModel(BaseCostModel):
    """What the runtime does, for one cluster, model and workload."""

    name = "calibrated"

    def __init__(self, cluster: Cluster, model: ModelSpec, workload: Workload) -> None:
        super().__init__(cluster, model, workload)
        work, devices = workload, cluster.devices
        self.capacity_bytes_D = cluster.memory_bytes - np.array([d.reserved_bytes for d in devices], dtype=np.float64)
        share = {
            field.name: np.array([getattr(device.efficiency, field.name) for device in devices])
            for field in fields(Efficiency)
        }
        self._half_rows_D, self._half_kv_D = share["attention_half_rows"], share["attention_half_kv"]
        self._edge_keys_D = share["attention_edge_keys"] if work.causal else np.zeros(len(devices))
        self._attention_overhead_D = share["attention_overhead_s"]
        self._memory_s_per_byte_D = 1 / (cluster.memory_bytes_per_s * share["memory"])
        self._s_per_flop_D = 1 / (cluster.peak_flops_per_s * share["matmul"])
        self._half_tokens_D = share["matmul_half_tokens"]
        self._passes = tuple(
            _Pass(
                name=name,
                token_s=work.micro_batch
                * (
                    flops.matmul_flops(model) * products * self._s_per_flop_D
                    + flops.elementwise_elements(model) * products * work.element_bytes * self._memory_s_per_byte_D
                ),
                fixed_s=products
                * (flops.matmul_flops(model) * self._s_per_flop_D * self._half_tokens_D + share["kernel_overhead_s"]),
                attention_s=operations * model.head_dim / (cluster.peak_flops_per_s * share[f"attention_{name}"]),
            )
            for name, products, operations in (
                ("forward", 1, flops.ATTENTION_FORWARD_FLOPS),
                ("backward", flops.MATMUL_BACKWARD, flops.ATTENTION_BACKWARD_FLOPS),
            )
        )
        # A checkpointed layer's backward begins with its forward.
        self._repeats = (2 if work.activation_checkpointing else 1, 1)
        self._unit_bytes = work.micro_batch * model.head_dim * work.element_bytes  # per token and head
        self._collective = Collective.over(workload.zero_cluster or cluster)
        layer, stage = model.layer_parameters, work.zero_stage
        self._gather_s = self._collective(layer * work.element_bytes) if stage == 3 else 0.0
        self._reduce_s = self._collective(layer * work.gradient_bytes) if stage == 3 else 0.0
        self.floor_s = 2 * self._gather_s + self._reduce_s
        self._logits_s_per_token_D = flops.logit_flops(model, tiled=work.tiled_logits) * self._s_per_flop_D
        self.loss_s_per_token_D = work.micro_batch * (
            self._logits_s_per_token_D + flops.logit_elements(model) * 4 * self._memory_s_per_byte_D
        )
        self._freeze_curves()

    def _freeze_curves(self) -> None:
        """Linear coefficients at an even share, and the bound of perfect balance: see `CostModel`."""
        work, model = self.workload, self.model
        even = work.seq_len / self.cluster.num_ranks
        causal = work.micro_batch * (0.5 if work.causal else 1.0)
        passes = list(zip(self._repeats, self._passes, strict=True))
        attention_D = causal * np.sum([repeats * each.attention_s for repeats, each in passes], axis=0)
        token_D = np.sum([repeats * each.token_s for repeats, each in passes], axis=0)
        fixed_D = np.sum([repeats * each.fixed_s for repeats, each in passes], axis=0)
        rows = 1 + self._half_rows_D / (work.micro_batch * model.num_heads * even)
        keys = 1 + self._half_kv_D * len(self.cluster.nodes) / work.seq_len
        self.attention_s_D = attention_D * rows * keys
        self.non_attention_s_per_token_D = token_D + fixed_D / even
        self.least_attention_s_D, self.least_non_attention_s_per_token_D = attention_D, token_D
        self.bound_s = _balanced_s(token_D * work.seq_len, attention_D * model.num_heads * work.seq_len**2)

    # --- time ---------------------------------------------------------------------------------------

    def block_s_many(self, grouping: Grouping, tokens_BD: Floats, heads_BD: Ints) -> Floats:
        """Time of one block for many assignments of one grouping, ``[B]``."""
        shape = self._shape(grouping, tokens_BD, heads_BD)
        return self._block_s([ring_finish_s(self._ring(shape, each)[1]) for each in self._passes])

    def _block_s(self, pass_B: list[Floats]) -> Floats:
        """Forward, then backward with what it repeats; ZeRO's traffic runs beside them and shows where it is longer."""
        backward_B = (self._repeats[0] - 1) * pass_B[0] + pass_B[1]
        return np.asarray(
            np.maximum(pass_B[0], self._gather_s) + np.maximum(backward_B, self._gather_s + self._reduce_s)
        )

    def terms(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> Terms:
        """The same by part.

        Non-attention is the longest of any group; all-to-all is what the exchanges add to the longest of both; ring
        steps are the rest, up to the end of the slowest group.
        """
        shape = self._shape(grouping, tokens_D[None], heads_D[None])
        before, finish = [], []
        for each in self._passes:
            non_attention_BK, ring = self._ring(shape, each)
            before.append((float(non_attention_BK.max()), float(ring.start_s.max())))
            finish.append(ring_finish_s(ring))
        block_s = float(self._block_s(finish)[0])
        non_attention_s = sum(repeats * part[0] for repeats, part in zip(self._repeats, before, strict=True))
        exchanged_s = sum(repeats * part[1] for repeats, part in zip(self._repeats, before, strict=True))
        return Terms(
            non_attention_s=non_attention_s,
            all_to_all_s=exchanged_s - non_attention_s,
            ring_steps_s=block_s - exchanged_s,
        )

    def _shape(self, grouping: Grouping, tokens_BD: Floats, heads_BD: Ints) -> _Shape:
        length_BK = grouping.by_group(np.add, tokens_BD)
        length_BD = length_BK[:, grouping.group_of]
        per_kv_head = self.model.queries_per_kv_head
        kv_heads_BD = kv_heads_of_ranks(grouping, heads_BD, per_kv_head)
        latency_BK, transfer_BK, shared_BK = ring_transfers_s(grouping, heads_BD, length_BK, per_kv_head)
        return _Shape(
            grouping=grouping,
            tokens_BD=tokens_BD,
            heads_BD=heads_BD,
            kv_heads_BD=kv_heads_BD,
            length_BK=length_BK,
            rows_BD=self.workload.micro_batch * length_BD * heads_BD,
            exchange_BK=self._exchange_s(grouping, tokens_BD, heads_BD, kv_heads_BD, length_BD),
            latency_BK=latency_BK,
            transfer_BK=transfer_BK,
            shared_BK=shared_BK,
        )

    def _exchange_s(
        self, grouping: Grouping, tokens_BD: Floats, heads_BD: Ints, kv_heads_BD: Ints, length_BD: Floats
    ) -> Floats:
        """Both all-to-alls of one pass, ``[B, K]``: q, k, v one way and the output the other (or their gradients).

        Packing and unpacking reads and writes what is sent and received once more; single ranks exchange nothing.
        """
        if grouping.num_groups == len(grouping.order):
            return np.zeros((len(tokens_BD), grouping.num_groups))
        width_BD = heads_BD + 2 * kv_heads_BD  # q, k and v
        both = exchange_s(
            grouping,
            np.concatenate([tokens_BD, tokens_BD]),
            self._unit_bytes * np.concatenate([width_BD, heads_BD]).astype(np.float64),
        )
        model = self.model
        packed_BD = tokens_BD * (2 * model.num_heads + 2 * model.num_kv_heads) + length_BD * (width_BD + heads_BD)
        copies_BK = grouping.by_group(np.maximum, 2 * self._unit_bytes * packed_BD * self._memory_s_per_byte_D)
        moved_BK = both[: len(tokens_BD)] + both[len(tokens_BD) :] + copies_BK
        return np.where(grouping.sizes > 1, moved_BK + 2 * exchange_latency_s(grouping), 0.0)

    def _ring(self, shape: _Shape, each: _Pass) -> tuple[Floats, RingCoefficients]:
        """Non-attention time of every group, ``[B, K]``, and one pass around the ring."""
        grouping, backward = shape.grouping, each.name == "backward"
        non_attention_BK = grouping.by_group(np.maximum, self._non_attention_s(shape.tokens_BD, each))
        slope_BD, fixed_BD, contiguous_causal = self._attention_s(shape, each)
        whole, num_groups = self.workload.seq_len, grouping.num_groups
        slope_BK = grouping.by_group(np.maximum, slope_BD)
        total_BK = grouping.by_group(np.maximum, slope_BD * whole + fixed_BD * num_groups)
        gradient_bytes = 2 * self.workload.micro_batch * self.model.head_dim * GRADIENT_ELEMENT_BYTES
        latency_BK, transfer_BK, shared_BK = shape.latency_BK, shape.transfer_BK, shape.shared_BK
        if backward:  # a transfer into p comes over the link from p to p + 1
            following = np.arange(1, num_groups + 1) % num_groups
            latency_BK, transfer_BK, shared_BK = (part[:, following] for part in (latency_BK, transfer_BK, shared_BK))
        return non_attention_BK, RingCoefficients(
            start_s=non_attention_BK + shape.exchange_BK,
            length=shape.length_BK,
            slope_s=slope_BK,
            fixed_s=(total_BK - slope_BK * whole) / num_groups,
            latency_s=latency_BK,
            kv_s=transfer_BK * (2 * self._unit_bytes),
            gradient_s=transfer_BK * (gradient_bytes if backward else 0),
            shared_kv_s=shared_BK * (2 * self._unit_bytes),
            shared_gradient_s=shared_BK * (gradient_bytes if backward else 0),
            backward=backward,
            contiguous_causal=contiguous_causal,
        )

    def _non_attention_s(self, tokens_BD: Floats, each: _Pass) -> Floats:
        return np.asarray(tokens_BD * each.token_s + np.where(tokens_BD > 0, each.fixed_s, 0.0))

    def _attention_s(self, shape: _Shape, each: _Pass) -> tuple[Floats, Floats, bool]:
        """Compute of every rank per token of the block and per block, ``[B, D]``, and whether blocks differ in kind.

        With more than one group partial results are merged in fp32, and backward adds up partial dK and dV.
        """
        work, several = self.workload, shape.grouping.num_groups > 1
        contiguous_causal = work.causal and several and not shape.grouping.zigzag
        share = 0.5 if work.causal and not contiguous_causal else 1.0
        active_BD = shape.rows_BD > 0
        slope_BD = np.where(active_BD, share * each.attention_s * (shape.rows_BD + self._half_rows_D), 0.0)
        fixed_BD = slope_BD * self._half_kv_D + np.where(active_BD, self._attention_overhead_D, 0.0)
        # The local block's diagonal, once per pass and therefore spread over the blocks.
        fixed_BD = fixed_BD + shape.rows_BD * (each.attention_s * self._edge_keys_D / shape.grouping.num_groups)
        if several:
            merge_s_D = MERGE_BYTES * self.model.head_dim * self._memory_s_per_byte_D
            fixed_BD = fixed_BD + shape.rows_BD * merge_s_D
            if each.name == "backward":
                slope_BD = slope_BD + 2 * work.micro_batch * shape.kv_heads_BD * merge_s_D
        return slope_BD, fixed_BD, contiguous_causal

    # --- outside the blocks -------------------------------------------------------------------------

    def outside_blocks_s(self, tokens_D: Floats) -> dict[str, float]:
        """Loss per micro-batch, ZeRO's traffic and the optimizer's step per iteration.

        Below stage 3 DeepSpeed reduces gradients by an all-reduce, twice a reduce-scatter, unless
        ``use_multi_rank_bucket_allreduce`` is off: in stage 2 for every micro-batch, else once. Stages 1 and 2 gather
        the new parameters. Adam reads and writes master weight and two moments in fp32, reads the gradient and writes
        the parameter. Around it DeepSpeed copies all gradients into its buckets, and out of these in stage 0, and all
        gathered parameters back into the model in stages 1 and 2.
        """
        work, model = self.workload, self.model
        loss_D = tokens_D * self.loss_s_per_token_D + self._logits_s_per_token_D * self._half_tokens_D
        loss_s = float(loss_D[tokens_D > 0].max())
        stage, embedding, count = work.zero_stage, model.embedding_parameters, model.num_parameters
        zero_s, reductions = 0.0, work.micro_batches if stage >= 2 else 1
        if stage == 3:
            loss_s += 2 * self._collective(embedding * work.element_bytes)
            loss_s += self._collective(embedding * work.gradient_bytes)
        else:
            zero_s = reductions * 2 * self._collective(count * work.gradient_bytes)
            zero_s += self._collective(count * work.element_bytes) if stage else 0.0
        weights_D = np.ones(len(tokens_D)) if work.zero_weights is None else np.array(work.zero_weights)
        own_D = count * (weights_D / weights_D.sum() / work.data_parallel if stage else np.ones(len(tokens_D)))
        step_bytes_D = own_D * (2 * work.optimizer_bytes + work.gradient_bytes + work.element_bytes)
        copied_back = {0: work.gradient_bytes, 3: 0}.get(stage, work.element_bytes)
        step_bytes_D = step_bytes_D + count * 2 * (reductions * work.gradient_bytes + copied_back)
        return {
            "loss_s": loss_s,
            "zero_s": zero_s,
            "optimizer_s": float((step_bytes_D * self._memory_s_per_byte_D).max()),
        }

    def memory_parts(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> dict[str, Floats]:
        """See `ds_hetero.cost.memory.memory_parts`."""
        return memory_parts(self.model, self.workload, grouping, tokens_D, heads_D)

    # --- explanations -------------------------------------------------------------------------------

    def busy_s(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> Floats:
        """Compute of every rank in one block, ``[D]``."""
        shape = self._shape(grouping, tokens_D[None], heads_D[None])
        busy_D = np.zeros(len(tokens_D))
        for repeats, each in zip(self._repeats, self._passes, strict=True):
            slope_BD, fixed_BD, contiguous_causal = self._attention_s(shape, each)
            seen_K, blocks_K = np.full((2, grouping.num_groups), [[self.workload.seq_len], [grouping.num_groups]])
            if contiguous_causal:  # earlier groups, and half of the own one
                seen_K = np.cumsum(shape.length_BK[0]) - shape.length_BK[0] / 2
                blocks_K = np.arange(grouping.num_groups) + 0.5
            attention_D = slope_BD[0] * seen_K[grouping.group_of] + fixed_BD[0] * blocks_K[grouping.group_of]
            busy_D += repeats * (self._non_attention_s(tokens_D, each) + attention_D)
        return busy_D

    def bottleneck(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> Bottleneck:
        """The largest part of the block, and the rank or the link that sets it."""
        terms = self.terms(grouping, tokens_D, heads_D)
        term = max(Terms.__slots__, key=lambda name: float(getattr(terms, name)))
        shape = self._shape(grouping, tokens_D[None], heads_D[None])
        each = self._passes[1]
        ring = self._ring(shape, each)[1]
        if term == "non_attention_s":
            rank = int(self._non_attention_s(tokens_D, each).argmax())
            return Bottleneck.of_rank(self.cluster, term, "compute", rank)
        if term == "all_to_all_s":
            group = int(shape.exchange_BK[0].argmax())
            ranks = grouping.order[grouping.offsets[group] : grouping.offsets[group + 1]]
            rank = int(ranks[(tokens_D[ranks] * (1 + heads_D[ranks])).argmax()])
            return Bottleneck.of_link(self.cluster, term, rank, self._slowest_peer(rank, ranks))
        finish = [float(ring_finish_s(self._ring(shape, one)[1])[0]) for one in self._passes]
        if terms.block_s > 1.02 * sum(repeats * one for repeats, one in zip(self._repeats, finish, strict=True)):
            return Bottleneck.of_rank(self.cluster, term, "ZeRO traffic", 0)
        alone_K = (ring.start_s + ring.slope_s * self.workload.seq_len + ring.fixed_s * grouping.num_groups)[0]
        if ring.contiguous_causal or finish[1] > 1.02 * alone_K.max():
            return self._slowest_transfer(shape, term)
        slope_BD, fixed_BD, _ = self._attention_s(shape, each)
        members_D = grouping.group_of == int(alone_K.argmax())
        busy_D = np.where(members_D, slope_BD[0] * self.workload.seq_len + fixed_BD[0] * grouping.num_groups, -1.0)
        return Bottleneck.of_rank(self.cluster, term, "compute", int(busy_D.argmax()))

    def _slowest_peer(self, rank: int, ranks: Ints) -> int:
        others = ranks[ranks != rank]
        node = self.cluster.node_of_rank
        return int(others[self.cluster.node_all_to_all_s_per_byte[node[rank], node[others]].argmax()])

    def _slowest_transfer(self, shape: _Shape, term: str) -> Bottleneck:
        position = int((shape.latency_BK + shape.transfer_BK * shape.length_BK.max())[0].argmax())
        edges = ring_edges(shape.grouping, shape.heads_BD, self.model.queries_per_kv_head)
        first = int(edges.starts[position])
        last = int(np.append(edges.starts, len(edges.heads))[position + 1])
        node = self.cluster.node_of_rank
        cost_E = edges.heads * self.cluster.node_p2p_s_per_byte[node[edges.sender], node[edges.receiver]]
        edge = first + int(cost_E[first:last].argmax())
        return Bottleneck.of_link(self.cluster, term, int(edges.sender[edge]), int(edges.receiver[edge]))

    def timeline(self, schedule: Schedule) -> tuple[Span, ...]:
        """Bars of one block: forward, the forward again where it is checkpointed, backward."""
        grouping, tokens_D, heads_D = self.arrays(schedule)
        shape = self._shape(grouping, tokens_D[None], heads_D[None])
        phases = ["forward", "recompute"] if self._repeats[0] == 2 else ["forward"]
        spans: list[Span] = []
        begin_s = 0.0
        for phase in (*phases, "backward"):
            each = self._passes[phase == "backward"]
            spans += self._pass_spans(shape, each, phase, begin_s)
            begin_s += float(ring_finish_s(self._ring(shape, each)[1])[0])
        return tuple(spans)

    def _pass_spans(self, shape: _Shape, each: _Pass, phase: str, begin_s: float) -> list[Span]:
        grouping, spans = shape.grouping, []
        non_attention_BK, ring = self._ring(shape, each)
        slope_BD, fixed_BD, contiguous_causal = self._attention_s(shape, each)
        starts, received = (part[:, 0] + begin_s for part in ring_schedule(ring))
        work_D = self._non_attention_s(shape.tokens_BD, each)[0]
        num_groups, backward = grouping.num_groups, each.name == "backward"
        for rank, group in enumerate(grouping.group_of.tolist()):
            work_s = begin_s + float(work_D[rank])
            spans.append(Span.of(rank, "compute", "non_attention", begin_s, work_s, phase=phase))
            if grouping.sizes[group] > 1:
                ready_s = begin_s + float(non_attention_BK[0, group])
                spans.append(Span.of(rank, "network", "all_to_all", ready_s, float(starts[0, group]), phase=phase))
            for step in range(num_groups):
                source = (group + 1 + step if backward else group - step) % num_groups
                share = 1.0 if not contiguous_causal or source < group else 0.5 * (source == group)
                step_s = share * float(slope_BD[0, rank] * shape.length_BK[0, source] + fixed_BD[0, rank])
                now_s, arrived_s = float(starts[step, group]), float(received[step, group])
                if step_s:
                    spans.append(Span.of(rank, "compute", "attention", now_s, now_s + step_s, step, phase))
                if arrived_s > now_s and shape.heads_BD[0, rank]:
                    spans.append(Span.of(rank, "network", "ring", now_s, arrived_s, step, phase))
        return spans


def _balanced_s(tokens_s_D: Floats, attention_s_D: Floats) -> float:
    """Least time to do two jobs together, each divisible at will over ranks that are busy all the time.

    The linear program  min T,  sum x = sum y = 1,  x_d tokens_s_d + y_d attention_s_d <= T  has the dual
    max (1 + r) / sum_d max(1 / tokens_s_d, r / attention_s_d), which peaks where r is the ratio of some rank's two
    times. With equal ratios this is total work over the sum of speeds.
    """
    kinds, counts = np.unique(np.stack([tokens_s_D, attention_s_D], axis=1), axis=0, return_counts=True)
    tokens_s, attention_s = kinds.T
    ratio = attention_s / tokens_s
    need = np.maximum(1 / tokens_s[None], ratio[:, None] / attention_s[None]) @ counts
    return float(((1 + ratio) / need).max())
