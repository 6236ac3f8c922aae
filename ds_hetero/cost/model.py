"""What both cost models share: from a schedule to a `Prediction`."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from ds_hetero.arrays import Floats, Ints
from ds_hetero.cluster.topology import Cluster
from ds_hetero.cost.grouping import Grouping
from ds_hetero.cost.workload import Bottleneck, Prediction, Span, Terms, Workload
from ds_hetero.errors import PlanError
from ds_hetero.models import ModelSpec
from ds_hetero.schedule import Schedule
from ds_hetero.units import GIB

__all__ = ["BaseCostModel"]


class BaseCostModel(ABC):
    """`ds_hetero.cost.CostModel`, with the parts that do not depend on the formulas filled in."""

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

    # --- what a model defines -----------------------------------------------------------------------

    @abstractmethod
    def block_s_many(self, grouping: Grouping, tokens_BD: Floats, heads_BD: Ints) -> Floats:
        """Time of one block for many assignments of one grouping, ``[B]``."""

    @abstractmethod
    def terms(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> Terms:
        """The time of one block by part."""

    @abstractmethod
    def memory_parts(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> dict[str, Floats]:
        """Peak memory by part, each ``[D]``; leading dimensions of the arguments are kept."""

    @abstractmethod
    def busy_s(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> Floats:
        """Time that every rank computes in one block, ``[D]``."""

    @abstractmethod
    def bottleneck(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> Bottleneck:
        """What decides the time of the block."""

    @abstractmethod
    def timeline(self, schedule: Schedule) -> tuple[Span, ...]:
        """Bars of one block, forward and backward."""

    def outside_blocks_s(self, tokens_D: Floats) -> dict[str, float]:
        """Parts of an iteration that lie outside the blocks, by name; HexiSeq has none."""
        return {}

    # --- what follows from it -----------------------------------------------------------------------

    def block_s(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> float:
        """Time of one block, forward and backward."""
        return float(self.block_s_many(grouping, tokens_D[None], heads_D[None])[0])

    def memory_bytes(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> Floats:
        """Peak memory of every rank, ``[D]``; leading dimensions of the arguments are kept."""
        return np.asarray(sum(self.memory_parts(grouping, tokens_D, heads_D).values()))

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
        """Everything there is to say of one schedule.

        Raises:
            PlanError: the schedule's ranks or heads are not those of the cluster and the model.
        """
        flat = self.arrays(schedule)
        work = self.workload
        terms = self.terms(*flat)
        outside = self.outside_blocks_s(flat[1])
        per_micro_batch = terms.block_s * self.model.num_layers + outside.get("loss_s", 0.0)
        per_iteration = outside.get("zero_s", 0.0) + outside.get("optimizer_s", 0.0)
        iteration_s = per_micro_batch * work.micro_batches + per_iteration
        parts = self.memory_parts(*flat)
        memory_D = np.asarray(sum(parts.values()))
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
            busy_s=tuple(self.busy_s(*flat).tolist()),
            parts_s={"blocks_s": terms.block_s * self.model.num_layers * work.micro_batches, **outside},
        )

    def _too_much(self, memory_D: Floats, parts: dict[str, Floats]) -> str | None:
        excess_D = memory_D - self.capacity_bytes_D
        if excess_D.max() <= 0:
            return None
        rank = int(excess_D.argmax())
        shares = ", ".join(f"{name.replace('_', ' ')} {part[rank] / GIB:.1f}" for name, part in parts.items())
        others = int((excess_D > 0).sum()) - 1
        need, has, excess = memory_D[rank] / GIB, self.capacity_bytes_D[rank] / GIB, excess_D[rank] / GIB
        text = f"{self.cluster.rank_name(rank)} needs {need:.1f} GiB of {has:.1f}: {excess:.1f} GiB too much ({shares})"
        return text + (f"; {others} more ranks do not fit" if others else "")
