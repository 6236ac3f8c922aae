"""Observe how many rows the experts of every rank get, and name ranks whose experts get more than was planned.

The host knows the rows of each layer's experts anyway, since they are the sizes of messages. They are added up on each
rank, and sent with the times of an observation.

    not named    rows >= 1.25 times the planned ones, twice in a row    -> named, with shares that would balance
    named        fewer, twice in a row                                  -> not named, with a message
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ds_hetero.common.reading import JsonDict
from ds_hetero.job.named_ranks import NamedRanks
from ds_hetero.planner.expert_loads import RowsLE, balanced_experts, experts_time, rows_of_ranks
from ds_hetero.values.section import SECTION
from ds_hetero.values.splits import Split

HOT_EXPERTS_RATIO = 1.25  # of a rank's rows to the planned ones; chosen, never measured
MIN_BALANCE_GAIN = 0.1  # of the experts' time that other shares have to save to be offered; chosen, never measured

RowsOfRank = Sequence[Sequence[int]]
"""Rows of each of a rank's experts, by layer."""


class ReplicaShares(NamedTuple):
    """How one replica divides the experts of a layer.

    Args:
        ranks: global ranks, ascending.
        sizes: experts of each.
        weights: by which they were divided.
    """

    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    weights: tuple[float, ...]


class ExpertLoads:
    """Adds up the rows of all experts, and describes loads that are not as planned; on rank 0.

    Args:
        take_rows: returns and forgets the rows that this rank's experts got; called on every rank.
        replicas: of the job.
    """

    def __init__(self, take_rows: Callable[[], RowsOfRank], replicas: Sequence[ReplicaShares]) -> None:
        self.take_rows, self._replicas = take_rows, replicas
        self._totals: list[list[list[int]]] = []  # rows of every expert, by replica and layer
        self._named = NamedRanks()

    @property
    def named_ranks(self) -> set[int]:
        """The ranks that are named for their experts' rows."""
        return self._named.ranks

    def observe(self, step: int, rows_by_rank: Sequence[RowsOfRank]) -> list[str]:
        """Add the rows of an observation; return messages about ranks with too many rows, and those that had."""
        observed = [_rows_of_replica(replica, rows_by_rank) for replica in self._replicas]
        self._add(observed)
        lines = []
        for number, (replica, rows_LE) in enumerate(zip(self._replicas, observed, strict=True)):
            for rank, ratio in zip(replica.ranks, _ratios(replica, rows_LE), strict=True):
                is_hot = ratio >= HOT_EXPERTS_RATIO
                if not self._named.changes(rank, is_hot):
                    continue
                if is_hot:
                    lines.append(self._text(step, number, rank, rows_LE))
                else:
                    lines.append(f"step {step}: the experts of rank {rank} get about the rows that were planned again")
        return lines

    def _add(self, observed: list[list[list[int]]]) -> None:
        """Add the rows of an observation to the totals."""
        if not self._totals:
            self._totals = observed
            return
        self._totals = [
            [[a + b for a, b in zip(*rows, strict=True)] for rows in zip(*layers, strict=True)]
            for layers in zip(self._totals, observed, strict=True)
        ]

    def _text(self, step: int, number: int, rank: int, rows_LE: RowsLE) -> str:
        """Return the message about a rank of a replica: its rows, its most loaded expert, and a remedy."""
        replica = self._replicas[number]
        place = replica.ranks.index(rank)
        total = sum(map(sum, rows_LE))
        rows, planned = rows_of_ranks(rows_LE, replica.sizes)[place] / total, _planned(replica)[place]
        start, stop = Split(replica.sizes).ranges[place]
        rows_of_experts = [sum(of_layers) for of_layers in zip(*rows_LE, strict=True)]
        expert = max(range(start, stop), key=lambda each: (rows_of_experts[each], each))
        most = rows_of_experts[expert] / total
        text = (
            f"step {step}: the experts of rank {rank} compute {rows:.0%} of all rows, planned were {planned:.0%}; "
            f"expert {expert} alone gets {most:.0%}"
        )
        sizes = balanced_experts(rows_LE, replica.sizes, replica.weights)
        now = experts_time(rows_LE, replica.sizes, replica.weights)
        gain = 1 - experts_time(rows_LE, sizes, replica.weights) / now
        if gain < MIN_BALANCE_GAIN:
            return (
                f"{text}. No other shares save {MIN_BALANCE_GAIN:.0%} of the experts' time. A larger "
                "router_aux_loss_coef lets the router choose more evenly."
            )
        shares = {**self._sizes_by_rank, **dict(zip(replica.ranks, sizes, strict=True))}
        return (
            f'{text}. "{SECTION}": {{"experts": {[shares[member] for member in sorted(shares)]}}} would save '
            f"{gain:.0%} of the experts' time, where the memory of the ranks takes them; resume a checkpoint with it."
        )

    @property
    def _sizes_by_rank(self) -> dict[int, int]:
        """Experts of a layer by global rank."""
        return {
            rank: size for replica in self._replicas for rank, size in zip(replica.ranks, replica.sizes, strict=True)
        }

    def to_dict(self) -> JsonDict:
        """Return the entry of ``run.json``: experts and shares of rows by rank, and the rows of every expert."""
        sizes, share_by_rank = self._sizes_by_rank, dict.fromkeys(self._sizes_by_rank, 0.0)
        planned_by_rank = {
            rank: planned
            for replica in self._replicas
            for rank, planned in zip(replica.ranks, _planned(replica), strict=True)
        }
        for replica, rows_LE in zip(self._replicas, self._totals, strict=False):
            total = sum(map(sum, rows_LE)) or 1
            for rank, rows in zip(replica.ranks, rows_of_ranks(rows_LE, replica.sizes), strict=True):
                share_by_rank[rank] = rows / total
        ranks = sorted(sizes)
        # Of every expert of a layer, the rows of all replicas.
        rows_LE = [
            [sum(of_expert) for of_expert in zip(*of_layer, strict=True)]
            for of_layer in zip(*self._totals, strict=True)
        ]
        return {
            "experts": [sizes[rank] for rank in ranks],
            "planned_share": [planned_by_rank[rank] for rank in ranks],
            "share": [share_by_rank[rank] for rank in ranks],
            "rows": rows_LE,
        }


def _rows_of_replica(replica: ReplicaShares, rows_by_rank: Sequence[RowsOfRank]) -> list[list[int]]:
    """Return the rows of all experts of a replica, by layer."""
    by_layer = zip(*(rows_by_rank[rank] for rank in replica.ranks), strict=True)
    return [[rows for of_rank in layer for rows in of_rank] for layer in by_layer]


def _planned(replica: ReplicaShares) -> list[float]:
    """Return each rank's share of the rows if every expert gets equally many."""
    total = sum(replica.sizes)
    return [size / total for size in replica.sizes]


def _ratios(replica: ReplicaShares, rows_LE: RowsLE) -> list[float]:
    """Return the rows of each rank in proportion to the planned ones; 0 for ranks without experts."""
    rows_R = rows_of_ranks(rows_LE, replica.sizes)
    total = sum(rows_R)
    planned = _planned(replica)
    return [rows / (total * share) if total and share else 0.0 for rows, share in zip(rows_R, planned, strict=True)]
