"""Other batches of the ranks, where each takes whole samples: as many as it computes in the time of the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ds_hetero.decision.batches import balanced_batches
from ds_hetero.job.monitoring.times import JobTimes
from ds_hetero.values.plans import BatchSplit, Plan
from ds_hetero.values.section import HeterogeneitySection

_LOOKS_AT_START = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchChange:
    """One change of the ranks' batches in a running job.

    Args:
        step: optimizer steps that this process has done before it.
        batch: samples of every rank's micro-batch from now on.
        gain: share of a step's time that the change was predicted to save.
    """

    step: int
    batch: tuple[int, ...]
    gain: float
    event: ClassVar[str] = "the batches changed"

    def applied_to(self, plan: Plan) -> Plan:
        """The plan with these batches."""
        split = plan.batch_split
        assert split is not None
        return Plan.of_replicas(
            plan.schedules, BatchSplit(micro_batch_sizes=self.batch, micro_batches=split.micro_batches)
        )

    def __str__(self) -> str:
        return f'goes on with "batch": {list(self.batch)}, predicted to save {self.gain:.1%} of a step'

    def to_dict(self) -> dict[str, object]:
        """For ``run.json``."""
        return {"step": self.step, "batch": list(self.batch), "gain": self.gain}


class BatchSearch:
    """Looks for other batches of the same sum; on rank 0. See `ds_hetero.job.monitoring.replanning.PlanSearch`.

    Args:
        section: with ``"by_speed"`` alone, the first steps are looked at some times; with ``"replan"``, all.
    """

    def __init__(self, section: HeterogeneitySection) -> None:
        self._min_gain, self._goes_on = section.replan.min_gain, section.replan.enabled
        self._left = _LOOKS_AT_START

    def propose(self, step: int, plan: Plan, seen: JobTimes) -> Sequence[BatchChange]:
        """The change that these times call for; none where it gains too little."""
        if not (self._goes_on or self._left):
            return []
        batch, gain = self._best(plan, seen)
        self._left = max(self._left - 1, 0)  # the first steps alone may show nothing
        if gain < self._min_gain:
            return []
        return [BatchChange(step=step, batch=batch, gain=gain)]

    def predicted_gain(self, plan: Plan, seen: JobTimes) -> float | None:
        """The share of a step that other batches would save."""
        return self._best(plan, seen)[1]

    def _best(self, plan: Plan, seen: JobTimes) -> tuple[tuple[int, ...], float]:
        split = plan.batch_split
        assert split is not None
        sizes = split.micro_batch_sizes
        own_s = [rank.own_median_s for rank in seen.ranks]
        if not all(own_s):
            return sizes, 0.0
        s_per_sample = [seconds / size for seconds, size in zip(own_s, sizes, strict=True)]
        total = sum(sizes)
        room = zip(sizes, (rank.growth for rank in seen.ranks), strict=True)
        most = [total if math.isinf(growth) else max(size, int(size * growth)) for size, growth in room]
        batch = balanced_batches(total, s_per_sample, most)
        slowest_s = max(size * seconds for size, seconds in zip(batch, s_per_sample, strict=True))
        return batch, (max(own_s) - slowest_s) / seen.step_s
