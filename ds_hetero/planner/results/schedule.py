"""Result of the search for a schedule: the schedule of one replica, its prediction, and the rejected candidates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ds_hetero.common.reading import JsonDict
from ds_hetero.cost.model import Prediction
from ds_hetero.planner.results.planned import Planned
from ds_hetero.planner.results.sentences import slower_text
from ds_hetero.values.schedule import Schedule


class Rejected(NamedTuple):
    """A candidate that was not chosen, and why."""

    name: str  # description for people
    prediction: Prediction | None  # predicted time and memory; None if there is no such schedule
    reason: str  # why it was not chosen

    def to_dict(self) -> JsonDict:
        """Return plain data for ``--json``."""
        return {"name": self.name, "block_s": self.prediction and self.prediction.block_s, "reason": self.reason}


def compared(name: str, prediction: Prediction, best: Prediction) -> Rejected:
    """Return a rejected candidate with the reason why it was rejected.

    Args:
        name: description of the candidate.
        prediction: prediction of the candidate.
        best: prediction of the schedule that was chosen.
    """
    if not prediction.feasible:
        reason = f"does not fit: {prediction.reason}"
    else:
        reason = f"{slower_text(prediction.iteration_s / best.iteration_s)}; {prediction.bottleneck.text}"
    return Rejected(name=name, prediction=prediction, reason=reason)


@dataclass(frozen=True, kw_only=True)
class PlannedSchedule(Planned):
    """The chosen schedule of one replica, its prediction, and its baselines."""

    prediction: Prediction  # with the bottleneck and the bound of perfect balance
    name: str  # description of the schedule for people
    baselines: dict[str, Prediction | None]  # of the best ``ulysses``, ``ring`` and ``usp``; None if none fits
    baseline_names: dict[str, str]  # names of these schedules, such as ``usp 2x8``
    baseline_reasons: dict[str, str]  # why a baseline has no prediction
    rejected: tuple[Rejected, ...]  # candidates that were not chosen

    @property
    def busy(self) -> dict[int, float]:
        """Share of a layer's time, 0 to 1, in which a rank computes, by rank; without idle ranks."""
        seconds, block_s = self.prediction.busy_s, self.prediction.block_s
        return {rank: busy_s / block_s for rank, busy_s in enumerate(seconds) if rank not in self.idle_ranks}

    @property
    def schedule(self) -> Schedule:
        """The schedule of the plan, with the ranks of the cluster."""
        return self.plan.schedules[0]

    @property
    def gain(self) -> float | None:
        """Tokens per second over those of the fastest baseline, such as 1.31; None if no baseline fits."""
        rates = [baseline.tokens_per_s for baseline in self.baselines.values() if baseline is not None]
        return self.prediction.tokens_per_s / max(rates) if rates else None

    @property
    def of_bound(self) -> float:
        """Speed of the schedule as a share of the speed at perfect balance with free communication."""
        return self.prediction.bound_s / self.prediction.block_s

    def to_dict(self) -> JsonDict:
        """Return plain data for ``--json``."""
        return {
            "schedule": self.schedule.to_dict(),
            "name": self.name,
            "planner": self.planner,
            "search_s": self.search_s,
            "predicted": self.prediction.to_dict(),
            "baselines": {name: baseline and baseline.to_dict() for name, baseline in self.baselines.items()},
            "baseline_names": self.baseline_names,
            "baseline_reasons": self.baseline_reasons,
            "gain": self.gain,
            "of_bound": self.of_bound,
            "idle_ranks": list(self.idle_ranks),
            "rejected": [rejected.to_dict() for rejected in self.rejected],
        }
