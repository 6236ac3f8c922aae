"""Make the monitor of an engine's steps, with the observers and the re-planning that the section asks for."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path

from ds_hetero.common.announce import announce
from ds_hetero.decision.decide import JobStart
from ds_hetero.engine.registry import Registry
from ds_hetero.engine.trained.model import TrainedModel
from ds_hetero.engine.trained.unlike_batches import UnlikeBatches
from ds_hetero.job.batch_search import BatchSearch
from ds_hetero.job.documents import CostRenewal
from ds_hetero.job.expert_loads import ExpertLoads, ReplicaShares
from ds_hetero.job.layer_search import LayerSearch
from ds_hetero.job.monitor import DocumentObserver, EventWriter, Observers, StepMonitor, steps_between
from ds_hetero.job.replanning import PlanSearch, Replanning, ScheduleSearch, has_schedules_to_change
from ds_hetero.job.run_record import RunRecord
from ds_hetero.job.start import World
from ds_hetero.job.stragglers import MOVE_LAYERS, MOVE_TOKENS, SHARE_SAMPLES, Remedy, Stragglers
from ds_hetero.runtime.step_clock import StepClock
from ds_hetero.values.placement import Placer
from ds_hetero.values.plans import Plan


def monitor_steps(
    registry: Registry, trained: TrainedModel, steps_per_print: float | None, writer: EventWriter
) -> StepMonitor:
    """Return the monitor of an engine's steps, which also re-plans if the section asks for it.

    Args:
        trained: a model that is no stage; it gets the monitor.
        steps_per_print: steps between two lines of DeepSpeed's log.
        writer: DeepSpeed's monitor.

    Caller: every rank of the world.
    """
    # Weak: the monitor is kept until the process exits, when it reports, and must not keep the model until then.
    weak = weakref.ref(trained)

    def change_plan(plan: Plan) -> None:
        changed = weak()
        assert changed is not None
        changed.change_plan(plan, registry.replica_of(plan))

    def change_placer(placer: Placer) -> None:
        changed = weak()
        assert changed is not None and changed.sequences is not None
        changed.sequences.placement.use(placer)

    start = trained.start
    changes_schedules = start.section.replan.enabled and has_schedules_to_change(start.plan)
    # With documents the costs of the placement are measured anew, instead of a search for other schedules.
    by_documents = trained.sequences is not None and trained.sequences.placement.by_documents
    renewal = CostRenewal(start, change_placer) if changes_schedules and by_documents else None
    documents = None if trained.zones is None else DocumentObserver(trained.zones, renewal)
    searches = changes_schedules and not by_documents
    replanning = Replanning(start.plan, ScheduleSearch(start), change_plan) if searches else None
    if trained.batches is not None and start.section.changes_batches:
        replanning = _replanning_batches(start, trained.batches, change_plan)
    trained.is_destroyed = False
    trained.monitor = make_monitor(
        registry, start, trained.clock, steps_per_print, writer, replanning, documents, _expert_loads(trained)
    )
    return trained.monitor


def _expert_loads(trained: TrainedModel) -> ExpertLoads | None:
    """Return the observer of the rows that experts get, of all layers alike; None if every rank has all experts."""
    experts, weights = trained.experts, trained.start.expert_weights
    if experts is None or weights is None:
        return None
    first = experts.in_replicas[0]
    alike = [layer for layer, in_replicas in enumerate(experts.in_replicas) if in_replicas == first]
    weak = weakref.ref(experts)  # see `monitor_steps`

    def take_rows() -> list[list[int]]:
        current = weak()
        assert current is not None
        rows = current.take_rows()
        return [rows[layer] for layer in alike]

    replicas = []
    for ranks, split in zip(first.ranks, first.splits, strict=True):
        replicas.append(ReplicaShares(ranks, split.sizes, tuple(weights[rank] for rank in ranks)))
    return ExpertLoads(take_rows, replicas)


def make_monitor(
    registry: Registry,
    start: JobStart,
    clock: StepClock,
    steps_per_print: float | None,
    writer: EventWriter,
    replanning: Replanning | None = None,
    documents: DocumentObserver | None = None,
    experts: ExpertLoads | None = None,
) -> StepMonitor:
    """Return the monitor of an engine's steps, with the observers that the section asks for.

    Args:
        steps_per_print: steps between two lines of DeepSpeed's log.
        writer: DeepSpeed's monitor.
        replanning: changes the plan; None if the section does not ask for it.
        documents: observes the placement of documents; None if batches are cut by length.
        experts: observes the rows of divided experts; None if every rank has all.

    Caller: every rank of the world, when the engine has been built.
    """
    is_first, replan = World.current().rank == 0, start.section.replan
    renews = documents is not None and documents.renewal is not None
    observers = Observers(
        replanning=replanning,
        documents=documents,
        stragglers=_stragglers(start, replanning) if is_first and replan.report_only else None,
        record=_run_record(registry, start, replanning) if is_first else None,
        experts=experts,
    )
    compares_ranks = replanning is not None or renews or replan.report_only
    interval = replan.interval_steps if compares_ranks else steps_between(steps_per_print)
    return StepMonitor(start, clock, observers, interval, writer)


def _run_record(registry: Registry, start: JobStart, replanning: Replanning | None) -> RunRecord | None:
    """Return the writer of run.json if ``"report"`` is set, else None; a second model has run-2.json, and so on."""
    if start.section.report is None:
        return None
    path = Path(start.section.report, registry.next_record_name())
    return RunRecord(start, path, lambda: [] if replanning is None else replanning.changes)


def _replanning_batches(start: JobStart, batches: UnlikeBatches, change_plan: Callable[[Plan], None]) -> Replanning:
    """Return the re-planning of batches whose ranks take whole samples.

    Before a change, every rank tries whether its larger batch fits into memory. On ZeRO-3 it does not: forwards gather
    parameters, so that a rank cannot run one alone.
    """
    tests_memory = start.facts.training.zero_stage < 3
    search = BatchSearch(start.section, tests_memory=tests_memory)
    if not tests_memory:
        return Replanning(start.plan, search, change_plan)
    batches.try_batches()
    weak = weakref.ref(batches)  # see `monitor_steps`

    def fits(plan: Plan) -> bool:
        current = weak()
        assert current is not None
        lines = search.learn(plan, current.samples_that_fit(plan))  # one for each rank whose batch does not fit
        if World.current().rank == 0:
            for line in lines:
                announce(line)
        return not lines

    return Replanning(start.plan, search, change_plan, fits)


def _stragglers(start: JobStart, replanning: Replanning | None) -> Stragglers:
    """Return the observer that names slow ranks, and predicts the gain of another plan."""
    current = start if replanning is None else replanning  # has the plan that runs
    search: PlanSearch
    remedy: Remedy | None
    if start.is_of_pipelines:
        search, remedy = LayerSearch(start.section.replan.min_gain), MOVE_LAYERS
    else:
        search, remedy = ScheduleSearch(start), MOVE_TOKENS if has_schedules_to_change(start.plan) else SHARE_SAMPLES
    return Stragglers(lambda seen: search.predicted_gain(current.plan, seen), remedy)
