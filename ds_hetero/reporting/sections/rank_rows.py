"""Which ranks a chart or a table shows: every one of them after a run, else one of those that do the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ds_hetero.cost import CostModel
from ds_hetero.values.schedule import Schedule

MAX_ROWS = 64


@dataclass(frozen=True, slots=True)
class RankRow:
    """Ranks that do the same.

    Args:
        ranks: of the replica, ascending.
        device: their name.
    """

    ranks: tuple[int, ...]
    device: str

    @property
    def rank(self) -> int:
        """The one that stands for all."""
        return self.ranks[0]

    @property
    def name(self) -> str:
        """``rank 3`` or ``ranks 0-7``; with gaps, the number of the others."""
        first, last = self.ranks[0], self.ranks[-1]
        if first == last:
            return f"rank {first}"
        if last - first + 1 == len(self.ranks):
            return f"ranks {first}-{last}"
        return f"rank {first} and {len(self.ranks) - 1} like it"


def rank_rows(cost: CostModel, schedule: Schedule, each: bool) -> list[RankRow]:
    """Return the rows, at most `MAX_ROWS`.

    Args:
        cost: of the replica.
        schedule: of the replica.
        each: every rank is a row of its own, as measured ranks differ.
    """
    tokens, heads = schedule.tokens(cost.workload.seq_len), heads_of(schedule)
    position = {rank: i for i, group in enumerate(schedule.ring_groups) for rank in group.ranks}
    alike: dict[Any, list[int]] = {}
    for rank in schedule.ranks:
        does = position[rank], cost.cluster.devices[rank], int(cost.cluster.node_of_rank[rank]), heads[rank]
        alike.setdefault(rank if each else (*does, tokens[rank] // 16), []).append(rank)
    rows = [RankRow(tuple(ranks), cost.cluster.devices[ranks[0]].name) for ranks in alike.values()]
    return sorted(rows, key=lambda row: row.rank)[:MAX_ROWS]


def heads_of(schedule: Schedule) -> dict[int, int]:
    """Query heads of every rank."""
    return {rank: heads for group in schedule.groups for rank, heads in zip(group.ranks, group.heads, strict=True)}
