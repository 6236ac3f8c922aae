"""Decide the plan of a job, and predict it: for rank 0 at the start, and for ``ds-hetero doctor``.

`resolve` makes the plan that the section asks for, with a `Searcher` for strategies that search; `forecast` predicts
every replica. Nothing here runs collectives, asks devices or knows a framework: the same facts give the same decision
everywhere. Imports no torch.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ds_hetero.cluster import Cluster, load_cluster
from ds_hetero.common.text import time_text
from ds_hetero.cost import Workload
from ds_hetero.decision.decide_pipelines import PipelineFacts, SearchedPipelines, search_pipelines
from ds_hetero.decision.expert_weights import check_expert_weights, expert_weights_of
from ds_hetero.decision.facts import JobFacts, with_trained_weights, workload_of
from ds_hetero.decision.forecast import Forecast, forecast
from ds_hetero.decision.resolve import (
    clusters_of_replicas,
    is_of_pipelines,
    needs_measuring,
    needs_planner,
    resolve,
    sp_size_of,
)
from ds_hetero.decision.searcher import Searcher
from ds_hetero.errors import ConfigError, ModelError, PlanError, ScheduleError
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.planner import PlannedSchedule
from ds_hetero.planner.expert_choice import divisions
from ds_hetero.planner.memory.zero_weights import weights_by_memory
from ds_hetero.values.plans import Plan
from ds_hetero.values.section import SECTION, HeterogeneitySection

logger = logging.getLogger(__name__)


_MIN_TOKENS = 1024  # shortest sequences that are tried; chosen, never measured


@dataclass(frozen=True, kw_only=True)
class JobStart:
    """A job's facts, plan and predictions, once its start is decided."""

    facts: JobFacts  # the same on all ranks
    plan: Plan  # of all ranks
    zero_weights: tuple[float, ...] | None = None  # ZeRO shares of all ranks, by ``"zero_partition": "memory"``
    expert_weights: tuple[float, ...] | None = None  # shares of the experts by rank; None if every rank has all
    experts_choice: str = ""  # on rank 0, what ``"experts": "best"`` has to say beside the division
    forecasts: tuple[Forecast, ...] = ()  # on rank 0, one per replica; empty if devices or model are unknown
    is_predicted: bool = False  # on every rank, whether rank 0 has forecasts
    no_forecast_reason: str | None = None  # on rank 0, why there is no forecast although the devices are known
    keeps_attention: bool = False  # on every rank, whether recomputation takes attention from the forward
    searched: SearchedPipelines | None = None  # on rank 0, result of the search for pipelines; None without a search

    @property
    def section(self) -> HeterogeneitySection:
        """The "heterogeneity" section."""
        return self.facts.section

    @property
    def is_of_pipelines(self) -> bool:
        """True if the model is divided into stages of pipelines."""
        return is_of_pipelines(self.plan, self.section)

    @property
    def places_by_default(self) -> bool:
        """True if batches may be placed by documents although the section does not ask for it.

        The devices must be known. Re-planning must be off, since it changes the schedule that placing is computed for.
        With a token unit, ranks get the tokens of the schedule.
        """
        section = self.section
        is_open = section.placement.mode is None and section.token_unit is None
        return is_open and self.is_predicted and not section.replan.enabled


def depends_on_measuring(facts: JobFacts, world_size: int) -> bool:
    """Return True if the live ranks must be measured before `decide` is called."""
    if wants_search(facts.section):
        return facts.section.cluster == "measure"
    is_unsplit = sp_size_of(facts.sp_sizes) == 1 or world_size == 1  # every rank has whole sequences
    return needs_measuring(facts.section) and (not is_unsplit or facts.section.zero_partition == "memory")


def decide(
    facts: JobFacts,
    world_size: int,
    *,
    measured: Cluster | None,
    on_host: bool,
    plan: Plan | None = None,
    impossible_stage_kinds: Mapping[str, str] | None = None,
) -> JobStart:
    """Resolve the section to a plan and predict it, or search for pipelines. Raises `HeteroError`: no plan fits.

    Reads the cluster file that the section names.

    Args:
        measured: cluster of the live ranks, if they were measured for ``"cluster": "measure"``.
        on_host: whether devices are CPUs, so that nothing can be offloaded to the host.
        plan: from the section; None if it names a strategy.
        impossible_stage_kinds: see `PipelineFacts`; used by the search for pipelines.
    """
    if wants_search(facts.section):
        pipelines = PipelineFacts(job=facts, impossible_stage_kinds=impossible_stage_kinds or {})
        searched = search_pipelines(pipelines, world_size, measured=measured, on_host=on_host)
        return JobStart(facts=facts, plan=searched.plan, searched=searched)
    if plan is not None and is_of_pipelines(plan, facts.section):
        return JobStart(facts=facts, plan=plan)
    check_expert_weights(facts.section, world_size)
    cluster = measured or _described_cluster(facts.section)
    job = _Job(facts, world_size, cluster, on_host)
    if facts.section.experts == "best":
        return _decide_best_experts(job, plan)
    start = _decide_tokens(job, plan)
    if facts.section.experts is None:
        return start
    return replace(start, expert_weights=expert_weights_of(facts, start.plan, cluster))


def _decide_best_experts(job: _Job, plan: Plan | None) -> JobStart:
    """Decide with experts where the tokens are, and with every division of them; return the fastest that fits.

    Raises:
        HeteroError: no job fits.
    """
    divided, reason = _best_division(job, plan)
    try:
        whole = replace(_decide_tokens(_with_experts(job, None), plan), facts=job.facts)
    except PlanError:
        if divided is None:
            raise
        return replace(divided, experts_choice="without dividing experts, nothing fits")
    if divided is not None and not (_fits(whole) and _slowest_s(whole) <= _slowest_s(divided)):
        return divided
    return replace(whole, experts_choice=_whole_experts_text(whole, divided, reason))


def _best_division(job: _Job, plan: Plan | None) -> tuple[JobStart | None, str]:
    """Decide with every division of experts, and return the fastest that fits; None, and why, if none can be had."""
    facts = job.facts
    if facts.no_experts_reason:
        return None, facts.no_experts_reason
    if facts.model.spec is None or job.cluster is None or job.cluster.num_ranks != job.world_size:
        return None, facts.model.no_spec_reason or "the devices of all ranks are not known."
    starts: list[JobStart] = []
    for division in divisions(facts.model.spec, job.workload(1), job.cluster):
        experts = division.experts
        divided = _with_experts(job, list(experts) if isinstance(experts, tuple) else experts)
        with contextlib.suppress(PlanError):  # it does not fit
            start = _decide_tokens(divided, plan)
            if len(start.plan.pipelines) > 1:
                return None, "times of experts in several replicas are not predicted. Give shares to divide them."
            weights = expert_weights_of(divided.facts, start.plan, job.cluster)
            starts.append(replace(start, facts=facts, expert_weights=weights))
    fastest = min(filter(_fits, starts), key=_slowest_s, default=None)
    return fastest, "" if fastest is not None else "no division of them fits."


def _with_experts(job: _Job, experts: object) -> _Job:
    """Return the job with another value of ``"experts"``."""
    section = job.facts.section.model_copy(update={"experts": experts})
    return replace(job, facts=replace(job.facts, section=section))


def _whole_experts_text(whole: JobStart, divided: JobStart | None, reason: str) -> str:
    """Say why experts are not divided: they cannot be, or a step would take longer.

    Args:
        divided: the fastest job with divided experts; None if there is none.
        reason: why there is none.
    """
    if divided is None:
        return f"experts are not divided: {reason}"
    return (
        f"experts are not divided: a step is predicted to take {time_text(_slowest_s(whole))}, and "
        f"{time_text(_slowest_s(divided))} if they were"
    )


def _decide_tokens(job: _Job, plan: Plan | None) -> JobStart:
    """Decide for sequences of the section's ``seq_len``; without it, of the model's longest, halved until they fit.

    The configuration of a model has the longest sequence that it can take, often 131,072 tokens. Most jobs train much
    shorter ones, so they must not fail because of that number.
    """
    section, tokens = job.facts.section, job.facts.model.max_seq_len
    try:
        return _decide_replicas(job, plan)
    except PlanError:
        if section.seq_len is not None or tokens is None or plan is not None:
            raise
        fewer_tokens, unit = tokens, section.token_unit or 1
        least_tokens = max(_MIN_TOKENS, unit * (sp_size_of(job.facts.sp_sizes) or job.world_size))
        while (fewer_tokens := fewer_tokens // 2) >= least_tokens and fewer_tokens % unit == 0:
            with contextlib.suppress(PlanError):
                facts = replace(job.facts, section=section.model_copy(update={"seq_len": fewer_tokens}))
                start = _decide_replicas(replace(job, facts=facts), plan)
                logger.warning(
                    "planned for sequences of %d tokens, since the %d of the model's max_position_embeddings do not "
                    'fit. Set "seq_len" in the "%s" section to the tokens of the sequences you train',
                    fewer_tokens,
                    tokens,
                    SECTION,
                )
                return start
        raise


def _decide_replicas(job: _Job, plan: Plan | None) -> JobStart:
    """Make a plan of replicas and predict it; attention is kept over recomputation as the section says.

    ``"where_it_fits"`` keeps it if that is predicted to fit and to be faster.
    """
    wish = job.facts.section.keep_attention
    if wish != "where_it_fits":
        return _decide_kept(replace(job, keeps_attention=wish is True), plan)
    kept: JobStart | None = None
    with contextlib.suppress(PlanError):  # kept attention leaves too little memory for any schedule
        kept = _decide_kept(replace(job, keeps_attention=True), plan)
    if kept is None or not job.facts.model.checkpointing or not _fits(kept):
        return _decide_kept(job, plan)
    with contextlib.suppress(PlanError):
        computed_again = _decide_kept(job, plan)
        if _fits(computed_again) and _slowest_s(computed_again) <= _slowest_s(kept):
            return computed_again
    return kept


def _fits(start: JobStart) -> bool:
    """Return True if every replica is predicted, and fits into memory."""
    return bool(start.forecasts) and all(forecast.prediction.feasible for forecast in start.forecasts)


def _slowest_s(start: JobStart) -> float:
    """Return the predicted time of a step of the slowest replica."""
    return max(forecast.prediction.iteration_s for forecast in start.forecasts)


def _decide_kept(job: _Job, plan: Plan | None) -> JobStart:
    """Make a plan of replicas and predict it; its ZeRO shares follow the free memory if the section asks for that."""
    facts, section, world_size = job.facts, job.facts.section, job.world_size
    sp_size = sp_size_of(facts.sp_sizes) or world_size
    by_memory = section.zero_partition == "memory"
    searcher: Searcher | None = None
    _expect_token_units(facts, sp_size)
    if needs_planner(section) and sp_size > 1:
        searcher = Searcher(
            facts.model.expect_spec(),
            job.workload(world_size // sp_size),
            section.layout,
            by_memory,
            section.token_unit,
        )
    plan = resolve(
        section,
        heads=(facts.model.num_heads, facts.model.num_kv_heads),
        world_size=world_size,
        sp_sizes=facts.sp_sizes,
        cluster=job.cluster,
        search=searcher,
        plan=plan,
    )
    _expect_ring(section, plan)
    if job.cluster is None and not by_memory:
        return JobStart(facts=facts, plan=plan, keeps_attention=job.keeps_attention)
    clusters = clusters_of_replicas(section, job.cluster, [schedule.sp_size for schedule in plan.schedules])
    weights: tuple[float, ...] | None = None
    if by_memory:
        # The shares follow from the memory that is free in a prediction with equal shares.
        equal_shares = [job.workload(len(clusters))] * len(clusters)
        replicas = _forecasts(facts.model.expect_spec(by_memory=True), plan, clusters, equal_shares)
        weights = weights_by_memory([(replica.cost, replica.schedule) for replica in replicas])
    searched = {} if searcher is None else searcher.planned
    try:
        spec = facts.model.expect_spec()
        forecasts = _forecasts(spec, plan, clusters, job.workloads(plan, weights), searched)
    except (ModelError, PlanError, ScheduleError) as error:  # a job trains without a prediction, too
        return JobStart(
            facts=facts,
            plan=plan,
            zero_weights=weights,
            no_forecast_reason=str(error),
            keeps_attention=job.keeps_attention,
        )
    return JobStart(
        facts=facts,
        plan=plan,
        zero_weights=weights,
        forecasts=forecasts,
        is_predicted=True,
        keeps_attention=job.keeps_attention,
    )


def _expect_token_units(facts: JobFacts, sp_size: int) -> None:
    """Refuse a token unit of which the tokens of a sequence are no multiple, or that no rank shares a sequence by.

    Raises:
        ConfigError: the section's ``token_unit`` cannot be kept.
    """
    unit, tokens = facts.section.token_unit, facts.section.seq_len or facts.model.max_seq_len
    if unit is None:
        return
    if sp_size == 1:
        raise ConfigError(
            f'"{SECTION}.token_unit" is {unit}, of which the ranks that share a sequence get multiples, but every '
            "sequence is on one rank. Leave the key out."
        )
    if tokens is not None and tokens % unit:
        below = tokens // unit * unit
        nearest = f"{below:,} or {below + unit:,}" if below else f"{unit:,}"
        raise ConfigError(
            f'"{SECTION}.token_unit" is {unit}, and the {tokens:,} tokens of a sequence are no multiple of it. Set '
            f'"seq_len" to {nearest}, and pad or cut sequences to it; or give another "token_unit".'
        )
    if tokens is not None and tokens < unit * sp_size:
        raise ConfigError(
            f'"{SECTION}.token_unit" is {unit}, and {sp_size} ranks with so many tokens each need '
            f'{unit * sp_size:,}, but a sequence has {tokens:,}. Give a smaller "token_unit".'
        )


def _expect_ring(section: HeterogeneitySection, plan: Plan) -> None:
    """Refuse rounded gradients of a ring in a plan without one, unless a search found that plan.

    Then rank 0 says that the key has no effect (`ds_hetero.decision.chosen_text.ring_gradient_lines`): re-planning may
    find a ring, and no user can know beforehand what a search finds.

    Raises:
        ConfigError: no replica has a ring.
    """
    has_ring = any(schedule.ring_size > 1 for schedule in plan.schedules)
    if section.ring_gradients != "fp32" and not has_ring and not needs_planner(section):
        raise ConfigError(
            f'"{SECTION}.ring_gradients" is "{section.ring_gradients}", the type of messages in a ring of groups, but '
            f'no replica of "{SECTION}.schedule" has several groups. Leave the key out, or give a schedule with a ring.'
        )


def _described_cluster(section: HeterogeneitySection) -> Cluster | None:
    """Return the cluster that the section describes; None if it has to be measured."""
    return None if section.cluster == "measure" else load_cluster(section.cluster)


@dataclass(frozen=True)
class _Job:
    """What a decision about a job is made from: facts, number of ranks, devices."""

    facts: JobFacts
    world_size: int  # ranks of the job
    cluster: Cluster | None  # of the job or of one replica; None if unknown
    on_host: bool  # devices are CPUs
    keeps_attention: bool = False  # recomputation takes attention from the forward

    def workload(self, num_replicas: int, weights: tuple[float, ...] | None = None) -> Workload:
        """Return the workload of one of ``num_replicas`` equal replicas.

        Args:
            weights: ZeRO shares of the ranks, of a single replica; None for those of the section.
        """
        workload = with_trained_weights(self.facts, workload_of(self.facts, num_replicas, on_host=self.on_host))
        workload = replace(workload, keep_attention=self.keeps_attention)
        if num_replicas > 1:
            # ZeRO shards over the ranks of all replicas, which a cluster of one replica does not describe.
            describes_all = self.cluster is not None and self.cluster.num_ranks == self.world_size
            return replace(workload, zero_cluster=self.cluster if describes_all else None)
        return workload if weights is None else replace(workload, zero_weights=weights)

    def workloads(self, plan: Plan, weights: tuple[float, ...] | None) -> list[Workload]:
        """Return the workload of every replica, each with its own batches."""
        workload = self.workload(len(plan.pipelines), weights)
        split = plan.batch_split
        if split is None:
            return [workload] * len(plan.pipelines)
        batches = zip(split.micro_batch_sizes, split.micro_batches, strict=True)
        return [replace(workload, micro_batch=size, micro_batches=count) for size, count in batches]


def _forecasts(
    model: ModelSpec,
    plan: Plan,
    clusters: Sequence[Cluster],
    workloads: Sequence[Workload],
    searched: Mapping[Cluster, PlannedSchedule] | None = None,
) -> tuple[Forecast, ...]:
    """Return the prediction of every replica.

    Args:
        clusters: cluster of every replica.
        workloads: workload of every replica.
        searched: results of the planner, by cluster; None without a search.
    """
    planned_by_cluster = searched or {}
    forecasts = []
    for schedule, cluster, workload in zip(plan.schedules, clusters, workloads, strict=True):
        forecasts.append(forecast(schedule, cluster, model, workload, planned_by_cluster.get(cluster)))
    return tuple(forecasts)


def wants_search(section: HeterogeneitySection) -> bool:
    """Return True if the job searches for pipelines at its start."""
    return section.parallel == "full" and section.schedule == "plan"
