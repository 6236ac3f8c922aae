"""Documents over all units whose nodes share the heads, where a ring passes keys and values on.

HexiSeq's groups "rank i of every node" (arXiv:2605.07569): they trade tokens for heads by all-to-all, keys and values
then stay inside nodes, each with its own heads, and the output comes back. With N nodes, H query and G key-value heads
that is (H + G) / (2 G N) of what passing on sends, but it hides behind nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ds_hetero.planner.document_search.candidates import PlacedLengths, place_everywhere
from ds_hetero.planner.document_search.loads import Loads, loads_of
from ds_hetero.planner.document_search.unit_costs import Pieces, UnitCosts
from ds_hetero.values.splits import share

# Documents times units, above which not every document is placed over all units. Chosen so that planning takes
# milliseconds with thousands of documents, as `candidates.MOST_WORK`.
MOST_FRAGMENTS = 3072
# Share of the predicted time that is left if heads are exchanged, at most: ranks wait for an exchange, and a smaller
# gain is no reason to. Chosen, never measured.
WORTH_EXCHANGING = 0.98


class ByHeads(NamedTuple):
    """A placement whose documents over all units exchange heads between nodes."""

    placed: PlacedLengths  # with the loads that follow
    heads: tuple[int, ...]  # of every node


def place_by_heads(
    lengths: Sequence[int], best: PlacedLengths, costs: UnitCosts, num_heads: int, padding: int
) -> ByHeads | None:
    """Return the faster of ``best`` and every document over all units, with heads exchanged; None if neither can be.

    Heads can be exchanged where all nodes have equally many units. Of thousands of documents only ``best`` is tried.

    Args:
        best: the placement whose keys and values are passed on.
        padding: tokens outside every document.
    """
    counts = set(map(len, costs.units_by_node))
    if costs.num_nodes == 1 or len(counts) > 1 or not costs.exchange_per_receive:
        return None
    placements = [best]
    if lengths and len(lengths) * len(costs.node) <= MOST_FRAGMENTS:
        everywhere = place_everywhere(lengths, costs, sum(lengths) + padding)
        if everywhere.loads.fits(costs):
            placements.append(everywhere)
    candidates = []
    for placed in placements:
        heads = _heads(placed.pieces, costs, num_heads)
        if heads is not None:
            loads = loads_by_heads(lengths, placed.pieces, costs, heads).with_padding(placed.padding, costs)
            candidates.append(ByHeads(replace(placed, loads=loads), heads))
    return min(candidates, key=lambda candidate: candidate.placed.predicted_s, default=None)


def _heads(pieces: Sequence[Pieces], costs: UnitCosts, num_heads: int) -> tuple[int, ...] | None:
    """Heads of every node, by its share of the tokens of documents over all units; None without such documents."""
    tokens_of_node = [0] * costs.num_nodes
    for ring in pieces:
        if len(ring) == len(costs.node):
            for unit, tokens in ring:
                tokens_of_node[costs.node[unit]] += tokens
    return share(num_heads, tokens_of_node) if any(tokens_of_node) else None


def loads_by_heads(lengths: Sequence[int], pieces: Sequence[Pieces], costs: UnitCosts, heads: Sequence[int]) -> Loads:
    """Return the loads of a placement whose documents over all units exchange heads.

    The i-th unit of a node computes its node's share of the heads for the tokens of the i-th units of all nodes. These
    units are a slot: of nodes (0, 1) and (2, 3) the slots are (0, 2) and (1, 3).
    """
    num_units = len(costs.node)
    slots = list(zip(*costs.units_by_node, strict=True))
    rest = [(length, ring) for length, ring in zip(lengths, pieces, strict=True) if len(ring) < num_units]
    loads = loads_of([length for length, _ in rest], [ring for _, ring in rest], costs)
    tokens, attention_s, fragments_s = list(loads.tokens), list(loads.attention_s), list(loads.fragments_s)
    inside_s = [0.0] * num_units  # receiving keys and values from units of the same node
    sent = [0.0] * num_units  # tokens, with all heads, that leave in the exchange
    received = [0.0] * num_units
    head_shares = [node_heads / sum(heads) for node_heads in heads]
    for length, ring in zip(lengths, pieces, strict=True):
        if len(ring) < num_units:
            continue
        tokens_of = dict(ring)
        for slot in slots:
            slot_tokens = sum(tokens_of[unit] for unit in slot)
            for unit in slot:
                node = costs.node[unit]
                head_share = head_shares[node]
                tokens[unit] += tokens_of[unit]
                attention_s[unit] += slot_tokens * head_share * length * costs.square_s[unit]
                fragments_s[unit] += costs.fragment_rows * head_share * length * costs.square_s[unit]
                inside_s[unit] += (length - slot_tokens) * head_share * costs.receive_s[node]
                sent[unit] += tokens_of[unit] * (1 - head_share)
                received[unit] += (slot_tokens - tokens_of[unit]) * head_share
    return replace(
        loads,
        tokens=tuple(tokens),
        linear_s=tuple(count * s for count, s in zip(tokens, costs.token_s, strict=True)),
        attention_s=tuple(attention_s),
        fragments_s=tuple(fragments_s),
        received_s=tuple(a + b for a, b in zip(loads.received_s, inside_s, strict=True)),
        exchange_s=max(_exchange_s(sent, costs), _exchange_s(received, costs)),
    )


def _exchange_s(tokens: Sequence[float], costs: UnitCosts) -> float:
    """Time of all-to-alls in which units send, or receive, all heads of so many tokens."""
    slowest_s = 0.0
    for node, units in enumerate(costs.units_by_node):
        slowest_s = max(slowest_s, sum(tokens[unit] for unit in units) * costs.cross_s[node])
        if costs.link_s:
            slowest_s = max(slowest_s, max(tokens[unit] for unit in units) * costs.link_s[node])
    return slowest_s * costs.exchange_per_receive
