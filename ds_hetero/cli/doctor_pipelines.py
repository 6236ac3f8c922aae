"""What ``ds-hetero doctor`` says of a section that asks for pipelines: a plan file, or ``"parallel": "full"``."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from torch import nn

from ds_hetero.cluster import load_cluster
from ds_hetero.config import SECTION
from ds_hetero.cost.objective import Objective
from ds_hetero.cost.stages.calibrated import CalibratedStageCosts
from ds_hetero.errors import ConfigError, PlanError
from ds_hetero.job.decide_pipelines import (
    PipelineFacts,
    check_pipeline_section,
    check_pipelines_searchable,
    pipelines_workload,
    search_pipelines,
    wants_search,
)
from ds_hetero.job.facts import JobFacts
from ds_hetero.job.pipeline_report import judged_text, pipelines_text, searched_text
from ds_hetero.job.plan_files import pipelines_in_file
from ds_hetero.planner.outer.given import judge_plan
from ds_hetero.plans import Plan

__all__ = ["examine_pipelines"]


def examine_pipelines(
    facts: JobFacts, ds_config: Mapping[str, Any], world_size: int, model: nn.Module | None
) -> dict[str, Any] | None:
    """Return the plan and its prediction, or when they will be decided; None where the section asks for no pipelines.

    Args:
        facts: of the job.
        ds_config: DeepSpeed's configuration.
        world_size: processes of the job.
        model: without weights, where one was given that transformers can build.

    Raises:
        HeteroError: as the start of the job.
    """
    section = facts.section
    plan = pipelines_in_file(section, world_size)
    if plan is None and not wants_search(section):
        return None
    check_pipeline_section(section)
    if plan is not None:
        _check_training(ds_config, plan)
    no_inners = _check_model(model, plan)
    if plan is None:
        return _searched(PipelineFacts(job=facts, no_inners=no_inners), world_size)
    return {"plan": plan.to_dict(), "decided": f"{pipelines_text(plan)}\n{_prediction(facts, plan, world_size)}"}


def _check_model(model: nn.Module | None, plan: Plan | None) -> dict[str, str]:
    """Refuse a model that cannot be cut; return why ranks cannot share the work of its stages."""
    if model is None:
        return {}
    from ds_hetero.integrations.transformers.stages import check_cuttable, check_stages, impossible_inners

    if plan is None:
        check_cuttable(model)
    else:
        check_stages(model, plan)
    return impossible_inners(model)


def _check_training(ds_config: Mapping[str, Any], plan: Plan) -> None:
    if find_spec("deepspeed") is not None:
        from ds_hetero.integrations.deepspeed.keys import expect_supported_keys
        from ds_hetero.integrations.deepspeed.pipeline.lone_engine import expect_batch_of_pipelines

        expect_supported_keys(ds_config, pipelines=True)
        split = plan.batch_split
        expect_batch_of_pipelines(ds_config, 0 if split is None else split.samples)


def _searched(facts: PipelineFacts, world_size: int) -> dict[str, Any]:
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
    text = f"{pipelines_text(searched.plan)}\n{searched_text(searched)}"
    return {"plan": searched.plan.to_dict(), "decided": text}


def _prediction(facts: JobFacts, plan: Plan, world_size: int) -> str:
    """What the cost model says of a given plan, where devices, model and length are known."""
    section, model = facts.section, facts.model
    seq_len = section.seq_len or plan.seq_len or model.max_seq_len
    known = {'a cluster file as "cluster"': section.cluster != "measure", "--model": model.spec, "--seq-len": seq_len}
    if missing := [name for name, value in known.items() if not value]:
        return f"no prediction of the step time without {' and '.join(missing)}"
    assert model.spec is not None and plan.batch_split is not None and seq_len is not None
    cluster = load_cluster(section.cluster)
    if cluster.num_ranks != world_size:
        raise ConfigError(
            f'"{SECTION}.cluster" describes {cluster.num_ranks} devices, the job has {world_size} processes.'
        )
    work = pipelines_workload(facts, on_host=False, seq_len=seq_len, checkpointing=plan.activation_checkpointing)
    costs = CalibratedStageCosts(cluster, model.spec, work)
    devices = [kind.device for kind in costs.pools.kinds]
    objective = Objective.of("time", devices, plan.batch_split.samples * seq_len, None)
    try:
        return judged_text(costs, judge_plan(costs, plan, objective))
    except PlanError as error:  # a plan of this kind runs all the same, unless memory is short
        return f"no prediction of the step time: {error}"
