"""Candidates of the planner: schedules that the search found, and all baselines, predicted by one cost model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ds_hetero.cost.model import CostModel, Prediction
from ds_hetero.planner.results.sentences import describe
from ds_hetero.values.baselines import COMPARED, all_baselines
from ds_hetero.values.schedule import Schedule

# Relative difference in time up to which a baseline is preferred, since it is simpler. Chosen, never measured.
RTOL_SIMPLER = 1e-6


class ScheduleCandidate(NamedTuple):
    """A schedule and its prediction."""

    name: str  # description for people
    schedule: Schedule  # with the ranks of the cluster
    prediction: Prediction  # under the planner's cost model

    @classmethod
    def of(cls, schedule: Schedule, cost: CostModel) -> ScheduleCandidate:
        """Return a schedule of the search as a candidate; its name describes its groups, see `describe`."""
        return cls(describe(schedule, cost.cluster), schedule, cost.predict(schedule))

    @property
    def kind(self) -> str:
        """The strategy of a baseline: ``usp`` for ``usp 4x2``."""
        return self.name.split()[0]


@dataclass(frozen=True, slots=True)
class Baselines:
    """Ulysses, Ring and all USP meshes under one cost model."""

    candidates: tuple[ScheduleCandidate, ...]  # all that exist, whether they fit into memory or not
    missing: dict[str, str]  # for each of `COMPARED` that does not exist, the reason

    @classmethod
    def under(cls, cost: CostModel) -> Baselines:
        """Predict every baseline for the cluster and the model of a cost model."""
        num_ranks, seq_len = cost.cluster.num_ranks, cost.workload.seq_len
        if seq_len < num_ranks:
            return cls((), dict.fromkeys(COMPARED, f"{num_ranks} ranks cannot share {seq_len} tokens"))
        schedules, missing = all_baselines(num_ranks, cost.model.num_heads, cost.model.num_kv_heads)
        candidates = tuple(
            ScheduleCandidate(name, schedule, cost.predict(schedule)) for name, schedule in schedules.items()
        )
        return cls(candidates, missing)

    def of_kind(self, kind: str) -> tuple[ScheduleCandidate, ...]:
        """Return all candidates of one strategy of `COMPARED`."""
        return tuple(candidate for candidate in self.candidates if candidate.kind == kind)

    def best(self, kind: str) -> ScheduleCandidate | None:
        """Return the fastest candidate of a strategy that fits into memory; None if none does."""
        feasible = [candidate for candidate in self.of_kind(kind) if candidate.prediction.feasible]
        return min(feasible, key=lambda candidate: candidate.prediction.iteration_s, default=None)

    def why_not(self, kind: str) -> str:
        """Return why `best` is None for a strategy: it has no schedule for these ranks, or none fits into memory."""
        if kind in self.missing:
            return self.missing[kind]
        predictions = [candidate.prediction for candidate in self.of_kind(kind)]
        return str(min(predictions, key=lambda prediction: max(prediction.memory_bytes)).reason)


def fastest(searched: Sequence[ScheduleCandidate], baselines: Sequence[ScheduleCandidate]) -> ScheduleCandidate | None:
    """Return the fastest candidate that fits into memory; None if none fits.

    A baseline that is as fast is preferred, since it is simpler.

    Args:
        searched: schedules that the search found.
    """

    def time_s(candidate: ScheduleCandidate) -> float:
        return candidate.prediction.iteration_s

    fitting_searched = [candidate for candidate in searched if candidate.prediction.feasible]
    fitting_baselines = [candidate for candidate in baselines if candidate.prediction.feasible]
    if not fitting_searched and not fitting_baselines:
        return None
    max_time_s = min(map(time_s, (*fitting_searched, *fitting_baselines))) * (1 + RTOL_SIMPLER)
    fast_baselines = [candidate for candidate in fitting_baselines if time_s(candidate) <= max_time_s]
    return min(fast_baselines or fitting_searched, key=time_s)
