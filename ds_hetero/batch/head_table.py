"""Split tables of the Ulysses all-to-all of one group for one placement, in elements.

A rank has its own tokens of all heads before the all-to-all, and all tokens of its own heads after it. The output of
attention goes the opposite way. Tokens and heads are uneven: a rank may have no tokens, or no heads.

Dimension key: S tokens of the group, W heads of q, k and v of one rank.
"""

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
    index: int  # of this rank among the members
    num_heads: int  # query heads of the model
    num_kv_heads: int  # KV heads of the model

    @property
    def own(self) -> Member:
        """This rank's entry of ``members``."""
        return self.members[self.index]

    @property
    def group_tokens(self) -> int:
        """Tokens of the group: S."""
        return sum(member.tokens for member in self.members)

    def qkv_sizes(self, unit: int) -> tuple[list[int], list[int]]:
        """Return the elements of q, k and v that this rank sends to, and receives from, each member.

        Gradients go the opposite way.

        Args:
            unit: elements of one token of one head.
        """
        this = self.own
        sent = [this.tokens * unit * member.width for member in self.members]
        received = [member.tokens * unit * this.width for member in self.members]
        return sent, received

    def output_sizes(self, unit: int) -> tuple[list[int], list[int]]:
        """Return the elements of the output that this rank sends to, and receives from, each member.

        Args:
            unit: elements of one token of one head.
        """
        this = self.own
        sent = [member.tokens * unit * this.num_q for member in self.members]
        received = [this.tokens * unit * member.num_q for member in self.members]
        return sent, received

    @cached_property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """``(first member, number of members)`` of each run: members whose heads one strided copy packs.

        The members of a run have equally many heads, in consecutive ranges. A member that shares KV heads with a member
        before it is a run by itself, as the ranges of the two overlap.
        """
        num_shared = dict(self.shared_kv_heads())
        runs: list[tuple[int, int]] = []
        for index, member in enumerate(self.members):
            if runs and member.width and self._continues(index):
                first, count = runs[-1]
                if not num_shared[first] and not num_shared[index]:
                    runs[-1] = (first, count + 1)
                    continue
            runs.append((index, 1))
        return tuple(runs)

    def _continues(self, index: int) -> bool:
        """Return whether a member's heads follow those of the member before it, and are equally many."""
        before, member = self.members[index - 1], self.members[index]
        is_alike = (member.num_q, member.num_kv) == (before.num_q, before.num_kv)
        follows = (member.q[0], member.kv[0]) == (before.q[1], before.kv[1])
        return is_alike and follows

    def shared_kv_heads(self) -> list[tuple[int, int]]:
        """``(member, number)`` by ascending heads: how many of its first KV heads another member before it has, too.

        Two members share a KV head if their ranges of query heads meet inside it. With 4 queries a KV head, query heads
        0-5 and 6-11 have KV heads 0-1 and 1-2: the second member shares one. When gradients come back, those of shared
        heads are added to what is written already, the others are written.
        """
        written_kv, shared = 0, []
        for index in sorted(range(len(self.members)), key=lambda member: self.members[member].q):
            first_kv, stop_kv = self.members[index].kv
            shared.append((index, max(min(written_kv, stop_kv) - first_kv, 0)))
            written_kv = max(written_kv, stop_kv)
        return shared


def members_of(placement: Placement, group: Group, ranks: Sequence[int]) -> tuple[Member, ...]:
    """Return the members of the all-to-all of ``group``; a rank of ``ranks`` outside the group exchanges nothing."""
    members = []
    for rank in ranks:
        if rank in group.ranks:
            q = group.head_range(rank)
            members.append(Member(placement.tokens(rank), q, placement.schedule.kv_heads(*q)))
        else:
            members.append(Member(0, (0, 0), (0, 0)))
    return tuple(members)
