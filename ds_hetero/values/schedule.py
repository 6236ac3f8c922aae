"""Schedule of one sequence-parallel replica: which tokens and heads every rank holds.

A schedule is data: all-to-all groups, their ring order, tokens and heads of every rank. The planner finds it, a user
writes it by hand, or a rule in `ds_hetero.values.baselines` makes it; the runtime executes it and does not depend on
its origin. HexiSeq calls it T (arXiv:2605.07569, section 3.1).

    tokens are weights: `Schedule.tokens` converts them to whole tokens for a length, the same on every rank
    heads are exact:    they sum to num_heads in every group

Nothing here imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain

from ds_hetero.common.reading import (
    MAX_HEADS,
    MAX_RANKS,
    JsonDict,
    JsonObject,
    expect_object_keys,
    expect_whole_number,
    is_list,
    is_weight,
    is_whole,
    shortened,
)
from ds_hetero.common.rounding import ceil_div
from ds_hetero.errors import ScheduleError
from ds_hetero.values.splits import Piece, Split, refine, share

Range = tuple[int, int]

LAYOUTS = ("contiguous", "zigzag")
VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Ranks that exchange tokens for heads by a Ulysses all-to-all, with their shares of both: HexiSeq's G_k."""

    ranks: tuple[int, ...]  # global ranks; heads are split in this order, tokens by ascending rank
    tokens: tuple[float, ...]  # token weight of each rank, >= 0; only the ratio over the whole schedule matters
    heads: tuple[int, ...]  # query heads of each rank after the all-to-all; zero is allowed

    @property
    def weight(self) -> float:
        """Sum of the token weights of the group's ranks, to which its number of tokens L_k is proportional."""
        return sum(self.tokens)

    @property
    def head_split(self) -> Split:
        """Split of the query heads over the ranks, in the order of ``ranks``."""
        return Split(self.heads)

    def head_range(self, rank: int) -> tuple[int, int]:
        """Return the query heads ``[start, stop)`` of ``rank``."""
        return self.head_split.ranges[self.ranks.index(rank)]

    def to_dict(self) -> JsonDict:
        """Return the group in the format of schedule files."""
        return {"ranks": list(self.ranks), "tokens": list(self.tokens), "heads": list(self.heads)}


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Groups, ring order, tokens and heads of one sequence-parallel replica.

    Args:
        layout: which positions a group holds. ``"contiguous"``: one interval. ``"zigzag"``: a mirrored pair of
            intervals, so that causal work is in proportion to tokens.

    Raises:
        ScheduleError: the fields contradict each other or are out of range. The message names the field and its value.
    """

    num_heads: int  # query heads of the model
    num_kv_heads: int  # key/value heads; divides ``num_heads``
    groups: tuple[Group, ...]  # all-to-all groups; they hold each of the ``sp_size`` ranks once
    ring: tuple[int, ...] = ()  # order in which KV travels, as indices of ``groups``; empty: the order of ``groups``
    layout: str = "zigzag"
    rank_step: int = 1  # from each rank to the next one; more than 1 if every rank stands for a tensor group

    def __post_init__(self) -> None:
        if not self.ring:
            object.__setattr__(self, "ring", tuple(range(len(self.groups))))
        _check(self)

    @property
    def sp_size(self) -> int:
        """Number of ranks of the replica."""
        return sum(len(group.ranks) for group in self.groups)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, ascending."""
        return tuple(sorted(chain.from_iterable(group.ranks for group in self.groups)))

    @property
    def ring_size(self) -> int:
        """Number of groups: K."""
        return len(self.groups)

    @cached_property
    def ring_groups(self) -> tuple[Group, ...]:
        """Groups in ring order; the index in this tuple is a group's ring position."""
        return tuple(self.groups[i] for i in self.ring)

    @property
    def queries_per_kv_head(self) -> int:
        """Number of query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    def ring_position(self, rank: int) -> int:
        """Return the ring position of the group of ``rank``. Raises `ScheduleError`: the schedule lacks the rank."""
        for position, group in enumerate(self.ring_groups):
            if rank in group.ranks:
                return position
        raise ScheduleError(f"rank {rank} is not in the schedule, whose ranks are {self.ranks}.")

    def kv_heads(self, start: int, stop: int) -> tuple[int, int]:
        """Return the KV heads ``[start, stop)`` that query heads ``[start, stop)`` need.

        Two ranges of query heads may need the same KV head: with 4 query heads per KV head, 0-5 and 6-11 need KV heads
        0-1 and 1-2.
        """
        first = start // self.queries_per_kv_head
        if stop <= start:
            return first, first
        return first, ceil_div(stop, self.queries_per_kv_head)

    @property
    def sub_rings(self) -> tuple[Piece, ...]:
        """Sub-ring tasks of the ring of all groups, see `sub_ring_tasks`."""
        return self.sub_ring_tasks(tuple(range(self.ring_size)))

    def sub_ring_tasks(self, members: tuple[int, ...]) -> tuple[Piece, ...]:
        """Return the sub-ring tasks of some groups: ranges of heads that one rank per group computes.

        See HexiSeq, section 3.3. ``owners[k]`` of a task is the global rank in the group at ring position
        ``members[k]``.
        """
        return _sub_ring_tasks(self, members)

    @property
    def token_weights(self) -> tuple[float, ...]:
        """Token weight of every rank, in the order of ``ranks``."""
        weights: dict[int, float] = {}
        for group in self.groups:
            weights.update(zip(group.ranks, group.tokens, strict=True))
        return tuple(weights[rank] for rank in self.ranks)

    def tokens(self, length: int) -> dict[int, int]:
        """Return the whole tokens of every rank, by largest remainder.

        Raises:
            ScheduleError: there are fewer tokens than ranks with a positive weight.
        """
        return dict(_tokens(self, length))

    def group_tokens(self, length: int) -> tuple[int, ...]:
        """Return the number of tokens L_k of every group, in ring order."""
        tokens = self.tokens(length)
        return tuple(sum(tokens[rank] for rank in group.ranks) for group in self.ring_groups)

    def chunks(self, length: int) -> tuple[tuple[Range, ...], ...]:
        """Return the position intervals ``(start, stop)`` of every group, in ring order; ascending inside a group."""
        return cut_span(self.group_tokens(length), self.layout)

    def shifted(self, first_rank: int) -> Schedule:
        """Return the same schedule for a replica whose lowest rank is ``first_rank``."""
        offset = first_rank - self.ranks[0]
        return self._renumbered(lambda rank: rank + offset) if offset else self

    def on_ranks(self, ranks: Sequence[int]) -> Schedule:
        """Return the same schedule in which ``ranks[r]`` takes the place of rank r; the schedule's ranks begin at 0."""
        return self._renumbered(lambda rank: ranks[rank])

    def of_tensor_groups(self, ranks: Sequence[int], size: int) -> Schedule:
        """Return the schedule of tensor groups whose first ranks run this schedule; the inverse of `column` 0.

        Args:
            ranks: ranks of all tensor groups, group by group; rank r stands for group r.
            size: ranks of each group.
        """
        groups = []
        for group in self.groups:
            first_ranks = tuple(ranks[rank * size] for rank in group.ranks)
            groups.append(replace(group, ranks=first_ranks, heads=tuple(heads * size for heads in group.heads)))
        return replace(
            self,
            num_heads=self.num_heads * size,
            num_kv_heads=self.num_kv_heads * size,
            groups=tuple(groups),
            rank_step=size,
        )

    def with_places(self, ranks: Sequence[int]) -> Schedule:
        """Return the same schedule in which the index of a rank in ``ranks`` takes its place; inverse of `on_ranks`."""
        return self._renumbered(lambda rank: ranks.index(rank), rank_step=1)

    def column(self, place: int) -> Schedule:
        """Return the schedule of the ranks at one place in their tensor groups, with their part of the heads.

        Every rank of this schedule stands for a tensor group: itself and the ``rank_step - 1`` ranks after it, which
        hold the same tokens and share its heads equally. Ranks of one group exchange no attention with one another.

        Example: ranks 0 and 2 have 6 and 2 of 8 heads. The column of place 1 has ranks 1 and 3 with 3 and 1 of 4 heads.
        """
        groups = []
        for group in self.groups:
            ranks = tuple(rank + place for rank in group.ranks)
            groups.append(replace(group, ranks=ranks, heads=tuple(heads // self.rank_step for heads in group.heads)))
        return replace(
            self,
            num_heads=self.num_heads // self.rank_step,
            num_kv_heads=self.num_kv_heads // self.rank_step,
            groups=tuple(groups),
        )

    def _renumbered(self, new_rank: Callable[[int], int], rank_step: int | None = None) -> Schedule:
        """Return the same schedule with every rank replaced by ``new_rank(rank)``; None keeps ``rank_step``."""
        groups = [replace(group, ranks=tuple(map(new_rank, group.ranks))) for group in self.groups]
        return replace(self, groups=tuple(groups), rank_step=rank_step or self.rank_step)

    def to_dict(self) -> JsonDict:
        """Return the content of a schedule file, version 1; see docs/schedules.md."""
        return {
            "version": VERSION,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "layout": self.layout,
            "ring": list(self.ring),
            "groups": [group.to_dict() for group in self.groups],
        }

    def to_json(self) -> str:
        """Return canonical JSON on one line."""
        return json.dumps(self.to_dict(), sort_keys=True)

    @cached_property
    def fingerprint(self) -> int:
        """63-bit hash of the canonical JSON, compared between ranks before the first collective."""
        import hashlib  # importing it takes longer than checking a schedule, and planning does not need it

        return int.from_bytes(hashlib.sha256(self.to_json().encode()).digest()[:8], "big") >> 1

    @classmethod
    def from_dict(cls, data: JsonObject, rank_step: int = 1) -> Schedule:
        """Read the content of a schedule file. Raises `ScheduleError`: wrong keys, types or values."""
        known = {"version", "num_heads", "num_kv_heads", "layout", "ring", "groups"}
        expect_object_keys("schedule", data, known - {"layout", "ring"}, {"layout", "ring"}, ScheduleError)
        if not is_whole(data["version"], VERSION, VERSION):
            raise ScheduleError(
                f"schedule version {shortened(data['version'])} is unknown; this release reads version {VERSION}. "
                "Plan again with this release."
            )
        if not is_list(data["groups"]):
            raise ScheduleError(f"groups must be a list, got {shortened(data['groups'])}.")
        if not is_list(data.get("ring", ())):
            raise ScheduleError(f"ring must be a list of group indices, got {shortened(data['ring'])}.")
        groups = []
        for i, group in enumerate(data["groups"]):
            keys = {"ranks", "tokens", "heads"}
            expect_object_keys(f"groups[{i}]", group, keys, frozenset(), ScheduleError)
            for key in sorted(keys):
                if not is_list(group[key]):
                    raise ScheduleError(
                        f"groups[{i}].{key} must be a list, one entry per rank, got {shortened(group[key])}."
                    )
            groups.append(Group(**{key: tuple(group[key]) for key in keys}))
        return cls(
            num_heads=data["num_heads"],
            num_kv_heads=data["num_kv_heads"],
            groups=tuple(groups),
            ring=tuple(data.get("ring", ())),
            layout=data.get("layout", "zigzag"),
            rank_step=rank_step,
        )


def schedules_for_world(schedule: Schedule, world_size: int) -> tuple[Schedule, ...]:
    """Repeat a schedule for every consecutive block of ranks.

    Raises:
        ScheduleError: the schedule's ranks do not begin at 0, or their number does not divide ``world_size``.
    """
    if schedule.ranks[0] != 0:
        raise ScheduleError(f"the schedule's ranks {schedule.ranks} must begin at 0.")
    if world_size % schedule.sp_size:
        raise ScheduleError(
            f"the schedule has {schedule.sp_size} ranks, the job has {world_size}, which is not a multiple of it. "
            f"Launch a multiple of {schedule.sp_size} processes or plan for {world_size}: ds-hetero plan."
        )
    return tuple(schedule.shifted(first) for first in range(0, world_size, schedule.sp_size))


@lru_cache(maxsize=1024)
def _sub_ring_tasks(schedule: Schedule, members: tuple[int, ...]) -> tuple[Piece, ...]:
    """Compute `Schedule.sub_ring_tasks`, cached: the common refinement of the groups' head splits."""
    groups = [schedule.ring_groups[member] for member in members]
    tasks = []
    for piece in refine([group.head_split for group in groups]):
        owners = [group.ranks[place] for group, place in zip(groups, piece.owners, strict=True)]
        tasks.append(Piece(piece.start, piece.stop, tuple(owners)))
    return tuple(tasks)


@lru_cache(maxsize=64)
def _tokens(schedule: Schedule, length: int) -> tuple[tuple[int, int], ...]:
    """Compute `Schedule.tokens`, cached: pairs of rank and tokens."""
    weights = schedule.token_weights
    num_holders = sum(1 for weight in weights if weight)
    if length < num_holders:
        raise ScheduleError(
            f"a sequence of {length} tokens is shorter than the {num_holders} ranks that need at least one each. "
            "Use longer sequences, fewer sequence-parallel ranks, or a schedule that gives some ranks weight 0."
        )
    return tuple(zip(schedule.ranks, share(length, weights), strict=True))


@lru_cache(maxsize=64)
def cut_span(sizes: tuple[int, ...], layout: str) -> tuple[tuple[Range, ...], ...]:
    """Divide the positions ``0 .. sum(sizes) - 1`` into shares of these sizes; each is a tuple of ascending intervals.

    ``"contiguous"`` gives every share one interval. ``"zigzag"`` gives out halves forth and back, so that every share
    has early and late positions. With sizes 4 and 3 the first share is [0, 2) and [5, 7), the second [2, 4), [4, 5).
    """
    if layout == "contiguous":
        return tuple((part,) for part in Split(sizes).ranges)
    front_sizes = tuple(ceil_div(size, 2) for size in sizes)
    back_sizes = tuple(size // 2 for size in sizes)
    middle = sum(front_sizes)
    front = Split(front_sizes).ranges
    back = reversed(Split(back_sizes[::-1]).ranges)  # the first share's second half comes last
    return tuple((first, (middle + start, middle + stop)) for first, (start, stop) in zip(front, back, strict=True))


def _check(schedule: Schedule) -> None:
    """Check all fields of a schedule. Raises `ScheduleError`, which names the field and its value."""
    for name in ("num_heads", "num_kv_heads"):
        expect_whole_number(name, getattr(schedule, name), 1, MAX_HEADS, ScheduleError)
    if schedule.num_heads % schedule.num_kv_heads:
        raise ScheduleError(
            f"num_heads={schedule.num_heads} is not a multiple of num_kv_heads={schedule.num_kv_heads}."
        )
    if schedule.layout not in LAYOUTS:
        raise ScheduleError(f"layout {shortened(schedule.layout)} is unknown; it is one of {', '.join(LAYOUTS)}.")
    if not schedule.groups:
        raise ScheduleError("groups is empty; a schedule has at least one group.")
    indices = list(range(len(schedule.groups)))
    are_indices = all(is_whole(i, 0, len(schedule.groups) - 1) for i in schedule.ring)
    if not are_indices or sorted(schedule.ring) != indices:
        raise ScheduleError(
            f"ring {shortened(list(schedule.ring))} must name each of the {len(schedule.groups)} groups once, by index."
        )
    for i, group in enumerate(schedule.groups):
        if not group.ranks or not len(group.ranks) == len(group.tokens) == len(group.heads):
            raise ScheduleError(
                f"groups[{i}] needs one entry of tokens and heads per rank, "
                f"got ranks={shortened(list(group.ranks))}, tokens={shortened(list(group.tokens))}, "
                f"heads={shortened(list(group.heads))}."
            )
        if not all(is_whole(rank, 0, MAX_RANKS) for rank in group.ranks):
            raise ScheduleError(f"groups[{i}].ranks must be whole numbers >= 0, got {shortened(list(group.ranks))}.")
        if not all(is_whole(heads, 0, MAX_HEADS) for heads in group.heads):
            raise ScheduleError(f"groups[{i}].heads must be whole numbers >= 0, got {shortened(list(group.heads))}.")
        if not all(map(is_weight, group.tokens)):
            raise ScheduleError(f"groups[{i}].tokens must be finite weights >= 0, got {shortened(list(group.tokens))}.")
        if sum(group.heads) != schedule.num_heads:
            raise ScheduleError(
                f"groups[{i}].heads {shortened(list(group.heads))} sum to {sum(group.heads)}, "
                f"but the model has num_heads={schedule.num_heads}. Every group computes every head of its tokens."
            )
    ranks, step = list(chain.from_iterable(group.ranks for group in schedule.groups)), schedule.rank_step
    if sorted(ranks) != list(range(min(ranks), min(ranks) + len(ranks) * step, step)):
        rule = "consecutive ranks" if step == 1 else f"ranks {step} apart, the first of each tensor group"
        raise ScheduleError(f"the groups must hold {rule}, each once, got {shortened(sorted(ranks))}.")
    if not any(group.weight for group in schedule.groups):
        raise ScheduleError("all token weights are zero; at least one rank must hold tokens.")
