"""The search problem: everything that the search may use, as arrays by canonical rank (see `canonical`).

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

KEPT_RANKS = 128  # ranks up to which groupings are kept, whose tables take memory; chosen, never measured
LEAST_ORDER_GAIN = 1e-9  # of the time, that another order of the groups must save; less is rounding
# Memory is looked at for so many rows first, and for so many times as many after these. Chosen, never measured.
_FIRST_ROWS, _MORE_ROWS = 32, 8
_COARSE_UNITS = 512  # per rank; with fewer, candidates are rounded before they are compared; chosen, never measured
_LAST_BITS = 11  # of a time's 53, which differ by machine: sums are made in another order


class Assignment(NamedTuple):
    """A point of the search space and its value."""

    time_s: float  # the cost model's time of one block, with a layer's share of the loss
    groups: tuple[Ints, ...]  # canonical ranks of every group, in ring order
    tokens: Floats  # by canonical rank, summing to seq_len
    heads: Ints  # by canonical rank


@dataclass(slots=True)
class Tried:
    """Moves from one assignment that were all evaluated, and none of which was better."""

    rows_of_step: dict[float, int] = field(default_factory=dict)  # moves, by size of the step
    rows_of_heads: int | None = None  # moves of heads, the same for every step; None until they are tried


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One cost model bound to a canonical cluster, and the numbers that closed forms need."""

    cost: CostModel  # the objective; its ranks are canonical
    token_unit: int  # tokens are handed out in multiples of this
    head_units: tuple[int, ...]  # allowed granularities of head cuts, in query heads
    zigzag: bool  # layout of the positions when there is more than one group

    @property
    def num_ranks(self) -> int:
        """D."""
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
        """Whether every group computes its share of attention with every other one: not if contiguous and causal."""
        return self.zigzag or not self.cost.workload.causal

    @cached_property
    def node(self) -> Ints:
        """Node of every rank."""
        return self.cost.cluster.node_of_rank

    @cached_property
    def speed(self) -> Floats:
        """Attention speed of every rank; the fastest has 1."""
        return np.asarray(self.cost.attention_s_D.min() / self.cost.attention_s_D)

    @cached_property
    def kind(self) -> Ints:
        """Class of every rank: ranks of one class are equal but for the node they sit in. Class 0 is the fastest."""
        rows = np.stack([-self.speed, self.cost.non_attention_s_per_token_D, -self.cost.capacity_bytes_D], axis=1)
        kind = np.unique(rows, axis=0, return_inverse=True)[1]
        return np.asarray(kind.reshape(-1), dtype=np.intp)

    @cached_property
    def token_speed(self) -> Floats:
        """Shares of the sequence per second outside attention, by rank."""
        return np.asarray(1 / (self.cost.non_attention_s_per_token_D * self.seq_len))

    @cached_property
    def attention_s(self) -> Floats:
        """Seconds in which each rank alone would do the attention of one head over the whole sequence."""
        return np.asarray(self.cost.attention_s_D * float(self.seq_len) ** 2)

    @cached_property
    def inverse_bandwidth(self) -> Floats:
        """Seconds per byte between ranks of two nodes, ``[M, M]``."""
        return np.asarray(1 / self.cost.cluster.node_bytes_per_s)

    @cached_property
    def tried(self) -> dict[tuple[bytes, ...], Tried]:
        """Assignments that descents have tried in vain, by grouping, tokens and heads that they started from."""
        return {}

    @cached_property
    def looked_at(self) -> set[bytes]:
        """Sets of working ranks all of whose partitions were looked at, as bytes of their masks."""
        return set()

    @cached_property
    def of_heads(self) -> dict[tuple[bytes, ...], Any]:
        """Values that moves from assignments of the same grouping and heads share; see `moves`."""
        return {}

    def best(
        self, grouping: Grouping, options: Sequence[tuple[Floats, Ints]], below_s: float = np.inf
    ) -> Assignment | None:
        """The fastest of several (tokens, heads) that fits into memory and takes less than ``below_s``, if any."""
        return self.best_row(grouping, *self.rows_of(options), below_s) if options else None

    def best_row(self, grouping: Grouping, tokens_BD: Floats, heads_BD: Ints, below_s: float) -> Assignment | None:
        """The fastest of several rows of tokens and heads that fits and takes less than ``below_s``, if any."""
        time_B = self.time_s(grouping, tokens_BD, heads_BD, below_s)
        return self.fastest_that_fits(grouping, tokens_BD, heads_BD, time_B, below_s)

    def rows_of(self, options: Sequence[tuple[Floats, Ints]]) -> tuple[Floats, Ints]:
        """Tokens, rounded, and heads of at least one option, ``[B, D]`` each."""
        tokens_BD = self.round(np.array([tokens for tokens, _ in options]))
        heads_BD = np.array([heads for _, heads in options])
        return tokens_BD, heads_BD

    def time_s(self, grouping: Grouping, tokens_BD: Floats, heads_BD: Ints, below_s: float = np.inf) -> Floats:
        """Times as in `Assignment`, ``[B]``; infinity where no order of the groups takes less than ``below_s``."""
        loss_B = self._loss_s(tokens_BD)
        if np.isfinite(below_s):
            block_B = self.cost.block_s_below(grouping, tokens_BD, heads_BD, below_s - loss_B)
        else:
            block_B = self.cost.block_s_many(grouping, tokens_BD, heads_BD)
        return _without_last_bits(block_B + loss_B)

    def fastest_that_fits(
        self, grouping: Grouping, tokens_BD: Floats, heads_BD: Ints, time_B: Floats, below_s: float = np.inf
    ) -> Assignment | None:
        """The fastest row that fits into memory and takes less than ``below_s``, of rows of these times, if any.

        Memory is only looked at for rows that would be chosen.
        """
        rows = np.flatnonzero(time_B < below_s)
        by_time = rows[np.argsort(time_B[rows], kind="stable")]
        first, count = 0, _FIRST_ROWS
        while first < len(by_time):
            some = by_time[first : first + count]
            first, count = first + count, count * _MORE_ROWS
            need = self.cost.memory_bytes(grouping, tokens_BD[some], heads_BD[some])
            fits = (need <= self.cost.capacity_bytes_D).all(axis=-1)
            if fits.any():
                row = some[np.argmax(fits)]
                groups = np.split(grouping.order, grouping.offsets[1:-1])
                return Assignment(float(time_B[row]), tuple(groups), tokens_BD[row].copy(), heads_BD[row].copy())
        return None

    def order_matters(self, at: Assignment) -> bool:
        """Whether another order of the groups could be faster."""
        if len(at.groups) < 3:
            return False
        (least_s,) = self.free_ring_s(self.grouping(at.groups), at.tokens[None], at.heads[None])
        return bool(least_s < at.time_s * (1 - LEAST_ORDER_GAIN))

    def free_ring_s(self, grouping: Grouping, tokens_BD: Floats, heads_BD: Ints) -> Floats:
        """Times as in `Assignment` that no order of the groups undercuts, ``[B]``; see `CostModel.free_ring_s`."""
        return self.cost.free_ring_s(grouping, tokens_BD, heads_BD) + self._loss_s(tokens_BD)

    def _loss_s(self, tokens_BD: Floats) -> Floats:
        """A layer's share of the loss, so that the sum over layers is the time of a micro-batch."""
        return np.asarray((tokens_BD * self.cost.loss_s_per_token_D).max(axis=-1) / self.cost.model.num_layers)

    @cached_property
    def floor_s(self) -> float:
        """Time that no assignment can undercut whatever it does; 0 unless ZeRO's traffic sets one."""
        loss_s = self.cost.loss_s_per_token_D
        least_loss_s = self.seq_len / np.sum(1 / loss_s) if loss_s.all() else 0.0
        return float(self.cost.floor_s + least_loss_s / self.cost.model.num_layers)

    def bound_s(self, active: Bools) -> float:
        """Time of one block at perfect balance over some of the ranks."""
        ratios = [speed.sum() / speed[active].sum() for speed in (self.speed, self.token_speed)]  # of all to those
        return self.cost.bound_s * float(min(ratios))

    def grouping(self, groups: Sequence[Ints]) -> Grouping:
        """Grouping for the cost model; ``groups`` in ring order. One partition is one object, with its tables."""
        key = tuple([group.tobytes() for group in groups])
        grouping = self._groupings.get(key)
        if grouping is None:
            grouping = Grouping(self.cost.cluster, groups, zigzag=self.zigzag and len(groups) > 1)
            if self.num_ranks <= KEPT_RANKS:
                self._groupings[key] = grouping
        return grouping

    @cached_property
    def _groupings(self) -> dict[tuple[bytes, ...], Grouping]:
        return {}

    @cached_property
    def coarse(self) -> bool:
        """Whether a token unit is so large that candidates must be rounded before they are compared."""
        return self.seq_len < _COARSE_UNITS * self.token_unit * self.num_ranks

    def round(self, tokens: Floats) -> Floats:
        """Tokens (leading dimensions are kept) in whole units where units are coarse; as they are elsewhere."""
        if not self.coarse:
            return tokens
        return whole_shares(tokens, self.seq_len, self.token_unit).astype(float)


def _without_last_bits(seconds: Floats) -> Floats:
    """Times to 42 of their 53 bits: what is as fast then ties on every machine.

    Times are positive, so that their bits as whole numbers are in their order; half of the last bit that stays is
    added, and the bits below it become 0.
    """
    half, mask = 1 << (_LAST_BITS - 1), -(1 << _LAST_BITS)
    rounded = (seconds.view(np.int64) + half) & mask
    return np.asarray(rounded.view(np.float64))
