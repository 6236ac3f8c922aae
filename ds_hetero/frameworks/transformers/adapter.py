"""The adapter of transformers: this module implements `ds_hetero.engine.adapters.ModelAdapter`."""

from __future__ import annotations

from torch import nn

from ds_hetero.engine.registry import Registry
from ds_hetero.engine.trained.split_model import SplitModel
from ds_hetero.engine.trained.staged_model import StagedModel
from ds_hetero.frameworks.transformers import attention, trainer
from ds_hetero.frameworks.transformers.attention import keep_attention_function as keep_attention_function
from ds_hetero.frameworks.transformers.model import placed_experts, stray_shards
from ds_hetero.frameworks.transformers.model.facts import describe_model as describe_model
from ds_hetero.frameworks.transformers.model.facts import read_facts_of_whole_model as read_facts_of_whole_model
from ds_hetero.frameworks.transformers.model.facts import read_model_facts as read_model_facts
from ds_hetero.frameworks.transformers.model.model_checks import check_quantized as check_quantized
from ds_hetero.frameworks.transformers.model.model_checks import containers_of_experts as containers_of_experts
from ds_hetero.frameworks.transformers.model.placed_experts import check_placeable as check_placeable
from ds_hetero.frameworks.transformers.model.placed_experts import place_experts as place_experts
from ds_hetero.frameworks.transformers.model.sharded_call import whole_results as whole_results
from ds_hetero.frameworks.transformers.model.sharded_model import ShardedModel
from ds_hetero.frameworks.transformers.self_check import SelfCheck
from ds_hetero.frameworks.transformers.stages import StageModel
from ds_hetero.frameworks.transformers.stages import check_cuttable as check_cuttable
from ds_hetero.frameworks.transformers.stages import check_stages as check_stages
from ds_hetero.frameworks.transformers.stages import impossible_stage_kinds as impossible_stage_kinds
from ds_hetero.frameworks.transformers.stages import is_on_meta as is_on_meta
from ds_hetero.frameworks.transformers.stages import outputs_with as outputs_with
from ds_hetero.runtime.replica import Replica
from ds_hetero.values.plans import Plan


def install(registry: Registry) -> None:
    """Register this engine's attention, check arguments of models for shards, and replace methods of the Trainer."""
    attention.install(registry.patches)
    placed_experts.install(registry.patches)
    stray_shards.install(registry.patches)
    trainer.install(registry)


def split_model(model: nn.Module, replica: Replica, kernel: str | None) -> SplitModel:
    """Return the model, switched to this engine's attention and with its self-check; see `ShardedModel`."""
    split = ShardedModel(model, replica, kernel)
    split.checks = SelfCheck(split)
    return split


def cut_model(model: nn.Module, plan: Plan, rank: int, tile_tokens: int | None) -> StagedModel:
    """Return the model, cut to this rank's stage of a pipeline; see `StageModel`."""
    return StageModel(model, plan, rank, tile_tokens)
