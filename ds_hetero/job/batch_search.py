"""Search for a faster division of a batch between ranks that each run the whole model.

A faster rank takes more samples, so that all ranks compute for equally long. The sum over the ranks stays the same.
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

_NUM_SEARCHES_AT_START = 4  # without "replan", ``"by_speed"`` searches so many observations; chosen, never measured


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
        """Return this change as an entry of ``run.json``."""
        return {"step": self.step, "batch": list(self.batch), "gain": self.gain}


class BatchSearch:
    """Proposes other batch sizes of the ranks, with the same global batch. Only rank 0 has one.

    It is a `ds_hetero.job.replanning.PlanSearch`.

    Args:
        section: with ``"replan"`` it searches at every observation; with ``"by_speed"`` alone, only at the first
            `_NUM_SEARCHES_AT_START`.
        tests_memory: whether the job tries a proposal on its devices before the change, and reports the samples that
            fit into memory to `learn`. If not, a rank's batch may grow as far as the measured peaks of memory allow.
    """

    def __init__(self, section: HeterogeneitySection, *, tests_memory: bool = False) -> None:
        self._min_gain = section.replan.min_gain
        self._always_searches = section.replan.enabled
        self._remaining_searches = _NUM_SEARCHES_AT_START
        self._tests_memory = tests_memory
        self._latest_step = 0  # at which a search was made
        self._max_samples = dict[int, int]()  # of ranks that ran out of memory with more samples

    def learn(self, plan: Plan, fitting_samples: Sequence[int]) -> list[str]:
        """Record the ranks that lack the memory for a proposed plan; return a message about each of them.

        Args:
            fitting_samples: by rank, the samples of a micro-batch that fit into its memory.
        """
        assert plan.batch_split is not None
        proposed = plan.batch_split.micro_batch_sizes
        limit_by_rank = {rank: limit for rank, limit in enumerate(fitting_samples) if limit < proposed[rank]}
        self._max_samples |= limit_by_rank
        return [
            f"rank {rank} ran out of memory when {proposed[rank]} samples were tried, and goes on with {limit} at most"
            for rank, limit in limit_by_rank.items()
        ]

    def propose(self, step: int, plan: Plan, job_times: JobTimes) -> Sequence[BatchChange]:
        """Return a list with the best change at the measured times; an empty list if its gain is too small."""
        # After a proposal that did not fit, the search of the same step is repeated; that does not count as a new one.
        is_retry = step == self._latest_step
        if not (self._always_searches or self._remaining_searches or is_retry):
            return []
        if self._remaining_searches and not is_retry:
            self._remaining_searches -= 1
        self._latest_step = step
        batch, gain = self._find_best(plan, job_times)
        if gain < self._min_gain:
            return []
        return [BatchChange(step=step, batch=batch, gain=gain)]

    def predicted_gain(self, plan: Plan, job_times: JobTimes) -> float | None:
        """Return the share of a step's time that the best batches would save."""
        return self._find_best(plan, job_times)[1]

    def _find_best(self, plan: Plan, job_times: JobTimes) -> tuple[tuple[int, ...], float]:
        """Return the best batch of every rank, and the share of a step's time that these batches are predicted to save.

        Example: two ranks with 4 samples each compute for 4 and 2 s. The best batches are 3 and 5 (3.0 and 2.5 s);
        of a step of 5 s they save 1 s, a gain of 0.2.
        """
        split = plan.batch_split
        assert split is not None
        sizes = split.micro_batch_sizes
        compute_s = [rank.own_median_s for rank in job_times.ranks]
        if not all(compute_s):  # a rank without a measurement
            return sizes, 0.0
        s_per_sample = [seconds / size for seconds, size in zip(compute_s, sizes, strict=True)]
        total = sum(sizes)
        max_samples = [total] * len(sizes)
        if not self._tests_memory:
            for rank, (size, times) in enumerate(zip(sizes, job_times.ranks, strict=True)):
                if not math.isinf(times.growth):
                    max_samples[rank] = max(size, int(size * times.growth))
        for rank, limit in self._max_samples.items():
            max_samples[rank] = max(limit, sizes[rank])  # the samples that the rank trains now do fit
        batch = balanced_batches(total, s_per_sample, max_samples)
        slowest_s = max(size * seconds for size, seconds in zip(batch, s_per_sample, strict=True))
        return batch, (max(compute_s) - slowest_s) / job_times.step_s
