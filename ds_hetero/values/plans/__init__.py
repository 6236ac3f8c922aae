"""Plans: the whole job as one value (pipelines, stages, batches), and the reader of plan files. Imports no torch."""

from ds_hetero.values.plans.batches import BatchSplit
from ds_hetero.values.plans.plan import Plan
from ds_hetero.values.plans.plan_files import read_plan
from ds_hetero.values.plans.stages import INNER, Pipeline, PlannedModel, Stage, ZeroOwners

__all__ = ["INNER", "BatchSplit", "Pipeline", "Plan", "PlannedModel", "Stage", "ZeroOwners", "read_plan"]
