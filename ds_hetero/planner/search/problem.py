"""The search problem: everything that the search may use, as arrays by canonical rank (see `canonical`).

Dimension key: D ranks (canonical), K groups, M nodes.

How much the search may evaluate: a count, not a clock, so that every machine finds the same plan.

One evaluation costs about as much as the ranks it sums over plus the ring's recurrence over pairs of groups; the
weights are those of the cost models of this package in numpy.

The few assignments that go on to the next stage of a search, and the time that another one has to undercut.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from ds_hetero.common.arrays import Bools, Floats, Ints
from ds_hetero.cost.model import CostModel
from ds_hetero.cost.terms.grouping import Grouping
from ds_hetero.planner.search.shares import whole_shares

KEPT_RANKS = 128  # ranks up to which groupings are kept
LEAST_GAIN = 1e-9  # relative; what another order of the groups must save
FIRST_ROWS, MORE_ROWS = 32, 8  # whose memory is looked at first, and how many times as many after these


class Assignment(NamedTuple):
    """A point of the search space and its value."""

    time_s: float  # the cost model's time of one block, with a layer's share of the loss
    groups: tuple[Ints, ...]  # canonical ranks of every group, in ring order
    tokens: Floats  # by canonical rank, summing to seq_len; heads: by canonical rank
    heads: Ints


@dataclass(slots=True)
class Tried:
    """Moves from one assignment that were all evaluated, and none of which was better."""

    rows_of_step: dict[float, int] = field(default_factory=dict)  # moves, by size of the step
    rows_of_heads: int | None = None  # moves of heads, the same for every step; None if they are not tried yet


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
        """Values that moves from assignments of the same grouping and heads share; see `proposals`."""
        return {}

    def best(
        self, grouping: Grouping, options: Sequence[tuple[Floats, Ints]], below_s: float = np.inf
    ) -> Assignment | None:
        """The fastest of several (tokens, heads) that fits into memory and takes less than ``below_s``, if any."""
        return self.best_row(grouping, *self.rows_of(options), below_s) if options else None

    def best_row(self, grouping: Grouping, tokens_BD: Floats, heads_BD: Ints, below_s: float) -> Assignment | None:
        """The same for arrays."""
        time_B = self.time_s(grouping, tokens_BD, heads_BD, below_s)
        return self.fastest_that_fits(grouping, tokens_BD, heads_BD, time_B, below_s)

    def rows_of(self, options: Sequence[tuple[Floats, Ints]]) -> tuple[Floats, Ints]:
        """Tokens, rounded, and heads of at least one option, ``[B, D]`` each."""
        return self.round(np.array([tokens for tokens, _ in options])), np.array([heads for _, heads in options])

    def time_s(self, grouping: Grouping, tokens_BD: Floats, heads_BD: Ints, below_s: float = np.inf) -> Floats:
        """Times as in `Assignment`, ``[B]``; infinity where no order of the groups takes less than ``below_s``."""
        loss_B = self._loss_s(tokens_BD)
        if np.isfinite(below_s):
            return _without_last_bits(self.cost.block_s_below(grouping, tokens_BD, heads_BD, below_s - loss_B) + loss_B)
        return _without_last_bits(self.cost.block_s_many(grouping, tokens_BD, heads_BD) + loss_B)

    def fastest_that_fits(
        self, grouping: Grouping, tokens_BD: Floats, heads_BD: Ints, time_B: Floats, below_s: float = np.inf
    ) -> Assignment | None:
        """The fastest row that fits into memory and takes less than ``below_s``, of rows of these times, if any.

        Memory is only looked at for rows that would be chosen.
        """
        rows = np.flatnonzero(time_B < below_s)
        rows = rows[np.argsort(time_B[rows], kind="stable")]
        first, count = 0, FIRST_ROWS
        while first < len(rows):
            some = rows[first : first + count]
            first, count = first + count, count * MORE_ROWS
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
        least_B = self.free_ring_s(self.grouping(at.groups), at.tokens[None], at.heads[None])
        return bool(least_B[0] < at.time_s * (1 - LEAST_GAIN))

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
        ratios = [speed.sum() / speed[active].sum() for speed in (self.speed, self.token_speed)]
        return self.cost.bound_s * float(min(ratios))

    def grouping(self, groups: Sequence[Ints]) -> Grouping:
        """Grouping for the cost model; ``groups`` in ring order. One partition is one object, with its tables."""
        key = tuple([group.tobytes() for group in groups])
        made = self._groupings.get(key)
        if made is None:
            made = Grouping(self.cost.cluster, groups, zigzag=self.zigzag and len(groups) > 1)
            if self.num_ranks <= KEPT_RANKS:
                self._groupings[key] = made
        return made

    @cached_property
    def _groupings(self) -> dict[tuple[bytes, ...], Grouping]:
        return {}

    @cached_property
    def coarse(self) -> bool:
        """Whether a token unit is so large that candidates must be rounded before they are compared."""
        return self.seq_len < 512 * self.token_unit * self.num_ranks

    def round(self, tokens: Floats) -> Floats:
        """Tokens (leading dimensions are kept) in whole units where units are coarse; as they are elsewhere."""
        return whole_shares(tokens, self.seq_len, self.token_unit).astype(float) if self.coarse else tokens


CALL_S = 5e-4
RANK_S = 3e-7
PAIR_S = 1.2e-8
EXHAUSTIVE_RANKS = 5  # ranks up to which all partitions are tried
THOROUGH_RANKS = 6  # ranks up to which so many starts are refined that what one descent misses another one finds
FEW_RANKS = 8  # ranks up to which a few starts are refined with more evaluations each


@dataclass(slots=True)
class EvaluationBudget:
    """Evaluations that may still be made."""

    left_s: float  # estimated seconds

    @classmethod
    def for_ranks(cls, num_ranks: int) -> EvaluationBudget:
        """0.15 s for 16 ranks, 0.3 s for 128, nearly proportional beyond; more for few, which are searched widely."""
        if num_ranks <= FEW_RANKS:
            return cls(0.4 if num_ranks <= EXHAUSTIVE_RANKS else 0.7)
        return cls(0.3 * (num_ranks / 128) ** (0.33 if num_ranks < 128 else 0.85))

    def split(self, parts: int) -> EvaluationBudget:
        """An equal part of what is left, taken out."""
        part = EvaluationBudget(max(self.left_s, 0.0) / parts)
        self.left_s -= part.left_s
        return part

    def is_spent(self, share: float) -> bool:
        """Whether ``share`` of what is left is too little for any evaluation."""
        return self.left_s * share <= CALL_S

    def rows(self, grouping: Grouping, wanted: int, share: float = 1.0) -> int:
        """How many of ``wanted`` evaluations of a grouping are within ``share`` of what is left; they count as made."""
        row_s = RANK_S * len(grouping.order) + PAIR_S * grouping.num_groups**2
        rows = min(wanted, int((self.left_s * share - CALL_S) / row_s))
        if rows <= 0:
            return 0
        self.left_s -= CALL_S + rows * row_s
        return rows


def _without_last_bits(seconds: Floats) -> Floats:
    """Times to 42 of their 53 bits: what is as fast then ties on every machine, whose sums differ in the last bits."""
    return np.asarray(((seconds.view(np.int64) + (1 << 10)) & -(1 << 11)).view(np.float64))


class Shortlist:
    """The best assignments so far, one per partition of the working ranks; of equal ones the earlier."""

    def __init__(self, keep: int, slower: float = np.inf) -> None:
        self._keep, self._slower = keep, slower
        self._kept: list[Assignment] = []
        self._partitions: dict[bytes, Assignment] = {}

    @property
    def best(self) -> list[Assignment]:
        """Those that are kept, best first."""
        return [each for each in self._kept if each.time_s <= self._slower * self._kept[0].time_s]

    @property
    def limit_s(self) -> float:
        """An assignment that takes this long, or longer, does not come in."""
        if not self._kept:
            return np.inf
        last_s = self._kept[-1].time_s if len(self._kept) == self._keep else np.inf
        return float(min(last_s, np.nextafter(self._slower * self._kept[0].time_s, np.inf)))

    def add(self, assignment: Assignment) -> None:
        """Take an assignment in, if it is among the best."""
        partition = working(assignment)
        earlier = self._partitions.get(partition)
        if assignment.time_s >= (earlier.time_s if earlier is not None else self.limit_s):
            return
        if earlier is not None:
            self._kept = [each for each in self._kept if each is not earlier]
        self._partitions[partition] = assignment
        insort(self._kept, assignment, key=attrgetter("time_s"))
        for left_out in self._kept[self._keep :]:
            del self._partitions[working(left_out)]
        del self._kept[self._keep :]


def best_of(assignments: Iterable[Assignment], keep: int, slower: float = np.inf) -> list[Assignment]:
    """The ``keep`` best, one per partition of the working ranks, at most ``slower`` times as slow as the best."""
    shortlist = Shortlist(keep, slower)
    for assignment in assignments:
        shortlist.add(assignment)
    return shortlist.best


def working(assignment: Assignment) -> bytes:
    """The partition of the ranks that work."""
    work = assignment.tokens + assignment.heads
    return b"|".join(sorted(np.sort(group[work[group] > 0]).tobytes() for group in assignment.groups))
