"""Calibrated cost model, the default: time and memory of the runtime at the rates that devices and links achieve.

It differs from HexiSeq's Eqs. 2-12 (`published`, arXiv:2605.07569) in these points:

    ring         no barrier between steps; KV travels one block ahead, dK/dV come back, in fp32  (`ring`)
    links        the bytes of a device add up at its ports, a node's at its NIC or switch       (`exchange_s`)
    passes       forward and backward apart; attention 4 + 10 FLOPs, matmuls 1 + 2              (`flops`)
    causality    half the work in a zigzag layout; contiguous groups compute only what their causal mask lets them see
    model        KV heads, the true width of the MLP, vocabulary and loss, the optimizer's step
    devices      achieved shares of the peaks, lower for few tokens, few heads and short keys   (`DeviceSpec`)
    ZeRO         stage 3's gathers and reductions run beside the blocks; the part that no block hides counts; lower
                 stages all-reduce after the backward and gather after the step                 (`RingCollective`)
    checkpoints  with activation checkpointing the backward begins with the layer's whole forward, its all-to-alls
                 included; recomputation inside attention is part of its 10 FLOPs. If attention is kept, the backward
                 begins with the rest of that forward alone: no attention, no all-to-all, no ring
    memory       per layer, by the tensors that are saved, phase by phase, with DeepSpeed's buffers  (`phases`)
    recurrence   linear-attention and SSM layers, beside those of attention                     (`recurrent`)
    experts      that live on ranks in unequal numbers, and tokens that travel to them          (`divided_experts`)

The time of a block is the time between two layers in a steady run: every group does its non-attention work and both
all-to-alls before its ring, and the slowest group of the ring ends the block. If a model has attention layers and
recurrent ones, the block's time is the average over all layers.

Dimension key: B assignments, D ranks, K groups in ring order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.arrays import Floats, Ints
from ds_hetero.cost import explain
from ds_hetero.cost.divided_experts import DividedExpertTimes
from ds_hetero.cost.model import Bottleneck, CostModel, Span, Terms
from ds_hetero.cost.passes import PLACEHOLDER_TOKENS, AssignedWork, BlockPasses
from ds_hetero.cost.recurrent import RecurrentLayer
from ds_hetero.cost.terms.expert_shares import expect_experts, without_experts
from ds_hetero.cost.terms.grouping import Grouping
from ds_hetero.cost.terms.host import host_bytes_per_s_D, offloaded_step_s_D
from ds_hetero.cost.terms.memory_parts import Phases
from ds_hetero.cost.terms.model_states import DividedExperts, owned_share_D
from ds_hetero.cost.terms.phases import StandingMemory, memory_phases
from ds_hetero.cost.terms.ring import ring_finish_s
from ds_hetero.cost.terms.trained import layer_weight_bytes, trained_of_ends, trained_of_layer, trained_parameters
from ds_hetero.cost.terms.zero import UNEVEN_GATHER_SLOWDOWN, UNEVEN_REDUCE_SLOWDOWN, RingCollective
from ds_hetero.cost.workload import Workload
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.values.schedule import Schedule

ROUNDING = 1e-12  # relative difference that summing in another order may make


class CalibratedCostModel(CostModel):
    """Times and memory of the runtime, for one cluster, model and workload.

    Attributes:
        attention_edge_s_D: seconds of attention per query token and head that do not grow with the keys of its sequence
            (or document): the slow start on short keys, and tiles on the diagonal of the causal mask.
    """

    name = "calibrated"

    def __init__(self, cluster: Cluster, model: ModelSpec, workload: Workload) -> None:
        super().__init__(cluster, model, workload)
        self.capacity_bytes_D = np.array([float(device.usable_bytes) for device in cluster.devices])
        self._block = BlockPasses(cluster, model, workload)
        self._experts: DividedExpertTimes | None = None
        if workload.experts is not None:
            expect_experts(model, workload)
            rest = BlockPasses(cluster, without_experts(model), workload)
            self._experts = DividedExpertTimes(cluster, model, workload, whole=self._block, rest=rest)
            self._block = rest
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
        self._host_s = [float(block_pass.host_s.max()) for block_pass in self._block.passes]
        self.floor_s = float(self._block_s(self._least_of_experts_P1())[0])
        self.loss_s_per_token_D = self._block.loss_s_per_token_D
        self._set_coefficients()

    def _from_host_s(self, num_bytes: float) -> float:
        """Return the time in which all ranks copy their shards of ``num_bytes`` of weights from their hosts.

        The ranks copy at the same time, so the slowest one counts. 0 if parameters are not offloaded.
        """
        work = self.workload
        if not work.offload_parameters:
            return 0.0
        shard_bytes = num_bytes / self.cluster.num_ranks / work.data_parallel
        return float((shard_bytes / host_bytes_per_s_D(self.cluster.devices)).max())

    @property
    def least_block_s(self) -> float:
        """Time of one block that no schedule undercuts.

        Each pass is perfectly balanced, or as long as ZeRO's traffic in that pass. With recurrent layers the bound is
        that of `CostModel`, for both passes together.
        """
        if self._recurrent is not None:
            return super().least_block_s
        work, heads = self.workload, self.model.num_heads
        pairs = work.micro_batch * (0.5 if work.causal else 1.0) * heads * work.seq_len**2
        least_s = []
        for block_pass in self._block.passes:
            pass_s = _balanced_s(block_pass.token_s * work.seq_len, block_pass.attention_s * pairs)
            least_s.append(np.array([pass_s]))
        return float(self._block_s(np.array(least_s) + self._least_of_experts_P1())[0])

    def block_s_many(self, grouping: Grouping, tokens_BD: Floats, heads_BD: Ints) -> Floats:
        """Return the time of one block for many assignments of one grouping, ``[B]``."""
        assigned = self._block.assigned(grouping, tokens_BD, heads_BD)
        attention_B = [ring_finish_s(ring) for ring in self._block.rings(assigned)]
        return self._block_s(self._of_all_layers(attention_B, grouping, tokens_BD))

    def block_s_below(self, grouping: Grouping, tokens_BD: Floats, heads_BD: Ints, below_B: Floats) -> Floats:
        """Return `block_s_many`, but infinity if the groups take at least ``below_B`` in every ring order, ``[B]``.

        Two lower bounds come first, since evaluating the ring takes longest: compute time alone excludes most
        assignments, and compute time with all-to-alls excludes most of the remaining ones.
        """
        if self._recurrent is not None:
            return super().block_s_below(grouping, tokens_BD, heads_BD, below_B)
        block, time_B = self._block, np.full(len(tokens_BD), np.inf)
        work = block.work(grouping, tokens_BD, heads_BD)
        compute = block.compute(work)
        rows, exchange_BK = np.arange(len(tokens_BD)), np.zeros((1, grouping.num_groups))
        for with_all_to_alls in (False, True):
            if with_all_to_alls:
                exchange_BK = block.exchange_s(work)
            bound_B = self._block_s(self._with_experts(compute.least_s(exchange_BK), work.tokens_BD))
            promising = np.flatnonzero(bound_B < below_B[rows] * (1 + ROUNDING))
            if not len(promising):
                return time_B
            rows, work, compute = rows[promising], work.take(promising), compute.take(promising)
        assigned = block.with_transfers(work, exchange_BK[promising])
        finish_B = [ring_finish_s(ring) for ring in block.rings(assigned, compute)]
        time_B[rows] = self._block_s(self._with_experts(finish_B, work.tokens_BD))
        return time_B

    def free_ring_s(self, grouping: Grouping, tokens_BD: Floats, heads_BD: Ints) -> Floats:
        """Return the times of one block whose ring transfers are free, ``[B]``.

        They are 0 for contiguous causal groups and for models with recurrent layers, for which there is no such bound.
        """
        work = self._block.work(grouping, tokens_BD, heads_BD)
        compute = self._block.compute(work)
        if compute.contiguous_causal or self._recurrent is not None:
            return super().free_ring_s(grouping, tokens_BD, heads_BD)
        return self._block_s(self._with_experts(compute.least_s(self._block.exchange_s(work)), tokens_BD))

    def terms(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> Terms:
        """Divide the time of one block into three terms that add up to it.

        non-attention   time of the group that takes longest outside attention; a scan counts as non-attention, and so
                        do the slowest rank's experts, if they are divided among ranks
        all-to-all      time of the group that takes longest outside attention and in all-to-alls, less the first term;
                        and the messages of divided experts
        ring steps      remaining time of the block, up to the end of the slowest group
        """
        assigned = self._block.assigned(grouping, tokens_D[None], heads_D[None])
        non_attention_s = exchanged_s = 0.0
        compute = self._block.compute(assigned.work)
        rings = self._block.rings(assigned, compute)
        for block_pass, group_s_BK, ring in zip(self._block.passes, compute.non_attention_PBK, rings, strict=True):
            share = block_pass.repeats * self._attention_share
            non_attention_s += share * float(group_s_BK.max())
            exchanged_s += share * float(ring.start_s.max())
        finish = [ring_finish_s(ring) for ring in rings]
        if self._recurrent is not None:
            for block_pass, times in zip(
                self._block.passes, self._recurrent.passes(grouping, tokens_D[None]), strict=True
            ):
                share = block_pass.repeats * self._recurrent_share
                non_attention_s += share * float((times.total_B - times.exchange_B)[0])
                exchanged_s += share * float(times.total_B[0])
        if self._experts is not None:
            experts = self._experts.times(tokens_D[None])
            for index, block_pass in enumerate(self._block.passes):
                non_attention_s += block_pass.repeats * float(experts.compute_PD[index].max())
                exchanged_s += block_pass.repeats * float(experts.total_PB[index, 0])
        block_s = float(self._block_s(self._of_all_layers(finish, grouping, tokens_D[None]))[0])
        return Terms(
            non_attention_s=non_attention_s,
            all_to_all_s=exchanged_s - non_attention_s,
            ring_steps_s=block_s - exchanged_s,
        )

    def coupled_rings_s(
        self, grouping: Grouping, tokens_D: Floats, heads_D: Ints, orders_PK: Ints | None = None
    ) -> Floats | None:
        """Return the times of coupled rings, see `CostModel.coupled_rings_s`."""
        assigned = self._block.assigned(grouping, tokens_D[None], heads_D[None])
        rings = self._block.rings(assigned)
        if rings[0].contiguous_causal:
            return None
        total_P = np.zeros(1 if orders_PK is None else len(orders_PK))
        for block_pass, ring in zip(self._block.passes, rings, strict=True):
            coupled = ring._replace(coupled=True) if orders_PK is None else ring.coupled_in_orders(orders_PK)
            total_P += block_pass.repeats * ring_finish_s(coupled)
        return total_P

    def outside_blocks_s(self, tokens_D: Floats) -> dict[str, float]:
        """Return the time of the loss per micro-batch, and of ZeRO's traffic and the optimizer's step per iteration.

        Traffic: Below stage 3 DeepSpeed all-reduces gradients, which takes as long as two reduce-scatters (assuming
        ``use_multi_rank_bucket_allreduce`` is on, its default); in stage 2 it does so for every micro-batch. Stages 1
        and 2 gather the new parameters. In stage 3 the traffic of layers is part of the blocks; here count the traffic
        of embedding and head and, with ``zero_within``, the all-reduce between nodes.

        Step: Adam reads and writes its state, reads the gradient, and writes the parameter. DeepSpeed also copies all
        gradients into its buckets, in stage 0 copies them back, and in stages 1 and 2 copies the gathered parameters
        into the model.
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
            if work.zero_within:  # an all-reduce between nodes, of which the last backward may hide a part; count all
                between_nodes = RingCollective.between(work.zero_cluster or self.cluster)
                zero_s = 2 * between_nodes(count * work.gradient_bytes)
        else:
            zero_s = reductions * 2 * self._collective(count * work.gradient_bytes)
            zero_s += self._collective(count * work.element_bytes) if stage else 0.0
        owned_D = count * (owned_share_D(work, self.cluster) if stage else np.ones(len(tokens_D)))
        step_bytes_D = owned_D * (2 * work.optimizer_bytes + work.gradient_bytes + work.element_bytes)
        copied_back = {0: work.gradient_bytes, 3: 0}.get(stage, work.element_bytes)
        step_bytes_D = step_bytes_D + count * 2 * (reductions * work.gradient_bytes + copied_back)
        experts = DividedExperts.of(model, work, self.cluster)
        step_bytes_D = step_bytes_D + 2 * (experts.optimizer_D + experts.gradients_D) + experts.weights_D
        step_s_D = step_bytes_D * self._block.rates.memory_s_per_byte
        if work.offload_optimizer:
            step_s_D = offloaded_step_s_D(self.cluster.devices, work, owned_D)
        return {"loss_s": loss_s, "zero_s": zero_s, "optimizer_s": float(step_s_D.max())}

    def memory_phases(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> Phases:
        """Return the memory of every rank by phase and part; `ds_hetero.cost.terms.phases` has the formulas."""
        return memory_phases(self._standing_memory, grouping, tokens_D, heads_D)

    @cached_property
    def _standing_memory(self) -> StandingMemory:
        """Memory that does not depend on the schedule."""
        return StandingMemory.of(self.model, self.workload, self.cluster)

    def exchange_s_K(self, schedule: Schedule) -> Floats:
        """Return the time of every group's all-to-alls in one block, both passes, by ring position, ``[K]``."""
        grouping, tokens_D, heads_D = self.arrays(schedule)
        exchange_BK = self._block.exchange_s(self._block.work(grouping, tokens_D[None], heads_D[None]))
        num_passes = sum(block_pass.repeats for block_pass in self._block.passes)
        return np.asarray(self._attention_share * num_passes * exchange_BK[0])

    def busy_s(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> Floats:
        """Return the time that every rank computes in one block, ``[D]``."""
        attention_D = explain.busy_s(self._block, self._block.work(grouping, tokens_D[None], heads_D[None]))
        if self._experts is not None:
            repeats = np.array([block_pass.repeats for block_pass in self._block.passes])
            return np.asarray(attention_D + repeats @ self._experts.compute_PD)
        if self._recurrent is None:
            return attention_D
        return self._attention_share * attention_D + self._recurrent_share * self._recurrent.busy_s(grouping, tokens_D)

    def bottleneck(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints, terms: Terms) -> Bottleneck:
        """Find the largest of the block's ``terms``, and the rank or link that sets it."""
        assigned = self._block.assigned(grouping, tokens_D[None], heads_D[None])
        attention_B = [ring_finish_s(ring) for ring in self._block.rings(assigned)]
        pass_s_B = self._of_all_layers(attention_B, grouping, tokens_D[None])
        if self._experts is not None:
            cause = self._bottleneck_of_experts(tokens_D, assigned, terms)
            if cause is not None:
                return cause
        if self._recurrent is not None and terms.all_to_all_s > max(terms.non_attention_s, terms.ring_steps_s):
            rank = int(tokens_D.argmax())
            peer = explain.slowest_peer(self.cluster, rank, np.arange(len(tokens_D)))
            return Bottleneck.of_link(self.cluster, "all_to_all_s", rank, peer)
        repeats = [block_pass.repeats for block_pass in self._block.passes]
        passes_s = sum(count * float(seconds_B[0]) for count, seconds_B in zip(repeats, pass_s_B, strict=True))
        # A block that takes more than 2 % longer than its passes waits for ZeRO's traffic or for the host.
        beside = self._slowest_beside() if terms.block_s > 1.02 * passes_s else None
        return explain.bottleneck(self._block, assigned, terms, beside=beside)

    def _bottleneck_of_experts(self, tokens_D: Floats, assigned: AssignedWork, terms: Terms) -> Bottleneck | None:
        """Return the rank whose experts, or the link whose messages, decide the largest term; None if others do."""
        assert self._experts is not None
        times = self._experts.times(tokens_D[None])
        repeats = np.array([block_pass.repeats for block_pass in self._block.passes])
        if terms.non_attention_s >= max(terms.all_to_all_s, terms.ring_steps_s):
            of_experts_D = repeats @ times.compute_PD
            is_largest = 2 * of_experts_D.max() > terms.non_attention_s
            rank = int(of_experts_D.argmax())
            return Bottleneck.of_rank(self.cluster, "non_attention_s", "experts", rank) if is_largest else None
        of_heads_s = float(repeats.sum() * assigned.exchange_BK[0].max())
        if terms.all_to_all_s < terms.ring_steps_s or of_heads_s > float(repeats @ times.exchange_PB[:, 0]):
            return None
        rank = self._experts.largest_sender(tokens_D)
        peer = explain.slowest_peer(self.cluster, rank, np.arange(len(tokens_D)))
        return Bottleneck.of_link(self.cluster, "all_to_all_s", rank, peer)

    def _slowest_beside(self) -> str:
        """Of ZeRO's traffic and the host's launches, which both run beside the passes, name the longer one."""
        host_s = 0.0
        for block_pass, pass_host_s in zip(self._block.passes, self._host_s, strict=True):
            host_s += block_pass.repeats * pass_host_s
        return "ZeRO traffic" if 2 * self._gather_s + self._reduce_s >= host_s else "the host's launches"

    def timeline(self, schedule: Schedule) -> tuple[Span, ...]:
        """Return when each rank computes and transfers in one block, see `ds_hetero.cost.explain.timeline`."""
        grouping, tokens_D, heads_D = self.arrays(schedule)
        assigned = self._block.assigned(grouping, tokens_D[None], heads_D[None])
        if self._experts is not None:
            return explain.timeline(self._block, assigned, self._experts.times(tokens_D[None]))
        if self._recurrent is None:
            return explain.timeline(self._block, assigned)
        return explain.mixed_timeline(
            self._block, assigned, self._recurrent, (self._attention_share, self._recurrent_share)
        )

    def _of_all_layers(
        self, attention_B: list[Floats], grouping: Grouping, tokens_BD: Floats
    ) -> Sequence[Floats] | Floats:
        """Return the times of both passes of an average layer, experts included, from those of an attention layer."""
        return self._with_experts(self._with_recurrence(attention_B, grouping, tokens_BD), tokens_BD)

    def _with_experts(self, pass_B: Sequence[Floats] | Floats, tokens_BD: Floats) -> Sequence[Floats] | Floats:
        """Add the time of divided experts to the times of both passes, ``[B]`` each."""
        return pass_B if self._experts is None else np.array(pass_B) + self._experts.times(tokens_BD).total_PB

    def _least_of_experts_P1(self) -> Floats:
        """Return the time of divided experts with free messages, ``[P, 1]``; zeros if experts are not divided."""
        return np.zeros((2, 1)) if self._experts is None else self._experts.least_P[:, None]

    def _with_recurrence(self, attention_B: list[Floats], grouping: Grouping, tokens_BD: Floats) -> list[Floats]:
        """Return the times of both passes of an average layer from those of an attention layer, ``[B]`` each."""
        if self._recurrent is None:
            return attention_B
        recurrent = self._recurrent.passes(grouping, tokens_BD)
        return [
            self._attention_share * attention + self._recurrent_share * times.total_B
            for attention, times in zip(attention_B, recurrent, strict=True)
        ]

    def _block_s(self, pass_B: Sequence[Floats] | Floats) -> Floats:
        """Return the time of a block, ``[B]``: forward, recomputation and backward.

        ZeRO's traffic and the host's launches run beside the passes; if they take longer, their time counts instead.

        Args:
            pass_B: times of one forward and of one backward, ``[B]`` each.
        """
        forward_B, backward_B = pass_B
        num_recomputed = self._block.passes[0].repeats - 1
        forward_host_s, backward_host_s = self._host_s
        backward_B = num_recomputed * forward_B + backward_B
        forward_beside_s = max(self._gather_s, forward_host_s)
        backward_beside_s = max(self._gather_s + self._reduce_s, num_recomputed * forward_host_s + backward_host_s)
        return np.asarray(np.maximum(forward_B, forward_beside_s) + np.maximum(backward_B, backward_beside_s))

    def _set_coefficients(self) -> None:
        """Set `bound_s`, and the seconds per token and per pair of query and key that `CostModel` declares.

        Kernels are slower on small shards. The ``least_`` seconds are those of very large shards, the others those of
        equal shards for all ranks.
        """
        work, model = self.workload, self.model
        even_tokens = work.seq_len / self.cluster.num_ranks
        pairs_share = work.micro_batch * (0.5 if work.causal else 1.0)
        passes, rates = self._block.passes, self._block.rates
        pass_attention_D = [block_pass.repeats * block_pass.attention_s for block_pass in passes]
        attention_D = pairs_share * np.sum(pass_attention_D, axis=0)
        token_D = np.sum([block_pass.repeats * block_pass.token_s for block_pass in passes], axis=0)
        fixed_D = np.sum([block_pass.repeats * block_pass.fixed_s for block_pass in passes], axis=0)
        if self._recurrent is not None:
            attention_D, share = self._attention_share * attention_D, self._recurrent_share
            token_D = self._attention_share * token_D + share * (self._recurrent.token_s_D + self._recurrent.scan_s_D)
            fixed_D = self._attention_share * fixed_D + share * self._recurrent.fixed_s_D
        # Attention is slower for few rows and short blocks of keys; a node's part of the sequence counts as a block.
        rows_slowdown_D = 1 + rates.half_rows / (work.micro_batch * model.num_heads * even_tokens)
        keys_slowdown_D = 1 + rates.half_kv * len(self.cluster.nodes) / work.seq_len
        self.attention_s_D = attention_D * rows_slowdown_D * keys_slowdown_D
        self.non_attention_s_per_token_D = token_D + fixed_D / even_tokens
        self.least_attention_s_D, self.least_non_attention_s_per_token_D = attention_D, token_D
        self.attention_edge_s_D = attention_D * (rates.half_kv + (2 if work.causal else 1) * rates.edge_keys)
        self.bound_s = _balanced_s(token_D * work.seq_len, attention_D * model.num_heads * work.seq_len**2)


def _balanced_s(tokens_s_D: Floats, attention_s_D: Floats) -> float:
    """Return the least time in which all ranks together do all non-attention work and all attention.

    Both kinds of work can be divided over the ranks in any way.

    Rank d takes the share x_d of the non-attention work and y_d of attention. The linear program

        min T,  sum x = sum y = 1,  x_d tokens_s_d + y_d attention_s_d <= T

    has the dual max over r of (1 + r) / sum_d max(1 / tokens_s_d, r / attention_s_d). Its maximum is where r is the
    ratio attention_s_d / tokens_s_d of some rank. If all ratios are equal, this is total work over the sum of speeds.

    Args:
        tokens_s_D: seconds in which a rank would do all non-attention work alone.
        attention_s_D: seconds in which a rank would do all attention alone.
    """
    # Equal ranks have equal terms in the sum: one row for each kind of rank.
    kinds, counts = np.unique(np.stack([tokens_s_D, attention_s_D], axis=1), axis=0, return_counts=True)
    tokens_s, attention_s = kinds.T
    ratio = attention_s / tokens_s
    need = np.maximum(1 / tokens_s[None], ratio[:, None] / attention_s[None]) @ counts
    return float(((1 + ratio) / need).max())
