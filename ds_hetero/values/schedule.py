"""The schedule: which tokens and heads every rank holds.

A schedule is data. The planner finds it, a user writes it by hand, or a rule in `ds_hetero.values.baselines` makes it;
the runtime executes it and does not depend on its origin. HexiSeq calls it T (arXiv:2605.07569, section
3.1): A2A groups, their ring order, per-rank tokens and per-rank heads.

    tokens are weights: `Schedule.tokens` turns them into whole tokens for a length, the same on every rank
    heads are exact:    they sum to num_heads in every group

Plain integers; nothing here imports torch.
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
    """Ranks that exchange by all-to-all: HexiSeq's G_k."""

    ranks: tuple[int, ...]  # global ranks; heads are cut in this order, tokens are laid out by ascending rank
    tokens: tuple[float, ...]  # token weight of each rank, >= 0; only the ratio over the whole schedule matters
    heads: tuple[int, ...]  # query heads of each rank after the all-to-all; zero is allowed

    @property
    def weight(self) -> float:
        """The group's token weight, L_k up to scale."""
        return sum(self.tokens)

    @property
    def head_split(self) -> Split:
        """Heads in the order of ``ranks``."""
        return Split(self.heads)

    def head_range(self, rank: int) -> tuple[int, int]:
        """Query heads ``[start, stop)`` of ``rank``."""
        return self.head_split.ranges[self.ranks.index(rank)]

    def to_dict(self) -> JsonDict:
        """A group in the schedule file format."""
        return {"ranks": list(self.ranks), "tokens": list(self.tokens), "heads": list(self.heads)}


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Groups, ring order, tokens and heads of one sequence-parallel replica.

    Args:
        layout: which positions a group holds. ``"contiguous"``: one interval. ``"zigzag"``: a mirrored pair of
            intervals, so that causal work is in proportion to tokens.

    Raises:
        ScheduleError: anything above does not hold. The message names the field and its values.
    """

    num_heads: int  # query heads of the model
    num_kv_heads: int  # key/value heads; divides ``num_heads``
    groups: tuple[Group, ...]  # all-to-all groups; they hold every rank ``first_rank .. first_rank + sp_size - 1`` once
    ring: tuple[int, ...] = ()  # order in which KV travels, by index of ``groups``; left out, the order given
    layout: str = "zigzag"

    def __post_init__(self) -> None:
        if not self.ring:
            object.__setattr__(self, "ring", tuple(range(len(self.groups))))
        _check(self)

    @property
    def sp_size(self) -> int:
        """Ranks of the replica."""
        return sum(len(group.ranks) for group in self.groups)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, ascending."""
        return tuple(sorted(chain.from_iterable(group.ranks for group in self.groups)))

    @property
    def ring_size(self) -> int:
        """Number of groups K."""
        return len(self.groups)

    @cached_property
    def ring_groups(self) -> tuple[Group, ...]:
        """The groups in ring order; position in this tuple is the ring position used everywhere below."""
        return tuple(self.groups[i] for i in self.ring)

    @property
    def queries_per_kv_head(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    def ring_position(self, rank: int) -> int:
        """Ring position of the group that holds ``rank``. Raises `ScheduleError`: ``rank`` is not in the schedule."""
        for position, group in enumerate(self.ring_groups):
            if rank in group.ranks:
                return position
        raise ScheduleError(f"rank {rank} is not in the schedule, whose ranks are {self.ranks}.")

    def kv_heads(self, start: int, stop: int) -> tuple[int, int]:
        """KV heads ``[start, stop)`` that serve query heads ``[start, stop)``; a KV head on a cut is on both sides."""
        first = start // self.queries_per_kv_head
        if stop <= start:
            return first, first
        return first, ceil_div(stop, self.queries_per_kv_head)

    @property
    def sub_rings(self) -> tuple[Piece, ...]:
        """The tasks of `sub_ring_tasks` in the ring of all groups."""
        return self.sub_ring_tasks(tuple(range(self.ring_size)))

    def sub_ring_tasks(self, members: tuple[int, ...]) -> tuple[Piece, ...]:
        """Head ranges of one rank per group (HexiSeq section 3.3); ``owners[k]``: global rank in ``members[k]``."""
        return _sub_ring_tasks(self, members)

    @property
    def token_weights(self) -> tuple[float, ...]:
        """Token weight of every rank, in the order of ``ranks``."""
        weights: dict[int, float] = {}
        for group in self.groups:
            weights.update(zip(group.ranks, group.tokens, strict=True))
        return tuple(weights[rank] for rank in self.ranks)

    def tokens(self, length: int) -> dict[int, int]:
        """Whole tokens of every rank, by largest remainder. Raises `ScheduleError`: fewer than ranks to hold some."""
        return dict(_tokens(self, length))

    def group_tokens(self, length: int) -> tuple[int, ...]:
        """Tokens L_k of the groups in ring order."""
        tokens = self.tokens(length)
        return tuple(sum(tokens[rank] for rank in group.ranks) for group in self.ring_groups)

    def chunks(self, length: int) -> tuple[tuple[Range, ...], ...]:
        """Position intervals ``(start, stop)`` that each group holds, in ring order; ascending inside a group."""
        return cut_span(self.group_tokens(length), self.layout)

    def shifted(self, first_rank: int) -> Schedule:
        """The same schedule for a replica whose lowest rank is ``first_rank``."""
        offset = first_rank - self.ranks[0]
        return self._renumbered(lambda rank: rank + offset) if offset else self

    def on_ranks(self, ranks: Sequence[int]) -> Schedule:
        """The same schedule with ``ranks[r]``, distinct and one for each from 0, in the place of rank r."""
        return self._renumbered(lambda rank: ranks[rank])

    def with_places(self, ranks: Sequence[int]) -> Schedule:
        """The same schedule with a rank's place in ``ranks`` instead of the rank."""
        return self._renumbered(lambda rank: ranks.index(rank))

    def _renumbered(self, new_rank: Callable[[int], int]) -> Schedule:
        groups = [replace(group, ranks=tuple(map(new_rank, group.ranks))) for group in self.groups]
        return replace(self, groups=tuple(groups))

    def to_dict(self) -> JsonDict:
        """The schedule file format, version 1; see docs/schedules.md."""
        return {
            "version": VERSION,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "layout": self.layout,
            "ring": list(self.ring),
            "groups": [group.to_dict() for group in self.groups],
        }

    def to_json(self) -> str:
        """Canonical JSON, one line."""
        return json.dumps(self.to_dict(), sort_keys=True)

    @cached_property
    def fingerprint(self) -> int:
        """63-bit hash of the canonical JSON, compared between ranks before the first collective."""
        import hashlib  # takes longer than a schedule's check, and plans do without

        return int.from_bytes(hashlib.sha256(self.to_json().encode()).digest()[:8], "big") >> 1

    @classmethod
    def from_dict(cls, data: JsonObject) -> Schedule:
        """Read the schedule file format. Raises `ScheduleError`: wrong keys or types, or it is inconsistent."""
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
        )


def schedules_for_world(schedule: Schedule, world_size: int) -> tuple[Schedule, ...]:
    """``schedule`` once per consecutive block of ranks. Raises `ScheduleError`: it does not divide ``world_size``."""
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
    groups = [schedule.ring_groups[member] for member in members]
    tasks = []
    for piece in refine([group.head_split for group in groups]):
        owners = [group.ranks[place] for group, place in zip(groups, piece.owners, strict=True)]
        tasks.append(Piece(piece.start, piece.stop, tuple(owners)))
    return tuple(tasks)


@lru_cache(maxsize=64)
def _tokens(schedule: Schedule, length: int) -> tuple[tuple[int, int], ...]:
    weights = schedule.token_weights
    busy = sum(1 for weight in weights if weight)
    if length < busy:
        raise ScheduleError(
            f"a sequence of {length} tokens is shorter than the {busy} ranks that are to hold some of it. "
            "Use longer sequences, fewer sequence-parallel ranks, or a schedule that gives some ranks weight 0."
        )
    return tuple(zip(schedule.ranks, share(length, weights), strict=True))


@lru_cache(maxsize=64)
def cut_span(sizes: tuple[int, ...], layout: str) -> tuple[tuple[Range, ...], ...]:
    """Position intervals, ascending, of as many shares of ``0 .. sum(sizes) - 1`` as there are ``sizes``.

    Zigzag gives out halves forth and back, so that every share has early and late positions: of 4 and 3 tokens the
    first share has [0, 2) and [5, 7), the second [2, 4) and [4, 5).
    """
    if layout == "contiguous":
        return tuple((part,) for part in Split(sizes).ranges)
    front_sizes = tuple(ceil_div(size, 2) for size in sizes)
    back_sizes = tuple(size // 2 for size in sizes)
    middle = sum(front_sizes)
    front = Split(front_sizes).ranges
    back = reversed(Split(back_sizes[::-1]).ranges)  # the first share's second half comes last
    return tuple((first, (middle + start, middle + stop)) for first, (start, stop) in zip(front, back, strict=True))


def _check(s: Schedule) -> None:
    for name in ("num_heads", "num_kv_heads"):
        expect_whole_number(name, getattr(s, name), 1, MAX_HEADS, ScheduleError)
    if s.num_heads % s.num_kv_heads:
        raise ScheduleError(f"num_heads={s.num_heads} is not a multiple of num_kv_heads={s.num_kv_heads}.")
    if s.layout not in LAYOUTS:
        raise ScheduleError(f"layout {shortened(s.layout)} is unknown; it is one of {', '.join(LAYOUTS)}.")
    if not s.groups:
        raise ScheduleError("groups is empty; a schedule has at least one group.")
    if not all(is_whole(i, 0, len(s.groups) - 1) for i in s.ring) or sorted(s.ring) != list(range(len(s.groups))):
        raise ScheduleError(
            f"ring {shortened(list(s.ring))} must name each of the {len(s.groups)} groups once, by index."
        )
    for i, group in enumerate(s.groups):
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
        if sum(group.heads) != s.num_heads:
            raise ScheduleError(
                f"groups[{i}].heads {shortened(list(group.heads))} sum to {sum(group.heads)}, "
                f"but the model has num_heads={s.num_heads}. Every group computes every head of its tokens."
            )
    ranks = list(chain.from_iterable(group.ranks for group in s.groups))
    if sorted(ranks) != list(range(min(ranks), min(ranks) + len(ranks))):
        raise ScheduleError(f"the groups must hold consecutive ranks, each once, got {shortened(sorted(ranks))}.")
    if not any(group.weight for group in s.groups):
        raise ScheduleError("all token weights are zero; at least one rank must hold tokens.")
