"""Registry of this process: its models, the agreement of the ranks for each, and the replacements made for them."""

from __future__ import annotations

import contextlib
import json
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

from torch import nn

from ds_hetero.common.announce import announce
from ds_hetero.decision.batches import as_whole
from ds_hetero.decision.decide import JobStart, sp_size_of
from ds_hetero.decision.facts import JobFacts
from ds_hetero.engine.adapters import Adapters, ElasticState, ModelAdapter, SplitModel, StagedModel
from ds_hetero.engine.ds_config import read_training_facts, section_of
from ds_hetero.engine.patching import Patches
from ds_hetero.engine.whole_model import WholeModel
from ds_hetero.job.batch_search import BatchSearch
from ds_hetero.job.document_advice import DocumentAdvice
from ds_hetero.job.document_zones import DocumentZones
from ds_hetero.job.documents import CostRenewal, agree_on_placer
from ds_hetero.job.layer_search import LayerSearch
from ds_hetero.job.monitor import DocumentObserver, EventWriter, Observers, StepMonitor, steps_between
from ds_hetero.job.prediction_check import PredictionCheck
from ds_hetero.job.replanning import PlanSearch, Replanning, ScheduleSearch, has_schedules_to_change
from ds_hetero.job.run_record import RunRecord
from ds_hetero.job.start import (
    MeasuredClusters,
    Request,
    World,
    agree_on_facts,
    agree_on_request,
    announce_start,
    requested_kernel,
    start_job,
)
from ds_hetero.job.stragglers import OF_LAYERS, OF_SAMPLES, OF_TOKENS, Remedy, Stragglers
from ds_hetero.planner.documents import DocumentPlacer
from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.runtime.process_groups import ProcessGroups
from ds_hetero.runtime.replica import Replica, make_replica
from ds_hetero.runtime.step_clock import StepClock
from ds_hetero.values.placement import Placer
from ds_hetero.values.plans import Plan
from ds_hetero.values.section import SECTION

T = TypeVar("T")


@dataclass
class PreparedModel:
    """A model that this engine trains."""

    model: SplitModel | WholeModel  # switched to our attention, or run whole where every replica is one rank
    start: JobStart  # what the ranks agreed on for it
    prediction_check: PredictionCheck  # compares its steps with the forecasts of ``start``
    monitor: StepMonitor | None = None  # observes its steps; None until its DeepSpeed engine has been built
    is_destroyed: bool = False  # its DeepSpeed engine is gone
    zones: DocumentZones | None = None  # where tokens of documents lie; None where batches are cut by length
    steps: object = None  # batches and losses of the Trainer where ranks take different ones
    elastic: ElasticState | None = None  # keeps the engine's state in memory; None in a job that is not elastic


class _Living(Generic[T]):
    """Objects that others keep alive, oldest first."""

    def __init__(self) -> None:
        self._weak: list[weakref.ref[T]] = []

    def all(self) -> list[T]:
        """Return all prepared models that still exist."""
        return [one for weak in self._weak if (one := weak()) is not None]

    @property
    def latest(self) -> T | None:
        """The one added last, of those that still exist."""
        return next(reversed(self.all()), None)

    def add(self, one: T) -> None:
        """Add it as the latest, also if it is there already."""
        self.remove(one)
        self._weak.append(weakref.ref(one))

    def remove(self, one: T) -> None:
        """Remove it if it is there, and those that exist no more."""
        self._weak = [weakref.ref(other) for other in self.all() if other is not one]


class Registry:
    """The state behind one `Handle`, which the frameworks share.

    It keeps no model alive: what was prepared for a model lives as long as the model.

    Attributes:
        ds_config: what registrations follow; None as long as no configuration is known.
    """

    def __init__(self, ds_config: Mapping[str, object] | None, adapters: Adapters) -> None:
        self.ds_config, self.adapters = ds_config, adapters
        self.patches = Patches()  # what has been replaced in the frameworks
        self._unsplit = _Living[nn.Module]()
        self._pipelined = _Living[StagedModel]()
        self._prepared = _Living[PreparedModel]()
        self._request: tuple[str, Request] | None = None
        self._replicas: dict[Plan, Replica] = {}
        self.process_groups = ProcessGroups()  # made so far; plans to come use them again
        self.clusters = MeasuredClusters()  # the live ranks, as far as they were measured
        self._num_records = 0
        self._has_said_stock = False

    @property
    def latest(self) -> PreparedModel | None:
        """The model prepared last with a section, of those that still exist."""
        return self._prepared.latest

    @property
    def latest_model(self) -> nn.Module | None:
        """The model prepared last: with a section, else cut into stages, else without a section."""
        if (owner := self._prepared.latest) is not None:
            return owner.model.model
        return self._unsplit.latest if (stages := self._pipelined.latest) is None else stages.model

    def is_unsplit(self, model: nn.Module) -> bool:
        """Whether ``model`` was prepared without a section."""
        return any(other is model for other in self._unsplit.all())

    def has_prepared(self, model: nn.Module) -> bool:
        """Whether ``model`` was prepared, with a section or without."""
        return self.find(model) is not None or self.is_pipelined(model) or self.is_unsplit(model)

    def elastic_of(self, model: nn.Module) -> ElasticState | None:
        """Return the state of the engine of ``model`` that outlives its process; None in a job that is not elastic."""
        owner = self.find_pipelined(model) or self.find(model)
        return None if owner is None else owner.elastic

    @property
    def in_training(self) -> list[PreparedModel]:
        """The models prepared with a section whose engines exist, oldest first."""
        return [prepared for prepared in self._prepared.all() if not prepared.is_destroyed]

    def say_stock(self, where: str, *, is_alone: bool = False) -> None:
        """Say on rank 0, once, that training is stock although this engine is registered.

        Args:
            where: the configuration is missing, or has no section.
            is_alone: ranks know nothing of each other, so that each trains the whole job.
        """
        num_ranks, is_first = int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("RANK", "0") == "0"
        if num_ranks == 1 or not is_first or self._has_said_stock or self._prepared.all():
            return
        self._has_said_stock = True
        announce(
            f'registered, but {where}: without a "{SECTION}" section this is stock training.'
            + (f" Each of the {num_ranks} ranks trains the whole job by itself." if is_alone else "")
        )

    def note_unsplit(self, model: nn.Module | None) -> None:
        """Note that ``model`` was prepared without a section."""
        if model is not None:
            self._unsplit.add(model)

    def note_pipelined(self, stages: StagedModel) -> None:
        """Note that a model was cut into stages of pipelines."""
        self._pipelined.add(stages)

    def find_pipelined(self, model: nn.Module) -> StagedModel | None:
        """Return the stage of ``model``; None if it was not cut into stages of pipelines."""
        return next((stages for stages in self._pipelined.all() if stages.model is model), None)

    def is_pipelined(self, model: nn.Module) -> bool:
        """Whether ``model`` was cut into stages of pipelines."""
        return self.find_pipelined(model) is not None

    def find(self, model: nn.Module) -> PreparedModel | None:
        """Return the preparation of ``model``, if there is one."""
        return next((known for known in self._prepared.all() if known.model.model is model), None)

    def find_split(self, model: nn.Module) -> SplitModel | None:
        """Return ``model`` as it is split; None if it was not prepared, or runs whole."""
        known = self.find(model)
        return None if known is None or isinstance(known.model, WholeModel) else known.model

    def find_split_by_ranks(self, ranks: Sequence[int]) -> SplitModel | None:
        """Return the latest model that is split over ``ranks``."""
        members = tuple(sorted(ranks))
        models = (known.model for known in reversed(self._prepared.all()) if known.model.replica.ranks == members)
        return next((model for model in models if not isinstance(model, WholeModel)), None)

    @contextlib.contextmanager
    def using(self, ds_config: Mapping[str, object]) -> Iterator[None]:
        """Let registrations inside follow ``ds_config``."""
        before, self.ds_config = self.ds_config, ds_config
        try:
            yield
        finally:
            self.ds_config = before

    def request_of(self, ds_config: Mapping[str, object]) -> Request:
        """Request of a configuration's section; read and agreed on once, until `forget_request`.

        Caller: every rank of the world.
        Collectives: those of `agree_on_request`, the first time.
        """
        text = json.dumps(ds_config.get(SECTION), default=repr)
        if self._request is None or self._request[0] != text:
            self._request = (
                text,
                agree_on_request(World.current(), lambda: section_of(ds_config), read_training_facts(ds_config)),
            )
        return self._request[1]

    def forget_request(self) -> None:
        """Forget the request, once its engine has been built: the next engine reads its own section and plan."""
        self._request = None

    @waiting_for_peers("starting the job")
    def prepare(
        self, model: nn.Module, ds_config: Mapping[str, object], sp_sizes: Mapping[str, int | None]
    ) -> PreparedModel:
        """Start the job of ``model`` with all ranks and switch it to this rank's replica; again, if it was before.

        Args:
            model: a PreTrainedModel, or a module around one; any module where the sequence-parallel size is 1.
            sp_sizes: see `ds_hetero.decision.decide.sp_size_of`.

        Caller: every rank of the world.
        """
        known = self.find(model)
        world, request = World.current(), self.request_of(ds_config)
        facts = agree_on_facts(world, lambda: _read_facts(self.adapters.models, model, request, ds_config, sp_sizes))
        start = start_job(world, facts, self.clusters, None if known is None else known.start, plan=request.plan)
        replica, kernel = self._replica_of(start.plan), requested_kernel(start.section.attention, world.rank)
        if known is not None and (known.model.replica is not replica or known.model.kernel != kernel):
            self._forget(known)
            known = None
        if known is not None and known.start.plan is start.plan:
            known.start = start
            return known
        if known is None:
            is_split = start.facts.model.is_split
            split = self.adapters.models.split_model
            switched = split(model, replica, kernel) if is_split else WholeModel(model, replica)
            known = PreparedModel(switched, start, PredictionCheck(()))
            switched.keep_alive(known)
            self._prepared.add(known)
        known.start, known.prediction_check = start, PredictionCheck(start.forecasts)
        known.model.declare_loss(start.section.loss)
        known.model.verify(start.section.compare_every)
        if isinstance(known.model, WholeModel):
            known.model.expect_section(start.section)
        else:
            known.model.declare_evaluation(start.section.evaluation)
            if start.section.tile_tokens is not None:
                known.model.tile(start.section.tile_tokens)
        places = start.section.placement.mode == "documents" or (start.places_by_default and _loader_cuts(known.model))
        _place_batches(known, agree_on_placer(world, start, replica.replica_id) if places else None)
        if world.rank == 0:
            announce_start(start)
        return known

    def monitor_steps(self, prepared: PreparedModel, steps_per_print: float | None, writer: EventWriter) -> StepMonitor:
        """Make what observes an engine's steps, and changes the plan if the section says so; on every rank."""
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
        wanted = start.section.replan.enabled and has_schedules_to_change(start.plan)
        by_documents = prepared.model.places_documents
        renewal = CostRenewal(start, change_placer) if wanted and by_documents else None
        documents = None if prepared.zones is None else DocumentObserver(prepared.zones, renewal)
        searches = wanted and not by_documents
        replanning = Replanning(start.plan, ScheduleSearch(start), change_plan) if searches else None
        if start.section.changes_batches:
            replanning = _replanning_batches(prepared, change_plan)
        prepared.is_destroyed = False
        prepared.monitor = self.watch(start, prepared.model.clock, steps_per_print, writer, replanning, documents)
        return prepared.monitor

    def watch(
        self,
        start: JobStart,
        clock: StepClock,
        steps_per_print: float | None,
        writer: EventWriter,
        replanning: Replanning | None = None,
        documents: DocumentObserver | None = None,
    ) -> StepMonitor:
        """Make what observes an engine's steps, as the section of its job says.

        Args:
            replanning: changes the plan; None where the section does not ask for it.

        Caller: every rank of the world, when the engine has been built.
        """
        is_first, replan = World.current().rank == 0, start.section.replan
        renews = documents is not None and documents.renewal is not None
        observers = Observers(
            replanning=replanning,
            documents=documents,
            stragglers=_stragglers(start, replanning) if is_first and replan.report_only else None,
            record=self._record(start, replanning) if is_first else None,
        )
        looks_often = replanning is not None or renews or replan.report_only
        interval = replan.interval_steps if looks_often else steps_between(steps_per_print)
        return StepMonitor(start, clock, observers, interval, writer)

    def _record(self, start: JobStart, replanning: Replanning | None) -> RunRecord | None:
        """Maker of the record of a job that writes ``run.json``: ``run-2.json`` for a second model, and so on."""
        if start.section.report is None:
            return None
        self._num_records += 1
        name = "run.json" if self._num_records == 1 else f"run-{self._num_records}.json"
        path = Path(start.section.report, name)
        return RunRecord(start, path, lambda: [] if replanning is None else replanning.changes)

    def undo(self) -> None:
        """Put back everything that was replaced, in the frameworks and in the models."""
        for prepared in self._prepared.all():
            prepared.prediction_check.report()
            if prepared.monitor is not None:
                prepared.monitor.report()
            self._forget(prepared)
        self.patches.undo()
        self._replicas.clear()
        self.process_groups.close()

    def _forget(self, prepared: PreparedModel) -> None:
        """Switch a model back."""
        prepared.model.restore()
        self._prepared.remove(prepared)

    def _replica_of(self, plan: Plan) -> Replica:
        """Return this rank's replica under ``plan``, made when it is first needed; every rank of the world."""
        if plan not in self._replicas:
            self._replicas[plan] = make_replica(plan, self.process_groups)
        return self._replicas[plan]


def _loader_cuts(model: SplitModel | WholeModel) -> bool:
    """Whether the loader cuts a model's batches, so that it can place them by their documents."""
    return not isinstance(model, WholeModel) and not model.cuts_inputs


def _place_batches(known: PreparedModel, placer: DocumentPlacer | None) -> None:
    """Let a model's batches be placed, and observed by what compares them with forecasts or counts their zones."""
    model, start = known.model, known.start
    model.place_documents(placer, asked_for=start.section.placement.mode is not None)
    known.zones = None if placer is None else DocumentZones(placer.costs.node)
    observers: list[PredictionCheck | DocumentAdvice | DocumentZones] = []
    if start.forecasts:
        observers.append(known.prediction_check)
        observers += [DocumentAdvice(start.section, start.forecasts)] if _loader_cuts(model) else []
    observers += [] if known.zones is None else [known.zones]
    model.record_batches([one.record_batch for one in observers])


def _replanning_batches(prepared: PreparedModel, change_plan: Callable[[Plan], None]) -> Replanning:
    """Return how batches are re-planned where ranks take whole samples; trials are left out where forwards gather."""
    start, weak, model = prepared.start, weakref.ref(prepared), prepared.model
    assert isinstance(model, WholeModel)
    tries = start.facts.training.zero_stage < 3
    search = BatchSearch(start.section, tries=tries)
    if not tries:
        return Replanning(start.plan, search, change_plan)
    model.try_batches()

    def fits(plan: Plan) -> bool:
        tried = weak()
        assert tried is not None and isinstance(tried.model, WholeModel)
        full = search.learn(plan, tried.model.room(plan))
        for line in full if World.current().rank == 0 else ():
            announce(line)
        return not full

    return Replanning(start.plan, search, change_plan, fits)


def _stragglers(start: JobStart, replanning: Replanning | None) -> Stragglers:
    current = start if replanning is None else replanning
    search: PlanSearch
    remedy: Remedy | None
    if start.is_of_pipelines:
        search, remedy = LayerSearch(start.section.replan.min_gain), OF_LAYERS
    else:
        search, remedy = ScheduleSearch(start), OF_TOKENS if has_schedules_to_change(start.plan) else OF_SAMPLES
    return Stragglers(lambda seen: search.predicted_gain(current.plan, seen), remedy)


def _read_facts(
    adapter: ModelAdapter,
    model: nn.Module,
    request: Request,
    ds_config: Mapping[str, object],
    sp_sizes: Mapping[str, int | None],
) -> JobFacts:
    """Return this rank's facts of the job; raises what is wrong with them."""
    assert request.section is not None
    of_batches = request.section.batch is not None
    whole = of_batches or sp_size_of(sp_sizes) == 1
    training = read_training_facts(ds_config)
    if of_batches or not whole:
        adapter.check_quantized(model, training.zero_stage)
    facts = (adapter.read_facts_of_whole_model if whole else adapter.read_model_facts)(model)
    return JobFacts(
        section=request.section,
        model=as_whole(facts) if of_batches else facts,
        training=training,
        sp_sizes=dict(sp_sizes),
    )
