"""Search of other batches of the ranks, where each takes whole samples.

A rank shall take as many as it computes in the time of the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ds_hetero.decision.batches import balanced_batches
from ds_hetero.job.job_times import JobTimes
from ds_hetero.values.plans import BatchSplit, Plan
from ds_hetero.values.section import HeterogeneitySection

_LOOKS_AT_START = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchChange:
    """One change of the ranks' batches in a running job."""

    step: int  # optimizer steps that this process has done before it
    batch: tuple[int, ...]  # samples of every rank's micro-batch from now on
    gain: float  # share of a step's time that the change was predicted to save
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
    """Looks for other batches of the same sum; on rank 0. See `ds_hetero.job.replanning.PlanSearch`.

    Args:
        section: with ``"by_speed"`` alone, the first steps are looked at some times; with ``"replan"``, all.
        tries: what fits is tried before a change, see `learn`; else it is as much as the peaks of memory leave.
    """

    def __init__(self, section: HeterogeneitySection, *, tries: bool = False) -> None:
        self._min_gain, self._goes_on = section.replan.min_gain, section.replan.enabled
        self._left, self._tries = _LOOKS_AT_START, tries
        self._looked_at = 0  # step
        self._most = dict[int, int]()  # samples of ranks that have run out of memory with more

    def learn(self, plan: Plan, room: Sequence[int]) -> list[str]:
        """Learn which ranks have no memory for a proposed plan; a line for each of them, for people."""
        assert plan.batch_split is not None
        wanted = plan.batch_split.micro_batch_sizes
        full = {rank: most for rank, most in enumerate(room) if most < wanted[rank]}
        self._most |= full
        return [
            f"rank {rank} ran out of memory when {wanted[rank]} samples were tried, and goes on with {most} at most"
            for rank, most in full.items()
        ]

    def propose(self, step: int, plan: Plan, seen: JobTimes) -> Sequence[BatchChange]:
        """The change that these times call for; none where it gains too little."""
        if not (self._goes_on or self._left or step == self._looked_at):
            return []
        batch, gain = self._best(plan, seen)
        self._left -= self._left > 0 and step != self._looked_at  # the first steps alone may show nothing
        self._looked_at = step
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
        most = [total] * len(sizes)
        if not self._tries:
            seen_room = [size * rank.growth for size, rank in zip(sizes, seen.ranks, strict=True)]
            most = [
                total if math.isinf(room) else max(size, int(room)) for size, room in zip(sizes, seen_room, strict=True)
            ]
        for rank, bound in self._most.items():
            most[rank] = max(bound, sizes[rank])
        batch = balanced_batches(total, s_per_sample, most)
        slowest_s = max(size * seconds for size, seconds in zip(batch, s_per_sample, strict=True))
        return batch, (max(own_s) - slowest_s) / seen.step_s
