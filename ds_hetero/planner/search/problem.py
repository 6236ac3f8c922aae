"""The search problem: a cost model with canonical ranks (see `canonical`), and arrays by rank for the search.

The search asks a problem for the fastest of many assignments that fits into memory (`Problem.best_row`).

Dimension key: B assignments, D ranks (canonical), K groups, M nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ds_hetero.common.arrays import Bools, Floats, Ints
from ds_hetero.cost.model import CostModel
from ds_hetero.cost.terms.grouping import Grouping
from ds_hetero.planner.search.shares import whole_shares

MAX_CACHED_RANKS = 128  # most ranks with which groupings are cached; their tables take memory; chosen, never measured
LEAST_ORDER_GAIN = 1e-9  # relative gain of time that another order of the groups must have; less is rounding
# Memory is computed for the 32 fastest rows first, then for 8 times as many, and so on. Chosen, never measured.
_FIRST_ROWS, _MORE_ROWS = 32, 8
_COARSE_UNITS = 512  # token units per rank; with fewer, candidates are rounded before they are compared; never measured
_NUM_ROUNDED_BITS = 11  # last bits of a time's 53 that may differ between machines, which add in different orders


class Assignment(NamedTuple):
    """Groups, tokens and heads of all ranks, and the time with them: a point of the search space."""

    time_s: float  # predicted time of one layer, with its share of the time of the loss
    groups: tuple[Ints, ...]  # canonical ranks of every group, in ring order
    tokens: Floats  # by canonical rank, summing to seq_len
    heads: Ints  # by canonical rank


@dataclass(slots=True)
class ExhaustedMoves:
    """Moves from one assignment that were all evaluated and failed: none was better."""

    num_by_step: dict[float, int] = field(default_factory=dict)  # number of moves, by step size
    num_head_moves: int | None = None  # number of moves of heads, which do not depend on the step; None if not tried


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A cost model with canonical ranks, and the numbers that closed forms need."""

    cost: CostModel  # the objective; its ranks are canonical
    token_unit: int  # every rank gets a multiple of so many tokens
    head_units: tuple[int, ...]  # allowed granularities of head cuts, in query heads
    zigzag: bool  # True for the zigzag layout of positions over several groups, False for the contiguous one

    @property
    def num_ranks(self) -> int:
        """Number of ranks, D."""
        return self.cost.cluster.num_ranks

    @property
    def num_heads(self) -> int:
        """Query heads of the model."""
        return self.cost.model.num_heads

    @property
    def seq_len(self) -> int:
        """Tokens of a sequence."""
        return self.cost.workload.seq_len

    @property
    def sees_everything(self) -> bool:
        """Whether queries of every group see keys of every other group; False for contiguous causal groups."""
        return self.zigzag or not self.cost.workload.causal

    @cached_property
    def node(self) -> Ints:
        """Index of every rank's node, ``[D]``."""
        return self.cost.cluster.node_of_rank

    @cached_property
    def speed(self) -> Floats:
        """Attention speed of every rank, ``[D]``; the fastest has 1."""
        return np.asarray(self.cost.attention_s_D.min() / self.cost.attention_s_D)

    @cached_property
    def kind(self) -> Ints:
        """Kind of every rank, ``[D]``: ranks of one kind have equal speed and memory. Kind 0 is the fastest."""
        rows = np.stack([-self.speed, self.cost.non_attention_s_per_token_D, -self.cost.capacity_bytes_D], axis=1)
        kind = np.unique(rows, axis=0, return_inverse=True)[1]
        return np.asarray(kind.reshape(-1), dtype=np.intp)

    @cached_property
    def token_speed(self) -> Floats:
        """Speed of every rank outside attention, as shares of the sequence per second, ``[D]``."""
        return np.asarray(1 / (self.cost.non_attention_s_per_token_D * self.seq_len))

    @cached_property
    def attention_s(self) -> Floats:
        """Seconds that every rank alone needs for attention of one head over the whole sequence, ``[D]``."""
        return np.asarray(self.cost.attention_s_D * float(self.seq_len) ** 2)

    @cached_property
    def inverse_bandwidth(self) -> Floats:
        """Seconds per byte between ranks of two nodes, ``[M, M]``."""
        return np.asarray(1 / self.cost.cluster.node_bytes_per_s)

    @cached_property
    def exhausted_moves(self) -> dict[tuple[bytes, ...], ExhaustedMoves]:
        """Moves that failed, by the groups, tokens and heads from which they were tried."""
        return {}

    @cached_property
    def exhausted_sets(self) -> set[bytes]:
        """Sets of working ranks for which stage I has evaluated all the partitions it proposes, as bytes of masks."""
        return set()

    @cached_property
    def move_contexts(self) -> dict[tuple[bytes, ...], Any]:
        """Cache of `moves._MoveContext`, by groups and heads as bytes."""
        return {}

    def best(
        self, grouping: Grouping, options: Sequence[tuple[Floats, Ints]], below_s: float = np.inf
    ) -> Assignment | None:
        """Return the fastest of ``options`` that fits into memory and is faster than ``below_s``; None if none is.

        Args:
            options: pairs of tokens and heads, ``[D]`` each.
        """
        return self.best_row(grouping, *self.as_rows(options), below_s) if options else None

    def best_row(self, grouping: Grouping, tokens_BD: Floats, heads_BD: Ints, below_s: float) -> Assignment | None:
        """Return the fastest row of tokens and heads that fits and is faster than ``below_s``; None if none is."""
        time_B = self.time_s(grouping, tokens_BD, heads_BD, below_s)
        return self.fastest_that_fits(grouping, tokens_BD, heads_BD, time_B, below_s)

    def as_rows(self, options: Sequence[tuple[Floats, Ints]]) -> tuple[Floats, Ints]:
        """Return the rounded tokens, and the heads, of one or more pairs as arrays, ``[B, D]`` each."""
        tokens_BD = self.round(np.array([tokens for tokens, _ in options]))
        heads_BD = np.array([heads for _, heads in options])
        return tokens_BD, heads_BD

    def time_s(self, grouping: Grouping, tokens_BD: Floats, heads_BD: Ints, below_s: float = np.inf) -> Floats:
        """Return predicted times of a layer, with its share of the loss, ``[B]``.

        The time of a row that takes at least ``below_s`` in every ring order is infinite.
        """
        loss_B = self._loss_s(tokens_BD)
        if np.isfinite(below_s):
            block_B = self.cost.block_s_below(grouping, tokens_BD, heads_BD, below_s - loss_B)
        else:
            block_B = self.cost.block_s_many(grouping, tokens_BD, heads_BD)
        return without_last_bits(block_B + loss_B)

    def fastest_that_fits(
        self, grouping: Grouping, tokens_BD: Floats, heads_BD: Ints, time_B: Floats, below_s: float = np.inf
    ) -> Assignment | None:
        """Return the fastest row that fits into memory and is faster than ``below_s``; None if none does.

        Memory is computed only for the rows that would be chosen.

        Args:
            time_B: times of the rows.
        """
        rows = np.flatnonzero(time_B < below_s)
        by_time = rows[np.argsort(time_B[rows], kind="stable")]
        first, count = 0, _FIRST_ROWS
        while first < len(by_time):
            batch = by_time[first : first + count]
            first, count = first + count, count * _MORE_ROWS
            need_bytes = self.cost.memory_bytes(grouping, tokens_BD[batch], heads_BD[batch])
            fits = (need_bytes <= self.cost.capacity_bytes_D).all(axis=-1)
            if fits.any():
                row = batch[np.argmax(fits)]  # the first that fits is the fastest
                groups = np.split(grouping.order, grouping.offsets[1:-1])
                return Assignment(float(time_B[row]), tuple(groups), tokens_BD[row].copy(), heads_BD[row].copy())
        return None

    def order_matters(self, current: Assignment) -> bool:
        """Whether another order of the groups in the ring could be faster."""
        if len(current.groups) < 3:
            return False
        (bound_s,) = self.free_ring_s(self.grouping(current.groups), current.tokens[None], current.heads[None])
        return bool(bound_s < current.time_s * (1 - LEAST_ORDER_GAIN))

    def free_ring_s(self, grouping: Grouping, tokens_BD: Floats, heads_BD: Ints) -> Floats:
        """Return lower bounds of the times in any order of the groups, ``[B]``; see `CostModel.free_ring_s`."""
        return self.cost.free_ring_s(grouping, tokens_BD, heads_BD) + self._loss_s(tokens_BD)

    def _loss_s(self, tokens_BD: Floats) -> Floats:
        """Return a layer's share of the time of the loss, ``[B]``: the loss over the number of layers."""
        return np.asarray((tokens_BD * self.cost.loss_s_per_token_D).max(axis=-1) / self.cost.model.num_layers)

    @cached_property
    def floor_s(self) -> float:
        """Lower bound of the time of every assignment; 0 unless ZeRO's traffic sets one."""
        loss_s = self.cost.loss_s_per_token_D
        least_loss_s = self.seq_len / np.sum(1 / loss_s) if loss_s.all() else 0.0
        return float(self.cost.floor_s + least_loss_s / self.cost.model.num_layers)

    def bound_s(self, active: Bools) -> float:
        """Return a lower bound of the time of a layer if only the active ranks work: perfect balance over them.

        Args:
            active: mask of the ranks that work, ``[D]``.
        """
        # Speed of all ranks over that of the active ones, in attention and outside it.
        slowdowns = [speed.sum() / speed[active].sum() for speed in (self.speed, self.token_speed)]
        return self.cost.bound_s * float(min(slowdowns))

    def grouping(self, groups: Sequence[Ints]) -> Grouping:
        """Return the groups, in ring order, as the cost model takes them; equal groups give the same object."""
        key = tuple([group.tobytes() for group in groups])
        grouping = self._groupings.get(key)
        if grouping is None:
            grouping = Grouping(self.cost.cluster, groups, zigzag=self.zigzag and len(groups) > 1)
            if self.num_ranks <= MAX_CACHED_RANKS:
                self._groupings[key] = grouping
        return grouping

    @cached_property
    def _groupings(self) -> dict[tuple[bytes, ...], Grouping]:
        """Cache of `grouping`, by the ranks of every group as bytes."""
        return {}

    @cached_property
    def coarse(self) -> bool:
        """Whether a token unit is so large that candidates have to be rounded before they are compared."""
        return self.seq_len < _COARSE_UNITS * self.token_unit * self.num_ranks

    def round(self, tokens: Floats) -> Floats:
        """Round tokens, ``[..., D]``, to whole units if units are coarse; return them unchanged otherwise."""
        if not self.coarse:
            return tokens
        return whole_shares(tokens, self.seq_len, self.token_unit).astype(float)


def without_last_bits(seconds: Floats) -> Floats:
    """Round times to 42 of their 53 bits, so that equally fast assignments tie on every machine.

    Positive floats, read as whole numbers, are in the same order. So rounding works on the bits: add half of the last
    bit that stays, and set the bits below it to 0.
    """
    half, mask = 1 << (_NUM_ROUNDED_BITS - 1), -(1 << _NUM_ROUNDED_BITS)
    rounded = (seconds.view(np.int64) + half) & mask
    return np.asarray(rounded.view(np.float64))
