"""A pipeline of as many stages as ranks, whose stages hand on what they get: the least that exchanges messages."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ds_hetero.runtime.pipeline.runner import PipelineRunner, neighbours_of
from ds_hetero.runtime.pipeline.stage_transfers import make_boundary_groups
from ds_hetero.runtime.process_groups import ProcessGroups
from ds_hetero.values.plans import Pipeline, Plan, PlannedModel, Stage
from tests.dist.test_pipeline import Batch


def lone_stages(rank: int, micro_batches: int) -> tuple[PipelineRunner, list[Batch]]:
    """The runner of this rank's stage, and a step's micro-batches; the first stage makes [2, 8, 4] of each.

    Caller: every rank of the world.
    """
    world_size = dist.get_world_size()
    stages = tuple(Stage(ranks=(i,), layers=(i, i + 1)) for i in range(world_size))
    pipeline = Pipeline(stages=stages, micro_batch_size=2, micro_batches=micro_batches)
    plan = Plan(pipelines=(pipeline,), model=PlannedModel(num_layers=world_size, num_heads=4, num_kv_heads=4))
    groups = make_boundary_groups(plan, ProcessGroups())

    def compute(_: object, hidden: torch.Tensor | None) -> torch.Tensor:
        if hidden is None:
            return torch.ones(2, 8, 4, requires_grad=True)
        return hidden.square().sum() if rank == world_size - 1 else hidden * 2

    runner = PipelineRunner(neighbours_of(plan, rank, groups, torch.device("cpu")), compute, 4, torch.float32)
    return runner, [Batch(torch.zeros(2, 8), 1.0) for _ in range(micro_batches)]
