"""Decide the pipelines of a job with ``"parallel": "full"``: for rank 0 at the start, and for ``ds-hetero doctor``.

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
    """Facts of a job, with the kinds of stages that its model cannot have; the search for pipelines needs both."""

    job: JobFacts  # section, model and training
    # The reason why this model cannot have stages of a kind ("tensor", "sequence"), by that kind.
    impossible_stage_kinds: Mapping[str, str]

    @property
    def stage_kinds(self) -> tuple[str, ...]:
        """Kinds of stages with several ranks that this model can have."""
        return tuple(inner for inner in INNERS if inner not in self.impossible_stage_kinds)


@dataclass(frozen=True, kw_only=True)
class SearchedPipelines:
    """The plan that the search for pipelines has found, with its prediction and the facts that it is for."""

    plan: Plan  # of all ranks
    planned: PlannedPipelines  # the plan with its prediction, baselines and reasons
    facts: PipelineFacts  # facts of the job


def check_pipeline_section(section: HeterogeneitySection) -> None:
    """Raise `ConfigError` for a key of the section that pipelines refuse; the message has key, value and remedy."""
    for path, value, key in _active_keys(section):
        if key.refused:
            raise ConfigError(
                f'"{SECTION}.{path}": {json.dumps(value)} cannot be used with pipelines: {key.refused}. Leave it out.'
            )


def idle_keys(section: HeterogeneitySection, plan: Plan) -> list[str]:
    """Return a sentence for every key of the section that has no effect on some stages of a plan."""
    sentences = []
    for path, _, key in _active_keys(section):
        for inner in stage_kinds_of(plan):
            if inner in key.idle:
                sentences.append(
                    f'"{SECTION}.{path}" has no effect in stages with "inner": "{inner}": {key.idle[inner]}'
                )
    return sentences


def stage_kinds_of(plan: Plan) -> tuple[str, ...]:
    """Return the kinds of a plan's stages, in the order of `INNER`."""
    present: set[str] = set()
    for pipeline in plan.pipelines:
        present.update(stage.inner for stage in pipeline.stages)
    return tuple(inner for inner in INNER if inner in present)


def _active_keys(section: HeterogeneitySection) -> Iterator[tuple[str, Any, SectionKey]]:
    """Yield path, value and row of every key that the user wrote with a value that does not switch it off."""
    for path, key in SECTION_KEYS.items():
        name, _, inside = path.partition(".")
        if name not in section.model_fields_set:
            continue
        value = getattr(section, name)
        if inside:
            value = getattr(value, inside)
        if value not in key.off:
            yield path, value.model_dump() if isinstance(value, BaseModel) else value, key


def global_batch_of(training: TrainingFacts, plan: Plan | None = None) -> int:
    """Return the sequences of a step over all pipelines.

    Args:
        plan: sets the global batch, which ds_config.json may repeat; None if the planner searches for the plan, and
            ds_config.json must set it.

    Raises:
        ConfigError: ds_config.json has another global batch than the plan, two different ones, or none.
    """
    if training.accumulation_steps not in (None, 1):
        raise ConfigError(
            f'"gradient_accumulation_steps" is {training.accumulation_steps}; with pipelines it is 1, since the engine '
            "is given the batch of a whole optimizer step, and the plan says how many micro-batches that is. Set it "
            "to 1, or leave it out."
        )
    configured = {}  # batch sizes that ds_config.json sets, by key
    if training.train_batch_size is not None:
        configured["train_batch_size"] = training.train_batch_size
    if training.micro_batch_size is not None:
        configured["train_micro_batch_size_per_gpu"] = training.micro_batch_size
    if plan is not None:
        assert plan.batch_split is not None
        samples = plan.batch_split.samples
        for key, value in configured.items():
            if value != samples:
                raise ConfigError(
                    f'"{key}" is {value}, but the pipelines of the plan take {samples} sequences per optimizer step. '
                    f"Every rank is given the global batch: set it to {samples}, or leave it out."
                )
        return samples
    if not configured:
        raise ConfigError(
            '"parallel": "full" shares the sequences of an optimizer step among pipelines, and ds_config.json does not '
            'say how many there are. Set "train_batch_size" to the global batch.'
        )
    if len(set(configured.values())) > 1:
        listed = " and ".join(f'"{key}" is {value}' for key, value in configured.items())
        raise ConfigError(
            f'{listed}. With "parallel": "full" all ranks are one worker, whose batch is the global one: make them '
            "equal, or leave one out."
        )
    return next(iter(configured.values()))


def check_pipelines_searchable(facts: JobFacts) -> None:
    """Raise an error if a search for pipelines cannot succeed on any devices.

    Raises:
        ConfigError: a key of the section is not supported, or there is no global batch.
        ModelError: no cost model describes the model.
    """
    check_pipeline_section(facts.section)
    global_batch_of(facts.training)
    _spec_of(facts)


def search_pipelines(
    facts: PipelineFacts, world_size: int, *, measured: Cluster | None, on_host: bool
) -> SearchedPipelines:
    """Search for the fastest pipelines of a job.

    Args:
        measured: cluster of the live ranks, if the section says ``"cluster": "measure"``.

    Raises:
        ConfigError: see `global_batch_of`; or the cluster has another number of devices than the job has ranks.
        ModelError: no cost model describes the model.
        PlanError: no plan fits, with the stage and the GiB that it lacks; or see `expect_trainable`.
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
        inners=facts.stage_kinds,
        planner=section.planner,
    )
    return SearchedPipelines(plan=planned.plan.with_layers(), planned=planned, facts=facts)


def _spec_of(facts: JobFacts) -> ModelSpec:
    """Return the shape of the model. Raises `ModelError`: no cost model describes it."""
    if facts.model.spec is None:
        raise ModelError(
            f'{facts.model.no_spec_reason} So no pipelines can be searched for: give "{SECTION}.schedule" a plan file.'
        )
    return facts.model.spec


def pipelines_workload(
    facts: JobFacts, *, on_host: bool, seq_len: int | None = None, checkpointing: bool | None = None
) -> Workload:
    """Return the workload of one pipeline, without batches. Raises `PlanError`: the tokens of a sequence are unknown.

    The owner of an element keeps its value and optimizer state in fp32, whatever the data type of the parameters. These
    bytes are per trained parameter if the model has adapters, else averages over all parameters.

    Args:
        seq_len: tokens of a sequence, used if the section does not set them.
        checkpointing: whether activations are checkpointed; None for the model's own setting.
    """
    model = facts.model if facts.model.max_seq_len else replace(facts.model, max_seq_len=seq_len)
    work = workload_of(replace(facts, model=model), 1, on_host=on_host)
    trained_share = 1.0 if model.adapter_rank else model.trained_share
    return replace(
        work,
        seq_len=facts.section.seq_len or seq_len or work.seq_len,
        micro_batch=1,
        micro_batches=1,
        zero_stage=1,
        zero_weights=None,
        activation_checkpointing=work.activation_checkpointing if checkpointing is None else checkpointing,
        optimizer_bytes=_ADAM_BYTES * trained_share,
        gradient_bytes=FP32_BYTES * trained_share,
        adapter_rank=model.adapter_rank,
        trains_embedding=model.trains_embedding,
        quantization=model.quantization,
        offload_optimizer=False,
        offload_parameters=False,
    )
