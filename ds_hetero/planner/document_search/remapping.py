"""Remapping: move tokens between attention and linear layers, so that units have the best number of tokens for each.

Linear layers are here all of a layer except attention. Attention is balanced by documents; linear layers are balanced
if every unit has tokens in proportion to its speed (Zeppelin: equally many). So tokens move to other units before the
linear layers and back after them.

Zeppelin (EuroSys 2026, section 3.4, Eq. 2) looks for transfers M >= 0 with the smallest maximum over units of the
sending cost, which is a row sum of T * M for seconds T per token, and gives this linear program to a solver. Here T has
two values, inside a node and between nodes, so bisection on the cost solves it exactly. A node sends inside it as much
as its surplus and its deficit allow. For a cost of c seconds, unit i must send at least

    (T_out * surplus_i - c) / (T_out - T_in)

tokens of its surplus inside its node. Example: a unit with 100 tokens too many, 1 ms per token inside the node and 10
ms to other nodes. To end within 550 ms it must send (1000 - 550) / 9 = 50 tokens inside; the other 50 take 500 ms.

With moves, all units wait twice: the slowest one decides in the linear layers, and again in attention. Without moves
only the sums have to be balanced: a unit with more attention can have less of the linear layers. So moving pays only if
uncut documents, memory or a published planner leave the sums uneven.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from operator import mul
from typing import NamedTuple

from ds_hetero.planner.document_search.candidates import PlacedLengths, place_lengths
from ds_hetero.planner.document_search.lanes import rank_tokens
from ds_hetero.planner.document_search.loads import Loads, loads_of
from ds_hetero.planner.document_search.unit_costs import UnitCosts, members_by_node
from ds_hetero.values.placement import Placement, TokenMove
from ds_hetero.values.splits import share

BISECTIONS = 60  # steps, down to the last bits of a time
ROUNDING = 1 + 1e-12  # ratio of times that counts as rounding
# Tokens are moved only if the step then takes at most this share of its predicted time without moves: moves are four
# more exchanges in a layer, and predictions have been 10 % off. Chosen, never measured.
MAX_MOVING_RATIO = 0.9
# Least cost of a token where only attention counts, as a share of ``token_s``, since costs must be > 0. Chosen, never
# measured.
LEAST_TOKEN_S_SHARE = 1e-6


class TokenTransfer(NamedTuple):
    """Tokens that one unit, or rank, sends to another one before the linear layers, and gets back after them."""

    sender: int  # unit that computes attention of the tokens
    receiver: int  # unit that computes their linear layers
    tokens: int  # number of tokens


class Remapped(NamedTuple):
    """A placement of documents for attention, and other numbers of tokens for linear layers."""

    placed: PlacedLengths  # placement for attention
    linear_tokens: tuple[int, ...]  # tokens in linear layers, ``[unit]``
    loads: Loads  # loads of attention and linear layers, and the time of the moves

    @property
    def predicted_s(self) -> float:
        """Predicted time of the layer."""
        return self.loads.predicted_s


def place_remapped(
    lengths: Sequence[int], best: PlacedLengths, costs: UnitCosts, *, padding: int, min_cut_tokens: int
) -> Remapped:
    """Return the faster of two placements with moved tokens: ``best``, and one that balances attention alone.

    Args:
        best: a placement that balances the sum of attention and linear layers.
        padding: tokens of the row outside every document.
        min_cut_tokens: shorter documents are not cut.

    Raises:
        BatchError: the units have too little memory.
    """
    # Costs of attention alone: of a token's cost only the part that attention causes.
    token_s = map(max, costs.edges_s, [LEAST_TOKEN_S_SHARE * seconds for seconds in costs.token_s])
    attention_costs = replace(costs, token_s=tuple(token_s), edge_s=())
    balanced = place_lengths(lengths, attention_costs, padding=padding, min_cut_tokens=min_cut_tokens)
    loads = loads_of(lengths, balanced.pieces, costs).with_padding(balanced.padding, costs)
    options = remapped(best, costs), remapped(replace(balanced, loads=loads), costs)
    return min(options, key=lambda option: option.predicted_s)


def remapped(placed: PlacedLengths, costs: UnitCosts) -> Remapped:
    """Return ``placed`` with tokens moved so that linear layers take equal time on all units, if memory allows."""
    attention_tokens = placed.loads.tokens
    linear_tokens = even_tokens(sum(attention_tokens), costs)
    transfers = remap(attention_tokens, linear_tokens, costs.node, costs)
    return Remapped(placed, linear_tokens, moved_loads(placed.loads, linear_tokens, transfers, costs))


def least_remapped_s(lengths: Sequence[int], costs: UnitCosts, padding: int) -> float:
    """Return a lower bound of placements with moves: linear layers and attention perfectly balanced, moves free."""
    tokens, squares = sum(lengths) + padding, sum(map(mul, lengths, lengths))
    tokens_per_s = sum(1 / seconds for seconds in costs.linear_s)
    squares_per_s = sum(1 / seconds for seconds in costs.square_s)
    return float(tokens / tokens_per_s + squares / squares_per_s)


def moved_loads(
    loads: Loads, linear_tokens: Sequence[int], transfers: Iterable[TokenTransfer], costs: UnitCosts
) -> Loads:
    """Return the loads of a layer after tokens are moved.

    Args:
        loads: loads without moves.
        linear_tokens: tokens in linear layers, ``[unit]``.
        transfers: between units, from attention to linear layers.
    """
    units = zip(loads.attention_s, loads.tokens, costs.edges_s, strict=True)
    return replace(
        loads,
        tokens=tuple(linear_tokens),
        linear_s=tuple(count * s for count, s in zip(linear_tokens, costs.linear_s, strict=True)),
        attention_s=tuple(attention_s + count * edge_s for attention_s, count, edge_s in units),
        moved_s=_moved_s(transfers, costs),
    )


def _moved_s(transfers: Iterable[TokenTransfer], costs: UnitCosts) -> float:
    """Return the time to move tokens in a layer: send queries, keys, values, return outputs; likewise for gradients.

    The longest time decides: that of a unit to send or to receive, or that of a node's NICs.
    """
    between_s = costs.link_s or costs.cross_s
    unit_s: Counter[tuple[int, bool]] = Counter()  # by unit, and True for sending or False for receiving
    node_s: Counter[tuple[int, bool]] = Counter()  # by node, and True for sending or False for receiving
    for sender, receiver, tokens in transfers:
        source, target = costs.node[sender], costs.node[receiver]
        token_s = costs.receive_s[source] if source == target else max(between_s[source], between_s[target])
        for unit, node, is_sending in ((sender, source, True), (receiver, target, False)):
            unit_s[unit, is_sending] += tokens * token_s  # type: ignore[assignment]
            node_s[node, is_sending] += tokens * costs.cross_s[node] * (source != target)  # type: ignore[assignment]
    return max((*unit_s.values(), *node_s.values()), default=0) * costs.exchange_per_receive


def with_linear_tokens(placement: Placement, linear_tokens: Sequence[int], costs: UnitCosts) -> Placement:
    """Return the placement with moves after which units have ``linear_tokens``, shared over their ranks by weights."""
    schedule = placement.schedule
    node_of_rank: dict[int, int] = {}
    for group, node in zip(schedule.ring_groups, costs.node, strict=True):
        node_of_rank.update(dict.fromkeys(group.ranks, node))
    nodes = [node_of_rank[rank] for rank in schedule.ranks]
    # Transfers here are between ranks, as indices into `Schedule.ranks`.
    transfers = remap(placement.rank_tokens, rank_tokens(schedule, linear_tokens), nodes, costs)
    tokens_by_pair: Counter[tuple[int, int]] = Counter()  # by sender and receiver
    for sender, receiver, count in transfers:
        tokens_by_pair[schedule.ranks[sender], schedule.ranks[receiver]] += count
    return placement.with_moves([TokenMove(*ranks, count) for ranks, count in tokens_by_pair.items()])


def loads_with_moves(loads: Loads, placement: Placement, costs: UnitCosts) -> Loads:
    """Return the loads of a placement with its moves, from those of ``placement.in_attention``."""
    unit_of: dict[int, int] = {}
    for unit, group in enumerate(placement.schedule.ring_groups):
        unit_of.update(dict.fromkeys(group.ranks, unit))
    transfers = [
        TokenTransfer(unit_of[move.attention_rank], unit_of[move.holder], move.tokens) for move in placement.moves
    ]
    linear_tokens = [placement.group_tokens(unit) for unit in range(len(costs.token_s))]
    return moved_loads(loads, linear_tokens, transfers, costs)


def remap(have: Sequence[int], want: Sequence[int], node: Sequence[int], costs: UnitCosts) -> list[TokenTransfer]:
    """Return transfers after which units that have ``have`` tokens have ``want`` tokens; the sums of both are equal.

    Only units with too many tokens send. Example: units A and B of one node, C and D of another have 10, 0, 6 and 0
    tokens and want 4 each. A has 6 too many, C has 2. Inside the nodes A sends 4 to B, and C sends 2 to D; then A sends
    2 to D.

    Args:
        have: tokens in attention, by unit.
        want: tokens in linear layers, by unit.
        node: node of every unit.
    """
    assert sum(have) == sum(want), (have, want)
    surplus = [attention - linear for attention, linear in zip(have, want, strict=True)]
    _, ideal_sends_inside = least_remap_s(surplus, node, *link_s(costs))
    units_by_node = members_by_node(tuple(node))
    # Whole tokens that every unit sends inside its node, in proportion to the solution.
    sends_inside = [0] * len(have)
    for tokens_inside, units in zip(map(round, _tokens_inside(surplus, node)), units_by_node, strict=True):
        if not tokens_inside:
            continue
        shares = share(tokens_inside, [ideal_sends_inside[unit] for unit in units])
        for unit, tokens in zip(units, shares, strict=True):
            sends_inside[unit] = min(tokens, max(surplus[unit], 0))
    deficit = [max(-extra, 0) for extra in surplus]
    transfers: list[TokenTransfer] = []
    for units in units_by_node:
        transfers += _match([(unit, sends_inside[unit]) for unit in units], units, deficit)
    sends_outside = [max(extra, 0) - tokens for extra, tokens in zip(surplus, sends_inside, strict=True)]
    return [*transfers, *_match(enumerate(sends_outside), range(len(have)), deficit)]


def least_remap_s(
    surplus: Sequence[float], node: Sequence[int], inside_s: float, between_s: float
) -> tuple[float, list[float]]:
    """Return the smallest possible time of the slowest sender, and the tokens that every unit sends inside its node.

    Args:
        surplus: tokens of a unit beyond those that it wants, negative if it has too few; their sum is 0.
        node: node of every unit.
        inside_s: seconds to send a token inside a node, less than ``between_s``.
        between_s: seconds to send a token to another node.
    """
    gives = [max(extra, 0.0) for extra in surplus]
    tokens_inside = _tokens_inside(surplus, node)
    low_s, high_s = 0.0, max(gives, default=0.0) * between_s
    for _ in range(BISECTIONS):
        limit_s = (low_s + high_s) / 2
        is_possible = _is_possible(gives, node, tokens_inside, inside_s, between_s, limit_s)
        low_s, high_s = (low_s, limit_s) if is_possible else (limit_s, high_s)
    sends_inside = [_must_send_inside(extra, inside_s, between_s, high_s) for extra in gives]
    # Nodes send as much as they can inside: what the units need not send for their own sake comes from any of them.
    tokens_left = list(tokens_inside)
    for tokens, unit_node in zip(sends_inside, node, strict=True):
        tokens_left[unit_node] -= tokens
    for unit, unit_node in enumerate(node):
        more = max(min(tokens_left[unit_node], gives[unit] - sends_inside[unit]), 0.0)
        sends_inside[unit] += more
        tokens_left[unit_node] -= more
    return high_s, sends_inside


def even_tokens(tokens: int, costs: UnitCosts) -> tuple[int, ...]:
    """Share tokens over units in proportion to the speed of their linear layers, as far as memory allows."""
    tokens_of_full: dict[int, int] = {}  # units whose memory is full, with their tokens
    while True:
        speeds = [0.0 if unit in tokens_of_full else 1 / s for unit, s in enumerate(costs.linear_s)]
        shares = share(tokens - sum(tokens_of_full.values()), speeds)
        newly_full = {unit: limit for unit, limit in enumerate(costs.most_tokens) if shares[unit] > limit}
        tokens_of_full |= newly_full
        if not newly_full or len(tokens_of_full) == len(speeds):
            return tuple(tokens_of_full.get(unit, count) for unit, count in enumerate(shares))


def link_s(costs: UnitCosts) -> tuple[float, float]:
    """Return the seconds to send a token inside a node and from node to node, over the slowest link of each kind."""
    inside_s = max(costs.receive_s)
    # The second is always larger than the first, and > 0, since `_must_send_inside` divides by the difference.
    return inside_s, max(max(costs.cross_s), inside_s * (1 + 1e-9), 1e-30)


def _tokens_inside(surplus: Sequence[float], node: Sequence[int]) -> list[float]:
    """Return by node the tokens that can be sent inside it: the smaller one of its surplus and its deficit."""
    gives, deficit = [0.0] * (max(node) + 1), [0.0] * (max(node) + 1)
    for extra, unit_node in zip(surplus, node, strict=True):
        if extra > 0:
            gives[unit_node] += extra
        else:
            deficit[unit_node] -= extra
    return [min(pair) for pair in zip(gives, deficit, strict=True)]


def _must_send_inside(surplus: float, inside_s: float, between_s: float, limit_s: float) -> float:
    """Return the fewest tokens of ``surplus`` that a unit has to send inside its node to end within ``limit_s``."""
    return min(max((between_s * surplus - limit_s) / (between_s - inside_s), 0.0), surplus)


def _is_possible(
    gives: Sequence[float],
    node: Sequence[int],
    tokens_inside: Sequence[float],
    inside_s: float,
    between_s: float,
    limit_s: float,
) -> bool:
    """Whether every unit can send its surplus within ``limit_s``.

    Args:
        gives: surplus of every unit, 0 if it has too few tokens.
        tokens_inside: most tokens that can be sent inside a node, by node.
    """
    needed = [0.0] * len(tokens_inside)
    for surplus, unit_node in zip(gives, node, strict=True):
        if surplus * inside_s > limit_s * ROUNDING:
            return False
        needed[unit_node] += _must_send_inside(surplus, inside_s, between_s, limit_s)
    return all(need <= limit * ROUNDING for need, limit in zip(needed, tokens_inside, strict=True))


def _match(gives: Iterable[tuple[int, int]], receivers: Sequence[int], deficit: list[int]) -> Iterator[TokenTransfer]:
    """Yield transfers from senders to receivers with a deficit, both in order; reduce ``deficit`` by them.

    Args:
        gives: senders, each with its number of tokens to send.
        deficit: tokens that every unit still needs; changed in place.
    """
    place = 0  # place of the next receiver in `receivers`
    for sender, tokens in gives:
        while tokens and place < len(receivers):
            receiver = receivers[place]
            count = min(tokens, deficit[receiver])
            if count:
                yield TokenTransfer(sender, receiver, count)
                tokens -= count
                deficit[receiver] -= count
            if not deficit[receiver]:
                place += 1
