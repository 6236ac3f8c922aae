"""Decisions of rank 0 where ``"parallel": "full"`` asks for pipelines, and ``ds-hetero doctor`` without a job.

Nothing here runs collectives, asks devices or knows a framework: the same facts give the same plan everywhere. Imports
no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from ds_hetero.cluster import Cluster, load_cluster
from ds_hetero.cost import Workload
from ds_hetero.cost.stages.calibrated import INNERS
from ds_hetero.decision.facts import FP32_BYTES, JobFacts, TrainingFacts, workload_of
from ds_hetero.errors import ConfigError, ModelError
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.planner.pipelines.native_types import expect_trainable
from ds_hetero.planner.pipelines.planning import plan_pipelines
from ds_hetero.planner.results.pipelines import PlannedPipelines
from ds_hetero.values.plans import INNER, Plan
from ds_hetero.values.plans.section_keys import SECTION_KEYS, SectionKey
from ds_hetero.values.section import SECTION, HeterogeneitySection

_ADAM_BYTES = 3 * FP32_BYTES  # value and two moments of an owned element


@dataclass(frozen=True, kw_only=True)
class PipelineFacts:
    """Facts of a job whose pipelines are searched for."""

    job: JobFacts  # section, model and training
    no_inners: Mapping[str, str]  # why ranks cannot share the work of a stage of this model, by the way

    @property
    def inners(self) -> tuple[str, ...]:
        """Ways in which several ranks may share the work of a stage."""
        return tuple(inner for inner in INNERS if inner not in self.no_inners)


@dataclass(frozen=True, kw_only=True)
class SearchedPipelines:
    """Result of the search."""

    plan: Plan  # what every rank does
    planned: PlannedPipelines  # with the prediction, its rivals and its reasons
    facts: PipelineFacts  # for which it was searched


def check_pipeline_section(section: HeterogeneitySection) -> None:
    """Refuse keys that pipelines do not follow. Raises `ConfigError`: names key, value and what to do."""
    for path, value, key in _asked_keys(section):
        if key.refused:
            raise ConfigError(
                f'"{SECTION}.{path}": {json.dumps(value)} cannot be used with pipelines: {key.refused}. Leave it out.'
            )


def idle_keys(section: HeterogeneitySection, plan: Plan) -> list[str]:
    """A sentence for every key of the section that has nothing to say in some stages of a plan."""
    return [
        f'"{SECTION}.{path}" has nothing to say in stages that are "inner": "{inner}": {key.idle[inner]}'
        for path, _, key in _asked_keys(section)
        for inner in inners_of(plan)
        if inner in key.idle
    ]


def inners_of(plan: Plan) -> tuple[str, ...]:
    """The kinds of a plan's stages, in the order of `INNER`."""
    present = {stage.inner for pipeline in plan.pipelines for stage in pipeline.stages}
    return tuple(inner for inner in INNER if inner in present)


def _asked_keys(section: HeterogeneitySection) -> Iterator[tuple[str, Any, SectionKey]]:
    """Path, value and row of every key that the user wrote and that asks for something."""
    for path, key in SECTION_KEYS.items():
        name, _, inside = path.partition(".")
        value = getattr(section, name)
        if name in section.model_fields_set and (value := getattr(value, inside) if inside else value) not in key.off:
            yield path, value.model_dump() if isinstance(value, BaseModel) else value, key


def global_batch_of(training: TrainingFacts, plan: Plan | None = None) -> int:
    """Sequences of a step over all pipelines. Raises `ConfigError`: ds_config.json says none, or others.

    Args:
        plan: that ds_config.json may not contradict; None where it is searched for, and ds_config.json must say.
    """
    if training.accumulation_steps not in (None, 1):
        raise ConfigError(
            f'"gradient_accumulation_steps" is {training.accumulation_steps}; with pipelines it is 1, since the engine '
            "is given the batch of a whole optimizer step, and the plan says how many micro-batches that is."
        )
    given = {"train_batch_size": training.train_batch_size, "train_micro_batch_size_per_gpu": training.micro_batch_size}
    known = {key: value for key, value in given.items() if value is not None}
    if plan is not None:
        assert plan.batch_split is not None
        samples = plan.batch_split.samples
        for key, value in known.items():
            if value != samples:
                raise ConfigError(
                    f'"{key}" is {value}, but the pipelines of the plan take {samples} sequences per optimizer step. '
                    f"Every rank is given the global batch: set it to {samples}, or leave it out."
                )
        return samples
    if not known:
        raise ConfigError(
            '"parallel": "full" shares the sequences of an optimizer step among pipelines, and ds_config.json does not '
            'say how many there are. Set "train_batch_size" to the global batch.'
        )
    if len(set(known.values())) > 1:
        listed = " and ".join(f'"{key}" is {value}' for key, value in known.items())
        raise ConfigError(
            f'{listed}. With "parallel": "full" all ranks are one worker, whose batch is the global one: make them '
            "equal, or leave one out."
        )
    return next(iter(known.values()))


def check_pipelines_searchable(facts: JobFacts) -> None:
    """Refuse what is impossible whatever is measured. Raises `ConfigError`, or `ModelError`: no cost model fits."""
    check_pipeline_section(facts.section)
    global_batch_of(facts.training)
    _spec_of(facts)


def search_pipelines(
    facts: PipelineFacts, world_size: int, *, measured: Cluster | None, on_host: bool
) -> SearchedPipelines:
    """Search for the fastest pipelines of a job.

    Args:
        measured: the live ranks, where the section says ``"cluster": "measure"``.

    Raises:
        ConfigError: see `global_batch_of`; or the cluster has another number of devices than the job has ranks.
        ModelError: no cost model describes the model.
        PlanError: nothing fits, and the message says which stage lacks how many GiB; or see `expect_trainable`.
    """
    job, section = facts.job, facts.job.section
    cluster = measured if measured is not None else load_cluster(section.cluster)
    if cluster.num_ranks != world_size:
        raise ConfigError(
            f'"{SECTION}.cluster" describes {cluster.num_ranks} devices, the job has {world_size} processes. With '
            '"parallel": "full" it describes every device of the job once, in rank order.'
        )
    workload = pipelines_workload(job, on_host=on_host)
    expect_trainable(cluster.devices, workload)
    planned = plan_pipelines(
        cluster,
        _spec_of(job),
        workload,
        global_batch_of(job.training),
        inners=facts.inners,
        planner=section.planner,
    )
    return SearchedPipelines(plan=planned.plan.with_layers(), planned=planned, facts=facts)


def _spec_of(facts: JobFacts) -> ModelSpec:
    if facts.model.spec is None:
        raise ModelError(
            f'{facts.model.no_spec_reason} So no pipelines can be searched for: give "{SECTION}.schedule" a plan file.'
        )
    return facts.model.spec


def pipelines_workload(
    facts: JobFacts, *, on_host: bool, seq_len: int | None = None, checkpointing: bool | None = None
) -> Workload:
    """Return the workload of one pipeline, without batches. Raises `PlanError`: no length of sequences.

    Owned elements have values and optimizer state in fp32, whatever the parameters are.

    Args:
        seq_len: tokens of a sequence, where the job does not say.
        checkpointing: of activations; None for what the model says.
    """
    model = facts.model if facts.model.max_seq_len else replace(facts.model, max_seq_len=seq_len)
    work = workload_of(replace(facts, model=model), 1, on_host=on_host)
    return replace(
        work,
        seq_len=facts.section.seq_len or seq_len or work.seq_len,
        micro_batch=1,
        micro_batches=1,
        zero_stage=1,
        zero_weights=None,
        activation_checkpointing=work.activation_checkpointing if checkpointing is None else checkpointing,
        optimizer_bytes=_ADAM_BYTES * model.trained_share,
        gradient_bytes=FP32_BYTES * model.trained_share,
        offload_optimizer=False,
        offload_parameters=False,
    )
