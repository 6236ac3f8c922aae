"""Times of the two passes of one block, forward and backward, computed from every rank's tokens and heads.

A pass consists of non-attention work, the all-to-alls of every group, and one trip of KV around the ring, which
`ring_finish_s` ends with the slowest group.

Dimension key: P passes (forward, backward), B assignments, D ranks, K groups in ring order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.arrays import Floats, Ints
from ds_hetero.cost.terms import flops
from ds_hetero.cost.terms.exchange import exchange_s
from ds_hetero.cost.terms.grouping import Grouping
from ds_hetero.cost.terms.head_cuts import kv_heads_of_ranks
from ds_hetero.cost.terms.host import checkpoint_copy_s_D, launch_time_factor
from ds_hetero.cost.terms.layer_memory import MLP_TILE_TOKENS
from ds_hetero.cost.terms.rates import AchievedRates
from ds_hetero.cost.terms.ring import RingCoefficients
from ds_hetero.cost.terms.ring_transfers import ring_transfers_s
from ds_hetero.cost.terms.trained import restored_bytes
from ds_hetero.cost.workload import Workload
from ds_hetero.models.shapes import ModelSpec

PLACEHOLDER_TOKENS = 1  # tokens that a rank with an empty shard computes, so that it joins all collectives
WIDE = 4  # bytes of fp32
# Bytes moved to merge one element of a partial result: read it and the running sum, write back, in fp32 with a cast.
MERGE_BYTES = 16


class Pass(NamedTuple):
    """Coefficients of the time of one block's forward or backward, linear in tokens and rows; arrays are ``[D]``.

    A row is one token of one head of one sequence.
    """

    name: str  # ``"forward"`` or ``"backward"``
    repeats: int  # runs per block: 2 for a forward that the backward repeats as a whole, by checkpointing
    token_s: Floats  # seconds outside attention, per token
    fixed_s: Floats  # seconds outside attention that do not depend on tokens
    attention_s: Floats  # seconds of full attention per query row (token x head x sequence) and key
    host_s: Floats  # time of the host to launch the pass, which takes at least that long

    def after(self, recomputed: Pass) -> Pass:
        """Return this backward with the part of the forward before it that is computed again: all but attention."""
        return self._replace(
            token_s=recomputed.token_s + self.token_s,
            fixed_s=recomputed.fixed_s + self.fixed_s,
            host_s=recomputed.host_s + self.host_s,
        )


class Work(NamedTuple):
    """Tokens and heads of every rank under each assignment, and the rows and KV heads that follow from them."""

    grouping: Grouping
    tokens_BD: Floats  # tokens of every rank
    heads_BD: Ints  # query heads of every rank
    kv_heads_BD: Ints  # KV heads that these query heads need
    length_BK: Floats  # tokens of every group
    rows_BD: Floats  # query rows of a rank: tokens of its group x its heads x sequences

    def take(self, rows: Ints) -> Work:
        """Return the work of some assignments.

        Args:
            rows: indices of the assignments.
        """
        return Work._make([self.grouping, *(array.take(rows, axis=0) for array in self[1:])])


class AssignedWork(NamedTuple):
    """Assignments with the times of their all-to-alls and ring transfers, ``[B, K]`` each."""

    work: Work
    exchange_BK: Floats  # seconds of both all-to-alls of one pass
    latency_BK: Floats  # seconds of start-up of a ring transfer into a group
    transfer_BK: Floats  # seconds of this transfer per token and byte of a KV head
    shared_BK: Floats  # least seconds of it per byte of a KV head, at a NIC or switch that other transfers use


class Compute(NamedTuple):
    """Compute time of every group's slowest rank, forward and backward."""

    non_attention_PBK: Floats  # seconds outside attention
    length_BK: Floats  # tokens of every group
    slope_PBK: Floats  # seconds of attention per token of a KV block
    fixed_PBK: Floats  # seconds of attention per KV block
    contiguous_causal: bool  # whether a group computes only a part of some blocks, as its causal mask allows

    def take(self, rows: Ints) -> Compute:
        """Return the compute times of some assignments.

        Args:
            rows: indices of the assignments.
        """
        return Compute._make(field if isinstance(field, bool) else field.take(rows, axis=-2) for field in self)

    def least_s(self, exchange_BK: Floats | float) -> Floats:
        """Return lower bounds of both passes, in which the ring's transfers are free, ``[P, B]``.

        Args:
            exchange_BK: seconds of both all-to-alls of a pass.
        """
        ready_PBK = self.non_attention_PBK + exchange_BK
        if not self.contiguous_causal:
            ready_PBK += self.slope_PBK * np.add.reduce(self.length_BK, axis=1, keepdims=True)
            ready_PBK += self.fixed_PBK * self.length_BK.shape[1]
        return np.asarray(np.maximum.reduce(ready_PBK, axis=2))


class _PassCounts(NamedTuple):
    """Work of one pass: numbers of runs, matmuls and FLOPs."""

    name: str  # ``"forward"`` or ``"backward"``
    repeats: int  # runs per block
    matmuls: float  # matmuls for each weight
    backward: int  # 1 backward, 0 forward
    attention_flops: int  # FLOPs of attention per query token, key token, head and element of a head
    recomputed_flops: float  # FLOPs that the backward computes again, beyond the repeats of the forward


def _pass_counts(model: ModelSpec, workload: Workload) -> tuple[_PassCounts, _PassCounts]:
    """Count the work of the forward and of the backward.

    A backward runs two matmuls for every weight, and one for a frozen weight. It recomputes a tiled MLP, unless
    checkpointing repeats the forward anyway. Recomputation stops at the last tensor that the backward needs. In torch's
    linear layer this is its input, which is saved before the matmul, so the last matmul of the MLP is not repeated.
    DeepSpeed's linear layer under ZeRO-3 saves its input after the matmul, and adapters come after the matmul; in both
    cases it is repeated.
    """
    recomputed = flops.mlp_flops(model) if workload.tiled_mlp and not workload.activation_checkpointing else 0.0
    is_torch_linear = workload.zero_stage < 3 and not workload.adapter_rank
    if (workload.tiled_mlp or workload.activation_checkpointing) and is_torch_linear:
        recomputed -= flops.down_projection_flops(model)
    forward = _PassCounts(
        name="forward",
        repeats=2 if workload.activation_checkpointing and not workload.keeps_attention else 1,
        matmuls=1,
        backward=0,
        attention_flops=flops.ATTENTION_FORWARD_FLOPS,
        recomputed_flops=0.0,
    )
    backward = _PassCounts(
        name="backward",
        repeats=1,
        matmuls=flops.MATMUL_BACKWARD - (1 if workload.adapter_rank else 0),
        backward=1,
        attention_flops=flops.ATTENTION_BACKWARD_FLOPS,
        recomputed_flops=recomputed,
    )
    return forward, backward


class BlockPasses:
    """Times of both passes of an attention layer, for one cluster, model and workload.

    Args:
        cluster: cluster of the ranks. With tensor parallelism it has one rank, which stands for all ranks that share a
            layer.
        cut: number of ranks that share every layer by tensor parallelism. Their matmuls are narrower; each rank
            computes norms and residuals of the full width.
    """

    def __init__(self, cluster: Cluster, model: ModelSpec, workload: Workload, cut: int = 1) -> None:
        self.cluster, self.model, self.workload, self._cut = cluster, model, workload, cut
        self.rates = rates = AchievedRates.of(cluster, causal=workload.causal, head_dim=model.head_dim)
        self._unit_bytes = workload.micro_batch * model.head_dim * workload.element_bytes  # per token and head
        forward, backward = map(self._pass, _pass_counts(model, workload))
        self.passes = forward, backward.after(forward) if workload.keeps_attention else backward
        self._token_s_P1D = np.array([block_pass.token_s for block_pass in self.passes])[:, None]
        self._fixed_s_P1D = np.array([block_pass.fixed_s for block_pass in self.passes])[:, None]
        self._attention_s_P1D = np.array([block_pass.attention_s for block_pass in self.passes])[:, None]
        frozen = workload.adapter_rank > 0 and not workload.trains_embedding
        logits_s_D = flops.logit_flops(model, tiled=workload.has_loss_tiles, frozen=frozen) * rates.s_per_flop
        self.loss_s_per_token_D = workload.micro_batch * (
            logits_s_D + flops.logit_elements(model) * WIDE * rates.memory_s_per_byte
        )
        self.loss_fixed_s_D = logits_s_D * rates.half_tokens
        if workload.has_loss_tiles and workload.tile_tokens:
            self.loss_s_per_token_D = self.loss_s_per_token_D + self.loss_fixed_s_D / workload.tile_tokens
        self._has_message_overhead = bool(cluster.message_overhead_s.any())

    def _pass(self, counts: _PassCounts) -> Pass:
        """Compute the times of one pass from matmul FLOPs, bytes of memory-bound kernels and launches.

        Gated models count as transformers runs them, one kernel per operation, unless Liger or torch.compile fuses
        these, or a profile has measured the kernels of a layer together.
        """
        rates, model, work, cut = self.rates, self.model, self.workload, self._cut
        backward, recomputed = counts.backward, counts.recomputed_flops
        is_eager = model.gated_mlp and not (work.fused_kernels or work.compiled)
        rank = work.adapter_rank
        matmul_s = flops.matmul_flops(model) * counts.matmuls * rates.s_per_flop
        further_s = (flops.adapter_flops(model, rank) * (1 + backward) + recomputed) * rates.s_per_flop
        elements = flops.adapter_elements(model, rank) / cut + flops.recomputed_elements(model, work) * backward / cut
        if work.tiled_mlp:
            # Matmuls of a tile have few tokens, so they are slower; gradients of weights are added tile by tile.
            tile_tokens = work.tile_tokens or MLP_TILE_TOKENS
            tiled_flops = flops.mlp_flops(model) * counts.matmuls + max(recomputed, 0)
            further_s = further_s + tiled_flops * rates.s_per_flop * rates.half_tokens / tile_tokens
            if backward and not rank:
                elements = elements + 3 * model.active_mlp_parameters / tile_tokens / cut
        copied_s = 0.0 if backward else checkpoint_copy_s_D(self.cluster.devices, model, work)
        elementwise_s = flops.elementwise_elements(model, cut) * (1 + backward) * rates.memory_s_per_byte
        if is_eager:
            eager_s = flops.eager_elements(model, backward=bool(backward), cut=cut) * rates.copy_s_per_byte
            elementwise_s = np.where(rates.is_profiled, elementwise_s, eager_s)
        memory_s = elements * rates.copy_s_per_byte + elementwise_s
        token_s = (matmul_s + further_s) / cut + work.element_bytes * memory_s
        visible_share = flops.visible_share(model, work.seq_len)
        dequantize_s = restored_bytes(model, work) / cut * rates.memory_s_per_byte
        return Pass(
            name=counts.name,
            repeats=counts.repeats,
            token_s=work.micro_batch * token_s + copied_s,
            fixed_s=matmul_s * rates.half_tokens + (1 + backward) * rates.kernel_overhead_s + dequantize_s,
            attention_s=visible_share
            * counts.attention_flops
            * model.head_dim
            / rates.attention_flops_per_s[counts.name],
            host_s=(1 + backward) * launch_time_factor(work) * rates.layer_host_s,
        )

    def alone_s(self) -> Floats:
        """Return the time of both passes on a rank with all tokens and 1 / ``cut`` of the heads, ``[P]``.

        Such a rank has no all-to-alls.
        """
        non_attention_P = self.non_attention_s(np.array([[float(self.workload.seq_len)]]))[:, 0, 0]
        host_s_P = [float(block_pass.host_s[0]) for block_pass in self.passes]
        return np.asarray(np.maximum(non_attention_P + self.attention_alone_s(), host_s_P))

    def attention_alone_s(self) -> Floats:
        """Return attention's part of `alone_s`, ``[P]``."""
        all_tokens = np.array([[float(self.workload.seq_len)]])
        work = self.work(Grouping(self.cluster, [range(1)]), all_tokens, np.array([[self.model.num_heads]]))
        slope_P11, fixed_P11, _ = self.attention_s(work)
        return np.asarray((slope_P11 * all_tokens + fixed_P11)[:, 0, 0])

    def work(self, grouping: Grouping, tokens_BD: Floats, heads_BD: Ints) -> Work:
        """Count the KV heads and query rows of every rank, and the tokens of every group, under each assignment."""
        length_BK = grouping.by_group(np.add, tokens_BD)
        return Work(
            grouping=grouping,
            tokens_BD=tokens_BD,
            heads_BD=heads_BD,
            kv_heads_BD=kv_heads_of_ranks(grouping, heads_BD, self.model.queries_per_kv_head),
            length_BK=length_BK,
            rows_BD=self.workload.micro_batch / self._cut * length_BK[:, grouping.group_of] * heads_BD,
        )

    def assigned(self, grouping: Grouping, tokens_BD: Floats, heads_BD: Ints) -> AssignedWork:
        """Compute the times of the all-to-alls and ring transfers of assignments."""
        work = self.work(grouping, tokens_BD, heads_BD)
        return self.with_transfers(work, self.exchange_s(work))

    def with_transfers(self, work: Work, exchange_BK: Floats) -> AssignedWork:
        """Add the times of ring transfers to those of all-to-alls, which `exchange_s` has computed."""
        per_kv_head = self.model.queries_per_kv_head
        transfers = ring_transfers_s(work.grouping, work.heads_BD, work.length_BK, per_kv_head)
        return AssignedWork(work, exchange_BK, *transfers)

    def compute(self, work: Work) -> Compute:
        """Return the compute time of the groups in both passes, see `Compute`."""
        grouping, seq_len = work.grouping, self.workload.seq_len
        slope_PBD, fixed_PBD, contiguous_causal = self.attention_s(work)
        slope_PBK = grouping.by_group(np.maximum, slope_PBD)
        # The rank with the largest slope need not be the slowest one. The fixed time is chosen so that a group takes
        # the time of its slowest rank for all blocks together.
        total_PBK = grouping.by_group(np.maximum, slope_PBD * seq_len + fixed_PBD * grouping.num_groups)
        return Compute(
            non_attention_PBK=grouping.by_group(np.maximum, self.non_attention_s(work.tokens_BD)),
            length_BK=work.length_BK,
            slope_PBK=slope_PBK,
            fixed_PBK=(total_PBK - slope_PBK * seq_len) / grouping.num_groups,
            contiguous_causal=contiguous_causal,
        )

    def rings(self, assigned: AssignedWork, compute: Compute | None = None) -> list[RingCoefficients]:
        """Return the terms of the ring's time as functions of the tokens of a KV block: forward, then backward.

        Args:
            compute: compute times of the assignments; None to compute them here.
        """
        compute = compute or self.compute(assigned.work)
        return [self._ring(assigned, compute, backward=backward) for backward in (False, True)]

    def _ring(self, assigned: AssignedWork, compute: Compute, *, backward: bool) -> RingCoefficients:
        """Return the terms of the ring's time in one pass, as functions of the tokens of a KV block."""
        pass_index, num_groups = int(backward), compute.length_BK.shape[1]
        gradient_bytes = 2 * self.workload.micro_batch * self.model.head_dim * self.workload.ring_gradient_bytes
        latency_BK, transfer_BK, shared_BK = assigned.latency_BK, assigned.transfer_BK, assigned.shared_BK
        if backward:
            # The ring turns the other way: group p receives from group p + 1, over the link by which p + 1 receives
            # from p in the forward.
            next_K = np.arange(1, num_groups + 1) % num_groups
            latency_BK, transfer_BK, shared_BK = latency_BK[:, next_K], transfer_BK[:, next_K], shared_BK[:, next_K]
        return RingCoefficients(
            start_s=compute.non_attention_PBK[pass_index] + assigned.exchange_BK,
            length=compute.length_BK,
            slope_s=compute.slope_PBK[pass_index],
            fixed_s=compute.fixed_PBK[pass_index],
            latency_s=latency_BK,
            kv_s=transfer_BK * (2 * self._unit_bytes),
            gradient_s=transfer_BK * (gradient_bytes if backward else 0),
            shared_kv_s=shared_BK * (2 * self._unit_bytes),
            shared_gradient_s=shared_BK * (gradient_bytes if backward else 0),
            backward=backward,
            contiguous_causal=compute.contiguous_causal,
        )

    def non_attention_s(self, tokens_BD: Floats) -> Floats:
        """Return the time of every rank outside attention, ``[P, B, D]``.

        An empty shard takes the time of `PLACEHOLDER_TOKENS` tokens.
        """
        return np.asarray(np.maximum(tokens_BD, PLACEHOLDER_TOKENS) * self._token_s_P1D + self._fixed_s_P1D)

    def attention_s(self, work: Work) -> tuple[Floats, Floats, bool]:
        """Compute attention's time on every rank, linear in the tokens of a KV block.

        With several groups, partial results are merged in fp32, and the backward adds up partial dK and dV. The host's
        time for the K - 1 transfers of the ring is spread over the K blocks.

        Returns:
            Seconds per token of a block, ``[P, B, D]``; seconds per block, ``[P, B, D]``; whether the groups are
            contiguous under a causal mask, so that a group computes all, half or nothing of a block.
        """
        causal, num_groups, attention_s_P1D = self.workload.causal, work.grouping.num_groups, self._attention_s_P1D
        contiguous_causal = causal and num_groups > 1 and not work.grouping.zigzag
        share = 0.5 if causal and not contiguous_causal else 1.0
        active_BD = work.rows_BD > 0
        slope_PBD = share * attention_s_P1D * (work.rows_BD + self.rates.half_rows)
        slope_PBD *= active_BD
        fixed_PBD = slope_PBD * self.rates.half_kv
        fixed_PBD += active_BD * self.rates.attention_overhead_s
        # The local block's diagonal, once per pass and therefore spread over the blocks.
        fixed_PBD += work.rows_BD * (attention_s_P1D * self.rates.edge_keys / num_groups)
        if num_groups > 1:
            merge_s_D = MERGE_BYTES * self.model.head_dim * self.rates.memory_s_per_byte
            fixed_PBD += work.rows_BD * merge_s_D
            if self._has_message_overhead:
                fixed_PBD += active_BD * (self.cluster.message_overhead_s * ((num_groups - 1) / num_groups))
            slope_PBD[1] += work.kv_heads_BD * (2 * self.workload.micro_batch) * merge_s_D
        return slope_PBD, fixed_PBD, contiguous_causal

    def exchange_s(self, work: Work) -> Floats:
        """Return the time of both all-to-alls of one pass, ``[B, K]``: of q, k and v, and of the output.

        In the backward the gradients travel instead, and take as long.

        Packing and unpacking read and write all sent and received bytes once more. Each all-to-all also takes the
        host's time, whatever the bytes. Groups of one rank exchange nothing.
        """
        grouping, tokens_BD, heads_BD, kv_heads_BD = work.grouping, work.tokens_BD, work.heads_BD, work.kv_heads_BD
        if grouping.num_groups == len(grouping.order):
            return np.zeros((len(tokens_BD), grouping.num_groups))
        qkv_heads_BD = heads_BD + 2 * kv_heads_BD
        # Both all-to-alls as rows of one call: the first B rows are q, k and v, the others the output.
        transfer_s = exchange_s(
            grouping,
            np.concatenate([tokens_BD, tokens_BD]),
            self._unit_bytes * np.concatenate([qkv_heads_BD, heads_BD]).astype(np.float64),
        )
        model, length_BD = self.model, work.length_BK[:, grouping.group_of]
        packed_BD = tokens_BD * (2 * model.num_heads + 2 * model.num_kv_heads) + length_BD * (qkv_heads_BD + heads_BD)
        copy_s_BK = grouping.by_group(np.maximum, 2 * self._unit_bytes * packed_BD * self.rates.memory_s_per_byte)
        exchange_s_BK = transfer_s[: len(tokens_BD)] + transfer_s[len(tokens_BD) :] + copy_s_BK
        return np.where(grouping.sizes > 1, exchange_s_BK + 2 * grouping.exchange_latency_s, 0.0)
