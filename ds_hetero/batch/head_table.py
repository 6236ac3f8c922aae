"""Split sizes of one group's Ulysses all-to-all for one placement, in elements.

Before the all-to-all a rank has its tokens of all heads; after it, the rank has all tokens of its heads. The output of
attention goes the opposite way. Tokens and heads are uneven: a rank may have no tokens, or no heads.

Example: two ranks with 3 and 1 tokens, and with 1 and 3 of the 4 heads. Before, they hold [3, 4] and [1, 4] (tokens,
heads); after, [4, 1] and [4, 3]. Rank 0 sends 3 tokens of 3 heads to rank 1, and receives 1 token of 1 head.

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
    """One rank of the group: its tokens, and the query and KV heads that it computes."""

    tokens: int  # number of tokens
    q: tuple[int, int]  # range of query heads
    kv: tuple[int, int]  # range of KV heads

    @property
    def num_q(self) -> int:
        """Number of query heads."""
        return self.q[1] - self.q[0]

    @property
    def num_kv(self) -> int:
        """Number of KV heads."""
        return self.kv[1] - self.kv[0]

    @property
    def width(self) -> int:
        """Number of heads of q, k and v together: W."""
        return self.num_q + 2 * self.num_kv


@dataclass(frozen=True)
class HeadTable:
    """Members of one group for one placement, and the split sizes of this rank's all-to-alls."""

    members: tuple[Member, ...]  # by ascending rank, which is the order of the process group and of the tokens
    index: int  # index of this rank among the members
    num_heads: int  # query heads of the model
    num_kv_heads: int  # KV heads of the model

    @property
    def this_member(self) -> Member:
        """This rank's entry of ``members``."""
        return self.members[self.index]

    @property
    def group_tokens(self) -> int:
        """Number of tokens of the group: S."""
        return sum(member.tokens for member in self.members)

    def qkv_sizes(self, unit: int) -> tuple[list[int], list[int]]:
        """Return the elements of q, k and v that this rank sends to, and receives from, each member.

        Gradients go the opposite way.

        Args:
            unit: elements of one token of one head.
        """
        this_member = self.this_member
        sent = [this_member.tokens * unit * member.width for member in self.members]
        received = [member.tokens * unit * this_member.width for member in self.members]
        return sent, received

    def output_sizes(self, unit: int) -> tuple[list[int], list[int]]:
        """Return the elements of the output that this rank sends to, and receives from, each member.

        Args:
            unit: elements of one token of one head.
        """
        this_member = self.this_member
        sent = [member.tokens * unit * this_member.num_q for member in self.members]
        received = [this_member.tokens * unit * member.num_q for member in self.members]
        return sent, received

    @cached_property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """Runs of members whose heads one strided copy can pack, as ``(first member, number of members)``.

        The members of a run have equally many heads, in consecutive ranges. A member that shares KV heads with an
        earlier member is a run by itself, since the ranges of the two overlap.
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
        """Whether a member has as many heads as the member before it, and its heads follow that member's heads."""
        previous, member = self.members[index - 1], self.members[index]
        has_equal_counts = (member.num_q, member.num_kv) == (previous.num_q, previous.num_kv)
        follows = (member.q[0], member.kv[0]) == (previous.q[1], previous.kv[1])
        return has_equal_counts and follows

    def shared_kv_heads(self) -> list[tuple[int, int]]:
        """Return for each member how many of its first KV heads an earlier member has, too.

        Two members share a KV head if one has some of its query heads and the other the rest. Example: with 4 query
        heads per KV head, members with query heads 0-5 and 6-11 have KV heads 0-1 and 1-2, so the second member shares
        one. When gradients come back, the gradient of a shared head is added to the earlier member's; all others are
        copied.

        Returns:
            Pairs ``(member, number of shared KV heads)``, in the order of the members' heads.
        """
        written_kv, shared = 0, []
        for index in sorted(range(len(self.members)), key=lambda member: self.members[member].q):
            first_kv, stop_kv = self.members[index].kv
            shared.append((index, max(min(written_kv, stop_kv) - first_kv, 0)))
            written_kv = max(written_kv, stop_kv)
        return shared


def members_of(placement: Placement, group: Group, ranks: Sequence[int]) -> tuple[Member, ...]:
    """Return the `Member` of each of ``ranks`` in the all-to-all of ``group``.

    A rank outside the group has no tokens and no heads, so that it exchanges nothing.
    """
    members = []
    for rank in ranks:
        if rank in group.ranks:
            q = group.head_range(rank)
            members.append(Member(placement.tokens(rank), q, placement.schedule.kv_heads(*q)))
        else:
            members.append(Member(0, (0, 0), (0, 0)))
    return tuple(members)
