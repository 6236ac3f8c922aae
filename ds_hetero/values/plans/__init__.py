"""The whole job as one value: pipelines, stages, batches; and the files that say it. Imports no torch."""

from ds_hetero.values.plans.batches import BatchSplit
from ds_hetero.values.plans.plan import INNER, Pipeline, Plan, PlannedModel, Stage, ZeroOwners, read_plan

__all__ = ["INNER", "BatchSplit", "Pipeline", "Plan", "PlannedModel", "Stage", "ZeroOwners", "read_plan"]
