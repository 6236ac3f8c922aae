"""The two passes of one block, forward and backward, as the runtime runs them: from tokens and heads to times.

A pass is non-attention work, the exchanges of every group, and one trip of KV around the ring. `ring_finish_s` says
when the slowest group is done.

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

PLACEHOLDER_TOKENS = 1  # of a rank without tokens, whose layers run as those of the others do
GRADIENT_ELEMENT_BYTES = 4  # partial dK and dV travel in fp32
WIDE = 4  # bytes of fp32
MERGE_BYTES = 16  # per element of a partial result: read it and the running one, write back, in fp32 with a cast


class Pass(NamedTuple):
    """Forward or backward of one block, linear in tokens and rows; arrays are ``[D]``."""

    name: str  # ``"forward"`` or ``"backward"``
    repeats: int  # runs by a block; 2 forward with checkpointing, whose backward begins with it
    token_s: Floats  # outside attention, per token
    fixed_s: Floats  # outside attention, whatever the tokens
    attention_s: Floats  # per query row (token x head x sequence) and key, full attention
    host_s: Floats  # least time of the pass, that of the host to launch it


class Work(NamedTuple):
    """Values of tokens and heads from which both passes compute the time of each rank."""

    grouping: Grouping  # the groups
    tokens_BD: Floats  # tokens of every rank
    heads_BD: Ints  # query heads of every rank
    kv_heads_BD: Ints  # KV heads that these need
    length_BK: Floats  # tokens of every group
    rows_BD: Floats  # query rows of a rank: tokens of its group x its heads x sequences

    def take(self, rows: Ints) -> Work:
        """The work of some assignments."""
        return Work._make([self.grouping, *(each.take(rows, axis=0) for each in self[1:])])


class AssignedWork(NamedTuple):
    """The work, and how long its bytes travel, ``[B, K]`` each."""

    work: Work
    exchange_BK: Floats  # both all-to-alls of one pass, in seconds
    latency_BK: Floats  # start-up of a ring transfer into a group
    transfer_BK: Floats  # its seconds per token and byte of a KV head
    shared_BK: Floats  # its least seconds per byte of a KV head, where others use the same NIC or switch


class Compute(NamedTuple):
    """Computing time of the groups, forward and backward (P)."""

    non_attention_PBK: Floats  # time outside attention of the slowest rank
    length_BK: Floats  # tokens of every group
    slope_PBK: Floats  # seconds of attention per token of a block
    fixed_PBK: Floats  # and per block
    contiguous_causal: bool  # whether a group computes less of some blocks than of others

    def take(self, rows: Ints) -> Compute:
        """The computation of some of the assignments."""
        return Compute._make(each if isinstance(each, bool) else each.take(rows, axis=-2) for each in self)

    def least_s(self, exchange_BK: Floats | float) -> Floats:
        """Times that the passes do not undercut whatever their rings' transfers take, ``[P, B]``."""
        ready_PBK = self.non_attention_PBK + exchange_BK
        if not self.contiguous_causal:
            ready_PBK += self.slope_PBK * np.add.reduce(self.length_BK, axis=1, keepdims=True)
            ready_PBK += self.fixed_PBK * self.length_BK.shape[1]
        return np.asarray(np.maximum.reduce(ready_PBK, axis=2))


def _passes(model: ModelSpec, workload: Workload) -> tuple[tuple[str, int, float, int, int, float], ...]:
    """Table of both passes: name, repeats, products, backward, attention's operations, operations computed again.

    A backward has two products for every weight, and one for a frozen one. What a checkpointed layer computes again
    ends with the last tensor that it keeps, before the last product of torch's own linear; DeepSpeed's of ZeRO-3 keeps
    its input behind the product, and adapters follow on it. Tiles of its MLP are computed again once, for both.
    """
    again = flops.mlp_flops(model) if workload.tiled_mlp and not workload.activation_checkpointing else 0.0
    is_torchs_own = workload.zero_stage < 3 and not workload.adapter_rank
    if (workload.tiled_mlp or workload.activation_checkpointing) and is_torchs_own:
        again -= flops.last_product_flops(model)
    products = flops.MATMUL_BACKWARD - (1 if workload.adapter_rank else 0)
    return (
        ("forward", 2 if workload.activation_checkpointing else 1, 1, 0, flops.ATTENTION_FORWARD_FLOPS, 0.0),
        ("backward", 1, products, 1, flops.ATTENTION_BACKWARD_FLOPS, again),
    )


class BlockPasses:
    """Times of both passes for one cluster, model and workload: the one formula of a layer.

    Args:
        cluster: ranks, or one that stands for those that cut a layer.
        cut: ranks that cut every layer by heads and columns, at the efficiency of narrower products; norms and
            residuals are computed by each of them.
    """

    def __init__(self, cluster: Cluster, model: ModelSpec, workload: Workload, cut: int = 1) -> None:
        self.cluster, self.model, self.workload, self._cut = cluster, model, workload, cut
        self.rates = rates = AchievedRates.of(cluster, causal=workload.causal, head_dim=model.head_dim)
        self._unit_bytes = workload.micro_batch * model.head_dim * workload.element_bytes  # per token and head
        self.passes = tuple(self._pass(*each) for each in _passes(model, workload))
        per_pass = zip(*((each.token_s, each.fixed_s, each.attention_s) for each in self.passes), strict=True)
        self._token_s_P1D, self._fixed_s_P1D, self._attention_s_P1D = (np.array(each)[:, None] for each in per_pass)
        frozen = workload.adapter_rank > 0 and not workload.trains_embedding
        logits_s_D = flops.logit_flops(model, tiled=workload.has_loss_tiles, frozen=frozen) * rates.s_per_flop
        self.loss_s_per_token_D = workload.micro_batch * (
            logits_s_D + flops.logit_elements(model) * WIDE * rates.memory_s_per_byte
        )
        self.loss_fixed_s_D = logits_s_D * rates.half_tokens
        if workload.has_loss_tiles and workload.tile_tokens:
            self.loss_s_per_token_D = self.loss_s_per_token_D + self.loss_fixed_s_D / workload.tile_tokens
        self._has_message_overhead = bool(cluster.message_overhead_s.any())

    def _pass(self, name: str, repeats: int, products: float, backward: int, operations: int, again: float) -> Pass:
        """One pass from its terms: a product's operations, elements of memory-bound kernels, the host's time.

        Gated models are counted as transformers runs them, kernel by kernel, unless Liger or a compiler joins these.
        """
        rates, model, work, cut = self.rates, self.model, self.workload, self._cut
        is_eager = model.gated_mlp and not (work.fused_kernels or work.compiled)
        rank = work.adapter_rank
        product_s = flops.matmul_flops(model) * products * rates.s_per_flop
        beside_s = (flops.adapter_flops(model, rank) * (1 + backward) + again) * rates.s_per_flop
        elements = flops.adapter_elements(model, rank) / cut + flops.recomputed_elements(model, work) * backward / cut
        if work.tiled_mlp:  # products are as slow as those of few tokens, gradients of weights add up tile by tile
            tile_tokens = work.tile_tokens or MLP_TILE_TOKENS
            of_tiles = flops.mlp_flops(model) * products + max(again, 0)
            beside_s = beside_s + of_tiles * rates.s_per_flop * rates.half_tokens / tile_tokens
            if backward and not rank:
                elements = elements + 3 * model.active_mlp_parameters / tile_tokens / cut
        copied_s = 0.0 if backward else checkpoint_copy_s_D(self.cluster.devices, model, work)
        joined_s = flops.elementwise_elements(model, cut) * (1 + backward) * rates.memory_s_per_byte
        if is_eager:
            apart_s = flops.eager_elements(model, backward=bool(backward), cut=cut) * rates.copy_s_per_byte
            joined_s = np.where(rates.is_profiled, joined_s, apart_s)
        memory_s = elements * rates.copy_s_per_byte + joined_s
        token_s = (product_s + beside_s) / cut + work.element_bytes * memory_s
        restored_s = restored_bytes(model, work) / cut * rates.memory_s_per_byte
        return Pass(
            name=name,
            repeats=repeats,
            token_s=work.micro_batch * token_s + copied_s,
            fixed_s=product_s * rates.half_tokens + (1 + backward) * rates.kernel_overhead_s + restored_s,
            attention_s=operations * model.head_dim / rates.attention_flops_per_s[name],
            host_s=(1 + backward) * launch_time_factor(work) * rates.layer_host_s,
        )

    def alone_s(self) -> Floats:
        """Time of both passes on a rank that has all tokens and its cut of the heads, without exchanges, ``[P]``."""
        outside_P = self.non_attention_s(np.array([[float(self.workload.seq_len)]]))[:, 0, 0]
        least_P = [float(each.host_s[0]) for each in self.passes]
        return np.asarray(np.maximum(outside_P + self.attention_alone_s(), least_P))

    def attention_alone_s(self) -> Floats:
        """The part of it that is attention's, ``[P]``."""
        whole = np.array([[float(self.workload.seq_len)]])
        work = self.work(Grouping(self.cluster, [range(1)]), whole, np.array([[self.model.num_heads]]))
        slope_P11, fixed_P11, _ = self.attention_s(work)
        return np.asarray((slope_P11 * whole + fixed_P11)[:, 0, 0])

    def work(self, grouping: Grouping, tokens_BD: Floats, heads_BD: Ints) -> Work:
        """The work that tokens and heads amount to."""
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
        """The work of assignments with its exchanges and its transfers."""
        work = self.work(grouping, tokens_BD, heads_BD)
        return self.with_transfers(work, self.exchange_s(work))

    def with_transfers(self, work: Work, exchange_BK: Floats) -> AssignedWork:
        """Add the ring's transfers to the exchanges of `exchange_s`."""
        per_kv_head = self.model.queries_per_kv_head
        transfers = ring_transfers_s(work.grouping, work.heads_BD, work.length_BK, per_kv_head)
        return AssignedWork(work, exchange_BK, *transfers)

    def compute(self, work: Work) -> Compute:
        """Computing time of the groups in both passes."""
        grouping, whole = work.grouping, self.workload.seq_len
        slope_PBD, fixed_PBD, contiguous_causal = self.attention_s(work)
        slope_PBK = grouping.by_group(np.maximum, slope_PBD)
        total_PBK = grouping.by_group(np.maximum, slope_PBD * whole + fixed_PBD * grouping.num_groups)
        return Compute(
            non_attention_PBK=grouping.by_group(np.maximum, self.non_attention_s(work.tokens_BD)),
            length_BK=work.length_BK,
            slope_PBK=slope_PBK,
            fixed_PBK=(total_PBK - slope_PBK * whole) / grouping.num_groups,
            contiguous_causal=contiguous_causal,
        )

    def rings(self, assigned: AssignedWork, compute: Compute | None = None) -> list[RingCoefficients]:
        """Both passes around the ring, of what the groups compute if that is known."""
        compute = compute or self.compute(assigned.work)
        return [self._ring(assigned, compute, backward=backward) for backward in (False, True)]

    def _ring(self, assigned: AssignedWork, compute: Compute, *, backward: bool) -> RingCoefficients:
        number, num_groups = int(backward), compute.length_BK.shape[1]
        gradient_bytes = 2 * self.workload.micro_batch * self.model.head_dim * GRADIENT_ELEMENT_BYTES
        latency_BK, transfer_BK, shared_BK = assigned.latency_BK, assigned.transfer_BK, assigned.shared_BK
        if backward:  # a transfer into p comes over the link from p to p + 1
            following = np.arange(1, num_groups + 1) % num_groups
            latency_BK, transfer_BK, shared_BK = (part[:, following] for part in (latency_BK, transfer_BK, shared_BK))
        return RingCoefficients(
            start_s=compute.non_attention_PBK[number] + assigned.exchange_BK,
            length=compute.length_BK,
            slope_s=compute.slope_PBK[number],
            fixed_s=compute.fixed_PBK[number],
            latency_s=latency_BK,
            kv_s=transfer_BK * (2 * self._unit_bytes),
            gradient_s=transfer_BK * (gradient_bytes if backward else 0),
            shared_kv_s=shared_BK * (2 * self._unit_bytes),
            shared_gradient_s=shared_BK * (gradient_bytes if backward else 0),
            backward=backward,
            contiguous_causal=compute.contiguous_causal,
        )

    def non_attention_s(self, tokens_BD: Floats) -> Floats:
        """Time of every rank outside attention, ``[P, B, D]``; one without tokens computes one that stands for none."""
        return np.asarray(np.maximum(tokens_BD, PLACEHOLDER_TOKENS) * self._token_s_P1D + self._fixed_s_P1D)

    def attention_s(self, work: Work) -> tuple[Floats, Floats, bool]:
        """Compute of every rank per token of the block and per block, ``[P, B, D]``, and whether blocks differ in kind.

        With more than one group partial results are merged in fp32, and backward adds up partial dK and dV; K - 1 hops
        of the ring take the host's time, spread over the K blocks.
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
        """Both all-to-alls of one pass, ``[B, K]``: q, k, v one way and the output the other (or their gradients).

        Packing and unpacking reads and writes what is sent and received once more, and takes the host of every rank
        some time whatever the bytes; single ranks exchange nothing.
        """
        grouping, tokens_BD, heads_BD, kv_heads_BD = work.grouping, work.tokens_BD, work.heads_BD, work.kv_heads_BD
        if grouping.num_groups == len(grouping.order):
            return np.zeros((len(tokens_BD), grouping.num_groups))
        width_BD = heads_BD + 2 * kv_heads_BD  # q, k and v
        both = exchange_s(
            grouping,
            np.concatenate([tokens_BD, tokens_BD]),
            self._unit_bytes * np.concatenate([width_BD, heads_BD]).astype(np.float64),
        )
        model, length_BD = self.model, work.length_BK[:, grouping.group_of]
        packed_BD = tokens_BD * (2 * model.num_heads + 2 * model.num_kv_heads) + length_BD * (width_BD + heads_BD)
        copies_BK = grouping.by_group(np.maximum, 2 * self._unit_bytes * packed_BD * self.rates.memory_s_per_byte)
        moved_BK = both[: len(tokens_BD)] + both[len(tokens_BD) :] + copies_BK
        return np.where(grouping.sizes > 1, moved_BK + 2 * grouping.exchange_latency_s, 0.0)
