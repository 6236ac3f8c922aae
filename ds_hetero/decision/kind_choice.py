"""Choose the kind of a job whose section says ``"parallel": "best"``: sequence parallelism or pipelines.

    choice = choose_kind(facts, 4, measured=None, on_host=False, closed={})    # on rank 0
    section = section_of_kind(facts.section, choice.kind)                      # on every rank

Both kinds give every rank the same whole batch of a step, so that no loader and no loop depends on the choice. Other
kinds, ZeRO stages, recomputation in the model, and numbers of micro-batches change what the script or ds_config.json
says; the best job over all of these is named with its factor, and not chosen. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ds_hetero.cluster import Cluster, load_cluster
from ds_hetero.decision.decide_pipelines import global_batch_of, pipelines_workload
from ds_hetero.decision.facts import JobFacts, with_trained_weights, workload_of
from ds_hetero.decision.resolve import sp_size_of
from ds_hetero.errors import ConfigError, PlanError
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.planner.jobs.job import Job, JobTask, Refused
from ds_hetero.planner.jobs.kinds import BATCH, KINDS, ONE, PIPELINES, SEQUENCE, Freedom
from ds_hetero.planner.jobs.pipelines import MAX_STAGE, best_pipelines
from ds_hetero.planner.jobs.search import best_first, search_jobs
from ds_hetero.planner.jobs.sequence import best_replica
from ds_hetero.planner.jobs.titles import job_title
from ds_hetero.planner.results.sentences import slower_text
from ds_hetero.values.section import SECTION, HeterogeneitySection

MIN_TOLD_GAIN = 1.05  # factor from which a job outside of the configuration is named; below, predictions err as much

_VALUE_OF_KIND = {SEQUENCE: "sequence", PIPELINES: "full"}  # of the key "parallel"
# Fields of `Workload` that ds_config.json, the section and the script set, and that a search could choose.
_SETTINGS = frozenset(
    {
        "zero_stage",
        "zero_within",
        "activation_checkpointing",
        "selective_checkpointing",
        "tiled_logits",
        "tiled_mlp",
        "offload_activations",
        "offload_optimizer",
        "micro_batch",
    }
)


@dataclass(frozen=True, kw_only=True)
class KindChoice:
    """The chosen kind of a job, and what rank 0 announces about it."""

    kind: str  # `kinds.SEQUENCE` or `kinds.PIPELINES`
    lines: tuple[str, ...]


def choose_kind(
    facts: JobFacts,
    world_size: int,
    *,
    measured: Cluster | None,
    on_host: bool,
    closed: Mapping[str, str],
    stage_kinds: tuple[str, ...] | None = None,
) -> KindChoice:
    """Choose the faster of the kinds that the configuration leaves open, by a search of each.

    Args:
        measured: cluster of the live ranks, if the section says ``"cluster": "measure"``.
        on_host: whether devices are CPUs, so that nothing can be offloaded to the host.
        closed: kinds that cannot be chosen here, with the reason.
        stage_kinds: kinds of stages with several ranks that the model can have; None for all.

    Raises:
        ConfigError: the section has no ``seq_len``; or its cluster has another number of devices than the job.
        ModelError: no cost model describes the model.
        PlanError: no kind fits.
    """
    section = facts.section
    if section.seq_len is None:
        raise ConfigError(
            f'"{SECTION}.parallel": "best" compares kinds of jobs at the length that you train. Set "seq_len" to the '
            "tokens of a sequence."
        )
    spec = facts.model.expect_spec()
    cluster = measured if measured is not None else load_cluster(section.cluster)
    size = sp_size_of(facts.sp_sizes) or world_size
    if cluster.num_ranks not in (world_size, size):
        raise ConfigError(
            f'"{SECTION}.cluster" describes {cluster.num_ranks} devices, the job has {world_size} processes. With '
            '"parallel": "best" it describes every device of the job once, in rank order.'
        )
    results = [
        _best_of_kind(facts, spec, cluster, kind, closed, stage_kinds, on_host=on_host) for kind in _VALUE_OF_KIND
    ]
    jobs = best_first([found for found in results if isinstance(found, Job)])
    refused = [found for found in results if isinstance(found, Refused)]
    if not jobs:
        reasons = "; ".join(f"{KINDS[one.kind]}: {one.reason}" for one in refused)
        raise PlanError(
            f'"parallel": "best" finds no kind of job that can run. {reasons}. Change what rules a kind out, or use '
            "shorter sequences."
        )
    best = jobs[0]
    lines = [_choice_text(jobs, refused)]
    if cluster.num_ranks == world_size:
        lines += _otherwise(facts, spec, best, on_host=on_host)
    return KindChoice(kind=best.kind, lines=tuple(lines))


def section_of_kind(section: HeterogeneitySection, kind: str) -> HeterogeneitySection:
    """Return the section of a job with the chosen kind; with sequences attention is kept where that fits and is faster.

    Args:
        kind: `kinds.SEQUENCE` or `kinds.PIPELINES`.
    """
    changes: dict[str, Any] = {"parallel": _VALUE_OF_KIND[kind]}
    if kind == SEQUENCE and "keep_attention" not in section.model_fields_set:
        changes["keep_attention"] = "where_it_fits"
    return section.model_copy(update=changes)


def _best_of_kind(
    facts: JobFacts,
    spec: ModelSpec,
    cluster: Cluster,
    kind: str,
    closed: Mapping[str, str],
    stage_kinds: tuple[str, ...] | None,
    *,
    on_host: bool,
) -> Job | Refused:
    """Return the best job of a kind under the settings of the configuration, or why there is none."""
    if kind in closed:
        return Refused(kind=kind, reason=closed[kind])
    if kind == SEQUENCE:
        work = with_trained_weights(facts, workload_of(facts, 1, on_host=on_host))
        fixed = _SETTINGS | ({"keep_attention"} if facts.section.keep_attention is not False else frozenset())
        work = replace(work, keep_attention=facts.section.keep_attention is True, zero_weights=None)
        batch = work.micro_batch * work.micro_batches
        task = JobTask(cluster=cluster, model=spec, workload=work, batch=batch, freedom=Freedom(fixed=fixed))
        return best_replica(task, SEQUENCE, [tuple(range(cluster.num_ranks))])
    task = JobTask(
        cluster=cluster,
        model=spec,
        workload=pipelines_workload(facts, on_host=on_host),
        batch=global_batch_of(facts.training),
        # Pipelines recompute as their plan says, whatever the model does, and have their own ZeRO.
        freedom=Freedom(fixed=_SETTINGS - {"activation_checkpointing", "micro_batch", "zero_stage", "zero_within"}),
        stage_kinds=stage_kinds,
    )
    return best_pipelines(task)


def _choice_text(jobs: list[Job], refused: list[Refused]) -> str:
    """Say which kind was chosen, and how much slower the other is, or why it cannot run."""
    best, *others = jobs
    texts = [f"{KINDS[job.kind]}: {slower_text(job.step_s / best.step_s)}" for job in others]
    texts += [f"{KINDS[one.kind]}: no, {one.reason}" for one in refused]
    return f'"parallel": "best" is {KINDS[best.kind]} ({"; ".join(texts)})'


def _otherwise(facts: JobFacts, spec: ModelSpec, chosen: Job, *, on_host: bool) -> Iterator[str]:
    """Yield a line on the best job under any settings, if it is faster by `MIN_TOLD_GAIN` than the chosen one."""
    batch = chosen.planned.tokens // chosen.workload.seq_len
    base = with_trained_weights(facts, workload_of(facts, 1, on_host=on_host))
    work = replace(base, micro_batch=1, micro_batches=batch, zero_weights=None, zero_within=False)
    fixed = frozenset({"offload_activations", "offload_optimizer"}) if on_host else frozenset[str]()
    task = JobTask(cluster=chosen.whole_cluster, model=spec, workload=work, batch=batch, freedom=Freedom(fixed=fixed))
    try:
        other = search_jobs(task).best
    except PlanError:
        return
    gain = chosen.step_s / other.step_s
    if gain >= MIN_TOLD_GAIN:
        changes = "; ".join(_changes(chosen, other))
        yield f"{gain:.2f} times as fast, were it open: {job_title(other)} ({changes}). `ds-hetero plan` writes it"


def _changes(chosen: Job, other: Job) -> Iterator[str]:
    """Yield what the configuration or the script would have to say for another job."""
    now, then = chosen.workload, other.workload
    if other.kind == PIPELINES:  # which recompute as their plan says, and divide the batch themselves
        if chosen.kind != PIPELINES:
            yield "pipelines, which take the batch of a step at once"
        if now.zero_stage > MAX_STAGE:
            yield f'"zero_optimization.stage": {MAX_STAGE} at most'
        return
    if other.kind in (BATCH, ONE):
        yield f"{KINDS[other.kind]} instead of {KINDS[chosen.kind]}"
    if then.zero_stage != now.zero_stage:
        yield f'"zero_optimization.stage": {then.zero_stage}'
    if then.zero_within and not now.zero_within:
        yield '"zero_within": "node"'
    if then.activation_checkpointing != now.activation_checkpointing:
        yield f"activation checkpointing {'on' if then.activation_checkpointing else 'off'}"
    if then.tiled_logits and not now.tiled_logits:
        yield '"tile_tokens"'
    if then.offload_optimizer != now.offload_optimizer:
        yield f"optimizer {'offloaded' if then.offload_optimizer else 'not offloaded'}"
    if then.offload_activations != now.offload_activations:
        yield f"checkpoints {'offloaded' if then.offload_activations else 'not offloaded'}"
    if other.kind == SEQUENCE and (then.micro_batch, then.micro_batches) != (now.micro_batch, now.micro_batches):
        yield f"{then.micro_batches} micro-batches of {then.micro_batch}"
