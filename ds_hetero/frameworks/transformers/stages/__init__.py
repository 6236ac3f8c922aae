"""Run a transformers model as stages of a pipeline: check that it can be cut, cut it, and run a stage."""

from ds_hetero.frameworks.transformers.stages.meta import empty_model, is_on_meta
from ds_hetero.frameworks.transformers.stages.stage_checks import check_cuttable, check_stages, impossible_stage_kinds
from ds_hetero.frameworks.transformers.stages.stage_model import StageModel, outputs_with

__all__ = [
    "StageModel",
    "check_cuttable",
    "check_stages",
    "empty_model",
    "impossible_stage_kinds",
    "is_on_meta",
    "outputs_with",
]
