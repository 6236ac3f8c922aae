"""Tokens and heads that the ranks of a group trade by all-to-all: the split tables of one placement, in elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ds_hetero.values.placement import Placement
from ds_hetero.values.schedule import Group


@dataclass(frozen=True)
class Member:
    """One rank of the group: its tokens, and the query and KV heads it computes."""

    tokens: int
    q: tuple[int, int]
    kv: tuple[int, int]

    @property
    def num_q(self) -> int:
        """Query heads."""
        return self.q[1] - self.q[0]

    @property
    def num_kv(self) -> int:
        """KV heads."""
        return self.kv[1] - self.kv[0]

    @property
    def width(self) -> int:
        """Heads of q, k and v together: W."""
        return self.num_q + 2 * self.num_kv


@dataclass(frozen=True)
class HeadTable:
    """Split tables of one group for one placement."""

    members: tuple[Member, ...]  # by ascending rank, which is the order of the process group and of the tokens
    index: int  # which of them this rank is
    num_heads: int  # query heads of the model
    num_kv_heads: int  # KV heads of the model

    @property
    def own(self) -> Member:
        """This rank."""
        return self.members[self.index]

    @property
    def group_tokens(self) -> int:
        """Tokens of the whole group: S."""
        return sum(member.tokens for member in self.members)

    def qkv_sizes(self, unit: int) -> tuple[list[int], list[int]]:
        """Elements of q, k and v to and from each member, ``unit`` for a token of a head; gradients the other way."""
        own = self.own
        sent = [own.tokens * unit * member.width for member in self.members]
        return sent, [member.tokens * unit * own.width for member in self.members]

    def output_sizes(self, unit: int) -> tuple[list[int], list[int]]:
        """Elements of the output that this rank sends to, and receives from, each member; as `qkv_sizes`."""
        own = self.own
        sent = [member.tokens * unit * own.num_q for member in self.members]
        return sent, [own.tokens * unit * member.num_q for member in self.members]

    @cached_property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """``(first member, number of members)`` that one copy serves, in the order of the members.

        Members of a run have as many heads as each other, whose ranges follow one another; a KV head that one of them
        shares with a member before is in a run of its own.
        """
        shared, runs = dict(self.shared_kv_heads()), list[tuple[int, int]]()
        for index, member in enumerate(self.members):
            first, count = runs[-1] if runs else (0, 0)
            before = self.members[index - 1]
            is_alike = (member.num_q, member.num_kv) == (before.num_q, before.num_kv)
            follows = (member.q[0], member.kv[0]) == (before.q[1], before.kv[1])
            if count and is_alike and follows and member.width and not shared[first] and not shared[index]:
                runs[-1] = (first, count + 1)
            else:
                runs.append((index, 1))
        return tuple(runs)

    def shared_kv_heads(self) -> list[tuple[int, int]]:
        """``(member, number)`` in the order of their heads: how gradients of KV heads that come back are put together.

        The first so many KV heads of the member also belong to one before it, as the cut lies inside a KV head: their
        gradients are added, those of the others are written.
        """
        written, shared = 0, []
        for index in sorted(range(len(self.members)), key=lambda i: self.members[i].q):
            first, last = self.members[index].kv
            shared.append((index, max(min(written, last) - first, 0)))
            written = max(written, last)
        return shared


def members_of(placement: Placement, group: Group, ranks: Sequence[int]) -> tuple[Member, ...]:
    """The members of an exchange in ``group``; those of ``ranks`` that are not in it trade nothing."""
    members = []
    for rank in ranks:
        if rank in group.ranks:
            q = group.head_range(rank)
            members.append(Member(placement.tokens(rank), q, placement.schedule.kv_heads(*q)))
        else:
            members.append(Member(0, (0, 0), (0, 0)))
    return tuple(members)
