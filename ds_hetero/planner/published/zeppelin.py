"""Zeppelin's partitioner as its Algorithms 1 and 2 say it (EuroSys 2026, section 3.1), for comparison.

It takes ranks for equal and balances tokens between nodes and squares of lengths inside them. Documents from a
threshold on are cut over several nodes, or over several units of a node; where a shorter one does not fit whole, the
threshold becomes the length of the longest that is to stay whole, and the pass begins again.

What the text leaves open is settled so: a document of exactly the threshold is cut; "empty buckets" are the least
loaded ones; c_avg counts all documents that stay on the node; a unit's capacity is at most twice the mean of tokens,
as a larger one leaves everything whole.

Zeppelin's remapping: from the tokens that attention wants on every unit to those that the linear modules want.

The paper (EuroSys 2026, Eq. 2) asks for the transfers M >= 0 that make the largest sending cost of a unit, the largest
row sum of T * M, as small as possible, and gives that program to a solver. T has two values here, inside a node and
between nodes, so that bisection on the cost solves it exactly: a node matches as much of its own surplus and deficit as
it can, and at cost c unit i must send at least (T_out * surplus_i - c) / (T_out - T_in) of its surplus inside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ds_hetero.errors import PlanError
from ds_hetero.planner.document_search.loads import Loads
from ds_hetero.planner.document_search.unit_costs import Pieces, UnitCosts
from ds_hetero.planner.published.interface import PublishedPlanner
from ds_hetero.values.splits import share

CAPACITY_OVER_MEAN = 2.0


class DocumentRing(NamedTuple):
    """A document and the units that share it evenly."""

    document: int  # its index
    zone: str  # ``"cluster"``, ``"node"`` or ``"local"``
    units: tuple[int, ...]  # in the order of the ring


class _Fragment(NamedTuple):
    """A node's share of a document, in tokens; an inter-node document may lie on one node all the same."""

    document: int
    tokens: float
    is_inter_node: bool


def zeppelin(lengths: Sequence[int], costs: UnitCosts) -> list[Pieces]:
    """Units of every document with their tokens.

    Raises:
        PlanError: nodes have different numbers of units.
    """
    units_by_node = costs.units_by_node
    if len({len(units) for units in units_by_node}) > 1:
        raise PlanError(
            f"Zeppelin cannot plan this: its Algorithm 1 has as many devices P on every node, here nodes have "
            f"{[len(units) for units in units_by_node]} units. Leave the planner out for ours."
        )
    placed: list[Pieces] = [[] for _ in lengths]
    capacity = min(min(costs.most_tokens), CAPACITY_OVER_MEAN * sum(lengths) / len(costs.token_s))
    for document, _, units in zeppelin_rings(lengths, units_by_node, capacity):
        tokens = share(lengths[document], [1.0] * len(units))
        placed[document] = [(unit, count) for unit, count in zip(units, tokens, strict=True) if count]
    return placed


def zeppelin_rings(
    lengths: Sequence[int], units_by_node: Sequence[Sequence[int]], capacity: float
) -> list[DocumentRing]:
    """Both algorithms.

    Args:
        lengths: of the documents.
        units_by_node: units of every node, as many on each.
        capacity: tokens that a unit has room for, the paper's L.
    """
    buckets = _inter_node(lengths, len(units_by_node), len(units_by_node[0]) * capacity)
    nodes_of: dict[int, list[int]] = {}
    rings = []
    for node, bucket in enumerate(buckets):
        for fragment in bucket:
            if fragment.is_inter_node:
                nodes_of.setdefault(fragment.document, []).append(node)
        rings += _intra_node(lengths, bucket, units_by_node[node], capacity)
    across = [
        DocumentRing(
            document, "cluster" if len(nodes) > 1 else "node", tuple(u for node in nodes for u in units_by_node[node])
        )
        for document, nodes in nodes_of.items()
    ]
    return across + rings


def _inter_node(lengths: Sequence[int], num_nodes: int, capacity: float) -> list[list[_Fragment]]:
    """Algorithm 1: documents of every node; ``capacity`` is that of a node."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)  # stable: ties by index
    average = sum(lengths) / num_nodes
    threshold = capacity
    while True:
        buckets: list[list[_Fragment]] = [[] for _ in range(num_nodes)]
        held = [0.0] * num_nodes
        for j in (j for j in order if lengths[j] >= threshold):
            count = min(-int(-lengths[j] // average), num_nodes)
            for node in sorted(range(num_nodes), key=lambda node: (held[node], node))[:count]:
                buckets[node].append(_Fragment(j, lengths[j] / count, True))
                held[node] += lengths[j] / count
        whole = [j for j in order if lengths[j] < threshold]
        for j in whole:
            node = min(range(num_nodes), key=lambda node: (held[node], node))
            if held[node] + lengths[j] > capacity:
                break
            buckets[node].append(_Fragment(j, lengths[j], False))
            held[node] += lengths[j]
        else:
            return buckets
        threshold = lengths[whole[0]]


def _intra_node(
    lengths: Sequence[int], bucket: Sequence[_Fragment], units: Sequence[int], capacity: float
) -> list[DocumentRing]:
    """Algorithm 2: rings of the documents that stay on one node."""
    shared = sum(fragment.tokens for fragment in bucket if fragment.is_inter_node) / len(units)
    inside = [fragment.document for fragment in bucket if not fragment.is_inter_node]
    average = sum(lengths[j] ** 2 for j in inside) / len(units)
    threshold = capacity
    while True:
        rings, held, at = [], [shared] * len(units), 0
        for j in (j for j in inside if lengths[j] >= threshold):
            count = min(-int(-(lengths[j] ** 2) // average), len(units))
            members = sorted((at + i) % len(units) for i in range(count))
            at += count
            for i in members:
                held[i] += lengths[j] / count
            rings.append(DocumentRing(j, "node" if count > 1 else "local", tuple(units[i] for i in members)))
        whole = [j for j in inside if lengths[j] < threshold]
        for j in whole:
            i = min(range(len(units)), key=lambda i: (held[i], i))
            if held[i] + lengths[j] > capacity:
                break
            held[i] += lengths[j]
            rings.append(DocumentRing(j, "local", (units[i],)))
        else:
            return rings
        threshold = lengths[whole[0]]


ZEPPELIN = PublishedPlanner(
    name="zeppelin", title="Zeppelin", source="EuroSys 2026, Algorithms 1 and 2", documents=zeppelin
)


BISECTIONS = 60
ROUNDING = 1 + 1e-12


class TokenTransfer(NamedTuple):
    """Tokens that one unit sends to another before the linear modules, and gets back after them."""

    sender: int
    receiver: int
    tokens: int


def least_remap_s(
    surplus: Sequence[float], node: Sequence[int], inside_s: float, between_s: float
) -> tuple[float, list[float]]:
    """The least possible cost of the unit that sends the most, and how much every unit sends inside its node.

    Args:
        surplus: tokens that a unit has too many; negative where it has too few; they sum to 0.
        node: of every unit.
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
    for i, where in enumerate(node):  # what the node can match beyond that, from whoever has it
        more = max(min(left[where], gives[i] - sends[i]), 0.0)
        sends[i] += more
        left[where] -= more
    return high_s, sends


def remap(have: Sequence[int], want: Sequence[int], costs: UnitCosts) -> list[TokenTransfer]:
    """Who sends how many tokens to whom; every unit keeps ``min(have, want)`` of its own.

    Args:
        have: tokens of every unit.
        want: tokens that it should have; the same sum.
        costs: give the node of every unit, and what sending costs.
    """
    assert sum(have) == sum(want), (have, want)
    surplus = [a - b for a, b in zip(have, want, strict=True)]
    inside_s, between_s = _link_s(costs)
    _, sends = least_remap_s(surplus, costs.node, inside_s, between_s)
    matched = _matched(surplus, costs.node)
    inside = [0] * len(have)
    for node, units in enumerate(costs.units_by_node):
        amounts = [sends[unit] for unit in units]
        if round(matched[node]):
            for unit, tokens in zip(units, share(round(matched[node]), amounts), strict=True):
                inside[unit] = min(tokens, max(surplus[unit], 0))
    lacks = [max(-extra, 0) for extra in surplus]
    transfers = []
    for units in costs.units_by_node:
        transfers += list(_match(((unit, inside[unit]) for unit in units), units, lacks))
    rest = ((unit, max(extra, 0) - sent) for unit, (extra, sent) in enumerate(zip(surplus, inside, strict=True)))
    return transfers + list(_match(rest, range(len(have)), lacks))


def even_tokens(tokens: int, costs: UnitCosts) -> tuple[int, ...]:
    """Tokens in proportion to the speed of the linear modules, as far as memory allows."""
    full: dict[int, int] = {}
    while True:
        speeds = [0.0 if unit in full else 1 / token_s for unit, token_s in enumerate(costs.token_s)]
        even = share(tokens - sum(full.values()), speeds)
        over = {unit: most for unit, most in enumerate(costs.most_tokens) if even[unit] > most}
        full |= over
        if not over or len(full) == len(speeds):
            return tuple(full.get(unit, count) for unit, count in enumerate(even))


def remapped_s(loads: Loads, costs: UnitCosts) -> float:
    """Predicted time of a block whose linear modules have even tokens.

    Every unit waits for the remap, so attention and the linear modules are each as slow as their slowest unit. A moved
    token is its queries, keys, values and output, and their gradients.
    """
    even = even_tokens(sum(loads.tokens), costs)
    linear_s = max(count * token_s for count, token_s in zip(even, costs.token_s, strict=True))
    surplus = [a - b for a, b in zip(loads.tokens, even, strict=True)]
    cost_s, _ = least_remap_s(surplus, costs.node, *_link_s(costs))
    units = zip(loads.attention_s, loads.fragments_s, loads.received_s, strict=True)
    attention_s = max(max(attention + fragments, received) for attention, fragments, received in units)
    return linear_s + attention_s + cost_s * costs.exchange_per_receive


def _link_s(costs: UnitCosts) -> tuple[float, float]:
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


def _match(gives: Iterator[tuple[int, int]], receivers: Sequence[int], lacks: list[int]) -> Iterator[TokenTransfer]:
    """Send what units give to those that lack tokens, both in order; ``lacks`` goes down."""
    at = 0
    for sender, tokens in gives:
        while tokens and at < len(receivers):
            receiver = receivers[at]
            count = min(tokens, lacks[receiver])
            if count:
                yield TokenTransfer(sender, receiver, count)
                tokens -= count
                lacks[receiver] -= count
            at += not lacks[receiver]
