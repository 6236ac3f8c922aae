"""Simulate one layer, forward and backward, on Zeppelin's clusters, by the same rules for all planners.

A rank consists of the GPUs of one tensor-parallel group. Rings run in lockstep: a round takes the longer of computing
and sending keys and values; backward rounds compute 2.5 and transfer 2 times as much. Rings of one rank run one after
another. Linear modules take three times their forward. Tokens of a mixture of experts travel to their experts inside a
node, and count where they come from. The optimizer and gradient synchronization are left out.

"ours" is the same placement step by step (`zeppelin_events`): without a barrier, a step begins when its keys have
arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil

from benchmarks.reproduce.zeppelin_events import block_s
from benchmarks.reproduce.zeppelin_paper import MACHINES, TOKENS_PER_GPU
from benchmarks.reproduce.zeppelin_setting import BACKWARD_COMPUTE, BACKWARD_WIRE, Setting
from ds_hetero.planner.document_search.candidates import place_lengths
from ds_hetero.planner.document_search.unit_costs import UnitCosts
from ds_hetero.planner.published.zeppelin import CAPACITY_OVER_MEAN, zeppelin_rings

OUR_ROOM = 3.0  # tokens that a rank has memory for, over the mean; Zeppelin's are CAPACITY_OVER_MEAN


def round_s(compute_s: float, wire_s: float) -> tuple[float, float]:
    """Return forward and backward of one round of a ring."""
    return max(compute_s, wire_s), max(BACKWARD_COMPUTE * compute_s, BACKWARD_WIRE * wire_s)


def _ring_s(size: int, compute_s: float, wire_s: float) -> float:
    """Return the time of all rounds of a ring; the last one sends nothing."""
    return (size - 1) * sum(round_s(compute_s, wire_s)) + (1 + BACKWARD_COMPUTE) * compute_s


def te(lengths: Sequence[int], setting: Setting, *, routed: bool = False) -> float:
    """Return the time of Transformer Engine's context parallelism: every document evenly over all ranks, in a ring."""
    size, tokens = setting.ranks, sum(lengths)
    wire_s = setting.wire_s(tokens / size, crosses=len(setting.units_by_node) > 1, routed=routed)
    compute_s = sum(n * n for n in lengths) / 2 / size**2 * setting.pair_s
    return _ring_s(size, compute_s, wire_s) + setting.token_s * tokens / size


def llama(lengths: Sequence[int], setting: Setting) -> float:
    """Return the time of Llama's context parallelism.

    Keys and values are gathered before attention, their gradients reduced after it.
    """
    size, tokens, nodes, per_node = setting.ranks, sum(lengths), len(setting.units_by_node), setting.ranks_of_node
    machine = MACHINES[setting.machine]
    between_s = (nodes - 1) / nodes / (machine["nic_bytes_per_s"] * machine["nics"])
    gather_s = tokens * setting.kv_bytes * (between_s + (per_node - 1) / per_node / setting.link_bytes_per_s)
    attention_s = sum(n * n for n in lengths) / 2 / size * setting.pair_s
    return 3 * gather_s + (1 + BACKWARD_COMPUTE) * attention_s + setting.token_s * tokens / size


def hybrid(lengths: Sequence[int], setting: Setting) -> float:
    """Return the time of hybrid data parallelism: a long document on its share of ranks by FLOPs, the others whole.

    Whole documents are assigned longest first.
    """
    size, per_node = setting.ranks, setting.ranks_of_node
    busy_s, most = [0.0] * size, 2 * sum(lengths) // size
    alone_s = [n * setting.token_s + (1 + BACKWARD_COMPUTE) / 2 * n * n * setting.pair_s for n in lengths]
    mean_s = sum(alone_s) / size
    for n, work_s in sorted(zip(lengths, alone_s, strict=True), reverse=True):
        count = min(max(1, round(work_s / mean_s), ceil(n / most)), size)
        first = min(range(size - count + 1), key=lambda rank: max(busy_s[rank : rank + count]))
        crosses = first // per_node != (first + count - 1) // per_node
        wire_s = setting.wire_s(n / count, crosses=crosses, routed=False)
        ring_s = _ring_s(count, n * n / 2 / count**2 * setting.pair_s, wire_s)
        end_s = max(busy_s[first : first + count]) + n / count * setting.token_s + ring_s
        busy_s[first : first + count] = [end_s] * count
    return max(busy_s)


def zeppelin(lengths: Sequence[int], setting: Setting, *, routed: bool = True, remapped: bool = True) -> float:
    """Return the time of Algorithms 1 and 2, one queue after the other.

    Linear modules run on even tokens, or on those of attention.
    """
    capacity = CAPACITY_OVER_MEAN * sum(lengths) / setting.ranks
    attention_s, tokens = [0.0] * setting.ranks, [0.0] * setting.ranks
    for document, zone, units in zeppelin_rings(lengths, setting.units_by_node, capacity):
        size, n = len(units), lengths[document]
        wire_s = setting.wire_s(n / size, crosses=zone == "cluster", routed=routed)
        ring_s = _ring_s(size, n * n / 2 / size**2 * setting.pair_s, wire_s)
        for unit in units:
            attention_s[unit] += ring_s
            tokens[unit] += n / size
    even = sum(lengths) / setting.ranks
    if remapped:
        return max(attention_s) + setting.token_s * even + 3 * setting.remap_s * even / TOKENS_PER_GPU
    return max(attention_s) + setting.token_s * max(tokens)


def costs_of(setting: Setting, tokens: int) -> UnitCosts:
    """Return our planner's costs in the setting."""
    nodes = len(setting.units_by_node)
    wire = (1 + BACKWARD_WIRE) * setting.kv_bytes
    return UnitCosts(
        token_s=(setting.token_s,) * setting.ranks,
        square_s=((1 + BACKWARD_COMPUTE) / 2 * setting.pair_s,) * setting.ranks,
        most_tokens=(int(OUR_ROOM * tokens / setting.ranks) + 1,) * setting.ranks,
        node=tuple(rank // setting.ranks_of_node for rank in range(setting.ranks)),
        receive_s=(wire / setting.link_bytes_per_s,) * nodes,
        cross_s=(wire / setting.node_bytes_per_s,) * nodes,
    )


def planned(lengths: Sequence[int], setting: Setting) -> float:
    """Return the time of our placement step by step; a rank's transfers run one after the other, without barriers."""
    costs = costs_of(setting, sum(lengths))
    placed = place_lengths(lengths, costs)
    return block_s(lengths, placed.pieces, costs.node, setting)


def in_lockstep(lengths: Sequence[int], setting: Setting) -> float:
    """Return the time of our placement with rings in lockstep, like the others."""
    costs = costs_of(setting, sum(lengths))
    placed = place_lengths(lengths, costs)
    busy_s = [setting.token_s * tokens for tokens in placed.loads.tokens]
    for n, ring in zip(lengths, placed.pieces, strict=True):
        size, most = len(ring), max(tokens for _, tokens in ring)
        crosses = len({costs.node[unit] for unit, _ in ring}) > 1
        wire_s = setting.wire_s(most, crosses=crosses, routed=True)
        ring_s = _ring_s(size, most * n / 2 / size * setting.pair_s, wire_s)
        for unit, _ in ring:
            busy_s[unit] += ring_s
    return max(busy_s)


def predicted(lengths: Sequence[int], setting: Setting) -> float:
    """Return our planner's prediction: no lockstep, and transfers hidden under all attention of a rank."""
    return place_lengths(lengths, costs_of(setting, sum(lengths))).predicted_s


METHODS: dict[str, Callable[[Sequence[int], Setting], float]] = {
    "te": te,
    "routing": lambda lengths, setting: te(lengths, setting, routed=True),
    "llama": llama,
    "hybrid": hybrid,
    "engine": lambda lengths, setting: zeppelin(lengths, setting, routed=False, remapped=False),
    "routing + engine": lambda lengths, setting: zeppelin(lengths, setting, remapped=False),
    "with remap": zeppelin,
    "ours, lockstep": in_lockstep,
    "ours": planned,
    "ours, predicted": predicted,
}
