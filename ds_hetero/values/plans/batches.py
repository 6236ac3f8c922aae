"""The samples of an optimizer step, shared by pipelines that take different batches.

A step uses the next G samples of the order in which one process would read them, G being the sum over the pipelines of
micro_batch_size x micro_batches. They are cut into one run of samples per pipeline, in order, and each run into that
pipeline's micro-batches. Plain integers; nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ds_hetero.common.reading import MAX_BATCH, expect_whole_number
from ds_hetero.errors import ScheduleError
from ds_hetero.values.splits import Split, share


@dataclass(frozen=True, kw_only=True)
class BatchSplit:
    """Samples of a step by pipelines with unlike batches. Raises `ScheduleError`: not one whole number >= 1 of each."""

    micro_batch_sizes: tuple[int, ...]  # samples of a micro-batch, by pipeline
    micro_batches: tuple[int, ...]  # micro-batches per optimizer step, by pipeline

    def __post_init__(self) -> None:
        if len(self.micro_batch_sizes) != len(self.micro_batches):
            raise ScheduleError(
                f"micro_batch_sizes {self.micro_batch_sizes} and micro_batches {self.micro_batches} need one entry per "
                "replica."
            )
        for name, values in (("micro_batch_size", self.micro_batch_sizes), ("micro_batches", self.micro_batches)):
            for i, value in enumerate(values):
                expect_whole_number(f"replicas[{i}].{name}", value, 1, MAX_BATCH, ScheduleError)

    @property
    def samples_of(self) -> tuple[int, ...]:
        """Samples per optimizer step, by pipeline."""
        return tuple(size * count for size, count in zip(self.micro_batch_sizes, self.micro_batches, strict=True))

    @property
    def samples(self) -> int:
        """The global batch: samples per optimizer step of all pipelines."""
        return sum(self.samples_of)

    @property
    def micro_steps(self) -> int:
        """Forwards and backwards per optimizer step on every rank of a job of replicas.

        That of the replica with the most micro-batches. The others fill up with batches in which no label counts,
        since ZeRO-2 and 3 communicate over all ranks in each.
        """
        return max(self.micro_batches)

    def micro_batches_of(self, pipeline: int, samples: int) -> list[tuple[int, int]]:
        """Return a pipeline's micro-batches ``[start, stop)`` among the first ``samples`` samples of a step.

        The last step of an epoch may have fewer samples than `samples`; they are shared in the same proportions, so
        that no pipeline gets more than it has room for. Pipelines with as many micro-batches each take theirs of the
        same micro-batch of one process, so that a mean over that is made of theirs.
        """
        count, whole = self.micro_batches[0], sum(self.micro_batch_sizes)
        if count > 1 and set(self.micro_batches) == {count}:
            of_one = replace(self, micro_batches=(1,) * len(self.micro_batches))
            return [
                (first + start, first + stop)
                for first in range(0, samples, whole)
                for start, stop in of_one.micro_batches_of(pipeline, min(whole, samples - first))
            ]
        start, stop = Split(share(samples, self.samples_of)).ranges[pipeline]
        size = self.micro_batch_sizes[pipeline]
        return [(first, min(first + size, stop)) for first in range(start, stop, size)]

    def __str__(self) -> str:
        parts = [f"{size} x {count}" for size, count in zip(self.micro_batch_sizes, self.micro_batches, strict=True)]
        return f"{' + '.join(parts)} = {self.samples} samples"
