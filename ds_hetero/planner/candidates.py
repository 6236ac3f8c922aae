"""Candidates of the planner: the best schedules of the search and every baseline, all under one cost model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_hetero.cost.model import CostModel
from ds_hetero.cost.prediction import Prediction
from ds_hetero.values.baselines import COMPARED, all_baselines
from ds_hetero.values.schedule import Schedule

SIMPLER = 1e-6  # a baseline whose time is this close to the best of the search is preferred


@dataclass(frozen=True, slots=True)
class ScheduleCandidate:
    """A schedule and its prediction.

    Args:
        name: what it is, for people.
        schedule: ranks as in the cluster.
        prediction: of the schedule under the planner's cost model.
    """

    name: str
    schedule: Schedule
    prediction: Prediction

    @property
    def kind(self) -> str:
        """The strategy that a baseline belongs to: ``usp`` for ``usp 4x2``."""
        return self.name.split()[0]


@dataclass(frozen=True, slots=True)
class Baselines:
    """Ulysses, Ring and all USP meshes under one cost model.

    Args:
        candidates: those that exist, whether they fit into memory or not.
        missing: the reason for each of `COMPARED` that does not exist.
    """

    candidates: tuple[ScheduleCandidate, ...]
    missing: dict[str, str]

    @classmethod
    def under(cls, cost: CostModel) -> Baselines:
        """Predict every baseline of the cost model's cluster and model."""
        num_ranks, seq_len = cost.cluster.num_ranks, cost.workload.seq_len
        if seq_len < num_ranks:
            return cls((), dict.fromkeys(COMPARED, f"{num_ranks} ranks cannot share {seq_len} tokens"))
        schedules, missing = all_baselines(num_ranks, cost.model.num_heads, cost.model.num_kv_heads)
        candidates = tuple(
            ScheduleCandidate(name, schedule, cost.predict(schedule)) for name, schedule in schedules.items()
        )
        return cls(candidates, missing)

    def of_kind(self, kind: str) -> tuple[ScheduleCandidate, ...]:
        """All candidates of one of `COMPARED`."""
        return tuple(candidate for candidate in self.candidates if candidate.kind == kind)

    def best(self, kind: str) -> ScheduleCandidate | None:
        """The fastest one of a kind that fits into memory; None if there is none."""
        feasible = [candidate for candidate in self.of_kind(kind) if candidate.prediction.feasible]
        return min(feasible, key=lambda candidate: candidate.prediction.iteration_s, default=None)

    def why_not(self, kind: str) -> str:
        """Why `best` is None: no such schedule exists, or none fits."""
        if kind in self.missing:
            return self.missing[kind]
        predictions = [candidate.prediction for candidate in self.of_kind(kind)]
        return str(min(predictions, key=lambda prediction: max(prediction.memory_bytes)).reason)


def fastest(searched: Sequence[ScheduleCandidate], baselines: Sequence[ScheduleCandidate]) -> ScheduleCandidate | None:
    """The fastest candidate that fits into memory; a baseline if it is as fast as any; None if nothing fits."""
    candidates = [*searched, *baselines]
    feasible = [(i, candidate) for i, candidate in enumerate(candidates) if candidate.prediction.feasible]
    if not feasible:
        return None
    least_s = min(candidate.prediction.iteration_s for _, candidate in feasible)
    close = [(i, each) for i, each in feasible if each.prediction.iteration_s <= least_s * (1 + SIMPLER)]
    return min(close, key=lambda item: (item[0] < len(searched), item[1].prediction.iteration_s, item[0]))[1]
