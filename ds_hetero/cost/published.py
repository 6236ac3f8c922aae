"""HexiSeq's performance model to the letter: Eqs. 2-12 of arXiv:2605.07569, section 4.2 and appendix A.

Full attention, peak rates, nothing calibrated. What the equations leave open is settled as follows:

    peer(d, t)   the ring passes KV from neighbour to neighbour in ring order, so the source of every step is the
                 group one position back, and the block it hands over is that of the group t positions back
    sub-rings    where a rank holds several sub-ring tasks its bytes from one source add up, and different
                 sources run side by side (the max over d of Eq. 12 becomes a max over pairs)
    latency      charged wherever a pair exists, also when it exchanges no bytes (Eq. 9); a rank without heads has
                 no ring peer
    M_static     weights, gradients and optimizer state under the workload's ZeRO stage

Grouped-query attention, MLP widths, vocabulary and causality do not appear in the equations and are ignored here.

Dimension key: B assignments, D ranks, K groups in ring order.
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
GAMMA_ACTIVATIONS = 2  # Eq. 3

_STEP_TABLE = 1 << 20  # entries of a table of ring steps that are worked on at once; chosen, never measured


class PublishedCostModel(CostModel):
    """Eqs. 2-12 of HexiSeq for one cluster, model and workload."""

    name = "published"

    def __init__(self, cluster: Cluster, model: ModelSpec, workload: Workload) -> None:
        super().__init__(cluster, model, workload)
        batch, hidden, element = workload.micro_batch, model.hidden_size, workload.element_bytes
        c_D, b_D = cluster.peak_flops_per_s, cluster.memory_bytes_per_s
        # Eq. 6: the roofline; both sides are linear in the tokens, so the larger coefficient decides.
        self._compute_bound_D = NON_ATTENTION_FLOPS * batch * hidden**2 / c_D
        self._memory_bound_D = NON_ATTENTION_ELEMENTS * batch * hidden * element / b_D
        self.non_attention_s_per_token_D = np.maximum(self._compute_bound_D, self._memory_bound_D)
        self.attention_s_D = ATTENTION_FLOPS * batch * model.head_dim / c_D
        self.least_attention_s_D = self.attention_s_D
        self.least_non_attention_s_per_token_D = self.non_attention_s_per_token_D
        self.floor_s = 0.0
        self.loss_s_per_token_D = np.zeros(cluster.num_ranks)
        self._a2a_bytes = A2A_TENSORS * batch * model.head_dim * element  # per token and head, Eq. 8
        self._ring_bytes = RING_TENSORS * batch * model.head_dim * element  # per token and head, Eq. 10
        self._s_per_byte = 1 / cluster.node_bytes_per_s
        stays = stays_on_device(cluster, model, workload, np.zeros(cluster.num_ranks))
        states = state_bytes(model, workload, cluster)
        self._states = {name: size + getattr(stays, name) for name, size in states.items()}
        self.capacity_bytes_D = cluster.memory_bytes
        work = NON_ATTENTION_FLOPS * batch * workload.seq_len * hidden**2
        work += ATTENTION_FLOPS * batch * workload.seq_len**2 * model.num_heads * model.head_dim
        self.bound_s = float(work / c_D.sum())

    def block_s_many(self, grouping: Grouping, tokens_BD: Floats, heads_BD: Ints) -> Floats:
        """Eq. 2 for many assignments of one grouping, ``[B]``."""
        return np.asarray(sum(self._terms(grouping, tokens_BD, heads_BD)))

    def terms(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> Terms:
        """Eq. 2 by part."""
        parts = self._terms(grouping, tokens_D[None], heads_D[None])
        return Terms(**dict(zip(Terms.__slots__, (float(part[0]) for part in parts), strict=True)))

    def _terms(self, grouping: Grouping, tokens_BD: Floats, heads_BD: Ints) -> tuple[Floats, Floats, Floats]:
        non_attention_B = (tokens_BD * self.non_attention_s_per_token_D).max(axis=1)
        return (
            non_attention_B,
            self._all_to_all_s(grouping, tokens_BD, heads_BD),
            self._ring_steps_s(grouping, tokens_BD, heads_BD).sum(axis=1),
        )

    def _all_to_all_s(self, grouping: Grouping, tokens_BD: Floats, heads_BD: Ints) -> Floats:
        """Eq. 9, ``[B]``: the slowest pair of different ranks of any group, times four.

        All pairs of a node slice share one link; so do all pairs of two sites, and those of different slices of a site.
        Of pairs that share a link the slowest has the largest s_d n_j.
        """
        if grouping.num_groups == len(grouping.order):
            return np.zeros(len(tokens_BD))
        node = grouping.slice_node
        product_BN = _largest_product(grouping.node_slices, tokens_BD, heads_BD)
        inside_BN = self.cluster.node_latency_s[node, node] + self._s_per_byte[node, node] * (
            self._a2a_bytes * product_BN
        )
        worst_B = np.where(grouping.node_slices.sizes > 1, inside_BN, 0.0).max(axis=1)
        source, destination, *nodes = grouping.site_pairs
        if len(source):
            tokens_BN, heads_BN = (grouping.node_slices.reduce(np.maximum, each) for each in (tokens_BD, heads_BD))
            tokens_BS, heads_BS = (grouping.sites.reduce(np.maximum, each) for each in (tokens_BN, heads_BN))
            product_BS = _largest_product(grouping.sites, tokens_BN, heads_BN)
            product_BX = np.where(
                source == destination, product_BS[:, source], tokens_BS[:, source] * heads_BS[:, destination]
            )
            pair = tuple(nodes)
            between_BX = self.cluster.node_latency_s[pair] + self._s_per_byte[pair] * (self._a2a_bytes * product_BX)
            worst_B = np.maximum(worst_B, between_BX.max(axis=1))
        return np.asarray(A2A_CALLS * worst_B)

    def _ring_steps_s(self, grouping: Grouping, tokens_BD: Floats, heads_BD: Ints) -> Floats:
        """Eq. 12 for every step, ``[B, K]``; equal groups have equal remote steps, which are computed once."""
        num_groups = grouping.num_groups
        length_BK = grouping.by_group(np.add, tokens_BD)
        compute_BK = self._compute_s_per_token(grouping, length_BK, heads_BD)
        local_B = (compute_BK * length_BK).max(axis=1)
        if num_groups == 1:
            return np.asarray(local_B[:, None])
        latencies, transfer_CBK = self._transfer_s_per_token(grouping, ring_edges(grouping, heads_BD), len(heads_BD))
        steps_BK = np.empty(length_BK.shape)
        steps_BK[:, 0] = local_B
        equal = bool((length_BK == length_BK[:, :1]).all())
        twice_BK = np.concatenate([length_BK, length_BK], axis=1)
        rows = 1 if equal else max(1, _STEP_TABLE // length_BK.size)
        for first in range(1, 2 if equal else num_groups, rows):
            step = np.arange(first, min(first + rows, num_groups))
            back_RK = num_groups + np.arange(num_groups)[None, :] - step[:, None]
            source_BRK = length_BK[:, None, :] if equal else twice_BK[:, back_RK]
            worst_BRK = compute_BK[:, None, :] * source_BRK
            for latency, transfer_BK in zip(latencies, transfer_CBK, strict=True):
                arrive_BRK = latency + transfer_BK[:, None, :] * source_BRK
                np.maximum(worst_BRK, arrive_BRK, out=worst_BRK, where=transfer_BK[:, None, :] >= 0)
            steps_BK[:, step] = worst_BRK.max(axis=2)
        if equal:
            steps_BK[:, 2:] = steps_BK[:, 1:2]
        return steps_BK

    def _compute_s_per_token(self, grouping: Grouping, length_BK: Floats, heads_BD: Ints) -> Floats:
        """Eq. 11 over c_d for the slowest rank of every group, per token of the source, ``[B, K]``."""
        return np.asarray(length_BK * grouping.by_group(np.maximum, heads_BD * self.attention_s_D))

    def _transfer_s_per_token(self, grouping: Grouping, edges: Edges, num_sets: int) -> tuple[Floats, Floats]:
        """Eq. 10 over bandwidth, by class of latency.

        Returns the latencies ``[C]`` and, for each, the slowest transfer into every group per token of the source,
        ``[C, B, K]``, -1 where the class does not occur.
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
        """Eq. 3, whatever the moment; not multiplied by layers, as in the paper."""
        batch, element = self.workload.micro_batch, self.workload.element_bytes
        length_D = grouping.by_group(np.add, tokens_D)[..., grouping.group_of]
        parts = MemoryParts(
            **self._states,
            activations=batch * element * GAMMA_ACTIVATIONS * tokens_D * self.model.hidden_size,
            ring_buffers=batch * element * 2.0 * length_D * heads_D * self.model.head_dim,
        )
        return {"always": parts}

    def busy_s(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> Floats:
        """Eqs. 6 and 7 over c_d, ``[D]``."""
        length_D = grouping.by_group(np.add, tokens_D)[grouping.group_of]
        attention_D = self.attention_s_D * heads_D * length_D * self.workload.seq_len
        return np.asarray(tokens_D * self.non_attention_s_per_token_D + attention_D)

    def bottleneck(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints, terms: Terms) -> Bottleneck:
        """The largest term of Eq. 2, and the rank or pair that sets it."""
        term = max(Terms.__slots__, key=lambda name: float(getattr(terms, name)))
        if term == "non_attention_s":
            rank = int((tokens_D * self.non_attention_s_per_token_D).argmax())
            memory = bool(self._memory_bound_D[rank] > self._compute_bound_D[rank])
            return Bottleneck.of_rank(self.cluster, term, "memory bandwidth" if memory else "compute", rank)
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
        """The pair behind Eq. 9."""
        worst = (-1.0, 0, 0)
        for k in range(grouping.num_groups):
            ranks = grouping.order[grouping.offsets[k] : grouping.offsets[k + 1]]
            node = self.cluster.node_of_rank[ranks]
            bytes_RR = self._a2a_bytes * tokens_D[ranks][:, None] * heads_D[ranks][None, :]
            time_RR = self.cluster.node_latency_s[np.ix_(node, node)] + self._s_per_byte[np.ix_(node, node)] * bytes_RR
            np.fill_diagonal(time_RR, -1.0)
            d, j = np.unravel_index(int(time_RR.argmax()), time_RR.shape)
            worst = max(worst, (float(time_RR[d, j]), int(ranks[d]), int(ranks[j])), key=lambda pair: pair[0])
        return worst[1], worst[2]

    def timeline(self, schedule: Schedule) -> tuple[Span, ...]:
        """Bars of one block with the barriers of Eq. 2; forward and backward are pooled, as in the paper."""
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
    """The largest ``tokens[d] * heads[j]`` of two different members of every part.

    Every member meets the most heads of its part, and who has them the second most. Parts of one member have no pair;
    theirs is not positive.
    """
    most = parts.reduce(np.maximum, heads_BI)
    holds = heads_BI == most[:, parts.part_of]
    second = parts.reduce(np.maximum, np.where(holds, -1, heads_BI))
    second = np.where(parts.reduce(np.add, holds.astype(np.int64)) > 1, most, second)
    others = np.where(holds, second[:, parts.part_of], most[:, parts.part_of])
    return parts.reduce(np.maximum, tokens_BI * others)
