"""Published cost model: HexiSeq's Eqs. 2-12 to the letter (arXiv:2605.07569, section 4.2 and appendix A).

It counts full attention at peak rates; nothing is calibrated. Where the equations leave a choice, this one is made:

    peer(d, t)   the ring passes KV from neighbour to neighbour in ring order, so the source of every step is the
                 group one position back, and the block that it sends at step t is that of the group t positions back
    sub-rings    if a rank has several sub-ring tasks, its bytes from one source add up, and transfers from different
                 sources run side by side (the max over d of Eq. 12 becomes a max over pairs)
    latency      every pair of ranks pays its latency, also if it exchanges no bytes (Eq. 9); a rank without heads has
                 no ring peer
    M_static     weights, gradients and optimizer state under the workload's ZeRO stage

Grouped-query attention, MLP widths, vocabulary and causality do not appear in the equations and are ignored here.

Dimension key: B assignments, D ranks, K groups in ring order, N node slices, S sites, P pairs of sites (`grouping`), R
ring steps that are computed at once, C classes of latency, G ranks of one group, I members of parts.
"""

from __future__ import annotations

import numpy as np

from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.arrays import Floats, Ints
from ds_hetero.cost.model import Bottleneck, CostModel, Span, Terms
from ds_hetero.cost.terms.group_by import GroupBy
from ds_hetero.cost.terms.grouping import Grouping
from ds_hetero.cost.terms.head_cuts import Edges, ring_edges
from ds_hetero.cost.terms.host_memory import stays_on_device
from ds_hetero.cost.terms.memory_parts import MemoryParts, Phases
from ds_hetero.cost.terms.model_states import state_bytes
from ds_hetero.cost.workload import Workload
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.values.schedule import Schedule

NON_ATTENTION_FLOPS = 72  # Eq. 5, per token and H^2: 24 forward, 48 backward
NON_ATTENTION_ELEMENTS = 40  # Eq. 4, per token and H: 20 forward, 20 backward
ATTENTION_FLOPS = 16  # Eq. 7: 4 forward, 4 recomputed, 8 backward
A2A_TENSORS = 3  # Eq. 8: q, k and v
A2A_CALLS = 4  # Eq. 9: two forward, two backward
RING_TENSORS = 4  # Eq. 10: k and v forward, the same again backward
ACTIVATION_TENSORS = 2  # Eq. 3: gamma, activations of the size of a layer's input

_STEP_TABLE = 1 << 20  # entries of a table of ring steps that are worked on at once; chosen, never measured


class PublishedCostModel(CostModel):
    """Eqs. 2-12 of HexiSeq for one cluster, model and workload."""

    name = "published"

    def __init__(self, cluster: Cluster, model: ModelSpec, workload: Workload) -> None:
        super().__init__(cluster, model, workload)
        batch, hidden, element = workload.micro_batch, model.hidden_size, workload.element_bytes
        # The equations call the peak of a device c_d and its memory bandwidth b_d.
        peak_D, bandwidth_D = cluster.peak_flops_per_s, cluster.memory_bytes_per_s
        # Eq. 6: the roofline; both sides are linear in the tokens, so the larger coefficient decides.
        self._compute_bound_D = NON_ATTENTION_FLOPS * batch * hidden**2 / peak_D
        self._memory_bound_D = NON_ATTENTION_ELEMENTS * batch * hidden * element / bandwidth_D
        self.non_attention_s_per_token_D = np.maximum(self._compute_bound_D, self._memory_bound_D)
        self.attention_s_D = ATTENTION_FLOPS * batch * model.head_dim / peak_D
        self.least_attention_s_D = self.attention_s_D
        self.least_non_attention_s_per_token_D = self.non_attention_s_per_token_D
        self.floor_s = 0.0
        self.loss_s_per_token_D = np.zeros(cluster.num_ranks)
        self._a2a_bytes = A2A_TENSORS * batch * model.head_dim * element  # per token and head, Eq. 8
        self._ring_bytes = RING_TENSORS * batch * model.head_dim * element  # per token and head, Eq. 10
        self._s_per_byte = 1 / cluster.node_bytes_per_s
        # Offloaded states stay in a device's memory if the device shares its host's.
        not_offloaded = stays_on_device(cluster, model, workload, np.zeros(cluster.num_ranks))
        states = state_bytes(model, workload, cluster)
        self._state_bytes = {name: size + getattr(not_offloaded, name) for name, size in states.items()}
        self.capacity_bytes_D = cluster.memory_bytes
        work = NON_ATTENTION_FLOPS * batch * workload.seq_len * hidden**2
        work += ATTENTION_FLOPS * batch * workload.seq_len**2 * model.num_heads * model.head_dim
        self.bound_s = float(work / peak_D.sum())

    def block_s_many(self, grouping: Grouping, tokens_BD: Floats, heads_BD: Ints) -> Floats:
        """Return the time of one block for many assignments of one grouping, ``[B]``: Eq. 2."""
        return np.asarray(sum(self._terms(grouping, tokens_BD, heads_BD)))

    def terms(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> Terms:
        """Return the three terms of Eq. 2."""
        non_attention_B, all_to_all_B, ring_steps_B = self._terms(grouping, tokens_D[None], heads_D[None])
        return Terms(
            non_attention_s=float(non_attention_B[0]),
            all_to_all_s=float(all_to_all_B[0]),
            ring_steps_s=float(ring_steps_B[0]),
        )

    def _terms(self, grouping: Grouping, tokens_BD: Floats, heads_BD: Ints) -> tuple[Floats, Floats, Floats]:
        """Return the terms non-attention, all-to-all and ring steps of Eq. 2, ``[B]`` each."""
        non_attention_B = (tokens_BD * self.non_attention_s_per_token_D).max(axis=1)
        return (
            non_attention_B,
            self._all_to_all_s(grouping, tokens_BD, heads_BD),
            self._ring_steps_s(grouping, tokens_BD, heads_BD).sum(axis=1),
        )

    def _all_to_all_s(self, grouping: Grouping, tokens_BD: Floats, heads_BD: Ints) -> Floats:
        """Return the time of all-to-alls by Eq. 9, ``[B]``: four times that of the slowest pair of ranks of a group.

        The bytes from rank d to rank j are proportional to s_d n_j: tokens of d times heads of j. All pairs inside a
        node slice have the same link rate; so have all pairs between two sites, and all between different slices of a
        site. Among pairs of one rate the slowest has the largest s_d n_j, so only this one is evaluated.
        """
        if grouping.num_groups == len(grouping.order):
            return np.zeros(len(tokens_BD))
        node = grouping.slice_node
        product_BN = _largest_product(grouping.node_slices, tokens_BD, heads_BD)
        inside_BN = self.cluster.node_latency_s[node, node] + self._s_per_byte[node, node] * (
            self._a2a_bytes * product_BN
        )
        slowest_B = np.where(grouping.node_slices.sizes > 1, inside_BN, 0.0).max(axis=1)
        source_P, destination_P, sender_P, receiver_P = grouping.site_pairs
        if len(source_P):
            tokens_BN = grouping.node_slices.reduce(np.maximum, tokens_BD)
            heads_BN = grouping.node_slices.reduce(np.maximum, heads_BD)
            tokens_BS = grouping.sites.reduce(np.maximum, tokens_BN)
            heads_BS = grouping.sites.reduce(np.maximum, heads_BN)
            product_BS = _largest_product(grouping.sites, tokens_BN, heads_BN)
            product_BP = np.where(
                source_P == destination_P, product_BS[:, source_P], tokens_BS[:, source_P] * heads_BS[:, destination_P]
            )
            nodes = sender_P, receiver_P
            between_BP = self.cluster.node_latency_s[nodes] + self._s_per_byte[nodes] * (self._a2a_bytes * product_BP)
            slowest_B = np.maximum(slowest_B, between_BP.max(axis=1))
        return np.asarray(A2A_CALLS * slowest_B)

    def _ring_steps_s(self, grouping: Grouping, tokens_BD: Floats, heads_BD: Ints) -> Floats:
        """Return the time of every ring step by Eq. 12, ``[B, K]``: step 0 is local, the others also wait for KV.

        At step t group p works on the block of group p - t. If all groups have equally many tokens, all remote steps
        are equal, and one of them is computed.
        """
        num_groups = grouping.num_groups
        length_BK = grouping.by_group(np.add, tokens_BD)
        compute_BK = self._compute_s_per_token(grouping, length_BK, heads_BD)
        local_B = (compute_BK * length_BK).max(axis=1)
        if num_groups == 1:
            return np.asarray(local_B[:, None])
        latencies, transfer_CBK = self._transfer_s_per_token(grouping, ring_edges(grouping, heads_BD), len(heads_BD))
        steps_BK = np.empty(length_BK.shape)
        steps_BK[:, 0] = local_B
        has_equal_groups = bool((length_BK == length_BK[:, :1]).all())
        twice_BK = np.concatenate([length_BK, length_BK], axis=1)  # twice_BK[:, K + p - t] is the block of group p - t
        rows = 1 if has_equal_groups else max(1, _STEP_TABLE // length_BK.size)
        for first in range(1, 2 if has_equal_groups else num_groups, rows):
            step_R = np.arange(first, min(first + rows, num_groups))
            source_RK = num_groups + np.arange(num_groups)[None, :] - step_R[:, None]
            block_BRK = length_BK[:, None, :] if has_equal_groups else twice_BK[:, source_RK]
            slowest_BRK = compute_BK[:, None, :] * block_BRK
            for latency, transfer_BK in zip(latencies, transfer_CBK, strict=True):
                arrival_BRK = latency + transfer_BK[:, None, :] * block_BRK
                np.maximum(slowest_BRK, arrival_BRK, out=slowest_BRK, where=transfer_BK[:, None, :] >= 0)
            steps_BK[:, step_R] = slowest_BRK.max(axis=2)
        if has_equal_groups:
            steps_BK[:, 2:] = steps_BK[:, 1:2]
        return steps_BK

    def _compute_s_per_token(self, grouping: Grouping, length_BK: Floats, heads_BD: Ints) -> Floats:
        """Return the time of every group's slowest rank per token of a KV block, ``[B, K]``: Eq. 11 over c_d."""
        return np.asarray(length_BK * grouping.by_group(np.maximum, heads_BD * self.attention_s_D))

    def _transfer_s_per_token(self, grouping: Grouping, edges: Edges, num_sets: int) -> tuple[Floats, Floats]:
        """Compute the transfer time into every group by Eq. 10 over bandwidth, by latency of the link.

        Returns:
            The different latencies, ``[C]``; for each latency the time of the slowest transfer into every group, per
            token of the block, ``[C, B, K]``: -1 if no link into the group has this latency.
        """
        pair = self.cluster.node_of_rank[edges.sender], self.cluster.node_of_rank[edges.receiver]
        latency_E = self.cluster.node_latency_s[pair]
        transfer_E = self._s_per_byte[pair] * (self._ring_bytes * edges.heads)
        latencies = np.unique(latency_E)
        by_class = [
            np.maximum.reduceat(np.where(latency_E == latency, transfer_E, -1.0), edges.starts) for latency in latencies
        ]
        return latencies, np.array(by_class).reshape(len(latencies), num_sets, grouping.num_groups)

    def memory_phases(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> Phases:
        """Return the memory of every rank by part: Eq. 3, which has one phase and counts activations of one layer."""
        batch, element = self.workload.micro_batch, self.workload.element_bytes
        length_D = grouping.by_group(np.add, tokens_D)[..., grouping.group_of]
        parts = MemoryParts(
            **self._state_bytes,
            activations=batch * element * ACTIVATION_TENSORS * tokens_D * self.model.hidden_size,
            ring_buffers=batch * element * 2.0 * length_D * heads_D * self.model.head_dim,
        )
        return {"always": parts}

    def busy_s(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> Floats:
        """Return the time that every rank computes in one block, ``[D]``: Eqs. 6 and 7 over c_d."""
        length_D = grouping.by_group(np.add, tokens_D)[grouping.group_of]
        attention_D = self.attention_s_D * heads_D * length_D * self.workload.seq_len
        return np.asarray(tokens_D * self.non_attention_s_per_token_D + attention_D)

    def bottleneck(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints, terms: Terms) -> Bottleneck:
        """Find the largest term of Eq. 2, and the rank or pair of ranks that sets it."""
        term = max(Terms.__slots__, key=lambda name: float(getattr(terms, name)))
        if term == "non_attention_s":
            rank = int((tokens_D * self.non_attention_s_per_token_D).argmax())
            is_memory_bound = bool(self._memory_bound_D[rank] > self._compute_bound_D[rank])
            return Bottleneck.of_rank(self.cluster, term, "memory bandwidth" if is_memory_bound else "compute", rank)
        if term == "all_to_all_s":
            return Bottleneck.of_link(self.cluster, term, *self._slowest_exchange(grouping, tokens_D, heads_D))
        length_K = grouping.by_group(np.add, tokens_D)
        length_D = length_K[grouping.group_of]
        compute_D = self.attention_s_D * heads_D * length_D * self.workload.seq_len
        rank = int(compute_D.argmax())
        if grouping.num_groups > 1:
            edges = ring_edges(grouping, heads_D[None])
            pair = self.cluster.node_of_rank[edges.sender], self.cluster.node_of_rank[edges.receiver]
            received_E = self.workload.seq_len - length_D[edges.receiver]
            transfer_E = self._s_per_byte[pair] * self._ring_bytes * edges.heads * received_E
            transfer_E += self.cluster.node_latency_s[pair] * (grouping.num_groups - 1)
            slowest = int(transfer_E.argmax())
            if transfer_E[slowest] > compute_D[rank]:
                ends = int(edges.sender[slowest]), int(edges.receiver[slowest])
                return Bottleneck.of_link(self.cluster, term, *ends)
        return Bottleneck.of_rank(self.cluster, term, "compute", rank)

    def _slowest_exchange(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> tuple[int, int]:
        """Return sender and receiver of the pair whose transfer takes the longest in Eq. 9."""
        slowest_s, slowest_pair = -1.0, (0, 0)
        for k in range(grouping.num_groups):
            ranks = grouping.order[grouping.offsets[k] : grouping.offsets[k + 1]]
            node = self.cluster.node_of_rank[ranks]
            nodes = np.ix_(node, node)
            bytes_GG = self._a2a_bytes * tokens_D[ranks][:, None] * heads_D[ranks][None, :]
            time_GG = self.cluster.node_latency_s[nodes] + self._s_per_byte[nodes] * bytes_GG
            np.fill_diagonal(time_GG, -1.0)  # a rank sends nothing to itself
            sender, receiver = np.unravel_index(int(time_GG.argmax()), time_GG.shape)
            pair_s = float(time_GG[sender, receiver])
            if pair_s > slowest_s:
                slowest_s, slowest_pair = pair_s, (int(ranks[sender]), int(ranks[receiver]))
        return slowest_pair

    def timeline(self, schedule: Schedule) -> tuple[Span, ...]:
        """Return when each rank is busy in one block with Eq. 2's barriers, for forward and backward together."""
        grouping, tokens_D, heads_D = self.arrays(schedule)
        terms = self.terms(grouping, tokens_D, heads_D)
        length_K = grouping.by_group(np.add, tokens_D)
        steps_K = self._ring_steps_s(grouping, tokens_D[None], heads_D[None])[0]
        non_attention_D = tokens_D * self.non_attention_s_per_token_D
        spans = []
        for rank, group in enumerate(grouping.group_of.tolist()):
            spans.append(Span.of(rank, "compute", "non_attention", 0.0, float(non_attention_D[rank])))
            now = terms.non_attention_s + terms.all_to_all_s
            if grouping.sizes[group] > 1:
                spans.append(Span.of(rank, "network", "all_to_all", terms.non_attention_s, now))
            for step, step_s in enumerate(steps_K.tolist()):
                source = length_K[(group - step) % grouping.num_groups]
                work = self.attention_s_D[rank] * heads_D[rank] * length_K[group] * source
                spans.append(Span.of(rank, "compute", "attention", now, now + float(work), step))
                now += step_s
        return tuple(spans)


def _largest_product(parts: GroupBy, tokens_BI: Floats, heads_BI: Ints) -> Floats:
    """Return the largest ``tokens[d] * heads[j]`` of two different members d and j of every part.

    The best partner j of a member is the member with most heads; the best partner of that member is the one with the
    second most. With heads 5, 3 and 1: members pair with 3, 5 and 5 heads. A part with one member has no pair; its
    result is not positive.
    """
    most_heads = parts.reduce(np.maximum, heads_BI)
    has_most = heads_BI == most_heads[:, parts.part_of]
    most_of_others = parts.reduce(np.maximum, np.where(has_most, -1, heads_BI))
    several_have_most = parts.reduce(np.add, has_most.astype(np.int64)) > 1
    second_most = np.where(several_have_most, most_heads, most_of_others)
    partner_heads = np.where(has_most, second_most[:, parts.part_of], most_heads[:, parts.part_of])
    return parts.reduce(np.maximum, tokens_BI * partner_heads)
