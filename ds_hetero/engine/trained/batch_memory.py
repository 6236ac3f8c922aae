"""Find how many samples of a planned micro-batch fit into each rank's memory, before re-planning takes the plan."""

from __future__ import annotations

from ds_hetero.engine.trained.recorded_forwards import RecordedForwards
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.data.batch_trial import BatchTrial
from ds_hetero.values.plans import BatchSplit


class BatchMemory:
    """Trials of larger batches; their forwards and backwards need no other rank.

    Args:
        trial: tries batches of this rank's model.
        forwards: of the model, from which the trial learns the arguments of a forward.
        replica_id: index of this rank in the batch sizes of a `BatchSplit`.
    """

    def __init__(self, trial: BatchTrial, forwards: RecordedForwards, replica_id: int) -> None:
        self._trial, self._replica_id = trial, replica_id
        forwards.trial = trial

    def samples_that_fit(self, planned: BatchSplit, present: BatchSplit) -> list[int]:
        """Return by rank how many samples of its planned micro-batch fit.

        Args:
            planned: the batches to try.
            present: the batches that the ranks train with, which are known to fit.

        Caller: every rank of the world.
        Collectives: one `on_all_ranks`.
        """
        planned_size = planned.micro_batch_sizes[self._replica_id]
        present_size = present.micro_batch_sizes[self._replica_id]

        def try_planned() -> int:
            if planned_size <= present_size:
                return planned_size
            return self._trial.max_samples(planned_size, present_size)

        return on_all_ranks(try_planned)
