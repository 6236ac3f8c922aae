"""Explanation of a block's time in the calibrated cost model: bottleneck, compute time of every rank, and timeline.

All functions take the passes of the block and one assignment of tokens and heads (B = 1).

Dimension key: B assignments, D ranks, K groups in ring order, E edges.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.arrays import Floats, Ints
from ds_hetero.cost.divided_experts import ExpertTimes
from ds_hetero.cost.model import Bottleneck, Span, Terms
from ds_hetero.cost.passes import AssignedWork, BlockPasses, Work
from ds_hetero.cost.recurrent import RecurrentLayer
from ds_hetero.cost.terms.head_cuts import ring_edges
from ds_hetero.cost.terms.ring import alone_s, ring_finish_s, ring_schedule


def busy_s(block: BlockPasses, work: Work) -> Floats:
    """Return the time that every rank computes in one block, ``[D]``."""
    grouping, tokens_D = work.grouping, work.tokens_BD[0]
    busy_D = np.zeros(len(tokens_D))
    slope_PBD, fixed_PBD, contiguous_causal = block.attention_s(work)
    non_attention_PBD = block.non_attention_s(work.tokens_BD)
    for index, block_pass in enumerate(block.passes):
        keys_K, blocks_K = np.full((2, grouping.num_groups), [[block.workload.seq_len], [grouping.num_groups]])
        if contiguous_causal:  # a group sees earlier groups and half of itself
            keys_K = np.cumsum(work.length_BK[0]) - work.length_BK[0] / 2
            blocks_K = np.arange(grouping.num_groups) + 0.5
        slope_D, fixed_D = slope_PBD[index, 0], fixed_PBD[index, 0]
        attention_D = slope_D * keys_K[grouping.group_of] + fixed_D * blocks_K[grouping.group_of]
        busy_D += block_pass.repeats * (non_attention_PBD[index, 0] + attention_D)
    return busy_D


def bottleneck(block: BlockPasses, assigned: AssignedWork, terms: Terms, *, beside: str | None) -> Bottleneck:
    """Find the largest term of the block, and the rank or the link that sets it.

    Args:
        beside: name of work that runs at the same time as the passes and takes longer, ``"ZeRO traffic"`` or ``"the
            host's launches"``; None if the passes take longest.
    """
    term = max(Terms.__slots__, key=lambda name: float(getattr(terms, name)))
    grouping, tokens_D, heads_D = assigned.work.grouping, assigned.work.tokens_BD[0], assigned.work.heads_BD[0]
    if term == "non_attention_s":
        rank = int(block.non_attention_s(assigned.work.tokens_BD)[1, 0].argmax())
        return Bottleneck.of_rank(block.cluster, term, "compute", rank)
    if term == "all_to_all_s":
        group = int(assigned.exchange_BK[0].argmax())
        ranks = grouping.order[grouping.offsets[group] : grouping.offsets[group + 1]]
        rank = int(ranks[(tokens_D[ranks] * (1 + heads_D[ranks])).argmax()])
        return Bottleneck.of_link(block.cluster, term, rank, slowest_peer(block.cluster, rank, ranks))
    if beside:
        return Bottleneck.of_rank(block.cluster, term, beside, 0)
    ring = block.rings(assigned)[1]
    alone_K = alone_s(ring)[0]
    if ring.contiguous_causal or float(ring_finish_s(ring)[0]) > 1.02 * alone_K.max():
        return _slowest_transfer(block, assigned, term)
    slope_PBD, fixed_PBD, _ = block.attention_s(assigned.work)
    members_D = grouping.group_of == int(alone_K.argmax())
    busy_D = np.where(members_D, slope_PBD[1, 0] * block.workload.seq_len + fixed_PBD[1, 0] * grouping.num_groups, -1.0)
    return Bottleneck.of_rank(block.cluster, term, "compute", int(busy_D.argmax()))


def timeline(block: BlockPasses, assigned: AssignedWork, experts: ExpertTimes | None = None) -> tuple[Span, ...]:
    """Return when each rank computes and transfers in the forward, recomputation (if any) and backward of a block.

    Args:
        experts: times of divided experts; None if experts are computed where the tokens are.
    """
    spans: list[Span] = []
    begin_s = 0.0
    for phase in _phases(block):
        spans += _pass_spans(block, assigned, phase, begin_s)
        begin_s += float(ring_finish_s(block.rings(assigned)[phase == "backward"])[0])
        if experts is not None:
            spans += _expert_spans(experts, phase, begin_s)
            begin_s += float(experts.total_PB[int(phase == "backward"), 0])
    return tuple(spans)


def _expert_spans(experts: ExpertTimes, phase: str, begin_s: float) -> list[Span]:
    """Return the intervals of divided experts in a pass: rows travel, experts compute, results travel."""
    number = int(phase == "backward")
    message_s = float(experts.exchange_PB[number, 0]) / 2
    compute_D = experts.compute_PD[number]
    computed_s = begin_s + message_s + float(compute_D.max())
    spans = []
    for rank, compute_s in enumerate(compute_D.tolist()):
        arrived_s = begin_s + message_s
        spans.append(Span.of(rank, "network", "all_to_all", begin_s, arrived_s, phase=phase))
        if compute_s:
            spans.append(Span.of(rank, "compute", "non_attention", arrived_s, arrived_s + compute_s, phase=phase))
        spans.append(Span.of(rank, "network", "all_to_all", computed_s, computed_s + message_s, phase=phase))
    return spans


def mixed_timeline(
    block: BlockPasses, assigned: AssignedWork, recurrent: RecurrentLayer, shares: tuple[float, float]
) -> tuple[Span, ...]:
    """Return when each rank computes and transfers in an average layer of a model with attention and recurrent layers.

    In every phase the intervals of attention come first, then those of the recurrence, each scaled by its share of the
    layers.

    Args:
        shares: numbers of attention layers and of recurrent layers, each over the number of all layers.
    """
    attention_share, recurrent_share = shares
    spans: list[Span] = []
    begin_s = 0.0
    times_of_passes = recurrent.passes(assigned.work.grouping, assigned.work.tokens_BD)
    for phase in _phases(block):
        backward = phase == "backward"
        for span in _pass_spans(block, assigned, phase, 0.0):
            start_s = begin_s + attention_share * span.start_s
            stop_s = begin_s + attention_share * span.stop_s
            spans.append(replace(span, start_s=start_s, stop_s=stop_s))
        begin_s += attention_share * float(ring_finish_s(block.rings(assigned)[backward])[0])
        recurrent_spans, begin_s = recurrent.spans(times_of_passes[backward], phase, begin_s, recurrent_share)
        spans += recurrent_spans
    return tuple(spans)


def _phases(block: BlockPasses) -> tuple[str, ...]:
    """Return the names of the phases of a block, in order."""
    return ("forward", "recompute", "backward") if block.passes[0].repeats == 2 else ("forward", "backward")


def slowest_peer(cluster: Cluster, rank: int, ranks: Ints) -> int:
    """Return the one of ``ranks`` that has the slowest link to ``rank`` in an all-to-all."""
    others = ranks[ranks != rank]
    node = cluster.node_of_rank
    return int(others[cluster.node_all_to_all_s_per_byte[node[rank], node[others]].argmax()])


def _slowest_transfer(block: BlockPasses, assigned: AssignedWork, term: str) -> Bottleneck:
    """Return the link with the longest transfer of KV in the ring, as the bottleneck of ``term``."""
    position = int((assigned.latency_BK + assigned.transfer_BK * assigned.work.length_BK.max())[0].argmax())
    edges = ring_edges(assigned.work.grouping, assigned.work.heads_BD, block.model.queries_per_kv_head)
    first = int(edges.starts[position])
    last = int(np.append(edges.starts, len(edges.heads))[position + 1])
    node = block.cluster.node_of_rank
    cost_E = edges.heads * block.cluster.node_p2p_s_per_byte[node[edges.sender], node[edges.receiver]]
    edge = first + int(cost_E[first:last].argmax())
    return Bottleneck.of_link(block.cluster, term, int(edges.sender[edge]), int(edges.receiver[edge]))


def _pass_spans(block: BlockPasses, assigned: AssignedWork, phase: str, begin_s: float) -> list[Span]:
    """Return when each rank computes and transfers in the pass named ``phase``, which begins at ``begin_s``."""
    grouping, spans, backward = assigned.work.grouping, [], phase == "backward"
    number = int(backward)
    compute = block.compute(assigned.work)
    non_attention_BK, ring = compute.non_attention_PBK[number], block.rings(assigned, compute)[number]
    slope_PBD, fixed_PBD, contiguous_causal = block.attention_s(assigned.work)
    slope_D, fixed_D = slope_PBD[number, 0], fixed_PBD[number, 0]
    starts, received = (part[:, 0] + begin_s for part in ring_schedule(ring))
    work_D = block.non_attention_s(assigned.work.tokens_BD)[number, 0]
    num_groups = grouping.num_groups
    for rank, group in enumerate(grouping.group_of.tolist()):
        work_s = begin_s + float(work_D[rank])
        spans.append(Span.of(rank, "compute", "non_attention", begin_s, work_s, phase=phase))
        if grouping.sizes[group] > 1:
            ready_s = begin_s + float(non_attention_BK[0, group])
            spans.append(Span.of(rank, "network", "all_to_all", ready_s, float(starts[0, group]), phase=phase))
        for step in range(num_groups):
            source = (group + 1 + step if backward else group - step) % num_groups
            share = 1.0 if not contiguous_causal or source < group else 0.5 * (source == group)
            step_s = share * float(slope_D[rank] * assigned.work.length_BK[0, source] + fixed_D[rank])
            now_s, arrived_s = float(starts[step, group]), float(received[step, group])
            if step_s:
                spans.append(Span.of(rank, "compute", "attention", now_s, now_s + step_s, step, phase))
            if arrived_s > now_s and assigned.work.heads_BD[0, rank]:
                spans.append(Span.of(rank, "network", "ring", now_s, arrived_s, step, phase))
    return spans
