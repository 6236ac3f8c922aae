"""A model that an engine trains with a section: what every kind of model has, and the parts that only some have.

    kind of model                 sequences   batches and losses                stage
    split over the sequence       yes         -                                 -
    whole on every rank           -           if ranks take different batches   -
    a stage of a pipeline         -           -                                 yes

A part that a model lacks is None. So code that is for one kind of model asks whether its part is None.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import nn

from ds_hetero.decision.decide import JobStart
from ds_hetero.engine.trained.elastic_state import ElasticState
from ds_hetero.engine.trained.split_model import SplitModel
from ds_hetero.engine.trained.staged_model import StagedModel
from ds_hetero.engine.trained.unlike_batches import UnlikeBatches
from ds_hetero.engine.trained.unlike_losses import UnlikeLosses
from ds_hetero.job.document_zones import DocumentZones
from ds_hetero.job.monitor import StepMonitor
from ds_hetero.job.prediction_check import PredictionCheck
from ds_hetero.runtime.experts.parts import ExpertParts
from ds_hetero.runtime.replica import Replica
from ds_hetero.runtime.step_clock import StepClock
from ds_hetero.values.plans import Plan

_KEEPER = "_ds_hetero_trained"  # attribute of a module that keeps its `TrainedModel` alive


@dataclass(kw_only=True, eq=False)
class TrainedModel:
    """One model that an engine trains. It lives as long as its module."""

    module: nn.Module  # as the script gave it to deepspeed.initialize
    start: JobStart  # what the ranks agreed on for it
    clock: StepClock  # times the phases of its steps
    rank_replica: Replica | None = None  # this rank's replica; None for a stage, see `replica`

    sequences: SplitModel | None = None  # its forwards on shards
    batches: UnlikeBatches | None = None  # micro-batches that differ between ranks
    losses: UnlikeLosses | None = None  # weighs the losses of such micro-batches
    stage: StagedModel | None = None  # this rank's part of the model
    experts: ExpertParts | None = None  # this rank's experts; None if it holds all of them
    zones: DocumentZones | None = None  # counts tokens of documents by zone; None if batches are cut by length
    elastic: ElasticState | None = None  # keeps the engine's state in memory; None in a job that is not elastic
    monitor: StepMonitor | None = None  # observes its steps; None until DeepSpeed's engine has been built
    trainer_steps: object = None  # batches and losses of the Trainer, if ranks take different batches

    # Compares its steps with the forecasts of ``start``.
    prediction_check: PredictionCheck = field(default_factory=lambda: PredictionCheck(()))
    is_destroyed: bool = False  # whether DeepSpeed's engine was destroyed

    def __post_init__(self) -> None:
        vars(self.module)[_KEEPER] = self

    def __deepcopy__(self, memo: dict[int, object]) -> TrainedModel:
        """Return this object, which a copied module refers to as well."""
        return self

    @property
    def replica(self) -> Replica:
        """This rank's replica under the present plan; only for a model that is no stage."""
        assert self.rank_replica is not None
        return self.rank_replica

    @property
    def kernel(self) -> str | None:
        """The attention kernel that the section requests for this rank; None for any, and for whole models."""
        return None if self.sequences is None else self.sequences.kernel

    @property
    def takes_shards(self) -> bool:
        """Whether a forward without a cache takes a shard at the moment."""
        return self.sequences is not None and self.sequences.takes_shards

    @property
    def waits_in_forward(self) -> bool:
        """Whether a forward would now run on a shard, so that it may wait for other ranks of its replica."""
        return self.sequences is not None and self.sequences.takes_shards and self.sequences.is_split

    @property
    def times_forward(self) -> bool:
        """Whether a forward would now count as one of training, so that its time is recorded."""
        if self.sequences is None or not self.sequences.is_split:  # the Trainer gives one rank whole batches
            return self.module.training
        return self.sequences.takes_shards

    @property
    def loader_cuts(self) -> bool:
        """Whether the loader shards batches (towers need whole ones), so that it can place them by their documents."""
        return self.sequences is not None and not self.sequences.cuts_inputs

    def change_plan(self, plan: Plan, replica: Replica) -> None:
        """Use another schedule of the same ranks, or other batches, from now on.

        Args:
            replica: this rank's replica under the plan.

        Caller: every rank of the world.
        """
        self.rank_replica = replica
        if self.sequences is not None:
            self.sequences.change_replica(replica)
        if self.batches is not None:
            self.batches.change_replica(replica)
        self.start = replace(self.start, plan=plan)

    def restore(self) -> None:
        """Undo everything that was changed in the module."""
        if self.sequences is not None:
            self.sequences.restore()
        if self.batches is not None:
            self.batches.restore()
        if vars(self.module).get(_KEEPER) is self:
            del vars(self.module)[_KEEPER]
