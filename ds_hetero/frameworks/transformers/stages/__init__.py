"""Stages of pipelines made of transformers models: which models can be cut, the cut, and a stage's passes."""

from ds_hetero.frameworks.transformers.stages.meta import empty_model, is_on_meta
from ds_hetero.frameworks.transformers.stages.stage_checks import check_cuttable, check_stages, impossible_inners
from ds_hetero.frameworks.transformers.stages.stage_model import StageModel, outputs_with

__all__ = [
    "StageModel",
    "check_cuttable",
    "check_stages",
    "empty_model",
    "impossible_inners",
    "is_on_meta",
    "outputs_with",
]
