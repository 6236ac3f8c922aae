"""Costs of documents for the units of a schedule: seconds per token, per square of a length, and per token received.

A unit is an all-to-all group of the schedule, by its ring position. The numbers come from the calibrated cost model
(`unit_costs`) or from a schedule's token weights alone (`UnitCosts.from_weights`).

How keys and values get from node to node, and what that costs; `ds_hetero.batch.routes` says how it is done.

Rank i of a node sends to rank i of the next one, so that all links work. Where nodes do not pair up, a block of a rank
without a partner enters the next node over the link of its first rank, or over proxies in three hops, whichever is
predicted to be faster (Zeppelin, EuroSys 2026, section 3.3 and Eq. 1). Units of the same nodes that hold nothing of a
document are proxies too where that is faster still.

`ds_hetero.planner.document_search.lanes` is another way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import isfinite
from typing import NamedTuple

from ds_hetero.common.reading import MAX_SEQ_LEN, shortened
from ds_hetero.errors import PlanError
from ds_hetero.values.schedule import Schedule

Pieces = list[tuple[int, int]]
"""Of one document, units with their tokens."""


HEAD_DIM = 128  # where only a schedule is known
EVEN_LENGTH_PER_WIDTH = 10  # attention of a document takes as long as the rest at about ten times the hidden size

TILE_ROWS = 128.0  # kernels on GPUs compute query rows in tiles of so many: half a tile of each chunk is waste

_BY_UNIT = ("token_s", "square_s", "most_tokens", "node", "edge_s")
_BY_NODE = ("receive_s", "cross_s", "link_s")
_OPTIONAL = ("edge_s", "link_s")
_SCALARS = ("exchange_per_receive", "fragment_rows", "step_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitCosts:
    """Costs of one transformer block, forward and backward, by unit and by node; the same numbers on every rank.

    Args:
        square_s: attention of a whole document of n tokens takes ``n * n * square_s``, of x of its tokens
            ``x * n * square_s``; the causal halving is in it, ``[unit]``.
        fragment_rows: queries' worth of attention that a document costs each unit that holds a part of it, beside that
            part: tiles of query rows that its two chunks do not fill, and the merging of what they see.
        step_s: what a step takes besides, whoever holds which tokens, over its blocks and micro-batches: the
            optimizer, ZeRO's traffic, the part of a loss without tokens. It takes from a gain's share of the step.
        edge_s: the part of ``token_s`` that goes with a token's attention, ``[unit]``: tiles on the diagonal of its
            document, and the unit's all-to-alls; empty for none.

    Raises:
        PlanError: lengths that differ, a number that is not finite, or a time of computing that is not positive.
    """

    token_s: tuple[float, ...]  # seconds outside attention per token of a unit, recomputation included, ``[unit]``
    square_s: tuple[float, ...]
    most_tokens: tuple[int, ...]  # tokens of a batch row that a unit's memory has room for, ``[unit]``
    node: tuple[int, ...]  # node of every unit, from 0 without gaps, ``[unit]``; over several, one of its own
    receive_s: tuple[float, ...]  # seconds to pass KV of a token, and gradients, between units of a node, ``[node]``
    cross_s: tuple[float, ...]  # the same from other nodes to the node, over all its interfaces, ``[node]``
    link_s: tuple[float, ...] = ()  # the same to one unit of the node, ``[node]``; empty where that sets no limit
    exchange_per_receive: float = 0.0  # bytes of q, k, v, output and gradients over those that ``receive_s`` counts
    fragment_rows: float = TILE_ROWS
    step_s: float = 0.0
    edge_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        units, nodes = len(self.token_s), max(self.node, default=-1) + 1
        for names, count, what in ((_BY_UNIT, units, "units"), (_BY_NODE, nodes, "nodes")):
            for name in names:
                given = getattr(self, name)
                if not count or (len(given) != count and (given or name not in _OPTIONAL)):
                    raise PlanError(f"{name} has {len(getattr(self, name))} entries; there are {count} {what}.")
        if set(self.node) != set(range(nodes)):
            raise PlanError(f"node must number the nodes from 0 without gaps, got {shortened(self.node)}.")
        for name in ("token_s", "square_s"):
            if not all(isfinite(value) and value > 0 for value in getattr(self, name)):
                raise PlanError(f"{name} must be finite and > 0, got {shortened(getattr(self, name))}.")
        for name in ("most_tokens", "edge_s", *_BY_NODE):
            if not all(isfinite(value) and value >= 0 for value in getattr(self, name)):
                raise PlanError(f"{name} must be finite and >= 0, got {shortened(getattr(self, name))}.")
        if any(edge_s >= token_s for edge_s, token_s in zip(self.edge_s, self.token_s, strict=False)):
            raise PlanError(f"edge_s is a part of token_s, got {shortened(self.edge_s)} of {shortened(self.token_s)}.")
        for name in _SCALARS:
            if not (isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise PlanError(f"{name} must be finite and >= 0, got {getattr(self, name)}.")

    @classmethod
    def from_weights(cls, schedule: Schedule) -> UnitCosts:
        """Costs where no cluster is known: token weights stand for speeds, links and memory are without limit.

        Seconds have no meaning then, only their ratios. How attention compares with the rest is that of a layer with
        a head size of 128 and a 4 H wide MLP. A unit without weight gets no tokens.
        """
        weights = [group.weight for group in schedule.ring_groups]
        slowest_s = 1 / min(weight for weight in weights if weight)
        token_s = tuple(1 / weight if weight else slowest_s for weight in weights)
        even_length = EVEN_LENGTH_PER_WIDTH * HEAD_DIM * schedule.num_heads
        return cls(
            token_s=token_s,
            square_s=tuple(seconds / even_length for seconds in token_s),
            most_tokens=tuple(MAX_SEQ_LEN if weight else 0 for weight in weights),
            node=(0,) * len(weights),
            receive_s=(0.0,),
            cross_s=(0.0,),
        )

    @property
    def edges_s(self) -> tuple[float, ...]:
        """``edge_s`` of every unit."""
        return self.edge_s or (0.0,) * len(self.token_s)

    @property
    def linear_s(self) -> tuple[float, ...]:
        """Seconds per token outside attention altogether, ``[unit]``."""
        return tuple(token_s - edge_s for token_s, edge_s in zip(self.token_s, self.edges_s, strict=True))

    @property
    def num_nodes(self) -> int:
        """Nodes that the units lie on."""
        return len(self.receive_s)

    @property
    def units_by_node(self) -> tuple[tuple[int, ...], ...]:
        """Units of every node, ascending."""
        return members_by_node(self.node)

    def limited(self, max_tokens: int) -> UnitCosts:
        """The same costs where no unit may hold more than ``max_tokens`` tokens."""
        return replace(self, most_tokens=tuple(min(most, max_tokens) for most in self.most_tokens))

    def through_one_link(self) -> UnitCosts:
        """The same costs if all that enters a node did so over the link of one unit, as in one ring over all units."""
        return replace(self, cross_s=tuple(map(max, self.cross_s, self.link_s)), link_s=()) if self.link_s else self

    def to_floats(self) -> list[float]:
        """All numbers in one list, as rank 0 sends them to the others; `from_floats` reads it."""
        flat = [float(len(self.token_s)), float(self.num_nodes), *(getattr(self, name) for name in _SCALARS)]
        for name in (*_BY_UNIT, *_BY_NODE):
            count = len(self.token_s) if name in _BY_UNIT else self.num_nodes
            flat += map(float, getattr(self, name) or (0.0,) * count)
        return flat

    @classmethod
    def from_floats(cls, flat: Sequence[float]) -> UnitCosts:
        """Read what `to_floats` wrote. Raises `PlanError`: the list has another length, or the costs make no sense."""
        head = 2 + len(_SCALARS)
        units, nodes = (int(flat[0]), int(flat[1])) if len(flat) >= head else (0, 0)
        if len(flat) != head + len(_BY_UNIT) * units + len(_BY_NODE) * nodes:
            raise PlanError(f"{len(flat)} numbers are not the costs of {units} units on {nodes} nodes.")
        values, at = {}, head
        for name in (*_BY_UNIT, *_BY_NODE):
            count = units if name in _BY_UNIT else nodes
            kind = int if name in ("most_tokens", "node") else float
            values[name] = tuple(map(kind, flat[at : at + count]))
            at += count
        for name in _OPTIONAL:
            values[name] = values[name] if any(values[name]) else ()
        scalars = dict(zip(_SCALARS, map(float, flat[2:head]), strict=True))
        assert {*values, *scalars} == {field.name for field in fields(cls)}
        return cls(**values, **scalars)  # type: ignore[arg-type]


@lru_cache(maxsize=64)
def members_by_node(node: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Units, or ranks, of every node, ascending, from the node of each."""
    members: list[list[int]] = [[] for _ in range(max(node) + 1)]
    for member, where in enumerate(node):
        members[where].append(member)
    return tuple(map(tuple, members))


WORTH_PROXIES = 0.9  # three hops are more messages than one
WORTH_OUTSIDERS_S = 1e-3  # of crossing, in a block: below it, messages of ranks that compute nothing for it cost more


def routed_s_per_byte(inside_s: float, between_s: float, senders: int, receivers: int) -> float:
    """Seconds per byte from one node to another over the links of many ranks with equal blocks.

    Directly, where each link carries at most ``senders / receivers`` blocks, rounded up; or by Eq. 1 of the paper, with
    as many proxies on both sides as the smaller node has ranks.

    Args:
        inside_s: seconds per byte between two ranks of a node.
        between_s: the same of two nodes.
    """
    proxies = min(senders, receivers)
    hop_s = inside_s * (proxies - 1) / proxies
    direct_s = between_s * -(-senders // receivers) / senders
    return min(hop_s + between_s / proxies + hop_s, direct_s)


def in_order(ring: Pieces, costs: UnitCosts) -> Pieces:
    """The units of a document in the order in which its keys and values travel: by node, then by number."""
    return sorted(ring, key=lambda piece: (costs.node[piece[0]], piece[0])) if costs.num_nodes > 1 else sorted(ring)


class Crossing(NamedTuple):
    """How a document that is cut over several nodes gets into them."""

    entering: dict[int, float]  # tokens whose keys and values enter its node over a unit's link, by unit
    proxies: bool  # whether they travel in three hops over proxies
    outside: tuple[int, ...] = ()  # proxies that hold no token of the document


def crossing_of(ring: Pieces, costs: UnitCosts) -> Crossing:
    """How a document gets from node to node fastest; ``ring``: its units, by ascending node, and their tokens."""
    by_node: dict[int, list[tuple[int, int]]] = {}
    for piece in ring:
        by_node.setdefault(costs.node[piece[0]], []).append(piece)
    direct = _direct(list(by_node.values()))
    if not costs.link_s:
        return Crossing(direct, False)
    largest = max(tokens for _, tokens in ring)
    hop_s = max(largest * costs.receive_s[node] for node in by_node) * 2

    def slowest_s(entering: dict[int, float]) -> float:
        return max(tokens * costs.link_s[costs.node[unit]] for unit, tokens in entering.items())

    best, best_s = Crossing(direct, False), slowest_s(direct)
    proxied = _proxied(list(by_node.values()))
    if slowest_s(proxied) + hop_s < WORTH_PROXIES * best_s:
        best, best_s = Crossing(proxied, True), slowest_s(proxied) + hop_s
    outside = _outside(ring, by_node, costs) if best_s > WORTH_OUTSIDERS_S else {}
    if outside:
        everyone = [sorted([*by_node[node], *((unit, 0) for unit in outside[node])]) for node in by_node]
        proxied = _proxied(everyone)
        if slowest_s(proxied) + hop_s < WORTH_PROXIES * best_s:
            best = Crossing(proxied, True, tuple(unit for node in by_node for unit in outside[node]))
    return best


def _outside(ring: Pieces, nodes: Iterable[int], costs: UnitCosts) -> dict[int, list[int]]:
    """By node of a document, the node's units that hold no token of it; empty where they all do."""
    by_node = {node: costs.units_by_node[node] for node in nodes}
    if sum(map(len, by_node.values())) == len(ring):
        return {}
    held = {unit for unit, _ in ring}
    return {node: [unit for unit in units if unit not in held] for node, units in by_node.items()}


def _direct(of_nodes: Sequence[Pieces]) -> dict[int, float]:
    """Tokens that enter over every unit's link if the i-th unit of a node sends to the i-th of the next one."""
    slots = max(map(len, of_nodes))
    of_slot = [sum(pieces[i][1] for pieces in of_nodes if i < len(pieces)) for i in range(slots)]
    entering: dict[int, float] = {}
    for pieces in of_nodes:
        for (unit, tokens), total in zip(pieces, of_slot, strict=False):
            entering[unit] = total - tokens
        entering[pieces[0][0]] += sum(of_slot[len(pieces) :])
    return entering


def _proxied(of_nodes: Sequence[Pieces]) -> dict[int, float]:
    """The same over proxies: in equal parts over as many links as the smaller of a node and the one before it has."""
    length = sum(tokens for pieces in of_nodes for _, tokens in pieces)
    entering: dict[int, float] = {}
    for before, pieces in zip((of_nodes[-1], *of_nodes), of_nodes, strict=False):
        proxies = min(len(before), len(pieces))
        own = sum(tokens for _, tokens in pieces)
        for number, (unit, _) in enumerate(pieces):
            entering[unit] = (length - own) / proxies if number < proxies else 0.0
    return entering
