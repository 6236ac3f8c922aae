"""All moves that a descent tries from an assignment, in the order in which a budget cuts them off.

    order   moves                                                        what for
    1       sets of ranks have more or fewer tokens                      equal ranks end together
    2       a rank gives tokens to another one (up to 16 ranks)          ranks without tokens get some
    3       heads move, and tokens follow them in several ways           a step that only both together make shorter
    4       heads and tokens of any two pairs (up to 6 ranks)            unlike ranks, where no class stands for many
    5       whole units, with and without heads (coarse units)           rounding would undo smaller moves

Dimension key: D ranks, X moves.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from ds_hetero.common.arrays import Floats, Ints
from ds_hetero.cost.terms.grouping import Grouping
from ds_hetero.planner.search.head_moves import MAX_PAIRED_RANKS, head_moves
from ds_hetero.planner.search.problem import Assignment, Problem, Tried
from ds_hetero.planner.search.rank_sets import FEW_SETS, rank_classes, rank_sets
from ds_hetero.planner.search.token_moves import (
    attention_speedup,
    moves_of_pairs,
    moves_of_sets,
    scaled_to,
    tokens_follow_heads,
    tokens_like_heads,
)
from ds_hetero.planner.search.unit_moves import two_units, unit_moves

# Sizes of moves, as a share of a rank's tokens, from large to small. Chosen, never measured.
STEPS = (0.3, 0.1, 0.03, 0.01, 0.003)
BOTH_STEPS = (0.1, 0.01)  # at which heads and tokens of any two pairs move at once; chosen, never measured


class Moves:
    """Tokens and heads after every move from one assignment, the most general moves first.

    Attributes:
        count: moves, those that were left out included.
        rows_of_heads: moves of heads among them.
    """

    def __init__(self) -> None:
        self.count = self.rows_of_heads = 0
        self._tokens: list[Floats] = []
        self._heads: list[Ints] = []
        self._numbers: list[Ints] = []  # of the moves that are there, among all

    def add(self, tokens_XD: Floats, heads_XD: Ints) -> None:
        """Add moves, ``[X, D]`` each."""
        self._tokens.append(tokens_XD)
        self._heads.append(heads_XD)
        self._numbers.append(np.arange(self.count, self.count + len(tokens_XD)))
        self.count += len(tokens_XD)

    def leave_out(self, rows: int) -> None:
        """Count moves that are known to be in vain, so that a budget ends where it would with them."""
        self.count += rows

    def first(self, allowed: int) -> tuple[Floats, Ints]:
        """Return tokens and heads of those of the first ``allowed`` moves that are not left out."""
        tokens_XD, heads_XD = np.concatenate(self._tokens), np.concatenate(self._heads)
        if allowed == self.count:
            return tokens_XD, heads_XD
        is_allowed = np.concatenate(self._numbers) < allowed
        return tokens_XD[is_allowed], heads_XD[is_allowed]


def is_paired(problem: Problem, step: float) -> bool:
    """Whether two moves of heads are made at once: at the last step, of few ranks."""
    return step == STEPS[-1] and problem.num_ranks <= MAX_PAIRED_RANKS


def all_moves(problem: Problem, grouping: Grouping, at: Assignment, step: float, tried: Tried) -> Moves:
    """All moves of a step from here; those that do not depend on the step only once."""
    moves, of_heads = Moves(), _of_heads(problem, grouping, at)
    is_last_step = step == STEPS[-1]
    are_heads_tried = tried.rows_of_heads is not None

    by_sets_XD = moves_of_sets(problem, grouping, at.tokens, of_heads.sets_SD, step)
    moves.add(problem.round(by_sets_XD), np.broadcast_to(at.heads, by_sets_XD.shape))

    pairs_XD = moves_of_pairs(at.tokens, step)
    # The first half, in which a rank gives all that it has, does not depend on the step.
    num_tried = len(pairs_XD) // 2 if are_heads_tried else 0
    moves.leave_out(num_tried)
    new_pairs_XD = pairs_XD[num_tried:]
    moves.add(problem.round(new_pairs_XD), np.broadcast_to(at.heads, new_pairs_XD.shape))

    changed_heads_XD = None
    if tried.rows_of_heads is not None and not is_paired(problem, step):
        moves.leave_out(tried.rows_of_heads)
    else:
        changed_heads_XD = of_heads.moves(paired=is_last_step)
        _add_head_moves(moves, problem, grouping, at, changed_heads_XD)

    if problem.num_ranks <= MAX_PAIRED_RANKS and step in BOTH_STEPS:
        single_XD = of_heads.moves(paired=False)
        tokens_XD = problem.round(np.repeat(pairs_XD, len(single_XD), axis=0))
        moves.add(tokens_XD, np.tile(single_XD, (len(pairs_XD), 1)))

    if problem.coarse and is_last_step:
        if changed_heads_XD is None:
            changed_heads_XD = of_heads.moves(paired=True)
        _add_unit_moves(moves, problem, grouping, at, of_heads.rank_class, changed_heads_XD)
    return moves


def _add_head_moves(moves: Moves, problem: Problem, grouping: Grouping, at: Assignment, heads_XD: Ints) -> None:
    """Add changed heads with the tokens as they are, and with tokens that follow them in several ways."""
    stay_XD = np.broadcast_to(at.tokens, heads_XD.shape)
    follow_XD = tokens_follow_heads(grouping, at, heads_XD)
    speedup_XD = attention_speedup(problem, grouping, at, heads_XD)

    def sped_up(tokens_XD: Floats) -> Floats:
        """Groups whose attention has become faster have more tokens."""
        return scaled_to(tokens_XD * speedup_XD, at.tokens, problem.seq_len)

    tokens = [stay_XD, sped_up(stay_XD), follow_XD]
    if problem.num_ranks <= FEW_SETS:
        like_heads_XD = tokens_like_heads(grouping, at, heads_XD)
        tokens += [sped_up(follow_XD), sped_up(like_heads_XD), like_heads_XD]
    moves.add(problem.round(np.concatenate(tokens)), np.concatenate([heads_XD] * len(tokens)))
    moves.rows_of_heads = len(tokens) * len(heads_XD)


def _add_unit_moves(
    moves: Moves, problem: Problem, grouping: Grouping, at: Assignment, rank_class: Ints, changed_heads_XD: Ints
) -> None:
    """Add moves of whole units with the heads as they are and with changed ones, and of two units without."""
    all_heads_XD = np.concatenate([at.heads[None], changed_heads_XD])
    for units_XD, heads_XD in (
        (unit_moves(problem, grouping, rank_class), all_heads_XD),
        (two_units(problem), all_heads_XD[:1]),
    ):
        tokens_XD = at.tokens + problem.token_unit * units_XD
        tokens_XD = tokens_XD[(tokens_XD >= 0).all(axis=1)]
        moves.add(np.repeat(tokens_XD, len(heads_XD), axis=0), np.tile(heads_XD, (len(tokens_XD), 1)))


class _OfHeads:
    """Parts that moves from assignments with the same groups and heads share: rank classes, rank sets, head moves."""

    def __init__(self, problem: Problem, grouping: Grouping, at: Assignment) -> None:
        self.rank_class = rank_classes(problem, grouping, at)
        self.sets_SD = rank_sets(problem, grouping, self.rank_class)
        self._moves: dict[bool, Ints] = {}
        self._make = partial(head_moves, problem, grouping, at, self.rank_class)

    def moves(self, *, paired: bool) -> Ints:
        """Return `head_moves`."""
        if paired not in self._moves:
            self._moves[paired] = self._make(paired)
        return self._moves[paired]


def _of_heads(problem: Problem, grouping: Grouping, at: Assignment) -> _OfHeads:
    """Make it, or find it where there are few ranks, of which a search meets the same heads again and again."""
    if problem.num_ranks > FEW_SETS:
        return _OfHeads(problem, grouping, at)
    key = grouping.order.tobytes(), grouping.offsets.tobytes(), at.heads.tobytes()
    if key not in problem.of_heads:
        problem.of_heads[key] = _OfHeads(problem, grouping, at)
    of_heads: _OfHeads = problem.of_heads[key]
    return of_heads
