"""Check the section of a ds_config.json for ``ds-hetero doctor``, as the start of a job checks it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

from ds_hetero.cli.planning.saves import saves_line, shared_memory
from ds_hetero.cluster import load_cluster
from ds_hetero.common.reading import MAX_RANKS, JsonDict, JsonObject, expect_whole_number, read_file, shortened
from ds_hetero.cost.stages.calibrated import INNERS
from ds_hetero.decision.batches import as_whole, plan_of_batches
from ds_hetero.decision.decide import decide, wants_search
from ds_hetero.decision.decide_pipelines import (
    PipelineFacts,
    check_pipeline_section,
    check_pipelines_searchable,
    global_batch_of,
    idle_keys,
    pipelines_workload,
    search_pipelines,
)
from ds_hetero.decision.facts import NO_MODEL, JobFacts, ModelFacts
from ds_hetero.decision.forecast import COST_MODEL
from ds_hetero.decision.kind_choice import choose_kind, section_of_kind
from ds_hetero.decision.resolve import (
    clusters_of_replicas,
    given_plan,
    is_of_pipelines,
    needs_planner,
    replica_size,
    sp_size_of,
)
from ds_hetero.decision.start_text import forecast_text, judged_text, pipelines_text, searched_text
from ds_hetero.engine.ds_config import read_training_facts, section_of
from ds_hetero.errors import ConfigError, HeteroError, PlanError
from ds_hetero.frameworks.deepspeed.batch_sizes import expect_batch_of_replicas
from ds_hetero.frameworks.deepspeed.keys import expect_supported_keys
from ds_hetero.job.bf16_support import device_without_bf16, expect_native_bf16
from ds_hetero.job.start import check_facts, expect_kernel
from ds_hetero.planner.jobs.kinds import PIPELINES, SEQUENCE
from ds_hetero.planner.pipelines.given import judge_given
from ds_hetero.planner.pipelines.native_types import expect_trainable
from ds_hetero.reporting.run_file import expect_writable
from ds_hetero.runtime.devices import default_device
from ds_hetero.sharding.zero_partition import check_weights, is_even, node_sizes
from ds_hetero.values.baselines import FROM_DEVICES
from ds_hetero.values.deprecated_keys import deprecation_lines
from ds_hetero.values.plans import Plan
from ds_hetero.values.section import SECTION, HeterogeneitySection


def examine_section(config: Path, model_facts: ModelFacts, world_size: int, model: nn.Module | None) -> JsonDict:
    """Check the section of a DeepSpeed configuration as the start of a job does.

    Args:
        model: the model without weights; None if none was given, or transformers cannot build it.

    Returns:
        Plain data: the schedules or pipelines that the section leads to, and their prediction. A fault of the section
        is under ``"problem"``, which is None without a fault.
    """
    report: JsonDict = {"problem": None, "enabled": True, "schedules": [], "decided": None, "predicted": None}
    report["deprecated"] = []
    try:
        expect_whole_number("--world-size", world_size, 1, MAX_RANKS, ConfigError)
        ds_config = read_file(config, "DeepSpeed configuration", ConfigError)
        if not isinstance(ds_config, Mapping):
            raise ConfigError(f"{config}: a DeepSpeed configuration is a JSON object, got {shortened(ds_config)}.")
        section, training = section_of(ds_config), read_training_facts(ds_config)
        if section is None:
            return {**report, "enabled": False}
        report["deprecated"] = deprecation_lines(section)
        expect_supported_keys(ds_config)
        if section.report is not None:
            expect_writable(section.report)
        sp_sizes = {"sequence_parallel_size of ds_config": training.sp_size}
        has_batches = section.sets_batch_by_rank  # every rank then runs the whole model
        job_model = as_whole(model_facts) if has_batches else model_facts
        facts = JobFacts(section=section, model=job_model, training=training, sp_sizes=sp_sizes)
        if section.batch:
            plan: Plan | None = plan_of_batches(section.batch, training, world_size)
        else:
            plan = given_plan(section, world_size)
        if section.parallel == "best":
            return {**report, **_best_kind(facts, ds_config, world_size, model)}
        in_pipelines = wants_search(section) or (plan is not None and is_of_pipelines(plan, section))
        _expect_native_bf16(facts, in_pipelines=in_pipelines)
        if in_pipelines:
            return {**report, **_pipelines(facts, plan, ds_config, world_size, model)}
        if model is not None and not has_batches:
            from ds_hetero.frameworks.transformers.model.model_checks import check_model

            check_model(model)
        return {**report, **_decision(facts, plan, ds_config, world_size, model)}
    except HeteroError as error:
        return {**report, "problem": str(error)}


def _best_kind(facts: JobFacts, ds_config: JsonObject, world_size: int, model: nn.Module | None) -> JsonDict:
    """Return the kind of job that ``"parallel": "best"`` chooses, with its plan; or why only the job can choose."""
    section = facts.section
    if section.cluster == "measure" or facts.model.spec is None:
        missing = "--model" if facts.model.spec is None else "a profile of the ranks (ds-hetero profile) as the cluster"
        return {
            "decided": f'"parallel": "best": the kind of job is chosen when it starts. To see it now, give {missing}.'
        }
    closed: dict[str, str] = {}
    impossible: Mapping[str, str] = {}
    in_pipelines = replace(facts, section=section_of_kind(section, PIPELINES))
    try:
        expect_supported_keys(ds_config, pipelines=True)
        check_pipelines_searchable(in_pipelines)
        impossible = _check_model(model, None)
    except HeteroError as error:
        closed[PIPELINES] = " ".join(str(error).split()).rstrip(".")
    kinds = tuple(inner for inner in INNERS if inner not in impossible)
    choice = choose_kind(facts, world_size, measured=None, on_host=False, closed=closed, stage_kinds=kinds)
    if choice.kind == PIPELINES:
        of_kind = _pipelines(in_pipelines, None, ds_config, world_size, model)
    else:
        in_sequences = replace(facts, section=section_of_kind(section, SEQUENCE))
        of_kind = _decision(in_sequences, None, ds_config, world_size, model)
    return {**of_kind, "decided": "\n".join([*choice.lines, str(of_kind.get("decided") or "")]).rstrip()}


def _expect_native_bf16(facts: JobFacts, *, in_pipelines: bool) -> None:
    """Refuse bfloat16 if this machine's GPU has no hardware for it.

    On a machine without a GPU nothing is refused: jobs for other machines are prepared there.

    Raises:
        ConfigError: as at the start of the job.
    """
    is_known = facts.model.no_spec_reason != NO_MODEL or facts.training.mixed_precision is not None
    if is_known and torch.cuda.is_available():
        device_lacking_bf16 = device_without_bf16(facts, default_device())
        expect_native_bf16(facts, [device_lacking_bf16], in_pipelines=in_pipelines)


def _decision(
    facts: JobFacts, plan: Plan | None, ds_config: JsonObject, world_size: int, model: nn.Module | None
) -> JsonDict:
    """Return the schedules, with a prediction if devices and model are known; or why only the job can decide them."""
    section = facts.section
    _check_before_deciding(facts, plan, ds_config, world_size, model)
    if later := _decided_at_start(facts, world_size):
        return {"decided": later}
    if section.cluster == "measure" and section.zero_partition == "memory":
        # The shares follow from memory that only a job measures; the schedules do not depend on them.
        facts = replace(facts, section=section.model_copy(update={"zero_partition": "uniform"}))
    decision = decide(facts, world_size, measured=None, on_host=False, plan=plan)
    if decision.plan.batch_split is not None and not section.sets_batch_by_rank:
        expect_batch_of_replicas(ds_config, decision.plan.batch_split, world_size, facts.training.sp_size)
    if decision.zero_weights is not None:
        _expect_partition(section, ds_config, decision.zero_weights, model)
    report: JsonDict = {"schedules": [schedule.to_dict() for schedule in decision.plan.schedules]}
    if decision.forecasts:
        report["predicted"] = [replica.prediction.to_dict() for replica in decision.forecasts]
        report["decided"] = forecast_text(decision.forecasts)
        if section.elastic is not None:
            cost = decision.forecasts[0].cost
            report["saves"] = shared_memory(cost, section.elastic.copies)
            report["decided"] += f"\n{saves_line(cost, report['saves'])}"
    elif decision.no_forecast_reason is not None and facts.model.spec is not None:
        report["decided"] = f"no prediction of the step time: {decision.no_forecast_reason}"
    return report


def _check_before_deciding(
    facts: JobFacts, plan: Plan | None, ds_config: JsonObject, world_size: int, model: nn.Module | None
) -> None:
    """Make the checks of a job's start that need neither measurement nor search. Raises `HeteroError`: a fault."""
    section = facts.section
    if facts.model.no_spec_reason == NO_MODEL:
        expect_kernel(facts)
    else:
        check_facts(facts, world_size)
    if isinstance(section.zero_partition, list):
        check_weights(section.zero_partition, world_size, zero_stage=facts.training.zero_stage)
    if isinstance(section.zero_within, list):
        node_sizes(section.zero_within, range(world_size))
    weights = section.zero_partition if isinstance(section.zero_partition, list) else (1.0,) * world_size
    _expect_partition(section, ds_config, weights, model)
    if plan is None:
        size = replica_size(facts.sp_sizes, world_size)
        if section.cluster != "measure":
            clusters_of_replicas(section, load_cluster(section.cluster), [size] * (world_size // size))


def _expect_partition(
    section: HeterogeneitySection, ds_config: JsonObject, weights: Sequence[float], model: nn.Module | None
) -> None:
    """Raise `ConfigError` if the installed DeepSpeed cannot make the ZeRO partition of the section."""
    differs_from_stock = section.zero_within is not None or not is_even(weights)
    if differs_from_stock and find_spec("deepspeed") is not None:
        from ds_hetero.frameworks.deepspeed.zero.optimizers import expect_possible

        expect_possible(ds_config, weights, model)


def _decided_at_start(facts: JobFacts, world_size: int) -> str | None:
    """Return why the schedule is only decided when the job starts; None if it can be decided now."""
    section, model = facts.section, facts.model
    if (sp_size_of(facts.sp_sizes) or world_size) == 1:
        return None
    name = f'"{"planner" if section.planner else "schedule"}": {json.dumps(section.strategy)}'
    if section.cluster == "measure" and (needs_planner(section) or section.schedule in FROM_DEVICES):
        rule = "the fastest schedule is searched for" if needs_planner(section) else "tokens follow their speeds"
        return (
            f"{name}: the ranks are measured at the start of the job, and {rule}. To see it now, profile them "
            "(ds-hetero profile) and name the file as the cluster."
        )
    seq_len = section.seq_len or model.max_seq_len
    if needs_planner(section) and (model.spec is None or seq_len is None):
        options = (("--model", model.spec), ('--seq-len or "seq_len"', seq_len))
        missing = " and ".join(text for text, value in options if value is None)
        return f"{name}: searched for at the start of the job. To see it now, give {missing}."
    return None


def _pipelines(
    facts: JobFacts, plan: Plan | None, ds_config: JsonObject, world_size: int, model: nn.Module | None
) -> JsonDict:
    """Return the plan of pipelines and its prediction, or why they are only decided when the job starts.

    Args:
        plan: plan that the section gives; None if the planner is to search for one.
        model: the model without weights; None if none was given, or transformers cannot build it.

    Raises:
        HeteroError: a fault that the start of the job would raise.
    """
    section = facts.section
    check_pipeline_section(section)
    if plan is not None:
        expect_supported_keys(ds_config, pipelines=True)
        global_batch_of(facts.training, plan)
    impossible_stage_kinds = _check_model(model, plan)
    if plan is None:
        return _search(PipelineFacts(job=facts, impossible_stage_kinds=impossible_stage_kinds), world_size)
    lines = [pipelines_text(plan), _prediction(facts, plan, world_size), *idle_keys(section, plan)]
    return {"plan": plan.to_dict(), "decided": "\n".join(lines)}


def _check_model(model: nn.Module | None, plan: Plan | None) -> dict[str, str]:
    """Check that a model can be divided into stages; return why it cannot run some kinds of stages, by kind.

    This is `PipelineFacts.impossible_stage_kinds`. Without a model nothing is checked, and the result is empty.

    Raises:
        HeteroError: the model cannot be divided into stages.
    """
    if model is None:
        return {}
    from ds_hetero.frameworks.transformers.stages import check_cuttable, check_stages, impossible_stage_kinds

    if plan is None:
        check_cuttable(model)
    else:
        check_stages(model, plan)
    return impossible_stage_kinds(model)


def _search(facts: PipelineFacts, world_size: int) -> JsonDict:
    """Search for pipelines as the start of the job would; or return why only the job can search."""
    job = facts.job
    seq_len = job.section.seq_len or job.model.max_seq_len
    missing = [text for text, value in (("--model", job.model.spec), ("--seq-len", seq_len)) if value is None]
    later = '"parallel": "full": pipelines are searched for at the start of the job'
    if missing:
        return {"decided": f"{later}. To see them now, give {' and '.join(missing)}."}
    check_pipelines_searchable(job)
    if job.section.cluster == "measure":
        return {
            "decided": f"{later}, on the ranks as they are measured then. To see them now, profile them (ds-hetero "
            "profile) and name the file as the cluster."
        }
    searched = search_pipelines(facts, world_size, measured=None, on_host=False)
    lines = [pipelines_text(searched.plan), searched_text(searched), *idle_keys(job.section, searched.plan)]
    return {"plan": searched.plan.to_dict(), "decided": "\n".join(lines)}


def _prediction(facts: JobFacts, plan: Plan, world_size: int) -> str:
    """Return a text on the predicted step of a plan, or on the inputs without which it cannot be predicted."""
    section, model = facts.section, facts.model
    seq_len = section.seq_len or plan.seq_len or model.max_seq_len
    inputs = {'a cluster file as "cluster"': section.cluster != "measure", "--model": model.spec, "--seq-len": seq_len}
    if missing := [name for name, value in inputs.items() if not value]:
        return f"no prediction of the step time without {' and '.join(missing)}"
    assert model.spec is not None
    cluster = load_cluster(section.cluster)
    if cluster.num_ranks != world_size:
        raise ConfigError(
            f'"{SECTION}.cluster" describes {cluster.num_ranks} devices, '
            f"the job has {world_size} processes. Describe the devices of the job, "
            f"or give --world-size {cluster.num_ranks}."
        )
    work = pipelines_workload(facts, on_host=False, seq_len=seq_len)
    expect_trainable(cluster.devices, work, plan)
    try:
        return judged_text(*judge_given(plan, COST_MODEL, cluster, model.spec, work))
    except PlanError as error:  # a plan of this kind runs all the same, unless memory is short
        return f"no prediction of the step time: {error}"
