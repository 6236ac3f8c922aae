"""The interface of a cost model, and what both of them share: from a schedule to a `Prediction`.

A search works on a `Grouping` and arrays of tokens and heads; people and files work on `Schedule`. Both cost models
have the methods of `CostModel`, so the search does not depend on which one it minimizes.

Dimension key: D ranks, K groups, B assignments of one grouping.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np

from ds_hetero.cluster.catalogue import confidence
from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.arrays import Floats, Ints
from ds_hetero.common.text import GIB
from ds_hetero.cost.prediction import Bottleneck, Prediction, Span, Terms
from ds_hetero.cost.terms.grouping import Grouping
from ds_hetero.cost.terms.memory import MemoryParts, Moments, peak_bytes, peak_parts
from ds_hetero.cost.workload import Workload
from ds_hetero.errors import PlanError
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.values.schedule import Schedule


class CostModel(ABC):
    """A cost model bound to a cluster, a model and a workload.

    Whatever does not depend on the schedule is computed when it is made; whatever depends only on who is grouped with
    whom is in `Grouping`. Methods take tokens and heads **indexed by rank**: tokens may be fractions, heads are whole
    and sum to ``num_heads`` in every group.

    Attributes:
        attention_s_D: seconds per query token x key token x head, forward and backward, at an even share.
        non_attention_s_per_token_D: forward and backward of one block outside attention, at an even share.
        least_attention_s_D: the same as ``attention_s_D`` for shapes without limit; no share is done faster.
        least_non_attention_s_per_token_D: the same for the work outside attention.
        capacity_bytes_D: memory that a schedule may use.
        bound_s: time of one block at perfect balance with free communication.
        floor_s: time of one block that no schedule can undercut, set by ZeRO's traffic.
        loss_s_per_token_D: embedding's and head's share of a micro-batch, outside the blocks.
    """

    name: str
    attention_s_D: Floats
    non_attention_s_per_token_D: Floats
    least_attention_s_D: Floats
    least_non_attention_s_per_token_D: Floats
    capacity_bytes_D: Floats
    bound_s: float
    floor_s: float
    loss_s_per_token_D: Floats

    def __init__(self, cluster: Cluster, model: ModelSpec, workload: Workload) -> None:
        self.cluster = cluster
        self.model = model
        self.workload = workload

    @abstractmethod
    def block_s_many(self, grouping: Grouping, tokens_BD: Floats, heads_BD: Ints) -> Floats:
        """Time of one block for many assignments of one grouping, ``[B]``; does not look at memory."""

    def block_s_below(self, grouping: Grouping, tokens_BD: Floats, heads_BD: Ints, below_B: Floats) -> Floats:
        """`block_s_many`, ``[B]``, or infinity where no order of the groups would take less than ``below_B``."""
        return self.block_s_many(grouping, tokens_BD, heads_BD)

    @abstractmethod
    def terms(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> Terms:
        """The time of one block by part."""

    @abstractmethod
    def memory_moments(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> Moments:
        """Memory by moment and part, each ``[D]``; leading dimensions of the arguments are kept."""

    def memory_parts(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> MemoryParts:
        """The parts of every rank's peak, each ``[D]``."""
        return peak_parts(self.memory_moments(grouping, tokens_D, heads_D))

    @property
    def attention_speeds(self) -> list[float]:
        """Speed of attention of every rank, relative to the fastest."""
        speeds: list[float] = (self.attention_s_D.min() / self.attention_s_D).tolist()
        return speeds

    @property
    def least_block_s(self) -> float:
        """Time of one block that no schedule undercuts: perfect balance, free exchanges, and ZeRO's traffic."""
        return max(self.bound_s, self.floor_s)

    @abstractmethod
    def busy_s(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> Floats:
        """Time that every rank computes in one block, ``[D]``."""

    @abstractmethod
    def bottleneck(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> Bottleneck:
        """The largest term of the block's time."""

    @abstractmethod
    def timeline(self, schedule: Schedule) -> tuple[Span, ...]:
        """Bars of one block, forward and backward, for a picture."""

    def free_ring_s(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> float:
        """Time of one block that no order of the groups undercuts; 0 where the cost model knows none."""
        return 0.0

    def outside_blocks_s(self, tokens_D: Floats) -> dict[str, float]:
        """Parts of an iteration outside the blocks: ``loss_s`` per micro-batch, others once; HexiSeq has none."""
        return {}

    def block_s(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> float:
        """Time of one block, forward and backward."""
        return float(self.block_s_many(grouping, tokens_D[None], heads_D[None])[0])

    def memory_bytes(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> Floats:
        """Peak memory of every rank, ``[D]``; leading dimensions of the arguments are kept."""
        return peak_bytes(self.memory_moments(grouping, tokens_D, heads_D))

    def arrays(self, schedule: Schedule) -> tuple[Grouping, Floats, Ints]:
        """A schedule as a grouping, whole tokens by rank and heads by rank.

        Raises:
            PlanError: its ranks or heads are not those of the cluster and the model.
            ScheduleError: the sequence is too short for it.
        """
        num_ranks = self.cluster.num_ranks
        if schedule.ranks != tuple(range(num_ranks)):
            raise PlanError(
                f"the schedule is for ranks {schedule.ranks[0]} to {schedule.ranks[-1]}, the cluster has ranks 0 to "
                f"{num_ranks - 1}. Give the cluster that the schedule was made for, or plan again."
            )
        heads = (schedule.num_heads, schedule.num_kv_heads)
        expected = (self.model.num_heads, self.model.num_kv_heads)
        if heads != expected:
            raise PlanError(
                f"the schedule has (num_heads, num_kv_heads) = {heads}, the model {self.model.name} has {expected}. "
                "Give the model that the schedule was made for, or plan again."
            )
        tokens = schedule.tokens(self.workload.seq_len)
        heads_D = np.zeros(num_ranks, dtype=np.int64)
        for group in schedule.groups:
            heads_D[list(group.ranks)] = group.heads
        tokens_D = np.array([tokens[rank] for rank in range(num_ranks)], dtype=np.float64)
        return Grouping.of_schedule(self.cluster, schedule), tokens_D, heads_D

    def predict(self, schedule: Schedule) -> Prediction:
        """Predict time and memory of one schedule, in whole tokens.

        Raises:
            PlanError: the schedule's ranks or heads are not those of the cluster and the model.
        """
        flat = self.arrays(schedule)
        work = self.workload
        terms = self.terms(*flat)
        outside = self.outside_blocks_s(flat[1])
        per_micro_batch = terms.block_s * self.model.num_layers + outside.get("loss_s", 0.0)
        iteration_s = per_micro_batch * work.micro_batches + once_s(outside)
        parts = self.memory_parts(*flat)
        memory_D = parts.total
        reason = self._too_much(memory_D, parts)
        return Prediction(
            cost_model=self.name,
            block_s=terms.block_s,
            iteration_s=iteration_s,
            tokens_per_s=work.seq_len * work.micro_batch * work.micro_batches / iteration_s,
            terms=terms,
            memory_bytes=tuple(int(x) for x in np.ceil(memory_D)),
            feasible=reason is None,
            reason=reason,
            bottleneck=self.bottleneck(*flat),
            bound_s=self.bound_s,
            error=max(device.error for device in self.cluster.devices),
            confidence=confidence(self.cluster.devices),
            busy_s=tuple(self.busy_s(*flat).tolist()),
            parts_s={"blocks_s": terms.block_s * self.model.num_layers * work.micro_batches, **outside},
        )

    def _too_much(self, memory_D: Floats, parts: MemoryParts) -> str | None:
        excess_D = memory_D - self.capacity_bytes_D
        if excess_D.max() <= 0:
            return None
        rank = int(excess_D.argmax())
        parts_of_rank = ((name.replace("_", " "), size) for name, size in parts.of_rank(rank).items() if size)
        shares = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts_of_rank)
        others = int((excess_D > 0).sum()) - 1
        need, has, excess = memory_D[rank] / GIB, self.capacity_bytes_D[rank] / GIB, excess_D[rank] / GIB
        text = f"{self.cluster.rank_name(rank)} needs {need:.1f} GiB of {has:.1f}: {excess:.1f} GiB too much ({shares})"
        return text + (f"; {others} more ranks do not fit" if others else "")


def once_s(outside: Mapping[str, float]) -> float:
    """Sum of the parts of `CostModel.outside_blocks_s` that come once in an iteration."""
    return sum(seconds for part, seconds in outside.items() if part != "loss_s")
