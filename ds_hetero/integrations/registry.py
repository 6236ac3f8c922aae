"""What this process has prepared: the models, what the ranks agreed on for each, and what was replaced for them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from torch import nn

from ds_hetero.integrations.deepspeed.facts import read_training_facts, section_of
from ds_hetero.integrations.patching import Patches
from ds_hetero.integrations.transformers.facts import read_facts_of_whole_model, read_model_facts
from ds_hetero.integrations.transformers.sharded_model import ShardedModel
from ds_hetero.integrations.whole_model import WholeModel
from ds_hetero.job.capabilities import requested_kernel
from ds_hetero.job.document_advice import DocumentAdvice
from ds_hetero.job.document_costs import CostRenewal, agree_on_placer
from ds_hetero.job.document_zones import DocumentZones
from ds_hetero.job.facts import JobFacts
from ds_hetero.job.monitor import DocumentObserver, EventWriter, Observers, StepMonitor, steps_between
from ds_hetero.job.prediction_check import PredictionCheck
from ds_hetero.job.replanning import Replanning, make_replanner, predicted_gain, wants_replanning
from ds_hetero.job.resolve import sp_size_of
from ds_hetero.job.run_record import RunRecord
from ds_hetero.job.start import JobStart, MeasuredClusters, World, agree_on_facts, announce_start, start_job
from ds_hetero.job.stragglers import Stragglers
from ds_hetero.placement import Placer
from ds_hetero.plans import Plan
from ds_hetero.runtime.attention.batch_layout import BatchLayout
from ds_hetero.runtime.peers.waiting import waiting_for_peers
from ds_hetero.runtime.replica import ProcessGroups, Replica, make_replica

__all__ = ["PipelinedModel", "PreparedModel", "Registry"]


class PipelinedModel(Protocol):
    """A model that was cut into stages of pipelines, of which this rank has one."""

    @property
    def model(self) -> nn.Module:
        """As the user gave it, with the parts of other stages taken out."""

    @property
    def plan(self) -> Plan:
        """What all ranks of the job do."""

    def save_pretrained(self, folder: str) -> None:
        """Write the weights of all stages, as transformers reads them; on every rank."""


@dataclass
class PreparedModel:
    """A model that this engine trains.

    Args:
        model: switched to our attention, or run whole where every replica is one rank.
        start: what the ranks agreed on for it.
        prediction_check: compares its steps with the forecasts of ``start``.
        monitor: observes its steps; None until its DeepSpeed engine has been built.
        is_destroyed: its DeepSpeed engine is gone.
        zones: where the tokens of its documents lie; None where batches are cut by their length.
        advice: looks at batches that are cut by their length; None where they could not be cut otherwise.
    """

    model: ShardedModel | WholeModel
    start: JobStart
    prediction_check: PredictionCheck
    monitor: StepMonitor | None = None
    is_destroyed: bool = False
    zones: DocumentZones | None = None
    advice: DocumentAdvice | None = None

    def record_batch(self, batch: BatchLayout) -> None:
        """Take note that a sharded forward begins."""
        self.prediction_check.record_batch(batch)
        if self.zones is not None:
            self.zones.record_batch(batch)
        if self.advice is not None:
            self.advice.record_batch(batch)


class Registry:
    """The state behind one `Handle`, which the integrations share.

    It keeps no model alive: what was prepared for a model lives as long as the model.

    Args:
        ds_config: the configuration given to `register`, if any.

    Attributes:
        ds_config: what registrations follow; None as long as no configuration is known.
        patches: what has been replaced in the frameworks.
        process_groups: made so far; plans to come use them again.
        clusters: the live ranks, as far as they were measured.
    """

    def __init__(self, ds_config: Mapping[str, object] | None) -> None:
        self.ds_config = ds_config
        self.patches = Patches()
        self._unsplit: list[weakref.ref[nn.Module]] = []
        self._pipelined: list[weakref.ref[PipelinedModel]] = []
        self._known: list[weakref.ref[PreparedModel]] = []
        self._replicas: dict[Plan, Replica] = {}
        self.process_groups = ProcessGroups()
        self.clusters = MeasuredClusters()
        self._num_records = 0

    @property
    def latest(self) -> PreparedModel | None:
        """The model prepared last with a section, of those that still exist."""
        prepared = self._prepared
        return prepared[-1] if prepared else None

    @property
    def unsplit_model(self) -> nn.Module | None:
        """The model prepared last without a section, if it still exists."""
        return next((model for weak in reversed(self._unsplit) if (model := weak()) is not None), None)

    def is_unsplit(self, model: nn.Module) -> bool:
        """Whether ``model`` was prepared without a section."""
        return any(weak() is model for weak in self._unsplit)

    @property
    def in_training(self) -> list[PreparedModel]:
        """The models prepared with a section whose engines exist, oldest first."""
        return [prepared for prepared in self._prepared if not prepared.is_destroyed]

    def note_unsplit(self, model: nn.Module | None) -> None:
        """``model`` was prepared without a section."""
        self._unsplit = [weak for weak in self._unsplit if weak() not in (None, model)]
        if model is not None:
            self._unsplit.append(weakref.ref(model))

    def note_pipelined(self, stages: PipelinedModel) -> None:
        """A model was cut into stages of pipelines."""
        self._pipelined = [weak for weak in self._pipelined if weak() is not None]
        self._pipelined.append(weakref.ref(stages))

    def find_pipelined(self, model: nn.Module) -> PipelinedModel | None:
        """What ``model`` has become, if it was cut into stages of pipelines."""
        alive = (weak() for weak in self._pipelined)
        return next((stages for stages in alive if stages is not None and stages.model is model), None)

    def is_pipelined(self, model: nn.Module) -> bool:
        """Whether ``model`` was cut into stages of pipelines."""
        return self.find_pipelined(model) is not None

    @property
    def latest_pipelined(self) -> PipelinedModel | None:
        """What the model cut last into stages of pipelines has become, if it still exists."""
        return next((stages for weak in reversed(self._pipelined) if (stages := weak()) is not None), None)

    def find(self, model: nn.Module) -> PreparedModel | None:
        """What was prepared for ``model``, if it was."""
        return next((known for known in self._prepared if known.model.model is model), None)

    def find_split(self, model: nn.Module) -> ShardedModel | None:
        """``model`` as it is split, if it was prepared and does not run whole."""
        known = self.find(model)
        return known.model if known is not None and isinstance(known.model, ShardedModel) else None

    def find_split_by_ranks(self, ranks: Sequence[int]) -> ShardedModel | None:
        """The latest model that is split over ``ranks``."""
        members = tuple(sorted(ranks))
        models = (known.model for known in reversed(self._prepared) if known.model.replica.ranks == members)
        return next((model for model in models if isinstance(model, ShardedModel)), None)

    @contextlib.contextmanager
    def using(self, ds_config: Mapping[str, object]) -> Iterator[None]:
        """Have registrations inside follow ``ds_config``."""
        before, self.ds_config = self.ds_config, ds_config
        try:
            yield
        finally:
            self.ds_config = before

    @waiting_for_peers("starting the job")
    def prepare(
        self, model: nn.Module, ds_config: Mapping[str, object], sp_sizes: Mapping[str, int | None]
    ) -> PreparedModel:
        """Start the job of ``model`` with all ranks and switch it to this rank's replica; again, if it was before.

        Args:
            model: a PreTrainedModel, or a module around one; any module where the sequence-parallel size is 1.
            ds_config: DeepSpeed's configuration, with a section.
            sp_sizes: see `ds_hetero.job.resolve.sp_size_of`.

        Caller: every rank of the world.
        """
        known = self.find(model)
        world = World.current()
        facts = agree_on_facts(world, lambda: _read_facts(model, ds_config, sp_sizes))
        start = start_job(world, facts, self.clusters, None if known is None else known.start)
        replica, kernel = self._replica_of(start.plan), requested_kernel(start.section.attention, world.rank)
        if known is not None and (known.model.replica is not replica or known.model.kernel != kernel):
            self._forget(known)
            known = None
        if known is not None and known.start.plan is start.plan:
            known.start = start
            return known
        if known is None:
            is_split = start.facts.model.is_split
            switched = ShardedModel(model, replica, kernel) if is_split else WholeModel(model, replica)
            known = PreparedModel(switched, start, PredictionCheck(()))
            switched.keep_alive(known)
            self._known.append(weakref.ref(known))
        known.start, known.prediction_check = start, PredictionCheck(start.forecasts)
        known.model.record_batches(known.record_batch)
        known.model.declare_loss(start.section.loss)
        known.model.verify(start.section.verify)
        if isinstance(known.model, WholeModel):
            known.model.expect_section(start.section)
        elif start.section.tile_tokens is not None:
            known.model.tile(start.section.tile_tokens)
        placer = agree_on_placer(world, start, replica.replica_id)
        known.model.place_documents(placer)
        known.zones = None if placer is None else DocumentZones(placer.costs.node)
        takes_advice = placer is None and isinstance(known.model, ShardedModel) and not known.model.cuts_inputs
        known.advice = DocumentAdvice(start.section, start.forecasts) if takes_advice else None
        if world.rank == 0:
            announce_start(start)
        return known

    def monitor_steps(self, prepared: PreparedModel, steps_per_print: float | None, writer: EventWriter) -> StepMonitor:
        """Make what observes an engine's steps, and changes the plan if the section says so.

        Args:
            prepared: what the engine trains.
            steps_per_print: of the engine's configuration.
            writer: the engine's monitors.

        Caller: every rank of the world, when the engine has been built.
        """
        weak = weakref.ref(prepared)  # the monitor reports when the process exits, and would keep the model until then

        def change_plan(plan: Plan) -> None:
            changed = weak()
            assert changed is not None
            changed.model.change_replica(self._replica_of(plan))
            changed.start = replace(changed.start, plan=plan)

        def change_placer(placer: Placer) -> None:
            changed = weak()
            assert changed is not None
            changed.model.place_documents(placer)

        start = prepared.start
        wanted, by_documents = wants_replanning(start), prepared.model.places_documents
        renewal = CostRenewal(start, change_placer) if wanted and by_documents else None
        documents = None if prepared.zones is None else DocumentObserver(prepared.zones, renewal)
        replanning = Replanning(start, change_plan) if wanted and not by_documents else None
        is_first = World.current().rank == 0
        observers = Observers(
            replanning=replanning,
            documents=documents,
            stragglers=_stragglers(start) if is_first and start.section.replan.report_only else None,
            make_record=self._recording(start, replanning) if is_first else None,
        )
        looks_often = wanted or start.section.replan.report_only
        interval = start.section.replan.interval_steps if looks_often else steps_between(steps_per_print)
        prepared.is_destroyed = False
        prepared.monitor = StepMonitor(start, prepared.model.clock, observers, interval, writer)
        return prepared.monitor

    def _recording(self, start: JobStart, replanning: Replanning | None) -> Callable[[], RunRecord] | None:
        """What makes the record of a job that writes ``run.json``: ``run-2.json`` for a second model, and so on."""
        if start.section.report is None:
            return None
        self._num_records += 1
        name = "run.json" if self._num_records == 1 else f"run-{self._num_records}.json"
        path = Path(start.section.report, name)
        return lambda: RunRecord(start, path, lambda: [] if replanning is None else replanning.changes)

    def undo(self) -> None:
        """Put back everything that was replaced, in the frameworks and in the models."""
        for prepared in self._prepared:
            prepared.prediction_check.report()
            if prepared.monitor is not None:
                prepared.monitor.report()
            self._forget(prepared)
        self.patches.undo()
        self._replicas.clear()
        self.process_groups.close()

    @property
    def _prepared(self) -> list[PreparedModel]:
        """What was prepared for models that still exist, oldest first."""
        self._known = [weak for weak in self._known if weak() is not None]
        return [prepared for weak in self._known if (prepared := weak()) is not None]

    def _forget(self, prepared: PreparedModel) -> None:
        """Switch a model back."""
        prepared.model.restore()
        self._known = [weak for weak in self._known if weak() is not prepared]

    def _replica_of(self, plan: Plan) -> Replica:
        """This rank's replica under ``plan``, made when it is first needed; every rank of the world."""
        if plan not in self._replicas:
            self._replicas[plan] = make_replica(plan, self.process_groups)
        return self._replicas[plan]


def _stragglers(start: JobStart) -> Stragglers:
    replanner = make_replanner(start)
    has_schedules = any(schedule.sp_size > 1 for schedule in start.plan.schedules)
    return Stragglers(lambda times: predicted_gain(replanner, start.plan, times), has_schedules=has_schedules)


def _read_facts(model: nn.Module, ds_config: Mapping[str, object], sp_sizes: Mapping[str, int | None]) -> JobFacts:
    """What this rank knows of the job; raises what is wrong with it."""
    section = section_of(ds_config)
    assert section is not None
    return JobFacts(
        section=section,
        model=(read_facts_of_whole_model if sp_size_of(sp_sizes) == 1 else read_model_facts)(model),
        training=read_training_facts(ds_config),
        sp_sizes=dict(sp_sizes),
    )
