"""Candidates of the planner: schedules of the search and every baseline, all under one cost model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ds_hetero.cost.model import CostModel, Prediction
from ds_hetero.planner.results.sentences import describe
from ds_hetero.values.baselines import COMPARED, all_baselines
from ds_hetero.values.schedule import Schedule

# How close to the best of the search, in time, a baseline has to be to be preferred as simpler. Chosen, never measured.
SIMPLER_WITHIN = 1e-6


class ScheduleCandidate(NamedTuple):
    """A schedule and its prediction."""

    name: str  # what it is, for people
    schedule: Schedule  # ranks as in the cluster
    prediction: Prediction  # of the schedule under the planner's cost model

    @classmethod
    def of(cls, schedule: Schedule, cost: CostModel) -> ScheduleCandidate:
        """A schedule of no strategy, by what it is."""
        return cls(describe(schedule, cost.cluster), schedule, cost.predict(schedule))

    @property
    def kind(self) -> str:
        """The strategy that a baseline belongs to: ``usp`` for ``usp 4x2``."""
        return self.name.split()[0]


@dataclass(frozen=True, slots=True)
class Baselines:
    """Ulysses, Ring and all USP meshes under one cost model."""

    candidates: tuple[ScheduleCandidate, ...]  # those that exist, whether they fit into memory or not
    missing: dict[str, str]  # the reason for each of `COMPARED` that does not exist

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

    def time_s(candidate: ScheduleCandidate) -> float:
        return candidate.prediction.iteration_s

    fitting_searched = [candidate for candidate in searched if candidate.prediction.feasible]
    fitting_baselines = [candidate for candidate in baselines if candidate.prediction.feasible]
    if not fitting_searched and not fitting_baselines:
        return None
    as_fast_s = min(map(time_s, (*fitting_searched, *fitting_baselines))) * (1 + SIMPLER_WITHIN)
    simple = [candidate for candidate in fitting_baselines if time_s(candidate) <= as_fast_s]
    return min(simple or fitting_searched, key=time_s)
