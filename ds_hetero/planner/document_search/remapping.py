"""Remapping: from the tokens that attention wants on every unit to those that linear layers want, and back.

Zeppelin (EuroSys 2026, section 3.4, Eq. 2) asks for the transfers M >= 0 that make the largest sending cost of a unit,
the largest row sum of T * M, as small as possible, and gives that program to a solver. T has two values here, inside a
node and between nodes, so that bisection on the cost solves it exactly: a node matches as much of its own surplus and
deficit as it can, and at cost c unit i must send at least (T_out * surplus_i - c) / (T_out - T_in) of its surplus
inside. Linear layers want tokens in proportion to their speed, where the paper wants equal numbers.

A block whose tokens move waits twice: its linear layers are as slow as their slowest unit, and so is its attention.
Without, a unit that has much of the one has little of the other, and only sums have to be balanced. So moving pays
where whole documents, memory or a published planner leave the sums uneven.
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

BISECTIONS = 60  # of a time, to the last bits of a number
ROUNDING = 1 + 1e-12  # a time that is longer by less is the same
# Share of the predicted time that is left with moves, at most: they are four more exchanges a block, and predictions
# have been 10 % off. Chosen, never measured.
WORTH_MOVING = 0.9
LEAST_S = 1e-6  # of a token outside attention, where only attention counts; chosen, never measured


class TokenTransfer(NamedTuple):
    """Tokens that one unit sends to another before the linear modules, and gets back after them."""

    sender: int
    receiver: int
    tokens: int


class Remapped(NamedTuple):
    """A placement of documents for attention, and other tokens outside."""

    placed: PlacedLengths  # for attention
    held: tuple[int, ...]  # tokens of every unit outside attention
    loads: Loads  # of both, with the moves

    @property
    def predicted_s(self) -> float:
        """Time of the block."""
        return self.loads.predicted_s


def place_remapped(
    lengths: Sequence[int], best: PlacedLengths, costs: UnitCosts, *, padding: int, min_cut_tokens: int
) -> Remapped:
    """The faster of ``best`` and one of attention alone with moved tokens. Raises `BatchError`: no memory."""
    # Attention alone: a token costs what goes with its attention, and nothing outside it.
    token_s = map(max, costs.edges_s, [LEAST_S * seconds for seconds in costs.token_s])
    attention_costs = replace(costs, token_s=tuple(token_s), edge_s=())
    alone = place_lengths(lengths, attention_costs, padding=padding, min_cut_tokens=min_cut_tokens)
    loads = loads_of(lengths, alone.pieces, costs).with_padding(alone.padding, costs)
    options = remapped(best, costs), remapped(replace(alone, loads=loads), costs)
    return min(options, key=lambda option: option.predicted_s)


def remapped(placed: PlacedLengths, costs: UnitCosts) -> Remapped:
    """The same attention, with tokens moved so that linear layers take equal time on all units, if memory allows."""
    attended = placed.loads.tokens
    held = even_tokens(sum(attended), costs)
    transfers = remap(attended, held, costs.node, costs)
    return Remapped(placed, held, moved_loads(placed.loads, held, transfers, costs))


def least_remapped_s(lengths: Sequence[int], costs: UnitCosts, padding: int) -> float:
    """The bound of placements with moves: linear layers and attention perfectly even, moving free."""
    tokens, squares = sum(lengths) + padding, sum(map(mul, lengths, lengths))
    tokens_per_s = sum(1 / seconds for seconds in costs.linear_s)
    squares_per_s = sum(1 / seconds for seconds in costs.square_s)
    return float(tokens / tokens_per_s + squares / squares_per_s)


def moved_loads(loads: Loads, held: Sequence[int], transfers: Iterable[TokenTransfer], costs: UnitCosts) -> Loads:
    """The loads of a block whose units hold other tokens outside attention.

    Args:
        loads: where every token is held by the unit that attends to it.
        transfers: between units, from attention.
    """
    attended = zip(loads.attention_s, loads.tokens, costs.edges_s, strict=True)
    return replace(
        loads,
        tokens=tuple(held),
        linear_s=tuple(count * s for count, s in zip(held, costs.linear_s, strict=True)),
        attention_s=tuple(s + count * edge_s for s, count, edge_s in attended),
        moved_s=_moved_s(transfers, costs),
    )


def _moved_s(transfers: Iterable[TokenTransfer], costs: UnitCosts) -> float:
    """Time of the all-to-alls of a block: queries, keys and values there, outputs back, and their gradients.

    As long as the unit that sends or receives for the longest, or the interfaces of a node.
    """
    between_s = costs.link_s or costs.cross_s
    by_unit: Counter[tuple[int, bool]] = Counter()  # seconds, of a unit, sending or receiving
    by_node: Counter[tuple[int, bool]] = Counter()
    for sender, receiver, tokens in transfers:
        source, target = costs.node[sender], costs.node[receiver]
        token_s = costs.receive_s[source] if source == target else max(between_s[source], between_s[target])
        for unit, node, sends in ((sender, source, True), (receiver, target, False)):
            by_unit[unit, sends] += tokens * token_s  # type: ignore[assignment]
            by_node[node, sends] += tokens * costs.cross_s[node] * (source != target)  # type: ignore[assignment]
    return max((*by_unit.values(), *by_node.values()), default=0) * costs.exchange_per_receive


def with_held_tokens(placement: Placement, held: Sequence[int], costs: UnitCosts) -> Placement:
    """The same attention; outside it units hold ``held`` tokens, shared by their ranks' weights."""
    schedule = placement.schedule
    node_of_rank: dict[int, int] = {}
    for group, node in zip(schedule.ring_groups, costs.node, strict=True):
        node_of_rank.update(dict.fromkeys(group.ranks, node))
    nodes = [node_of_rank[rank] for rank in schedule.ranks]
    transfers = remap(placement.rank_tokens, rank_tokens(schedule, held), nodes, costs)
    tokens: Counter[tuple[int, int]] = Counter()  # of a sender and a receiver
    for sender, receiver, count in transfers:
        tokens[schedule.ranks[sender], schedule.ranks[receiver]] += count
    return placement.with_moves([TokenMove(*ranks, count) for ranks, count in tokens.items()])


def loads_with_moves(loads: Loads, placement: Placement, costs: UnitCosts) -> Loads:
    """The loads of a placement with its moves. ``loads``: of ``placement.in_attention``."""
    unit_of: dict[int, int] = {}
    for unit, group in enumerate(placement.schedule.ring_groups):
        unit_of.update(dict.fromkeys(group.ranks, unit))
    transfers = [TokenTransfer(unit_of[move.attends], unit_of[move.holds], move.tokens) for move in placement.moves]
    held = [placement.group_tokens(unit) for unit in range(len(costs.token_s))]
    return moved_loads(loads, held, transfers, costs)


def remap(have: Sequence[int], want: Sequence[int], node: Sequence[int], costs: UnitCosts) -> list[TokenTransfer]:
    """Transfers from ``have`` to ``want`` tokens, of equal sums; every unit keeps ``min(have, want)`` tokens.

    On two nodes (A, B) and (C, D) that have 10, 0, 6 and 0 tokens and want 4 each, A has 6 too many and C 2. Inside
    their nodes A sends 4 to B and C 2 to D; then A sends the other 2 to D.
    """
    assert sum(have) == sum(want), (have, want)
    surplus = [a - b for a, b in zip(have, want, strict=True)]
    _, sends = least_remap_s(surplus, node, *link_s(costs))
    by_node = members_by_node(tuple(node))
    # Whole tokens that every unit sends inside its node, in proportion to what the program says.
    sends_inside = [0] * len(have)
    for tokens_matched, members in zip(map(round, _matched(surplus, node)), by_node, strict=True):
        if not tokens_matched:
            continue
        shares = share(tokens_matched, [sends[index] for index in members])
        for index, tokens in zip(members, shares, strict=True):
            sends_inside[index] = min(tokens, max(surplus[index], 0))
    lacks = [max(-extra, 0) for extra in surplus]
    transfers: list[TokenTransfer] = []
    for members in by_node:
        transfers += _match([(index, sends_inside[index]) for index in members], members, lacks)
    rest = [max(extra, 0) - sent for extra, sent in zip(surplus, sends_inside, strict=True)]
    return [*transfers, *_match(enumerate(rest), range(len(have)), lacks)]


def least_remap_s(
    surplus: Sequence[float], node: Sequence[int], inside_s: float, between_s: float
) -> tuple[float, list[float]]:
    """The least possible cost of the unit that sends the most, and how much every unit sends inside its node.

    Args:
        surplus: tokens that a unit has too many; negative where it has too few; they sum to 0.
        inside_s: seconds to send a token inside a node, less than ``between_s``.
        between_s: seconds to send a token to another node.
    """
    gives = [max(extra, 0.0) for extra in surplus]
    matched = _matched(surplus, node)
    low_s, high_s = 0.0, max(gives, default=0.0) * between_s
    for _ in range(BISECTIONS):
        cost_s = (low_s + high_s) / 2
        fits = _fits(gives, node, matched, inside_s, between_s, cost_s)
        low_s, high_s = (low_s, cost_s) if fits else (cost_s, high_s)
    sends = [_must_send(extra, inside_s, between_s, high_s) for extra in gives]
    left = list(matched)
    for tokens, where in zip(sends, node, strict=True):
        left[where] -= tokens
    for i, where in enumerate(node):  # what the node can match beyond that, from any unit that has some
        more = max(min(left[where], gives[i] - sends[i]), 0.0)
        sends[i] += more
        left[where] -= more
    return high_s, sends


def even_tokens(tokens: int, costs: UnitCosts) -> tuple[int, ...]:
    """Tokens in proportion to the speed of linear layers, as far as memory allows."""
    full: dict[int, int] = {}
    while True:
        speeds = [0.0 if unit in full else 1 / s for unit, s in enumerate(costs.linear_s)]
        even = share(tokens - sum(full.values()), speeds)
        over = {unit: most for unit, most in enumerate(costs.most_tokens) if even[unit] > most}
        full |= over
        if not over or len(full) == len(speeds):
            return tuple(full.get(unit, count) for unit, count in enumerate(even))


def link_s(costs: UnitCosts) -> tuple[float, float]:
    """Seconds to send a token inside a node and from node to node, on the slowest link of each kind."""
    inside_s = max(costs.receive_s)
    return inside_s, max(max(costs.cross_s), inside_s * (1 + 1e-9), 1e-30)


def _matched(surplus: Sequence[float], node: Sequence[int]) -> list[float]:
    """Tokens that every node can send from unit to unit inside it."""
    gives, lacks = [0.0] * (max(node) + 1), [0.0] * (max(node) + 1)
    for extra, where in zip(surplus, node, strict=True):
        if extra > 0:
            gives[where] += extra
        else:
            lacks[where] -= extra
    return [min(pair) for pair in zip(gives, lacks, strict=True)]


def _must_send(surplus: float, inside_s: float, between_s: float, cost_s: float) -> float:
    """The least that a unit sends inside its node if its cost is to be at most ``cost_s``."""
    return min(max((between_s * surplus - cost_s) / (between_s - inside_s), 0.0), surplus)


def _fits(
    gives: Sequence[float],
    node: Sequence[int],
    matched: Sequence[float],
    inside_s: float,
    between_s: float,
    cost_s: float,
) -> bool:
    """Whether no unit needs more than ``cost_s``."""
    needed = [0.0] * len(matched)
    for surplus, where in zip(gives, node, strict=True):
        if surplus * inside_s > cost_s * ROUNDING:
            return False
        needed[where] += _must_send(surplus, inside_s, between_s, cost_s)
    return all(need <= most * ROUNDING for need, most in zip(needed, matched, strict=True))


def _match(gives: Iterable[tuple[int, int]], receivers: Sequence[int], lacks: list[int]) -> Iterator[TokenTransfer]:
    """Send what units give to ``receivers`` that lack tokens, both in order, and reduce ``lacks``."""
    place = 0  # of the receiver whose turn it is
    for sender, tokens in gives:
        while tokens and place < len(receivers):
            receiver = receivers[place]
            count = min(tokens, lacks[receiver])
            if count:
                yield TokenTransfer(sender, receiver, count)
                tokens -= count
                lacks[receiver] -= count
            if not lacks[receiver]:
                place += 1
