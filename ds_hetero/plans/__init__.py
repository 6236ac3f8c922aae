"""The whole job as one value: pipelines, stages, batches; and the files that say it. Imports no torch."""

from ds_hetero.plans.batches import BatchSplit
from ds_hetero.plans.checks import INNER
from ds_hetero.plans.reading import read_plan
from ds_hetero.plans.values import Pipeline, Plan, PlannedModel, Stage, ZeroOwners

__all__ = ["INNER", "BatchSplit", "Pipeline", "Plan", "PlannedModel", "Stage", "ZeroOwners", "read_plan"]
