"""Costs of documents on the units of a schedule: seconds per token, per square of a length, and per received token.

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
"""Units of one document with their tokens: [(0, 700), (2, 300)] is 700 tokens on unit 0 and 300 on unit 2."""

HEAD_DIM = 128  # usual head size, for costs from a schedule alone
# Ratio of a document's tokens L to the hidden size H at which causal attention takes as long as the rest of a layer:
# the rest has 24 H^2 FLOPs per token, attention 2 L H, which gives 12; it is less with grouped KV heads.
EVEN_LENGTH_PER_WIDTH = 10

# Query rows of a tile of GPU kernels: on average half a tile of every chunk is not filled. Chosen, never measured.
TILE_ROWS = 128.0

_FIELDS_BY_UNIT = ("token_s", "square_s", "most_tokens", "node", "edge_s")
_FIELDS_BY_NODE = ("receive_s", "cross_s", "link_s")
_OPTIONAL_FIELDS = ("edge_s", "link_s")
_SCALAR_FIELDS = ("exchange_per_receive", "fragment_rows", "step_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitCosts:
    """Costs of one layer, forward and backward, by unit and by node; the same numbers on every rank.

    Args:
        square_s: seconds of attention per token and token of its document, ``[unit]``: a whole document of n tokens
            takes ``n * n * square_s``, x of its tokens ``x * n * square_s``. Causal attention is already halved.
        fragment_rows: additional attention of every unit of a document that is cut, in query rows: tiles of query rows
            that its two chunks do not fill, and the merging of partial results.
        step_s: time of a step that does not depend on the placement, divided by layers and micro-batches: the
            optimizer, ZeRO's traffic, a constant part of the loss. The larger it is, the smaller is the share of a step
            that a placement can save.
        edge_s: the part of ``token_s`` that a token causes on the unit that computes its attention, also if another
            unit computes its linear layers, ``[unit]``: tiles on the diagonal of its document, and the unit's
            all-to-alls; empty for none.

    Raises:
        PlanError: tuples have different lengths, a number is not finite, or a time of computing is not positive.
    """

    token_s: tuple[float, ...]  # seconds per token outside attention, recomputation included, ``[unit]``
    square_s: tuple[float, ...]
    most_tokens: tuple[int, ...]  # tokens of a batch row that fit into a unit's memory, ``[unit]``
    node: tuple[int, ...]  # node of every unit, from 0 without gaps, ``[unit]``; a unit over several has a separate one
    receive_s: tuple[float, ...]  # seconds to send a token's keys, values and their gradients inside a node, ``[node]``
    cross_s: tuple[float, ...]  # the same from other nodes to a node, over all its NICs, ``[node]``
    link_s: tuple[float, ...] = ()  # the same to one unit of the node, ``[node]``; empty if a unit's link sets no limit
    exchange_per_receive: float = 0.0  # bytes of q, k, v, output and gradients over the bytes of ``receive_s``
    fragment_rows: float = TILE_ROWS
    step_s: float = 0.0
    edge_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        units, nodes = len(self.token_s), max(self.node, default=-1) + 1
        for names, count, what in ((_FIELDS_BY_UNIT, units, "units"), (_FIELDS_BY_NODE, nodes, "nodes")):
            for name in names:
                values = getattr(self, name)
                is_left_out = not values and name in _OPTIONAL_FIELDS
                if not count or (len(values) != count and not is_left_out):
                    raise PlanError(f"{name} has {len(values)} entries; there are {count} {what}.")
        if set(self.node) != set(range(nodes)):
            raise PlanError(f"node must number the nodes from 0 without gaps, got {shortened(self.node)}.")
        for name in ("token_s", "square_s"):
            if not all(isfinite(value) and value > 0 for value in getattr(self, name)):
                raise PlanError(f"{name} must be finite and > 0, got {shortened(getattr(self, name))}.")
        for name in ("most_tokens", "edge_s", *_FIELDS_BY_NODE):
            if not all(isfinite(value) and value >= 0 for value in getattr(self, name)):
                raise PlanError(f"{name} must be finite and >= 0, got {shortened(getattr(self, name))}.")
        if any(edge_s >= token_s for edge_s, token_s in zip(self.edge_s, self.token_s, strict=False)):
            raise PlanError(
                f"edge_s must be less than token_s, of which it is a part; got {shortened(self.edge_s)} and "
                f"{shortened(self.token_s)}."
            )
        for name in _SCALAR_FIELDS:
            if not (isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise PlanError(f"{name} must be finite and >= 0, got {getattr(self, name)}.")

    @classmethod
    def from_weights(cls, schedule: Schedule) -> UnitCosts:
        """Make costs from a schedule alone: token weights are speeds; links and memory have no limit.

        Only the ratios of these seconds count. The ratio of attention to the rest is that of a layer with a head size
        of 128 and an MLP of width 4 H. A unit without weight gets no tokens.
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
        """``edge_s`` of every unit, ``[unit]``; 0 if it was left out."""
        return self.edge_s or (0.0,) * len(self.token_s)

    @property
    def linear_s(self) -> tuple[float, ...]:
        """Seconds per token in linear layers alone: ``token_s`` less ``edge_s``, ``[unit]``."""
        return tuple(token_s - edge_s for token_s, edge_s in zip(self.token_s, self.edges_s, strict=True))

    @property
    def num_nodes(self) -> int:
        """Number of nodes of the units."""
        return len(self.receive_s)

    @property
    def units_by_node(self) -> tuple[tuple[int, ...], ...]:
        """Units of every node, ascending."""
        return members_by_node(self.node)

    def limited(self, max_tokens: int) -> UnitCosts:
        """Return the same costs with at most ``max_tokens`` tokens on every unit."""
        return replace(self, most_tokens=tuple(min(most, max_tokens) for most in self.most_tokens))

    def through_one_link(self) -> UnitCosts:
        """Return the same costs for one ring over all units: all tokens enter a node over the link of one unit."""
        return replace(self, cross_s=tuple(map(max, self.cross_s, self.link_s)), link_s=()) if self.link_s else self

    def to_floats(self) -> list[float]:
        """Return all numbers in one list, as rank 0 sends them to the other ranks; `from_floats` reads it."""
        flat = [float(len(self.token_s)), float(self.num_nodes), *(getattr(self, name) for name in _SCALAR_FIELDS)]
        for name in (*_FIELDS_BY_UNIT, *_FIELDS_BY_NODE):
            count = len(self.token_s) if name in _FIELDS_BY_UNIT else self.num_nodes
            flat += map(float, getattr(self, name) or (0.0,) * count)
        return flat

    @classmethod
    def from_floats(cls, flat: Sequence[float]) -> UnitCosts:
        """Make the costs from a list of `to_floats`. Raises `PlanError` if its length or its numbers are impossible."""
        header_size = 2 + len(_SCALAR_FIELDS)  # number of units, number of nodes, scalars
        units, nodes = (int(flat[0]), int(flat[1])) if len(flat) >= header_size else (0, 0)
        if len(flat) != header_size + len(_FIELDS_BY_UNIT) * units + len(_FIELDS_BY_NODE) * nodes:
            raise PlanError(f"{len(flat)} numbers are not the costs of {units} units on {nodes} nodes.")
        values, start = {}, header_size
        for name in (*_FIELDS_BY_UNIT, *_FIELDS_BY_NODE):
            count = units if name in _FIELDS_BY_UNIT else nodes
            number_type = int if name in ("most_tokens", "node") else float
            values[name] = tuple(map(number_type, flat[start : start + count]))
            start += count
        for name in _OPTIONAL_FIELDS:
            values[name] = values[name] if any(values[name]) else ()
        scalars = dict(zip(_SCALAR_FIELDS, map(float, flat[2:header_size]), strict=True))
        assert {*values, *scalars} == {field.name for field in fields(cls)}
        return cls(**values, **scalars)  # type: ignore[arg-type]


@lru_cache(maxsize=64)
def members_by_node(node: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the units, or ranks, of every node, ascending.

    Args:
        node: node of every unit, or rank: (0, 0, 1) gives ((0, 1), (2,)).
    """
    members: list[list[int]] = [[] for _ in range(max(node) + 1)]
    for member, member_node in enumerate(node):
        members[member_node].append(member)
    return tuple(map(tuple, members))
