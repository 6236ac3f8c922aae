"""Exchange heads between nodes, instead of keys and values, for documents that are cut over all units.

A ring over all units sends keys and values from node to node. Instead, the i-th units of all nodes, here called a slot,
can exchange tokens for heads by all-to-all, as HexiSeq's groups "rank i of every node" do (arXiv:2605.07569). Then
every node has its share of the heads for all tokens, keys and values stay inside the node, and the output returns by a
second all-to-all. With N nodes, H query heads and G key-value heads, the exchange sends (H + G) / (2 G N) times the
bytes of the ring, but no computation hides it. Example: 2 nodes, H = 32, G = 8: 40 / 32 = 1.25 times; with H = G: half.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ds_hetero.planner.document_search.candidates import PlacedLengths, place_everywhere
from ds_hetero.planner.document_search.loads import Loads, loads_of
from ds_hetero.planner.document_search.unit_costs import Pieces, UnitCosts
from ds_hetero.values.splits import share

# Most documents times units for which a placement with every document over all units is tried. Chosen so that planning
# takes milliseconds with thousands of documents, as `candidates.MAX_WORK`.
MAX_FRAGMENTS = 3072
# Heads are exchanged only if the layer then takes less than this share of its predicted time without exchange: ranks
# wait for an exchange, and a smaller gain is within the error of predictions. Chosen, never measured.
MAX_EXCHANGE_RATIO = 0.98


class ByHeads(NamedTuple):
    """A placement in which nodes exchange heads of the documents that are cut over all units."""

    placed: PlacedLengths  # placement, whose loads include the exchange
    heads: tuple[int, ...]  # heads that every node computes


def place_by_heads(
    lengths: Sequence[int], best: PlacedLengths, costs: UnitCosts, num_heads: int, padding: int
) -> ByHeads | None:
    """Return the faster of two placements with exchanged heads: ``best``, and every document cut over all units.

    None if heads cannot be exchanged: this needs several nodes, all with the same number of units, and a document that
    is cut over all units. With thousands of documents only ``best`` is tried.

    Args:
        lengths: tokens of every document.
        best: the best placement without exchange.
        num_heads: query heads of the model.
        padding: tokens of the row outside every document.
    """
    units_per_node = set(map(len, costs.units_by_node))
    if costs.num_nodes == 1 or len(units_per_node) > 1 or not costs.exchange_per_receive:
        return None
    placements = [best]
    if lengths and len(lengths) * len(costs.node) <= MAX_FRAGMENTS:
        everywhere = place_everywhere(lengths, costs, sum(lengths) + padding)
        if everywhere.loads.fits(costs):
            placements.append(everywhere)
    candidates = []
    for placed in placements:
        heads = _heads_by_node(placed.pieces, costs, num_heads)
        if heads is not None:
            loads = loads_by_heads(lengths, placed.pieces, costs, heads).with_padding(placed.padding, costs)
            candidates.append(ByHeads(replace(placed, loads=loads), heads))
    return min(candidates, key=lambda candidate: candidate.placed.predicted_s, default=None)


def _heads_by_node(pieces: Sequence[Pieces], costs: UnitCosts, num_heads: int) -> tuple[int, ...] | None:
    """Share the heads over nodes by their tokens of documents cut over all units; None without such documents."""
    tokens_of_node = [0] * costs.num_nodes
    for ring in pieces:
        if len(ring) == len(costs.node):
            for unit, tokens in ring:
                tokens_of_node[costs.node[unit]] += tokens
    return share(num_heads, tokens_of_node) if any(tokens_of_node) else None


@dataclass(slots=True)
class _UnitLoad:
    """Load of one unit, to which documents are added."""

    tokens: int
    attention_s: float
    fragments_s: float
    inside_s: float = 0.0  # receiving keys and values from other units of its node
    sent_tokens: float = 0.0  # tokens that it sends in the exchange; half the heads of a token count as 0.5
    received_tokens: float = 0.0  # tokens that it receives in the exchange, counted likewise


def loads_by_heads(lengths: Sequence[int], pieces: Sequence[Pieces], costs: UnitCosts, heads: Sequence[int]) -> Loads:
    """Return the loads of a placement in which nodes exchange heads of the documents that are cut over all units.

    A unit computes its node's share of the heads for the tokens of its whole slot. Example: nodes (0, 1) and (2, 3)
    have the slots (0, 2) and (1, 3). Each node has half of the heads; of a document unit 0 has 60 tokens, unit 2 has
    40. Then unit 0 sends half the heads of 60 tokens, receives half the heads of 40, and computes half the heads of
    100.

    Args:
        pieces: units of every document, with their tokens.
        heads: heads of every node.
    """
    num_units = len(costs.node)
    other_lengths, other_rings = [], []  # documents that are not over all units
    for length, ring in zip(lengths, pieces, strict=True):
        if len(ring) < num_units:
            other_lengths.append(length)
            other_rings.append(ring)
    loads = loads_of(other_lengths, other_rings, costs)
    units = [_UnitLoad(*load) for load in zip(loads.tokens, loads.attention_s, loads.fragments_s, strict=True)]
    slots = list(zip(*costs.units_by_node, strict=True))
    head_shares = [node_heads / sum(heads) for node_heads in heads]
    for length, ring in zip(lengths, pieces, strict=True):
        if len(ring) == num_units:
            for slot in slots:
                _add_slot(units, slot, length, dict(ring), head_shares, costs)
    received_s = [inside_s + unit.inside_s for inside_s, unit in zip(loads.received_s, units, strict=True)]
    return replace(
        loads,
        tokens=tuple(unit.tokens for unit in units),
        linear_s=tuple(unit.tokens * s for unit, s in zip(units, costs.token_s, strict=True)),
        attention_s=tuple(unit.attention_s for unit in units),
        fragments_s=tuple(unit.fragments_s for unit in units),
        received_s=tuple(received_s),
        exchange_s=max(
            _exchange_s([unit.sent_tokens for unit in units], costs),
            _exchange_s([unit.received_tokens for unit in units], costs),
        ),
    )


def _add_slot(
    units: Sequence[_UnitLoad],
    slot: Sequence[int],
    length: int,
    tokens_of: Mapping[int, int],
    head_shares: Sequence[float],
    costs: UnitCosts,
) -> None:
    """Add a document of ``length`` tokens to the loads of the units of one slot.

    Args:
        tokens_of: tokens of the document, by unit.
        head_shares: share of the heads, by node.
    """
    slot_tokens = sum(tokens_of[unit] for unit in slot)
    for unit in slot:
        node = costs.node[unit]
        head_share = head_shares[node]
        load = units[unit]
        load.tokens += tokens_of[unit]
        load.attention_s += slot_tokens * head_share * length * costs.square_s[unit]
        load.fragments_s += costs.fragment_rows * head_share * length * costs.square_s[unit]
        load.inside_s += (length - slot_tokens) * head_share * costs.receive_s[node]
        load.sent_tokens += tokens_of[unit] * (1 - head_share)
        load.received_tokens += (slot_tokens - tokens_of[unit]) * head_share


def _exchange_s(tokens: Sequence[float], costs: UnitCosts) -> float:
    """Return the time of all-to-alls in which every unit sends, or receives, all heads of ``tokens[unit]`` tokens.

    The busiest NICs of a node decide, or the busiest link of a unit.
    """
    slowest_s = 0.0
    for node, units in enumerate(costs.units_by_node):
        slowest_s = max(slowest_s, sum(tokens[unit] for unit in units) * costs.cross_s[node])
        if costs.link_s:
            slowest_s = max(slowest_s, max(tokens[unit] for unit in units) * costs.link_s[node])
    return slowest_s * costs.exchange_per_receive
