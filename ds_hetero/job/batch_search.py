"""Search for faster batches of ranks that train whole samples.

A faster rank takes more samples, so that all ranks compute for equally long. The sum over the ranks stays.
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

_PROBES_AT_START = 4  # observations after which ``"by_speed"`` alone stops; chosen, never measured


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchChange:
    """A change of the ranks' batches in a running job."""

    step: int  # optimizer steps that this process had done before the change
    batch: tuple[int, ...]  # samples of every rank's micro-batch from now on
    gain: float  # share of a step's time that the change is predicted to save
    event: ClassVar[str] = "the batches changed"

    def applied_to(self, plan: Plan) -> Plan:
        """Return the plan with these batches."""
        split_before = plan.batch_split
        assert split_before is not None
        split = BatchSplit(micro_batch_sizes=self.batch, micro_batches=split_before.micro_batches)
        return Plan.of_replicas(plan.schedules, split)

    def __str__(self) -> str:
        return f'goes on with "batch": {list(self.batch)}, predicted to save {self.gain:.1%} of a step'

    def to_dict(self) -> dict[str, object]:
        """Return the entry of ``run.json``."""
        return {"step": self.step, "batch": list(self.batch), "gain": self.gain}


class BatchSearch:
    """Proposes other batches of the same sum; on rank 0. See `ds_hetero.job.replanning.PlanSearch`.

    Args:
        section: with ``"replan"``, every observation is searched; with ``"by_speed"`` alone, the first few.
        tries: whether a proposal is tried in memory before the change, see `learn`; if not, a rank's batch may grow
            as far as the measured peaks of memory allow.
    """

    def __init__(self, section: HeterogeneitySection, *, tries: bool = False) -> None:
        self._min_gain = section.replan.min_gain
        self._always_searches = section.replan.enabled
        self._probes_to_go = _PROBES_AT_START
        self._tries = tries
        self._latest_step = 0  # of the latest search
        self._most_samples = dict[int, int]()  # by rank that ran out of memory with more

    def learn(self, plan: Plan, room: Sequence[int]) -> list[str]:
        """Learn which ranks lack the memory for a proposed plan; return a line for people for each of these.

        Args:
            room: samples for which every rank has memory.
        """
        assert plan.batch_split is not None
        wanted = plan.batch_split.micro_batch_sizes
        too_large = {rank: most for rank, most in enumerate(room) if most < wanted[rank]}
        self._most_samples |= too_large
        return [
            f"rank {rank} ran out of memory when {wanted[rank]} samples were tried, and goes on with {most} at most"
            for rank, most in too_large.items()
        ]

    def propose(self, step: int, plan: Plan, seen: JobTimes) -> Sequence[BatchChange]:
        """Return the best change at these times; nothing if its gain is too small."""
        # A proposal that did not fit is followed by another search of the same step, which is no new probe.
        is_retry = step == self._latest_step
        if not (self._always_searches or self._probes_to_go or is_retry):
            return []
        if self._probes_to_go and not is_retry:
            self._probes_to_go -= 1
        self._latest_step = step
        batch, gain = self._best(plan, seen)
        if gain < self._min_gain:
            return []
        return [BatchChange(step=step, batch=batch, gain=gain)]

    def predicted_gain(self, plan: Plan, seen: JobTimes) -> float | None:
        """Return the share of a step that other batches would save."""
        return self._best(plan, seen)[1]

    def _best(self, plan: Plan, seen: JobTimes) -> tuple[tuple[int, ...], float]:
        """Return the best batch of every rank, and the share of a step that it is predicted to save.

        An example: two ranks with 4 samples each compute for 4 and 2 s. The best batches are 3 and 5 (3.0 and 2.5 s);
        of a step of 5 s they save 1 s, a gain of 0.2.
        """
        split = plan.batch_split
        assert split is not None
        sizes = split.micro_batch_sizes
        compute_s = [rank.own_median_s for rank in seen.ranks]
        if not all(compute_s):  # a rank without a measurement
            return sizes, 0.0
        s_per_sample = [seconds / size for seconds, size in zip(compute_s, sizes, strict=True)]
        total = sum(sizes)
        most_samples = [total] * len(sizes)
        if not self._tries:
            for rank, (size, times) in enumerate(zip(sizes, seen.ranks, strict=True)):
                if not math.isinf(times.growth):
                    most_samples[rank] = max(size, int(size * times.growth))
        for rank, most in self._most_samples.items():
            most_samples[rank] = max(most, sizes[rank])  # the samples that it trains now do fit
        batch = balanced_batches(total, s_per_sample, most_samples)
        slowest_s = max(size * seconds for size, seconds in zip(batch, s_per_sample, strict=True))
        return batch, (max(compute_s) - slowest_s) / seen.step_s
