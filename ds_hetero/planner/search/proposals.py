"""The moves that a descent tries from an assignment: sets of ranks together, pairs of ranks, heads with tokens.

Dimension key: D ranks, K groups, S sets of ranks, X proposals.

Stage III: descent over heads and tokens of one partition.

HexiSeq moves a little between two devices and accepts what strictly lowers the block time. With equal
devices every bottleneck is a tie of many, and no move of a pair lowers a maximum; so sets of equal ranks move
together, heads and tokens move in one step, and single ranks move where there are few (`proposals`).

One round proposes all moves of one step size, evaluates them in one call and takes the best.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import permutations, product

import numpy as np

from ds_hetero.common.arrays import Bools, Floats, Ints, distinct
from ds_hetero.cost.terms.grouping import Grouping
from ds_hetero.planner.search.problem import Assignment, EvaluationBudget, Problem, Tried

Masks = Bools

STEPS = (0.3, 0.1, 0.03, 0.01, 0.003)
BOTH_STEPS = (0.1, 0.01)  # at which a head and tokens move between any two pairs of a few ranks at once
MAX_SETS, FEW_SETS = 32, 16  # finer labels than this do not become sets; the second for nodes, groups and ranks
FEW_CLASSES = 5  # of the most and of the least loaded ones that exchange heads
MAX_PAIRED_RANKS = 6  # ranks up to which two heads move at once
MAX_DIRECTED_RANKS = 5  # ranks up to which tokens of all of them move at once, in `in_all_directions`
MAX_TABLE = 4_000_000  # numbers in one batch of proposals


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
        self._places: list[Ints] = []

    def add(self, tokens_XD: Floats, heads_XD: Ints) -> None:
        """Add moves, ``[X, D]`` each."""
        self._tokens.append(tokens_XD)
        self._heads.append(heads_XD)
        self._places.append(np.arange(self.count, self.count + len(tokens_XD)))
        self.count += len(tokens_XD)

    def leave_out(self, rows: int) -> None:
        """Count moves that are known to be in vain."""
        self.count += rows

    def first(self, allowed: int) -> tuple[Floats, Ints]:
        """Return tokens and heads of those of the first ``allowed`` moves that are not left out."""
        tokens_XD, heads_XD = np.concatenate(self._tokens), np.concatenate(self._heads)
        if allowed == self.count:
            return tokens_XD, heads_XD
        rows = np.concatenate(self._places) < allowed
        return tokens_XD[rows], heads_XD[rows]


def is_paired(problem: Problem, step: float) -> bool:
    """Whether two heads move at once."""
    return step == STEPS[-1] and problem.num_ranks <= MAX_PAIRED_RANKS


def proposals(problem: Problem, grouping: Grouping, at: Assignment, step: float, tried: Tried) -> Moves:
    """All moves of a step from here; those that do not depend on the step only once."""
    moves, of_heads = Moves(), _of_heads(problem, grouping, at)
    by_sets_XD = _token_moves(problem, grouping, at.tokens, of_heads.sets_SD, step)
    pairs_XD = _pair_moves(at.tokens, step)
    again = 0 if tried.rows_of_heads is None else len(pairs_XD) // 2  # a rank gives all that it has
    moves.add(problem.round(by_sets_XD), np.broadcast_to(at.heads, by_sets_XD.shape))
    moves.leave_out(again)
    moves.add(problem.round(pairs_XD[again:]), np.broadcast_to(at.heads, pairs_XD[again:].shape))
    changed_XD = None
    if tried.rows_of_heads is not None and not is_paired(problem, step):
        moves.leave_out(tried.rows_of_heads)
    else:
        changed_XD = of_heads.moves(paired=step == STEPS[-1])
        _add_head_moves(moves, problem, grouping, at, changed_XD)
    if problem.num_ranks <= MAX_PAIRED_RANKS and step in BOTH_STEPS:
        single_XD = of_heads.moves(paired=False)
        both_XD = problem.round(np.repeat(pairs_XD, len(single_XD), axis=0))
        moves.add(both_XD, np.tile(single_XD, (len(pairs_XD), 1)))
    if problem.coarse and step == STEPS[-1]:
        if changed_XD is None:
            changed_XD = of_heads.moves(paired=True)
        _add_unit_moves(moves, problem, grouping, at, of_heads.rank_class, changed_XD)
    return moves


def _add_head_moves(moves: Moves, problem: Problem, grouping: Grouping, at: Assignment, changed_XD: Ints) -> None:
    """Add changed heads with the tokens as they are, and with tokens that follow them in several ways."""
    stay_XD = np.broadcast_to(at.tokens, changed_XD.shape)
    beside_XD = _tokens_beside(grouping, at, changed_XD)
    faster_XD = _faster(problem, grouping, at, changed_XD)
    tokens = [stay_XD, filled(stay_XD * faster_XD, at.tokens, problem.seq_len), beside_XD]
    if problem.num_ranks <= FEW_SETS:
        like_heads_XD = _tokens_like_heads(grouping, at, changed_XD)
        tokens += [filled(each * faster_XD, at.tokens, problem.seq_len) for each in (beside_XD, like_heads_XD)]
        tokens.append(like_heads_XD)
    moves.add(problem.round(np.concatenate(tokens)), np.concatenate([changed_XD] * len(tokens)))
    moves.rows_of_heads = len(tokens) * len(changed_XD)


def _add_unit_moves(
    moves: Moves, problem: Problem, grouping: Grouping, at: Assignment, rank_class: Ints, changed_XD: Ints
) -> None:
    """Add moves of whole units, with the heads as they are and with changed ones."""
    heads_YD = np.concatenate([at.heads[None], changed_XD])
    for moves_XD, with_XD in (
        (_unit_moves(problem, grouping, rank_class), heads_YD),
        (two_units(problem), heads_YD[:1]),
    ):
        unit_XD = at.tokens + problem.token_unit * moves_XD
        unit_XD = unit_XD[(unit_XD >= 0).all(axis=1)]
        moves.add(np.repeat(unit_XD, len(with_XD), axis=0), np.tile(with_XD, (len(unit_XD), 1)))


class _OfHeads:
    """Values that moves depend on if only tokens change: `_rank_classes`, `_sets`, and the moves of heads."""

    def __init__(self, problem: Problem, grouping: Grouping, at: Assignment) -> None:
        self.rank_class = _rank_classes(problem, grouping, at)
        self.sets_SD = _sets(problem, grouping, self.rank_class)
        self._made: dict[bool, Ints] = {}
        self._make = partial(_head_moves, problem, grouping, at, self.rank_class)

    def moves(self, *, paired: bool) -> Ints:
        """Return `_head_moves`."""
        if paired not in self._made:
            self._made[paired] = self._make(paired)
        return self._made[paired]


def _of_heads(problem: Problem, grouping: Grouping, at: Assignment) -> _OfHeads:
    """Make it, or find it where there are few ranks, of which a search meets the same heads again and again."""
    if problem.num_ranks > FEW_SETS:
        return _OfHeads(problem, grouping, at)
    key = grouping.order.tobytes(), grouping.offsets.tobytes(), at.heads.tobytes()
    if key not in problem.of_heads:
        problem.of_heads[key] = _OfHeads(problem, grouping, at)
    made: _OfHeads = problem.of_heads[key]
    return made


def _rank_classes(problem: Problem, grouping: Grouping, at: Assignment) -> Ints:
    """Class of every rank, ``[D]``: one class is ranks that do the same work in groups of the same make-up."""
    _, own = np.unique(problem.kind * (problem.num_heads + 1) + at.heads, return_inverse=True)
    count = int(own.max()) + 1
    if grouping.num_groups * count > MAX_TABLE:
        return np.asarray(own)
    makeup = np.bincount(grouping.group_of * count + own, minlength=grouping.num_groups * count)
    _, group_class = np.unique(makeup.reshape(-1, count), axis=0, return_inverse=True)
    _, rank_class = np.unique(group_class.reshape(-1)[grouping.group_of] * count + own, return_inverse=True)
    return np.asarray(rank_class)


def _sets(problem: Problem, grouping: Grouping, rank_class: Ints) -> Masks:
    """Ranks to move together: by kind, by class, by node, by group, one by one; as masks ``[S, D]``."""
    single = np.arange(problem.num_ranks)
    return _masks(
        (
            (problem.kind, MAX_SETS), (rank_class, MAX_SETS), (problem.node, FEW_SETS), (grouping.group_of, FEW_SETS),
            (single, FEW_SETS),
        ),
        problem.num_ranks,
    )  # fmt: skip


def _masks(labels: Sequence[tuple[Ints, int]], num_ranks: int) -> Masks:
    """The sets of ranks with one value of a label, without repeats, ``[S, D]``; each label with its limit of values."""
    masks = [np.zeros((0, num_ranks), dtype=bool)]
    for label, limit in labels:
        num_values = int(label.max()) + 1
        if 1 < num_values <= limit:
            masks.append(label == np.arange(num_values)[:, None])
    unique = {mask.tobytes(): mask for mask in np.concatenate(masks)}
    return np.array(list(unique.values()), dtype=bool).reshape(-1, num_ranks)


def _token_moves(problem: Problem, grouping: Grouping, tokens: Floats, masks_SD: Masks, step: float) -> Floats:
    """Give a set of ranks a little more or less: at the expense of everybody, or of the rest of their groups."""
    factors = np.array([1 + step, 1 / (1 + step)])
    scaled = (tokens * np.where(masks_SD[:, None, :], factors[:, None], 1.0)).reshape(-1, problem.num_ranks)
    everybody = filled(scaled, tokens, tokens.sum())
    part_of_a_group = grouping.by_group(np.logical_or, masks_SD) & ~grouping.by_group(np.logical_and, masks_SD)
    scaled = scaled[np.repeat(part_of_a_group.any(axis=1), 2)]
    inside_XK = grouping.by_group(np.add, scaled)
    before_K = grouping.by_group(np.add, tokens)
    scale_XK = np.divide(before_K, inside_XK, out=np.ones_like(inside_XK), where=inside_XK > 0)
    return np.concatenate([everybody, scaled * scale_XK[:, grouping.group_of]])


def _pair_moves(tokens: Floats, step: float) -> Floats:
    """Tokens after one rank has given another one a share of the sequence, or all of its own, where ranks are few.

    Other moves scale what a rank has; these also give tokens to ranks that have none.
    """
    num_ranks = len(tokens)
    if num_ranks > FEW_SETS:
        return np.zeros((0, num_ranks))
    giver, taker = np.nonzero(~np.eye(num_ranks, dtype=bool) & (tokens > 0)[:, None])
    most = tokens[giver]
    amounts_2P = np.array([most, np.minimum(most, step * tokens.sum() / num_ranks)])
    moved_2PD, pairs = np.full((2, len(giver), num_ranks), tokens), np.arange(len(giver))
    moved_2PD[:, pairs, giver] -= amounts_2P
    moved_2PD[:, pairs, taker] += amounts_2P
    return moved_2PD.reshape(-1, num_ranks)


def _head_moves(problem: Problem, grouping: Grouping, at: Assignment, rank_class: Ints, paired: bool) -> Ints:
    """Heads after moving one unit between two classes of a group: in every group that has both, and in the first alone.

    Also from all ranks of a class to all of another one, since an exchange ends with its slowest rank; and where there
    are few ranks, two such moves at once.
    """
    classes = _classes_to_move(problem, at, rank_class)
    first, last = _first_and_last(grouping, rank_class, classes)
    changes = list(_moves_of_classes(problem, grouping, rank_class, classes))
    for a, b in product(range(len(classes)), repeat=2):
        takers = last[b] if a == b else first[b]
        pairs = [(first[a][k], takers[k]) for k in sorted(first[a].keys() & takers.keys()) if first[a][k] != takers[k]]
        both = pairs + [(t, g) for g, t in pairs] if a == b else pairs
        for unit, chosen in product(problem.head_units, {len(pairs), 1} if pairs else ()):
            for some in (both[:chosen], both[len(pairs) :][:chosen]):
                if some and at.heads[some[0][0]] >= unit:
                    change = np.zeros(problem.num_ranks, dtype=np.int64)
                    for giver, taker in some:
                        change[giver] -= unit
                        change[taker] += unit
                    changes.append(change)
    if not changes:
        return np.zeros((0, problem.num_ranks), dtype=np.int64)
    change_XD = np.array(changes)
    if paired and problem.num_ranks <= MAX_PAIRED_RANKS:
        i, j = np.triu_indices(len(change_XD), k=1)
        change_XD = distinct(np.concatenate([change_XD, change_XD[i] + change_XD[j]]), axis=0)
    heads_XD = at.heads + change_XD
    return np.asarray(heads_XD[(heads_XD >= 0).all(axis=1)])


def _moves_of_classes(problem: Problem, grouping: Grouping, rank_class: Ints, classes: Sequence[int]) -> Iterator[Ints]:
    """Changes of heads where every rank of one class gives a unit to the ranks of another one in its group, ``[D]``."""
    members = [
        [np.flatnonzero((rank_class == a) & (grouping.group_of == k)) for a in classes] for k in _groups(grouping)
    ]
    for a, b in permutations(range(len(classes)), 2):
        both = [(of_group[a], of_group[b]) for of_group in members if len(of_group[a]) and len(of_group[b])]
        if not any(len(givers) > 1 or len(takers) > 1 for givers, takers in both):
            continue
        for unit in problem.head_units:
            change = np.zeros(problem.num_ranks, dtype=np.int64)
            for givers, takers in both:
                change[givers] -= unit
                np.add.at(change, takers[np.arange(len(givers)) % len(takers)], unit)
            yield change


def _groups(grouping: Grouping) -> range:
    """Numbers of the groups whose ranks move heads together; of many groups alike, none."""
    return range(grouping.num_groups if grouping.num_groups <= FEW_SETS else 0)


def _classes_to_move(problem: Problem, at: Assignment, rank_class: Ints) -> list[int]:
    """The classes whose attention takes longest and shortest; all where there are few."""
    classes, first = np.unique(rank_class, return_index=True)
    if len(classes) <= 2 * FEW_CLASSES:
        return list(classes.tolist())
    load = (at.heads * problem.attention_s)[first]
    order = classes[np.argsort(load, kind="stable")].tolist()
    return [*order[:FEW_CLASSES], *order[-FEW_CLASSES:]]


def _first_and_last(
    grouping: Grouping, rank_class: Ints, classes: Sequence[int]
) -> tuple[list[dict[int, int]], list[dict[int, int]]]:
    """The first and the last rank of every class in every group that has one, by class and group."""
    first: dict[int, dict[int, int]] = {each: {} for each in classes}
    last: dict[int, dict[int, int]] = {each: {} for each in classes}
    in_order = rank_class[grouping.order].tolist(), grouping.group_of[grouping.order].tolist(), grouping.order.tolist()
    for each, group, rank in zip(*in_order, strict=True):
        if each in first:
            first[each].setdefault(group, rank)
            last[each][group] = rank
    return list(first.values()), list(last.values())


def _faster(problem: Problem, grouping: Grouping, at: Assignment, heads_XD: Ints) -> Floats:
    """How much faster the new heads make the slowest rank of every rank's group, ``[X, D]``."""
    before_K = grouping.by_group(np.maximum, at.heads * problem.attention_s)
    after_XK = grouping.by_group(np.maximum, heads_XD * problem.attention_s)
    return np.asarray((before_K / after_XK)[:, grouping.group_of])


def _tokens_beside(grouping: Grouping, at: Assignment, heads_XD: Ints) -> Floats:
    """Tokens of every rank scaled like its heads within its group: what a rank keeps it need not send."""
    ratio_XD = np.divide(heads_XD, at.heads, out=np.ones(heads_XD.shape), where=at.heads > 0)
    moved_XD = at.tokens * ratio_XD
    before_K, after_XK = grouping.by_group(np.add, at.tokens), grouping.by_group(np.add, moved_XD)
    scale_XK = np.divide(before_K, after_XK, out=np.ones_like(after_XK), where=after_XK > 0)
    moved_XD = moved_XD * scale_XK[:, grouping.group_of]
    return filled(moved_XD, at.tokens, at.tokens.sum())


def _tokens_like_heads(grouping: Grouping, at: Assignment, heads_XD: Ints) -> Floats:
    """Tokens of every group shared in proportion to heads, the best where only links matter."""
    share_XD = heads_XD / grouping.by_group(np.add, heads_XD)[:, grouping.group_of]
    return np.asarray(share_XD * grouping.by_group(np.add, at.tokens)[grouping.group_of])


def filled(share_XD: Floats, tokens: Floats, total: float) -> Floats:
    """``total`` tokens in proportion to every row; where all that had tokens lost them, they stay where they were."""
    whole_X = share_XD.sum(axis=1)
    scale_X = np.divide(total, whole_X, out=np.zeros_like(whole_X), where=whole_X > 0)
    return np.asarray(np.where(whole_X[:, None] > 0, share_XD * scale_X[:, None], tokens))


def _unit_moves(problem: Problem, grouping: Grouping, rank_class: Ints) -> Floats:
    """Whole token units from one set of ranks to another, every rank of a set giving or taking alike, ``[X, D]``.

    Sets are classes, kinds and groups, and single ranks where there are few.
    """
    num_ranks = problem.num_ranks
    masks = _masks(((rank_class, FEW_SETS), (problem.kind, FEW_SETS), (grouping.group_of, FEW_SETS)), num_ranks)
    moves = [units * _one_unit(num_ranks) for units in (1, 2, 3)] if num_ranks <= FEW_SETS else []
    for a, b in permutations(masks, 2):
        if not (a & b).any():
            whole = np.lcm(a.sum(), b.sum())
            moves.append((whole // b.sum() * b - whole // a.sum() * a.astype(float))[None])
    return np.concatenate([np.zeros((0, num_ranks)), *moves])


def two_units(problem: Problem) -> Floats:
    """One unit from a rank to another, or two units between single ranks at once, where there are few, ``[X, D]``."""
    if problem.num_ranks > MAX_PAIRED_RANKS:
        return np.zeros((0, problem.num_ranks))
    single_XD = _one_unit(problem.num_ranks)
    i, j = np.triu_indices(len(single_XD))
    return np.asarray(np.concatenate([single_XD, single_XD[i] + single_XD[j]]))


def _one_unit(num_ranks: int) -> Floats:
    """One unit from every rank to every other one, ``[X, D]``."""
    eye = np.eye(num_ranks)
    return np.asarray((eye[None] - eye[:, None])[~eye.astype(bool)])


IMAX = 100  # rounds, HexiSeq's value
MIN_GAIN = 1e-6  # relative; less is rounding
ONE_ROUND = 0.25  # share of the remaining budget that one batch of proposals may take


def descend(problem: Problem, start: Assignment, steps: tuple[float, ...], budget: EvaluationBudget) -> Assignment:
    """The local optimum reached from ``start`` in at most `IMAX` rounds with moves of ever smaller size."""
    grouping = problem.grouping(start.groups)
    best = start
    step = 0
    for _ in range(IMAX):
        moved = _best_move(problem, grouping, best, steps[step], budget)
        if moved is not None:
            best = moved
        elif step + 1 < len(steps):
            step += 1
        else:
            break
    return best


def _best_move(
    problem: Problem, grouping: Grouping, at: Assignment, step: float, budget: EvaluationBudget
) -> Assignment | None:
    place = (grouping.order.tobytes(), grouping.offsets.tobytes(), at.tokens.tobytes(), at.heads.tobytes())
    tried = problem.tried.setdefault(place, Tried())
    if step in tried.rows_of_step:  # in vain again; it counts as if it were evaluated
        budget.rows(grouping, tried.rows_of_step[step], ONE_ROUND)
        return None
    moves = proposals(problem, grouping, at, step, tried)
    allowed = budget.rows(grouping, moves.count, ONE_ROUND)
    tokens_XD, heads_XD = moves.first(allowed)
    size = max(1, MAX_TABLE // max(grouping.num_groups**2, problem.num_ranks))
    best = at
    for first in range(0, len(tokens_XD), size):
        rows = slice(first, first + size)
        below_s = best.time_s * (1 - MIN_GAIN)
        best = problem.best_row(grouping, tokens_XD[rows], heads_XD[rows], below_s) or best
    if best is not at:
        return _further(problem, grouping, at, best, budget)
    if allowed == moves.count:
        tried.rows_of_step[step] = allowed
        if not is_paired(problem, step):
            tried.rows_of_heads = moves.rows_of_heads
    return None


def _further(
    problem: Problem, grouping: Grouping, at: Assignment, moved: Assignment, budget: EvaluationBudget
) -> Assignment:
    """Go on in the direction of a move of tokens alone, as far as that pays."""
    if (moved.heads != at.heads).any():
        return moved
    ratio = np.divide(moved.tokens, at.tokens, out=np.ones_like(at.tokens), where=at.tokens > 0)
    tokens_XD = moved.tokens * ratio ** np.array([[1], [2], [4], [8]])
    tokens_XD = problem.round(filled(tokens_XD, moved.tokens, problem.seq_len))
    tokens_XD = tokens_XD[: budget.rows(grouping, len(tokens_XD))]
    heads_XD = np.broadcast_to(at.heads, tokens_XD.shape)
    return problem.best_row(grouping, tokens_XD, heads_XD, moved.time_s) or moved


def in_all_directions(problem: Problem, start: Assignment) -> Assignment:
    """The local optimum where the tokens of all of a few ranks move at once, by unlike shares.

    The time of a ring is a maximum of sums: on its ridges no move of a pair or of a set lowers it, but many others do.
    """
    if problem.num_ranks > MAX_DIRECTED_RANKS:
        return start
    shares_XD, grouping, best = _directions(problem.num_ranks), problem.grouping(start.groups), start
    for step in STEPS[2:]:
        moved: Assignment | None = best
        while moved is not None:
            best = moved
            tokens_XD = problem.round(best.tokens + step * problem.seq_len / problem.num_ranks * shares_XD)
            tokens_XD = tokens_XD[((tokens_XD >= 0) & ((tokens_XD > 0) | (best.tokens == 0))).all(axis=1)]
            heads_XD = np.broadcast_to(best.heads, tokens_XD.shape)
            moved = problem.best_row(grouping, tokens_XD, heads_XD, best.time_s * (1 - MIN_GAIN))
    return best


@cache
def _directions(num_ranks: int) -> Floats:
    """Shares from -2 to 2 by rank that add up to 0 when their mean is taken off, each once, ``[X, D]``."""
    shares_XD = np.array(list(product((-2.0, -1.0, 0.0, 1.0, 2.0), repeat=num_ranks)))
    shares_XD = shares_XD[(shares_XD.min(axis=1) == -2) & (shares_XD.max(axis=1) > -2)]  # others differ by a constant
    return np.asarray(shares_XD - shares_XD.mean(axis=1, keepdims=True))


def round_to_units(problem: Problem, start: Assignment) -> Assignment | None:
    """The best whole units near an assignment in single tokens, up to two units from the nearest, if any fits."""
    nearest = problem.round(start.tokens)
    around_XD = nearest + problem.token_unit * np.concatenate([np.zeros((1, len(nearest))), two_units(problem)])
    around_XD = around_XD[(around_XD >= 0).all(axis=1)]
    heads_XD = np.broadcast_to(start.heads, around_XD.shape)
    return problem.best_row(problem.grouping(start.groups), around_XD, heads_XD, np.inf)
