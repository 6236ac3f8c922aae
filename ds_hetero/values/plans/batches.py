"""Batch split: how the samples of an optimizer step are divided over pipelines with different batches.

A step uses the next G samples in the order of one process, where G is the sum over the pipelines of micro_batch_size x
micro_batches. Every pipeline takes a contiguous range of them, in order, and divides it into its micro-batches. Two
pipelines with 2 x 2 and 1 x 1 samples take samples 0-1, 2-3, and 4. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ds_hetero.common.reading import MAX_BATCH, expect_whole_number
from ds_hetero.errors import ScheduleError
from ds_hetero.values.splits import Split, share


@dataclass(frozen=True, kw_only=True)
class BatchSplit:
    """Micro-batches of a step, by pipeline.

    Raises:
        ScheduleError: a field does not have one whole number >= 1 per pipeline.
    """

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
    def samples_by_pipeline(self) -> tuple[int, ...]:
        """Samples per optimizer step, by pipeline."""
        return tuple(size * count for size, count in zip(self.micro_batch_sizes, self.micro_batches, strict=True))

    @property
    def samples(self) -> int:
        """The global batch: samples per optimizer step of all pipelines."""
        return sum(self.samples_by_pipeline)

    @property
    def micro_steps(self) -> int:
        """Forwards and backwards per optimizer step on every rank of a job of replicas.

        This is the number of the replica with the most micro-batches. All other replicas add dummy batches, in which no
        label counts, because ZeRO 2 and 3 communicate over all ranks in every forward and backward.
        """
        return max(self.micro_batches)

    def micro_batches_of(self, pipeline: int, samples: int) -> list[tuple[int, int]]:
        """Return a pipeline's micro-batches ``[start, stop)`` among the first ``samples`` samples of a step.

        The last step of an epoch may have fewer samples than a full one. They are divided in the same proportions, so
        that no pipeline gets more than fit into its memory.

        If all pipelines have equally many micro-batches, their i-th ones together are the i-th micro-batch of one
        process, so a loss that is a mean over its micro-batch has the same samples. With two micro-batches each, of 2
        and 1 samples, the first pipeline takes samples 0-1 and 3-4, the second 2 and 5.
        """
        count = self.micro_batches[0]
        if count > 1 and set(self.micro_batches) == {count}:
            joint_size = sum(self.micro_batch_sizes)  # the micro-batch of one process
            split_of_one = replace(self, micro_batches=(1,) * len(self.micro_batches))  # of one micro-batch
            ranges = []
            for first in range(0, samples, joint_size):
                for start, stop in split_of_one.micro_batches_of(pipeline, min(joint_size, samples - first)):
                    ranges.append((first + start, first + stop))
            return ranges
        start, stop = Split(share(samples, self.samples_by_pipeline)).ranges[pipeline]
        size = self.micro_batch_sizes[pipeline]
        return [(first, min(first + size, stop)) for first in range(start, stop, size)]

    def __str__(self) -> str:
        parts = [f"{size} x {count}" for size, count in zip(self.micro_batch_sizes, self.micro_batches, strict=True)]
        return f"{' + '.join(parts)} = {self.samples} samples"
