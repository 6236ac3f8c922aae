"""The state behind a `Handle`: the models of this process, what the ranks agreed on for each, and all replacements."""

from __future__ import annotations

import contextlib
import json
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

from torch import nn

from ds_hetero.common.announce import announce
from ds_hetero.decision.batches import as_whole
from ds_hetero.decision.decide import JobStart
from ds_hetero.decision.expert_weights import check_experts
from ds_hetero.decision.facts import JobFacts
from ds_hetero.decision.resolve import sp_size_of
from ds_hetero.elastic.worker import is_elastic
from ds_hetero.engine.adapters import Adapters, ModelAdapter
from ds_hetero.engine.ds_config import read_training_facts, section_of
from ds_hetero.engine.patching import Patches
from ds_hetero.engine.trained.elastic_state import ElasticState
from ds_hetero.engine.trained.model import TrainedModel
from ds_hetero.engine.trained.split_model import SplitModel
from ds_hetero.engine.trained.staged_model import StagedModel
from ds_hetero.engine.trained.unlike_batches import UnlikeBatches
from ds_hetero.engine.trained.unlike_losses import UnlikeLosses
from ds_hetero.engine.trained.whole_model_checks import expect_section_of_whole_model, raise_whole_documents
from ds_hetero.errors import HeteroError
from ds_hetero.job.document_advice import DocumentAdvice
from ds_hetero.job.document_zones import DocumentZones
from ds_hetero.job.documents import agree_on_placer
from ds_hetero.job.prediction_check import PredictionCheck
from ds_hetero.job.start import (
    ClusterCache,
    Request,
    World,
    agree_on_facts,
    agree_on_request,
    announce_start,
    requested_kernel,
    start_job,
)
from ds_hetero.planner.documents import DocumentPlacer
from ds_hetero.runtime.devices import default_device
from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.runtime.process_groups import ProcessGroups
from ds_hetero.runtime.replica import Replica, make_replica
from ds_hetero.runtime.step_clock import StepClock
from ds_hetero.values.plans import Plan
from ds_hetero.values.section import SECTION, HeterogeneitySection

T = TypeVar("T")


class _WeakList(Generic[T]):
    """Weak references to objects, oldest first; an object leaves the list when nothing else keeps it alive."""

    def __init__(self) -> None:
        self._references: list[weakref.ref[T]] = []

    def all(self) -> list[T]:
        """Return the objects that still exist."""
        return [item for reference in self._references if (item := reference()) is not None]

    @property
    def latest(self) -> T | None:
        """The object that was added last, of those that still exist."""
        return next(reversed(self.all()), None)

    def add(self, item: T) -> None:
        """Append an object; if it is in the list already, move it to the end."""
        self.remove(item)
        self._references.append(weakref.ref(item))

    def remove(self, item: T) -> None:
        """Remove an object, if it is in the list."""
        self._references = [weakref.ref(other) for other in self.all() if other is not item]


class Registry:
    """The state behind a `Handle`, which the adapters of all frameworks share.

    It keeps no model alive: a `TrainedModel` lives as long as its module.

    Attributes:
        ds_config: the configuration for models that are registered with frameworks; None if it is not known yet.
        adapters: adapters of the frameworks.
        patches: replacements in the frameworks.
        process_groups: process groups that exist already, and are used again by later plans.
        clusters: measurements of the live ranks.
    """

    def __init__(self, ds_config: Mapping[str, object] | None, adapters: Adapters) -> None:
        self.ds_config, self.adapters = ds_config, adapters
        self.patches = Patches()
        self._unsplit = _WeakList[nn.Module]()  # models that were prepared without a section
        self._trained = _WeakList[TrainedModel]()  # models that were prepared with a section
        self._request: tuple[str, Request] | None = None  # with the JSON text of the section that it was read from
        self._replicas: dict[Plan, Replica] = {}
        self.process_groups = ProcessGroups()
        self.clusters = ClusterCache()
        self._num_records = 0  # files run.json, run-2.json, ... so far
        self._has_announced_stock = False

    @property
    def _on_replicas(self) -> list[TrainedModel]:
        """The models with a section that are no stages of pipelines, oldest first."""
        return [trained for trained in self._trained.all() if trained.stage is None]

    @property
    def latest(self) -> TrainedModel | None:
        """The latest model that was prepared with a section and is no stage, of those that still exist."""
        return next(reversed(self._on_replicas), None)

    @property
    def latest_model(self) -> nn.Module | None:
        """The latest model with a section and no stage; else the latest stage's; else the latest without a section."""
        trained = self.latest or self._trained.latest
        return self._unsplit.latest if trained is None else trained.module

    def is_unsplit(self, model: nn.Module) -> bool:
        """Return whether a model was prepared without a section."""
        return any(other is model for other in self._unsplit.all())

    def has_prepared(self, model: nn.Module) -> bool:
        """Return whether a model was prepared, with a section or without."""
        return self.find(model) is not None or self.is_unsplit(model)

    def elastic_of(self, model: nn.Module) -> ElasticState | None:
        """Return the state of a model's engine that outlives the process; None in a job that is not elastic."""
        trained = self.find(model)
        return None if trained is None else trained.elastic

    @property
    def in_training(self) -> list[TrainedModel]:
        """The models with a section whose engines were not destroyed, oldest first; no stages of pipelines."""
        return [trained for trained in self._on_replicas if not trained.is_destroyed]

    def say_stock(self, where: str, *, is_alone: bool = False) -> None:
        """Announce on rank 0, once, that stock DeepSpeed trains although ds_hetero is registered.

        Args:
            where: a clause that says where the configuration or its section is missing.
            is_alone: whether the ranks have no process group, so that each trains the whole job.
        """
        num_ranks, is_first = int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("RANK", "0") == "0"
        if num_ranks == 1 or not is_first or self._has_announced_stock or self._on_replicas:
            return
        self._has_announced_stock = True
        announce(
            f'registered, but {where}: without a "{SECTION}" section this is stock training.'
            + (f" Each of the {num_ranks} ranks trains the whole job by itself." if is_alone else "")
        )

    def note_unsplit(self, model: nn.Module | None) -> None:
        """Note that a model was prepared without a section."""
        if model is not None:
            self._unsplit.add(model)

    def add(self, trained: TrainedModel) -> None:
        """Add a model that was prepared with a section."""
        self._trained.add(trained)

    def find(self, model: nn.Module) -> TrainedModel | None:
        """Return the latest `TrainedModel` of a module; None if the module was not prepared with a section."""
        return next((trained for trained in reversed(self._trained.all()) if trained.module is model), None)

    def find_on_replica(self, model: nn.Module) -> TrainedModel | None:
        """Return a model that was prepared with a section and is no stage of a pipeline; None for any other."""
        trained = self.find(model)
        return None if trained is None or trained.stage is not None else trained

    def find_stage(self, model: nn.Module) -> StagedModel | None:
        """Return this rank's stage of a model; None if the model was not cut into stages of pipelines."""
        trained = self.find(model)
        return None if trained is None else trained.stage

    def is_pipelined(self, model: nn.Module) -> bool:
        """Return whether a model was cut into stages of pipelines."""
        return self.find_stage(model) is not None

    def find_split(self, model: nn.Module) -> SplitModel | None:
        """Return the part of ``model`` that is split over the sequence; None if it was not prepared, or runs whole."""
        trained = self.find(model)
        return None if trained is None else trained.sequences

    def find_split_by_ranks(self, ranks: Sequence[int]) -> SplitModel | None:
        """Return the latest model that is split over exactly these ranks; None if there is none."""
        members = tuple(sorted(ranks))
        for trained in reversed(self._trained.all()):
            if trained.sequences is not None and trained.replica.ranks == members:
                return trained.sequences
        return None

    @contextlib.contextmanager
    def using(self, ds_config: Mapping[str, object]) -> Iterator[None]:
        """Inside the context, set ``self.ds_config``, the configuration for models that are prepared there."""
        before, self.ds_config = self.ds_config, ds_config
        try:
            yield
        finally:
            self.ds_config = before

    def request_of(self, ds_config: Mapping[str, object]) -> Request:
        """Return what a configuration's section requests; it is read and compared once, until `forget_request`.

        Caller: every rank of the world.
        Collectives: those of `agree_on_request`, the first time.
        """
        section_text = json.dumps(ds_config.get(SECTION), default=repr)
        if self._request is not None:
            known_text, known_request = self._request
            if known_text == section_text:
                return known_request
        training = read_training_facts(ds_config)
        request = agree_on_request(World.current(), lambda: section_of(ds_config), training)
        self._request = section_text, request
        return request

    def set_section(self, ds_config: Mapping[str, object], section: HeterogeneitySection) -> None:
        """Replace the section of a configuration's request, until `forget_request`, by one that leaves less open.

        Caller: every rank of the world, with the same section.
        """
        request = self.request_of(ds_config)
        assert self._request is not None
        self._request = self._request[0], replace(request, section=section)

    def forget_request(self) -> None:
        """Drop the request when its engine has been built: the next engine reads its section and plan anew."""
        self._request = None

    @waiting_for_peers("starting the job")
    def prepare(
        self, model: nn.Module, ds_config: Mapping[str, object], sp_sizes: Mapping[str, int | None]
    ) -> TrainedModel:
        """Let all ranks agree on the job of a model, and split the model for this rank's replica.

        A model that was prepared before is prepared again only if its plan or its kernel has changed.

        Args:
            model: a PreTrainedModel, or a module around one; any module if the sequence-parallel size is 1.
            ds_config: a configuration with a section.
            sp_sizes: see `ds_hetero.decision.resolve.sp_size_of`.

        Caller: every rank of the world.
        """
        trained = self.find_on_replica(model)
        world, request = World.current(), self.request_of(ds_config)
        facts = agree_on_facts(world, lambda: _read_facts(self.adapters.models, model, request, ds_config, sp_sizes))
        start = start_job(world, facts, self.clusters, None if trained is None else trained.start, plan=request.plan)
        replica, kernel = self.replica_of(start.plan), requested_kernel(start.section.attention, world.rank)
        if trained is not None and (trained.replica is not replica or trained.kernel != kernel):
            self._restore(trained)
            trained = None
        if trained is not None and trained.start.plan is start.plan:
            trained.start = start
            return trained
        if trained is None:
            trained = self._make(model, start, replica, kernel)
            self.add(trained)
        trained.start, trained.prediction_check = start, PredictionCheck(start.forecasts)
        _declare(trained, start)
        is_requested = start.section.placement.mode == "documents"
        places_documents = is_requested or (start.places_by_default and trained.loader_cuts)
        _place_batches(trained, agree_on_placer(world, start, replica.replica_id) if places_documents else None)
        if world.rank == 0:
            announce_start(start)
        return trained

    def _make(self, model: nn.Module, start: JobStart, replica: Replica, kernel: str | None) -> TrainedModel:
        """Make the `TrainedModel` of a module: with split sequences, with weighed losses, or with neither."""
        if start.facts.model.is_split:
            sequences = self.adapters.models.split_model(model, replica, kernel)
            trained = TrainedModel(
                module=model, start=start, clock=sequences.clock, rank_replica=replica, sequences=sequences
            )
            if start.expert_weights is not None:
                trained.experts = self.adapters.models.place_experts(model, start.expert_weights, replica)
            return trained
        trained = TrainedModel(module=model, start=start, clock=StepClock(default_device()), rank_replica=replica)
        if replica.batch_split is not None:
            trained.batches = UnlikeBatches(model, replica)
            trained.losses = UnlikeLosses(trained.batches)
        return trained

    def next_record_name(self) -> str:
        """Return the name of the next file that records a run: run.json, then run-2.json, and so on."""
        self._num_records += 1
        return "run.json" if self._num_records == 1 else f"run-{self._num_records}.json"

    def undo(self) -> None:
        """Undo all changes in the frameworks and in the models."""
        for trained in self._on_replicas:
            trained.prediction_check.report()
            if trained.monitor is not None:
                trained.monitor.report()
            self._restore(trained)
        self.patches.undo()
        self._replicas.clear()
        self.process_groups.close()

    def _restore(self, trained: TrainedModel) -> None:
        """Undo all changes in a model, and remove its entry."""
        trained.restore()
        self._trained.remove(trained)

    def replica_of(self, plan: Plan) -> Replica:
        """Return this rank's replica under a plan; it is made at the first call. Caller: every rank of the world."""
        if plan not in self._replicas:
            self._replicas[plan] = make_replica(plan, self.process_groups)
        return self._replicas[plan]


def _declare(trained: TrainedModel, start: JobStart) -> None:
    """Give a model its settings of the section. Raises `HeteroError` on every rank: a key does not suit the model."""
    section = start.section
    if trained.sequences is None:
        name, batches = type(trained.module).__name__, trained.batches
        expect_section_of_whole_model(name, section, takes_unlike_batches=batches is not None)
        if batches is not None:
            batches.declare(section)
        return
    trained.sequences.losses.declare(section.loss)
    trained.sequences.pace.every = section.compare_every
    trained.sequences.evaluation.declare(section.evaluation)
    if section.tile_tokens is not None:
        trained.sequences.tile(section.tile_tokens)
    trained.sequences.keeps_attention = start.keeps_attention
    trained.sequences.ring_gradients = section.ring_gradients


def _place_batches(trained: TrainedModel, placer: DocumentPlacer | None) -> None:
    """Set how a model's batches are placed, and which observers get the layout of every batch.

    Args:
        placer: places batches by their documents; None to cut them by length.

    Raises:
        ConfigError: on every rank: documents are to be placed, but the model's batches are not split.
    """
    sequences, start = trained.sequences, trained.start
    if sequences is None:
        if placer is not None:
            raise_whole_documents(type(trained.module).__name__)
        return
    sequences.placement.use(placer, asked_for=start.section.placement.mode is not None)
    trained.zones = None if placer is None else DocumentZones(placer.costs.node)
    observers: list[PredictionCheck | DocumentAdvice | DocumentZones] = []
    if start.forecasts:
        observers.append(trained.prediction_check)
        if trained.loader_cuts:
            observers.append(DocumentAdvice(start.section, start.forecasts))
    if trained.zones is not None:
        observers.append(trained.zones)
    sequences.record_batches([observer.record_batch for observer in observers])


def _read_facts(
    adapter: ModelAdapter,
    model: nn.Module,
    request: Request,
    ds_config: Mapping[str, object],
    sp_sizes: Mapping[str, int | None],
) -> JobFacts:
    """Return this rank's facts of the job. Raises `HeteroError`: the model or the settings cannot be used."""
    assert request.section is not None
    has_rank_batches = request.section.sets_batch_by_rank
    runs_whole = has_rank_batches or sp_size_of(sp_sizes) == 1
    training = read_training_facts(ds_config)
    if has_rank_batches or not runs_whole:
        adapter.check_quantized(model, training.zero_stage)
    read_facts = adapter.read_facts_of_whole_model if runs_whole else adapter.read_model_facts
    facts = read_facts(model)
    no_experts_reason = ""
    if request.section.experts is not None:
        try:
            check_experts(
                request.section,
                training,
                is_split=not runs_whole,
                is_elastic=is_elastic() or request.section.elastic is not None,
                element_bytes=facts.element_bytes,
            )
            adapter.check_placeable(model)
        except HeteroError as error:
            if request.section.experts != "best":
                raise
            no_experts_reason = str(error)
    return JobFacts(
        section=request.section,
        model=as_whole(facts) if has_rank_batches else facts,
        training=training,
        sp_sizes=dict(sp_sizes),
        no_experts_reason=no_experts_reason,
    )
