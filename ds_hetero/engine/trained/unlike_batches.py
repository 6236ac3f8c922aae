"""Different batches on the ranks, each of which runs the whole model: what is needed to weigh the ranks' losses.

A loss has a micro-batch that it was computed from (`micro_batch_order`), forwards that led to it (`recorded_forwards`)
and a unit that it is a mean over (`loss_unit`). Probes find out whether samples influence each other, in which case no
weights are exact (`sample_probes`). `unlike_losses` weighs the losses.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from ds_hetero.engine.outside_runs import gathering_in_forward, in_evaluation
from ds_hetero.engine.patching import Function
from ds_hetero.engine.trained.batch_memory import BatchMemory
from ds_hetero.engine.trained.forward_arguments import ForwardArguments, run_batch
from ds_hetero.engine.trained.loss_unit import LossUnit
from ds_hetero.engine.trained.micro_batch_order import MicroBatchOrder
from ds_hetero.engine.trained.recorded_forwards import RecordedForwards
from ds_hetero.engine.trained.sample_probes import SampleProbes
from ds_hetero.engine.trained.sample_readers import SampleReader, SampleReaders
from ds_hetero.errors import ConfigError
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.data.batch_trial import BatchTrial
from ds_hetero.runtime.data.loss_units import Batch, loss_in, probe, unit_of_probes
from ds_hetero.runtime.data.probe_pace import ProbePace
from ds_hetero.runtime.data.sample_loader import MicroBatchCounts
from ds_hetero.runtime.replica import Replica
from ds_hetero.values.plans import BatchSplit, Plan
from ds_hetero.values.section import HeterogeneitySection


class UnlikeBatches:
    """The batches of one model; a `ds_hetero.runtime.data.sample_loader.Trainee` for its loaders.

    Args:
        model: the module.
        replica: this rank's replica, which is this rank alone; its plan has the batches of all ranks.

    Attributes:
        order: finds the micro-batch that a loss was computed from.
        forwards: what the latest forwards of training left behind.
        unit: what the loss is a mean over.
        probes: whether samples influence each other.
        readers: of the samples of this model's loaders.
        memory: tries larger batches; None if re-planning cannot try any.
        times_ranks: autograd nodes by which a Trainer multiplied the latest loss by the number of ranks. They are no
            part of the loss, since in one process there would be none.
    """

    def __init__(self, model: nn.Module, replica: Replica) -> None:
        assert replica.sp_size == 1, replica
        self.model, self.replica = model, replica
        self.order = MicroBatchOrder(type(model).__name__)
        self.forwards = RecordedForwards(model)
        self.unit = LossUnit()
        self.probes = SampleProbes(model, self.forwards)
        self.readers = SampleReaders()
        self.memory: BatchMemory | None = None
        self.times_ranks: list[Node] = []

    def restore(self) -> None:
        """Remove the hooks from the module."""
        self.forwards.remove()

    @property
    def split(self) -> BatchSplit:
        """Micro-batch sizes and numbers of micro-batches of all ranks, from the plan."""
        assert self.replica.batch_split is not None
        return self.replica.batch_split

    def declare(self, section: HeterogeneitySection) -> None:
        """Take the keys of the section that are about losses and batches."""
        self.unit.declare(section.loss)
        self.probes.pace = ProbePace(section.compare_every)
        self.readers.follow_speeds = section.changes_batches

    # What loaders ask and tell, see `Trainee`.

    @property
    def training(self) -> bool:
        """Whether the module is in training."""
        return self.model.training

    def note_reader(self, reader: SampleReader | None) -> None:
        """Let a loader's reader follow changes of the ranks' batches. Raises `BatchError`: see `SampleReaders.add`."""
        self.readers.add(reader, self.split)

    def give(self, batch: MicroBatchCounts | None) -> None:
        """Announce the micro-batch of the next loss; None if it is unknown."""
        self.order.give(batch)

    def expect_used(self) -> None:
        """Check that the loss of the announced batch was weighed. Raises `StepError`: it had no backward."""
        self.order.expect_used()

    @property
    def only_fills_up(self) -> bool:
        """Whether the model trains on a copy of a batch that only fills up an optimizer step, and counts no samples."""
        return self.training and self.order.only_fills_up

    # Forwards, backwards and steps of the engine.

    @property
    def needs_probe(self) -> bool:
        """Whether the next forward is the first of training; the same on every rank."""
        return not self.probes.has_run and self.model.training and torch.is_grad_enabled()

    def around_forward(self, forward: Function, *args: Batch, **kwargs: Batch) -> object:
        """Replace the engine's forward: before the first forward of training, examine the batch of that forward."""
        if self.needs_probe:
            self.examine_first_batch(args, kwargs)
        return forward(*args, **kwargs)

    def examine_first_batch(self, args: tuple[Batch, ...], kwargs: dict[str, Batch]) -> None:
        """Probe a first batch, see `SampleProbes.expect_samples_apart`; with accumulation, find the unit of its loss.

        Args:
            args: positional arguments of the first forward.
            kwargs: its arguments by name.

        Caller: every rank of the world.
        Collectives: those of up to twelve forwards, and four `on_all_ranks`.

        Raises:
            ConfigError: on every rank: see `SampleProbes.expect_samples_apart`.
            ModelError: on every rank: see `SampleProbes.expect_samples_apart`.
        """
        arguments = ForwardArguments(args, kwargs)
        rows, batch = arguments.rows, arguments.as_batch()

        def run(batch: Batch) -> object:
            return run_batch(self.model, batch)

        def compute(batch: Batch) -> Tensor | None:
            return loss_in(run(batch))

        self.probes.expect_samples_apart(compute, batch, run)
        if self.unit.is_examined or self.unit.name is not None or self.split.micro_steps == 1:
            return
        self.unit.is_examined = True
        with gathering_in_forward(self.model), in_evaluation(self.model):
            results_of_ranks = on_all_ranks(lambda: probe(compute, batch, rows))
        if all(result.has_loss for result in results_of_ranks):
            with contextlib.suppress(ConfigError):  # a mean over none of the units: its graph is read later
                self.unit.name = unit_of_probes(results_of_ranks, type(self.model).__name__)

    def end_backward(self) -> None:
        """Clear the state of a loss whose backward has run, and expect the next micro-batch."""
        self.order.end_backward()
        self.forwards.clear()
        self.times_ranks.clear()

    def note_scaled_loss(self) -> None:
        """Note that the latest loss was scaled for the engine's average of gradients."""
        self.forwards.has_run = False

    def end_step(self) -> bool:
        """Clear the state of a step; return True if the module ran with gradients, but no loss was scaled."""
        has_run = self.forwards.has_run
        self.forwards.has_run = False
        return has_run

    # Re-planning.

    def try_batches(self) -> None:
        """Make `memory`, which finds the micro-batches that fit, from now on."""
        self.memory = BatchMemory(BatchTrial(self.model), self.forwards, self.replica.replica_id)

    def samples_that_fit(self, plan: Plan) -> list[int]:
        """Return by rank how many samples of a plan's micro-batch fit into memory; see `BatchMemory`."""
        assert plan.batch_split is not None and self.memory is not None
        return self.memory.samples_that_fit(plan.batch_split, self.split)

    def change_replica(self, replica: Replica) -> None:
        """Change the batches of the ranks, from the first optimizer step of which no rank has read a batch yet.

        Caller: every rank of the world.
        Collectives: one `on_all_ranks`.
        """
        self.replica = replica
        self.readers.change(self.split)
