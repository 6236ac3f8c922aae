"""What rank 0 decides where ``"parallel": "full"`` asks for pipelines, and ``ds-hetero doctor`` without a job.

No collectives, no devices, no framework: the same facts give the same plan everywhere. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ds_hetero.cluster import Cluster, load_cluster
from ds_hetero.config import SECTION, HeterogeneitySection
from ds_hetero.cost import Workload
from ds_hetero.cost.stages.calibrated import INNERS
from ds_hetero.errors import ConfigError, ModelError
from ds_hetero.job.facts import JobFacts, TrainingFacts
from ds_hetero.job.workload import FP32_BYTES, workload_of
from ds_hetero.models import ModelSpec
from ds_hetero.planner.outer.planned import PlannedPipelines
from ds_hetero.planner.outer.planning import plan_pipelines
from ds_hetero.plans import Plan

__all__ = [
    "PipelineFacts",
    "SearchedPipelines",
    "check_pipeline_section",
    "check_pipelines_searchable",
    "global_batch_of",
    "pipelines_workload",
    "search_pipelines",
    "wants_search",
]

_ADAM_BYTES = 3 * FP32_BYTES  # value and two moments of an owned element


@dataclass(frozen=True, kw_only=True)
class PipelineFacts:
    """What is read of a job whose pipelines are searched for.

    Args:
        job: section, model and training.
        no_inners: why ranks cannot share the work of a stage of this model, by the way in which they cannot.
    """

    job: JobFacts
    no_inners: Mapping[str, str]

    @property
    def left_out(self) -> Mapping[str, str]:
        """Ways in which no stage of the job may share its work, and why."""
        fixed = {"tensor": '"replan" moves layers, and shards of tensor parallelism stay where they are'}
        return {**(fixed if self.job.section.replan.enabled else {}), **self.no_inners}

    @property
    def inners(self) -> tuple[str, ...]:
        """Ways in which several ranks may share the work of a stage."""
        return tuple(inner for inner in INNERS if inner not in self.left_out)


@dataclass(frozen=True, kw_only=True)
class SearchedPipelines:
    """What the search has found.

    Args:
        plan: what every rank does.
        planned: with the prediction, its rivals and its reasons.
        facts: for which it was searched.
    """

    plan: Plan
    planned: PlannedPipelines
    facts: PipelineFacts


def wants_search(section: HeterogeneitySection) -> bool:
    """Whether pipelines are to be searched for at the start of the job."""
    return section.parallel == "full" and section.schedule == "plan"


def check_pipeline_section(section: HeterogeneitySection) -> None:
    """Refuse keys of the section that pipelines do not follow.

    Raises:
        ConfigError: names the key, its value and what to do.
    """
    instead = {
        "layout": "the schedules of the plan's stages have theirs",
        "loss": "pipelines compute the loss of the model themselves",
        "zero_partition": 'optimizer state follows "zero.owner_weights" of the plan file',
        "placement": "batches are cut by length",
        "report": "the phases of their steps go to the monitor alone",
    }
    for key, reason in instead.items():
        value = getattr(section, key)
        if value != type(section).model_fields[key].default:
            shown = getattr(value, "mode", value)
            raise ConfigError(f'"{SECTION}.{key}": {shown!r} cannot be used with pipelines: {reason}. Leave it out.')
    if section.replan.report_only:
        raise ConfigError(
            f'"{SECTION}.replan.report_only" is not possible with pipelines: ranks are not judged by their phases. '
            "Leave it out, or train a schedule of sequence parallelism."
        )


def global_batch_of(training: TrainingFacts) -> int:
    """Return the sequences of an optimizer step over all pipelines.

    Raises:
        ConfigError: ds_config.json does not say, or says two numbers.
    """
    if training.accumulation_steps not in (None, 1):
        raise ConfigError(
            f'"gradient_accumulation_steps" is {training.accumulation_steps}; with "parallel": "full" it is 1, since '
            "the engine is given the batch of a whole optimizer step, and the plan says how many micro-batches that is."
        )
    given = {
        "train_batch_size": training.train_batch_size,
        "train_micro_batch_size_per_gpu": training.micro_batch_size,
    }
    known = {key: value for key, value in given.items() if value is not None}
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
    """Refuse what can be known to be impossible before anything is measured.

    Raises:
        ConfigError: see `check_pipeline_section` and `global_batch_of`.
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
        facts: of the job.
        world_size: ranks of the job.
        measured: the live ranks, where the section says ``"cluster": "measure"``.
        on_host: devices are CPUs.

    Raises:
        ConfigError: see `global_batch_of`; or the cluster has another number of devices than the job has ranks.
        ModelError: no cost model describes the model.
        PlanError: nothing fits; the message says which stage lacks how many GiB.
    """
    job, section = facts.job, facts.job.section
    cluster = measured if measured is not None else load_cluster(section.cluster)
    if cluster.num_ranks != world_size:
        raise ConfigError(
            f'"{SECTION}.cluster" describes {cluster.num_ranks} devices, the job has {world_size} processes. With '
            '"parallel": "full" it describes every device of the job once, in rank order.'
        )
    planned = plan_pipelines(
        cluster,
        _spec_of(job),
        pipelines_workload(job, on_host=on_host),
        global_batch_of(job.training),
        inners=facts.inners,
    )
    return SearchedPipelines(plan=replace(planned.plan.with_layers(), zero=None), planned=planned, facts=facts)


def _spec_of(facts: JobFacts) -> ModelSpec:
    if facts.model.spec is None:
        raise ModelError(
            f'{facts.model.no_spec_reason} So no pipelines can be searched for: give "{SECTION}.schedule" a plan file.'
        )
    return facts.model.spec


def pipelines_workload(
    facts: JobFacts, *, on_host: bool, seq_len: int | None = None, checkpointing: bool | None = None
) -> Workload:
    """Return the workload of one pipeline; its batches are the search's to choose.

    Owned elements have values and optimizer state in fp32, whatever the parameters are.

    Args:
        facts: of the job.
        on_host: devices are CPUs.
        seq_len: tokens of a sequence, where the job does not say.
        checkpointing: of activations; None for what the model says.

    Raises:
        PlanError: neither the section nor the model says how long sequences are.
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
