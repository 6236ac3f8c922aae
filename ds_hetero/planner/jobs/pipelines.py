"""The best job of pipelines: stages of unequal devices, each with some of the layers."""

from __future__ import annotations

from dataclasses import replace

from ds_hetero.cost.stages.calibrated import INNERS, CalibratedStageCosts
from ds_hetero.cost.workload import Workload
from ds_hetero.errors import PlanError
from ds_hetero.planner.jobs.job import Job, JobTask, Refused
from ds_hetero.planner.jobs.kinds import PIPELINES
from ds_hetero.planner.jobs.settings import tilings
from ds_hetero.planner.pipeline_search.search import default_effort_s
from ds_hetero.planner.pipeline_search.stage_schedules import ScheduleFinder
from ds_hetero.planner.pipelines.native_types import expect_trainable
from ds_hetero.planner.pipelines.planning import MICRO_BATCH_SIZES, plan_pipelines
from ds_hetero.planner.results.pipelines import PlannedPipelines

# Of the effort of a search for pipelines alone (``--parallel full``), so that eight unlike devices with everything free
# take less than 3 s.
EFFORT_SHARE = 0.08
MAX_STAGE = 2  # ZeRO stages that pipelines run under; they own optimizer state as stage 1 does


def best_pipelines(task: JobTask) -> Job | Refused:
    """Return the fastest job of pipelines, or why there is none."""
    work = task.workload
    if task.cluster.num_ranks == 1:
        return Refused(kind=PIPELINES, reason="there is one GPU")
    if not task.freedom.may_choose("zero_stage") and work.zero_stage > MAX_STAGE:
        return Refused(kind=PIPELINES, reason=f"--zero-stage {work.zero_stage}: pipelines run under ZeRO 0 to 2")
    if not task.freedom.may_choose("zero_within") or work.offloads:
        return Refused(kind=PIPELINES, reason="pipelines run without offloads and without ZeRO inside nodes")
    if task.freedom.may_choose("zero_stage"):
        work = replace(work, zero_stage=1)
    try:
        expect_trainable(task.cluster.devices, work)
    except PlanError as error:
        return Refused(kind=PIPELINES, reason=_first_sentence(error))
    found: Job | Refused = Refused(kind=PIPELINES, reason="does not fit")
    for tiled in tilings(work, task.freedom):
        found = _best_of_tiling(task, tiled)
        if isinstance(found, Job):
            break
    return found


def _best_of_tiling(task: JobTask, work: Workload) -> Job | Refused:
    """Return the fastest job of pipelines under ``work``, of which only recomputation and micro-batches are chosen."""
    try:
        return _job(task, work, _planned(task, work))
    except PlanError as error:
        return Refused(kind=PIPELINES, reason=_first_sentence(error))


def _planned(task: JobTask, work: Workload) -> PlannedPipelines:
    """Search for pipelines. Raises `PlanError`: nothing fits, or no cost model of stages covers the training."""
    cluster, model = task.cluster, task.model
    sizes = MICRO_BATCH_SIZES if task.freedom.may_choose("micro_batch") else (work.micro_batch,)
    work = replace(work, micro_batch=1, micro_batches=1)
    inners = INNERS if task.stage_kinds is None else task.stage_kinds
    costs = None
    if not task.freedom.may_choose("activation_checkpointing"):
        costs = CalibratedStageCosts(cluster, model, work, inners, find=ScheduleFinder())
    return plan_pipelines(
        cluster,
        model,
        work,
        task.batch,
        costs=costs,
        micro_batch_sizes=sizes,
        inners=inners,
        effort_s=EFFORT_SHARE * default_effort_s(cluster.num_ranks),
        from_published=False,
        with_sequence=False,
    )


def _job(task: JobTask, work: Workload, planned: PlannedPipelines) -> Job:
    """Make the job of pipelines."""
    recomputes = bool(planned.plan.activation_checkpointing)
    return Job(
        kind=PIPELINES,
        cluster=task.cluster,
        whole_cluster=task.cluster,
        left_out=(),
        workload=replace(work, activation_checkpointing=recomputes, micro_batch=1, micro_batches=task.batch),
        planned=planned,
        limit=_limit(planned),
    )


def _limit(planned: PlannedPipelines) -> str:
    """Return in a few words what limits the speed: the beginning of the plan's sentence on its period."""
    period = next((reason for reason in planned.reasons if reason.startswith("one micro-batch")), planned.reasons[0])
    return period.partition(":")[0].partition(";")[0].partition(", longer")[0]


def _first_sentence(error: PlanError) -> str:
    return str(error).partition(". ")[0]
