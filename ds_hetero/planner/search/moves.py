"""All moves that a descent tries from an assignment; a budget cuts off the last ones.

    order   moves                                                        why
    1       sets of ranks get more or fewer tokens                       a single one of many equal ranks saves nothing
    2       a rank gives tokens to another one (up to 16 ranks)          ranks without tokens get some
    3       heads move, and tokens follow them in several ways           heads alone may cost time before tokens follow
    4       heads and tokens of any two pairs move (up to 6 ranks)       unlike ranks are in no common class
    5       whole units of tokens, also with heads (coarse units)        rounding would undo smaller moves

Dimension key: D ranks, X moves.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from ds_hetero.common.arrays import Floats, Ints
from ds_hetero.cost.terms.grouping import Grouping
from ds_hetero.planner.search.head_moves import MAX_PAIRED_RANKS, head_moves
from ds_hetero.planner.search.problem import Assignment, ExhaustedMoves, Problem
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

# Sizes of moves, as shares of a rank's tokens, from large to small. Chosen, never measured.
STEPS = (0.3, 0.1, 0.03, 0.01, 0.003)
BOTH_STEPS = (0.1, 0.01)  # step sizes with which heads and tokens of any two pairs move at once; never measured


class Moves:
    """Tokens and heads after every move from one assignment.

    Attributes:
        count: number of moves, including those that are left out because they failed before.
        num_head_moves: number of moves of heads among them.
    """

    def __init__(self) -> None:
        self.count = self.num_head_moves = 0
        self._tokens: list[Floats] = []
        self._heads: list[Ints] = []
        self._numbers: list[Ints] = []  # place of every stored move among all moves

    def add(self, tokens_XD: Floats, heads_XD: Ints) -> None:
        """Add moves: the tokens and heads after them, ``[X, D]`` each."""
        self._tokens.append(tokens_XD)
        self._heads.append(heads_XD)
        self._numbers.append(np.arange(self.count, self.count + len(tokens_XD)))
        self.count += len(tokens_XD)

    def leave_out(self, rows: int) -> None:
        """Count moves that are known to fail, without storing them, so that a budget ends at the same move."""
        self.count += rows

    def first(self, num_allowed: int) -> tuple[Floats, Ints]:
        """Return tokens and heads after the first ``num_allowed`` moves, without those left out, ``[X, D]`` each."""
        tokens_XD, heads_XD = np.concatenate(self._tokens), np.concatenate(self._heads)
        if num_allowed == self.count:
            return tokens_XD, heads_XD
        is_allowed_X = np.concatenate(self._numbers) < num_allowed
        return tokens_XD[is_allowed_X], heads_XD[is_allowed_X]


def is_paired(problem: Problem, step: float) -> bool:
    """Whether two moves of heads are made at once: with the smallest step, and few ranks."""
    return step == STEPS[-1] and problem.num_ranks <= MAX_PAIRED_RANKS


def all_moves(
    problem: Problem, grouping: Grouping, current: Assignment, step: float, exhausted: ExhaustedMoves
) -> Moves:
    """Return all moves of size ``step`` from ``current``, in the order of the module's table.

    Moves that do not depend on the step are left out if a larger step has tried them.

    Args:
        exhausted: moves from ``current`` that failed before.
    """
    moves, context = Moves(), _move_context(problem, grouping, current)
    is_last_step = step == STEPS[-1]
    are_heads_tried = exhausted.num_head_moves is not None

    set_moves_XD = moves_of_sets(problem, grouping, current.tokens, context.sets_SD, step)
    moves.add(problem.round(set_moves_XD), np.broadcast_to(current.heads, set_moves_XD.shape))

    pairs_XD = moves_of_pairs(current.tokens, step)
    # The first half, in which a rank gives all its tokens, does not depend on the step.
    num_tried = len(pairs_XD) // 2 if are_heads_tried else 0
    moves.leave_out(num_tried)
    new_pairs_XD = pairs_XD[num_tried:]
    moves.add(problem.round(new_pairs_XD), np.broadcast_to(current.heads, new_pairs_XD.shape))

    changed_heads_XD = None
    if exhausted.num_head_moves is not None and not is_paired(problem, step):
        moves.leave_out(exhausted.num_head_moves)
    else:
        changed_heads_XD = context.moves(paired=is_last_step)
        _add_head_moves(moves, problem, grouping, current, changed_heads_XD)

    if problem.num_ranks <= MAX_PAIRED_RANKS and step in BOTH_STEPS:
        single_XD = context.moves(paired=False)
        tokens_XD = problem.round(np.repeat(pairs_XD, len(single_XD), axis=0))
        moves.add(tokens_XD, np.tile(single_XD, (len(pairs_XD), 1)))

    if problem.coarse and is_last_step:
        if changed_heads_XD is None:
            changed_heads_XD = context.moves(paired=True)
        _add_unit_moves(moves, problem, grouping, current, context.rank_class, changed_heads_XD)
    return moves


def _add_head_moves(moves: Moves, problem: Problem, grouping: Grouping, current: Assignment, heads_XD: Ints) -> None:
    """Add moves with ``heads_XD`` as new heads: with unchanged tokens, and with tokens that follow the heads."""
    unchanged_XD = np.broadcast_to(current.tokens, heads_XD.shape)
    follow_XD = tokens_follow_heads(grouping, current, heads_XD)
    speedup_XD = attention_speedup(problem, grouping, current, heads_XD)

    def shift_to_faster_groups(tokens_XD: Floats) -> Floats:
        """Return more tokens for groups whose attention has become faster."""
        return scaled_to(tokens_XD * speedup_XD, current.tokens, problem.seq_len)

    choices = [unchanged_XD, shift_to_faster_groups(unchanged_XD), follow_XD]
    if problem.num_ranks <= FEW_SETS:
        like_heads_XD = tokens_like_heads(grouping, current, heads_XD)
        choices += [shift_to_faster_groups(follow_XD), shift_to_faster_groups(like_heads_XD), like_heads_XD]
    moves.add(problem.round(np.concatenate(choices)), np.concatenate([heads_XD] * len(choices)))
    moves.num_head_moves = len(choices) * len(heads_XD)


def _add_unit_moves(
    moves: Moves, problem: Problem, grouping: Grouping, current: Assignment, rank_class: Ints, changed_heads_XD: Ints
) -> None:
    """Add moves of whole token units with unchanged and with changed heads, and of two units with unchanged heads."""
    all_heads_XD = np.concatenate([current.heads[None], changed_heads_XD])
    for units_XD, heads_XD in (
        (unit_moves(problem, grouping, rank_class), all_heads_XD),
        (two_units(problem), all_heads_XD[:1]),
    ):
        tokens_XD = current.tokens + problem.token_unit * units_XD
        tokens_XD = tokens_XD[(tokens_XD >= 0).all(axis=1)]
        moves.add(np.repeat(tokens_XD, len(heads_XD), axis=0), np.tile(heads_XD, (len(tokens_XD), 1)))


class _MoveContext:
    """Rank classes, rank sets and moves of heads, which all assignments with the same groups and heads share."""

    def __init__(self, problem: Problem, grouping: Grouping, current: Assignment) -> None:
        self.rank_class = rank_classes(problem, grouping, current)
        self.sets_SD = rank_sets(problem, grouping, self.rank_class)
        self._moves: dict[bool, Ints] = {}
        self._make = partial(head_moves, problem, grouping, current, self.rank_class)

    def moves(self, *, paired: bool) -> Ints:
        """Return the heads after every move of heads, ``[X, D]``, see `head_moves`."""
        if paired not in self._moves:
            self._moves[paired] = self._make(paired)
        return self._moves[paired]


def _move_context(problem: Problem, grouping: Grouping, current: Assignment) -> _MoveContext:
    """Return an assignment's classes, sets and moves; cached for few ranks, since the same heads often occur again."""
    if problem.num_ranks > FEW_SETS:
        return _MoveContext(problem, grouping, current)
    key = grouping.order.tobytes(), grouping.offsets.tobytes(), current.heads.tobytes()
    if key not in problem.move_contexts:
        problem.move_contexts[key] = _MoveContext(problem, grouping, current)
    context: _MoveContext = problem.move_contexts[key]
    return context
