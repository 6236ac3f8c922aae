"""The default cost model: what the runtime does, at the rates that devices and links achieve.

It differs from HexiSeq's Eqs. 2-12 (`published`, arXiv:2605.07569) in this:

    ring         no barrier between steps; KV travels one block ahead, dK/dV in fp32 come back  (`ring`)
    links        bytes of a device add up at its ports, a node's at its NIC or switch           (`exchange_s`)
    passes       forward and backward apart; attention 4 + 10 FLOPs, matmuls 1 + 2              (`flops`)
    causality    half the work in a zigzag layout; contiguous groups compute what they can see
    model        KV heads, the true width of the MLP, vocabulary and loss, the optimizer's step
    devices      achieved shares of the peaks, lower for few tokens, few heads and short keys   (`DeviceSpec`)
    ZeRO         stage 3's gathers and reductions beside the blocks, hidden as far as they fit; lower stages'
                 all-reduce after the backward and their gather after the step        (`RingCollective`)
    checkpoints  with activation checkpointing the backward begins with the layer's whole forward, its exchanges
                 included; attention's own recomputation is part of its 10 operations
    memory       per layer, by what is saved, phase by phase, with DeepSpeed's buffers          (`phases`)
    recurrence   linear-attention and SSM layers, beside those of attention                     (`recurrent`)

A block is the time between two layers in a steady run: non-attention work and both exchanges of a group come before
its ring, and the slowest group of the ring ends the block. Of a model with layers of attention and of recurrence it is
their mean, each kind weighted by how many there are.

Dimension key: B assignments, D ranks, K groups in ring order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.arrays import Floats, Ints
from ds_hetero.cost import explain
from ds_hetero.cost.model import Bottleneck, CostModel, Span, Terms
from ds_hetero.cost.passes import PLACEHOLDER_TOKENS, BlockPasses
from ds_hetero.cost.recurrent import RecurrentLayer
from ds_hetero.cost.terms.grouping import Grouping
from ds_hetero.cost.terms.host import host_bytes_per_s_D, offloaded_step_s_D
from ds_hetero.cost.terms.memory_parts import Phases
from ds_hetero.cost.terms.model_states import owned_share_D
from ds_hetero.cost.terms.phases import StandingMemory, memory_phases
from ds_hetero.cost.terms.ring import ring_finish_s
from ds_hetero.cost.terms.trained import layer_weight_bytes, trained_of_ends, trained_of_layer, trained_parameters
from ds_hetero.cost.terms.zero import UNEVEN_GATHER_SLOWDOWN, UNEVEN_REDUCE_SLOWDOWN, RingCollective
from ds_hetero.cost.workload import Workload
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.values.schedule import Schedule

ROUNDING = 1e-12  # relative; by which sums in another order may differ


class CalibratedCostModel(CostModel):
    """Times and memory of the runtime, for one cluster, model and workload.

    Attributes:
        attention_edge_s_D: seconds per query token and head that every sequence, or document, adds to
            ``least_attention_s_D``: for short keys and for the tiles on the diagonal.
    """

    name = "calibrated"

    def __init__(self, cluster: Cluster, model: ModelSpec, workload: Workload) -> None:
        super().__init__(cluster, model, workload)
        self.capacity_bytes_D = np.array([float(device.usable_bytes) for device in cluster.devices])
        self._block = BlockPasses(cluster, model, workload)
        self._recurrent: RecurrentLayer | None = None
        self._attention_share, self._recurrent_share = model.attention_layers / model.num_layers, 0.0
        if model.recurrent is not None:
            self._recurrent = RecurrentLayer(cluster, model, workload, self._block.rates)
            self._recurrent_share = model.recurrent.num_layers / model.num_layers
        owners = workload.zero_cluster or cluster
        self._collective = RingCollective.within(owners) if workload.zero_within else RingCollective.over(owners)
        is_uneven = workload.zero_weights is not None and len(set(workload.zero_weights)) > 1
        self._gather = self._collective.slowed(UNEVEN_GATHER_SLOWDOWN if is_uneven else 1.0)
        self._reduce = self._collective.slowed(UNEVEN_REDUCE_SLOWDOWN if is_uneven else 1.0)
        self._gather_s = self._reduce_s = 0.0
        if workload.zero_stage == 3:
            gathered = layer_weight_bytes(model, workload)
            self._gather_s = self._gather(gathered) + self._from_host_s(gathered)
            self._reduce_s = self._reduce(trained_of_layer(model, workload) * workload.gradient_bytes)
        self._host_s = [float(each.host_s.max()) for each in self._block.passes]
        self.floor_s = float(self._block_s(np.zeros((2, 1)))[0])
        self.loss_s_per_token_D = self._block.loss_s_per_token_D
        self._freeze_curves()

    def _from_host_s(self, num_bytes: float) -> float:
        """Copy of every rank's part of a layer from the host, of the slowest."""
        work = self.workload
        if not work.offload_parameters:
            return 0.0
        own = num_bytes / self.cluster.num_ranks / work.data_parallel
        return float((own / host_bytes_per_s_D(self.cluster.devices)).max())

    @property
    def least_block_s(self) -> float:
        """Perfect balance in each pass, beside ZeRO's traffic in the same pass; of both together for recurrences."""
        if self._recurrent is not None:
            return super().least_block_s
        work, heads = self.workload, self.model.num_heads
        pairs = work.micro_batch * (0.5 if work.causal else 1.0) * heads * work.seq_len**2
        least_s = [_balanced_s(each.token_s * work.seq_len, each.attention_s * pairs) for each in self._block.passes]
        return float(self._block_s([np.array([each_s]) for each_s in least_s])[0])

    def block_s_many(self, grouping: Grouping, tokens_BD: Floats, heads_BD: Ints) -> Floats:
        """Time of one block for many assignments of one grouping, ``[B]``."""
        assigned = self._block.assigned(grouping, tokens_BD, heads_BD)
        attention_B = [ring_finish_s(ring) for ring in self._block.rings(assigned)]
        return self._block_s(self._with_recurrence(attention_B, grouping, tokens_BD))

    def block_s_below(self, grouping: Grouping, tokens_BD: Floats, heads_BD: Ints, below_B: Floats) -> Floats:
        """`block_s_many` where some order of the groups can take less than ``below_B``, elsewhere infinity.

        What ranks compute rules most assignments out, and exchanges most of the rest: few go through the ring, which
        is the longest part of an evaluation.
        """
        if self._recurrent is not None:
            return super().block_s_below(grouping, tokens_BD, heads_BD, below_B)
        block, time_B = self._block, np.full(len(tokens_BD), np.inf)
        work = block.work(grouping, tokens_BD, heads_BD)
        compute = block.compute(work)
        rows, exchange_BK = np.arange(len(tokens_BD)), np.zeros((1, grouping.num_groups))
        for exchanges in (False, True):
            if exchanges:
                exchange_BK = block.exchange_s(work)
            least_B = self._block_s(compute.least_s(exchange_BK))
            kept = np.flatnonzero(least_B < below_B[rows] * (1 + ROUNDING))
            if not len(kept):
                return time_B
            rows, work, compute = rows[kept], work.take(kept), compute.take(kept)
        assigned = block.with_transfers(work, exchange_BK[kept])
        time_B[rows] = self._block_s([ring_finish_s(ring) for ring in block.rings(assigned, compute)])
        return time_B

    def free_ring_s(self, grouping: Grouping, tokens_BD: Floats, heads_BD: Ints) -> Floats:
        """Times of one block whose keys and values are always there; 0 for contiguous causal groups and recurrences."""
        work = self._block.work(grouping, tokens_BD, heads_BD)
        compute = self._block.compute(work)
        if compute.contiguous_causal or self._recurrent is not None:
            return super().free_ring_s(grouping, tokens_BD, heads_BD)
        return self._block_s(compute.least_s(self._block.exchange_s(work)))

    def terms(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> Terms:
        """The time of one block by part.

        Non-attention is the longest of any group; all-to-all is what the exchanges add to the longest of both; ring
        steps are the rest, up to the end of the slowest group. A scan counts as non-attention.
        """
        assigned = self._block.assigned(grouping, tokens_D[None], heads_D[None])
        non_attention_s = exchanged_s = 0.0
        compute = self._block.compute(assigned.work)
        rings = self._block.rings(assigned, compute)
        for block_pass, of_groups_BK, ring in zip(self._block.passes, compute.non_attention_PBK, rings, strict=True):
            share = block_pass.repeats * self._attention_share
            non_attention_s += share * float(of_groups_BK.max())
            exchanged_s += share * float(ring.start_s.max())
        finish = [ring_finish_s(ring) for ring in rings]
        if self._recurrent is not None:
            for block_pass, times in zip(
                self._block.passes, self._recurrent.passes(grouping, tokens_D[None]), strict=True
            ):
                share = block_pass.repeats * self._recurrent_share
                non_attention_s += share * float((times.total_B - times.exchange_B)[0])
                exchanged_s += share * float(times.total_B[0])
        block_s = float(self._block_s(self._with_recurrence(finish, grouping, tokens_D[None]))[0])
        return Terms(
            non_attention_s=non_attention_s,
            all_to_all_s=exchanged_s - non_attention_s,
            ring_steps_s=block_s - exchanged_s,
        )

    def outside_blocks_s(self, tokens_D: Floats) -> dict[str, float]:
        """Loss per micro-batch, ZeRO's traffic and the optimizer's step per iteration.

        Below stage 3 DeepSpeed reduces gradients by an all-reduce, twice a reduce-scatter, unless
        ``use_multi_rank_bucket_allreduce`` is off: in stage 2 for every micro-batch, else once. Stages 1 and 2 gather
        the new parameters. Adam reads and writes master weight and two moments in fp32, reads the gradient and writes
        the parameter. Around it DeepSpeed copies all gradients into its buckets, and out of these in stage 0, and all
        gathered parameters back into the model in stages 1 and 2.
        """
        work, model = self.workload, self.model
        computed_D = np.maximum(tokens_D, PLACEHOLDER_TOKENS)
        loss_D = computed_D * self._block.loss_s_per_token_D + self._block.loss_fixed_s_D
        loss_s = float(loss_D.max())
        stage, embedding, count = work.zero_stage, model.embedding_parameters, trained_parameters(model, work)
        zero_s, reductions = 0.0, work.micro_batches if stage >= 2 else 1
        if stage == 3:
            loss_s += 2 * self._gather(embedding * work.element_bytes)
            loss_s += self._reduce(trained_of_ends(model, work) * work.gradient_bytes)
            if work.zero_within:  # twice, to be added up and back; what the last backward hides is not taken off
                between_nodes = RingCollective.between(work.zero_cluster or self.cluster)
                zero_s = 2 * between_nodes(count * work.gradient_bytes)
        else:
            zero_s = reductions * 2 * self._collective(count * work.gradient_bytes)
            zero_s += self._collective(count * work.element_bytes) if stage else 0.0
        own_D = count * (owned_share_D(work, self.cluster) if stage else np.ones(len(tokens_D)))
        step_bytes_D = own_D * (2 * work.optimizer_bytes + work.gradient_bytes + work.element_bytes)
        copied_back = {0: work.gradient_bytes, 3: 0}.get(stage, work.element_bytes)
        step_bytes_D = step_bytes_D + count * 2 * (reductions * work.gradient_bytes + copied_back)
        step_s_D = step_bytes_D * self._block.rates.memory_s_per_byte
        if work.offload_optimizer:
            step_s_D = offloaded_step_s_D(self.cluster.devices, work, own_D)
        return {"loss_s": loss_s, "zero_s": zero_s, "optimizer_s": float(step_s_D.max())}

    def memory_phases(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> Phases:
        """See `ds_hetero.cost.terms.phases`."""
        return memory_phases(self._standing_memory, grouping, tokens_D, heads_D)

    @cached_property
    def _standing_memory(self) -> StandingMemory:
        return StandingMemory.of(self.model, self.workload, self.cluster)

    def exchange_s_K(self, schedule: Schedule) -> Floats:
        """Both all-to-alls of every group in one block, forward and backward, by ring position."""
        grouping, tokens_D, heads_D = self.arrays(schedule)
        exchange_BK = self._block.exchange_s(self._block.work(grouping, tokens_D[None], heads_D[None]))
        passes = sum(block_pass.repeats for block_pass in self._block.passes)
        return np.asarray(self._attention_share * passes * exchange_BK[0])

    def busy_s(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> Floats:
        """Time that every rank computes in one block, ``[D]``."""
        attention_D = explain.busy_s(self._block, self._block.work(grouping, tokens_D[None], heads_D[None]))
        if self._recurrent is None:
            return attention_D
        return self._attention_share * attention_D + self._recurrent_share * self._recurrent.busy_s(grouping, tokens_D)

    def bottleneck(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints, terms: Terms) -> Bottleneck:
        """The largest part of the block, and the rank or the link that sets it."""
        assigned = self._block.assigned(grouping, tokens_D[None], heads_D[None])
        finish = [ring_finish_s(ring) for ring in self._block.rings(assigned)]
        finish = self._with_recurrence(finish, grouping, tokens_D[None])
        if self._recurrent is not None and terms.all_to_all_s > max(terms.non_attention_s, terms.ring_steps_s):
            rank = int(tokens_D.argmax())
            peer = explain.slowest_peer(self.cluster, rank, np.arange(len(tokens_D)))
            return Bottleneck.of_link(self.cluster, "all_to_all_s", rank, peer)
        repeats = [block_pass.repeats for block_pass in self._block.passes]
        alone_s = sum(count * float(part[0]) for count, part in zip(repeats, finish, strict=True))
        return explain.bottleneck(
            self._block, assigned, terms, beside=self._slowest_beside() if terms.block_s > 1.02 * alone_s else None
        )

    def _slowest_beside(self) -> str:
        """Name of the longest term that runs beside the passes."""
        host_s = sum(count.repeats * each for count, each in zip(self._block.passes, self._host_s, strict=True))
        return "ZeRO traffic" if 2 * self._gather_s + self._reduce_s >= host_s else "the host's launches"

    def timeline(self, schedule: Schedule) -> tuple[Span, ...]:
        """Bars of one block: forward, the forward again where it is checkpointed, backward."""
        grouping, tokens_D, heads_D = self.arrays(schedule)
        assigned = self._block.assigned(grouping, tokens_D[None], heads_D[None])
        if self._recurrent is None:
            return explain.timeline(self._block, assigned)
        return explain.mixed_timeline(
            self._block, assigned, self._recurrent, (self._attention_share, self._recurrent_share)
        )

    def _with_recurrence(self, attention_B: list[Floats], grouping: Grouping, tokens_BD: Floats) -> list[Floats]:
        """Forward and backward of the mean layer, of those of an attention layer."""
        if self._recurrent is None:
            return attention_B
        recurrent = self._recurrent.passes(grouping, tokens_BD)
        return [
            self._attention_share * attention + self._recurrent_share * times.total_B
            for attention, times in zip(attention_B, recurrent, strict=True)
        ]

    def _block_s(self, pass_B: Sequence[Floats] | Floats) -> Floats:
        """Forward, then backward with what it repeats; ZeRO and the host run beside them, and may take longer."""
        again = self._block.passes[0].repeats - 1
        forward_host_s, backward_host_s = self._host_s
        backward_B = again * pass_B[0] + pass_B[1]
        least_s = max(self._gather_s, forward_host_s)
        least_back_s = max(self._gather_s + self._reduce_s, again * forward_host_s + backward_host_s)
        return np.asarray(np.maximum(pass_B[0], least_s) + np.maximum(backward_B, least_back_s))

    def _freeze_curves(self) -> None:
        """Linear coefficients at an even share, and the bound of perfect balance: see `CostModel`."""
        work, model = self.workload, self.model
        even = work.seq_len / self.cluster.num_ranks
        causal = work.micro_batch * (0.5 if work.causal else 1.0)
        passes, rates = self._block.passes, self._block.rates
        attention_D = causal * np.sum([block_pass.repeats * block_pass.attention_s for block_pass in passes], axis=0)
        token_D = np.sum([block_pass.repeats * block_pass.token_s for block_pass in passes], axis=0)
        fixed_D = np.sum([block_pass.repeats * block_pass.fixed_s for block_pass in passes], axis=0)
        if self._recurrent is not None:
            attention_D, share = self._attention_share * attention_D, self._recurrent_share
            token_D = self._attention_share * token_D + share * (self._recurrent.token_s_D + self._recurrent.scan_s_D)
            fixed_D = self._attention_share * fixed_D + share * self._recurrent.fixed_s_D
        rows = 1 + rates.half_rows / (work.micro_batch * model.num_heads * even)
        keys = 1 + rates.half_kv * len(self.cluster.nodes) / work.seq_len
        self.attention_s_D = attention_D * rows * keys
        self.non_attention_s_per_token_D = token_D + fixed_D / even
        self.least_attention_s_D, self.least_non_attention_s_per_token_D = attention_D, token_D
        self.attention_edge_s_D = attention_D * (rates.half_kv + (2 if work.causal else 1) * rates.edge_keys)
        self.bound_s = _balanced_s(token_D * work.seq_len, attention_D * model.num_heads * work.seq_len**2)


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
