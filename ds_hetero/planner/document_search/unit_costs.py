"""Costs of documents for the units of a schedule: seconds per token, per square of a length, and per token received.

A unit is an all-to-all group of the schedule, by its ring position. The numbers come from the calibrated cost model
(`calibrated_costs.unit_costs`) or from a schedule's token weights alone (`UnitCosts.from_weights`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import isfinite

from ds_hetero.common.reading import MAX_SEQ_LEN, shortened
from ds_hetero.errors import PlanError
from ds_hetero.values.schedule import Schedule

Pieces = list[tuple[int, int]]
"""Units of one document with their tokens."""

HEAD_DIM = 128  # where only a schedule is known: the usual width of a head
# Tokens of a document over the hidden size, at which causal attention takes as long as the rest of a layer: that has
# 24 H^2 FLOPs a token, attention 2 L H. Of decoders with grouped KV heads it is less.
EVEN_LENGTH_PER_WIDTH = 10

# Kernels on GPUs compute query rows in tiles of so many: half a tile of each chunk is waste. Chosen, never measured.
TILE_ROWS = 128.0

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
