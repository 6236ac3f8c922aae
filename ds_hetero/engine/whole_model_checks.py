"""Refusals of what a module that runs whole on every rank cannot have, or not on unlike batches."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ds_hetero.errors import ConfigError, ModelError
from ds_hetero.runtime.data.loss_units import Batch, UnitCounts
from ds_hetero.values.section import SECTION, HeterogeneitySection


def expect_convention(name: str, convention: str | None, *, takes_unlike_batches: bool) -> None:
    """Refuse a loss convention of the section that means nothing here.

    Args:
        name: of the module's class.

    Raises:
        ConfigError: on every rank, for a convention of split models, or for a unit where all replicas take equal
            batches.
    """
    if convention not in (None, "replica_mean", *UnitCounts._fields):
        raise ConfigError(
            f'"{SECTION}.loss" is "{convention}", which counts the tokens of a batch, but '
            f"{name} is not split: its loss is that of the batch already. Leave the key out."
        )
    if not takes_unlike_batches and convention in UnitCounts._fields:
        raise ConfigError(
            f'"{SECTION}.loss": "{convention}" weighs the losses of replicas that take different batches, but the '
            "schedule says no micro_batch_size and micro_batches. Leave the key out."
        )


def expect_section_of_whole_model(name: str, section: HeterogeneitySection) -> None:
    """Refuse keys of the section that change or compute parts of sequences. Raises `ConfigError`.

    Args:
        name: of the module's class.
    """
    if section.tile_tokens is not None:
        raise ConfigError(
            f'"tile_tokens": {section.tile_tokens} tiles models of transformers that are split over a sequence, '
            f"and {name} is not. Leave the key out."
        )
    if section.evaluation == "sharded":
        raise ConfigError(
            f'"{SECTION}.evaluation": "sharded" splits the sequences of an evaluation over ranks, but {name} runs '
            "whole on every rank. Leave the key out."
        )
    if section.replan.enabled and section.batch is None:
        raise ConfigError(
            f'"replan": {{"enabled": true}} moves tokens between the ranks of a replica, but {name} runs whole on '
            'every rank. "replan": {"report_only": true} names slow ranks; give each as many samples as it is fast '
            'by "batch": [6, 2].'
        )


def expect_no_router_loss(model: nn.Module, batch: Batch) -> None:
    """Refuse experts' load-balancing loss, a product of two means over a rank's tokens. Raises `ConfigError`."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    weight = getattr(text, "router_aux_loss_coef", 0)
    if weight and (getattr(text, "output_router_logits", False) or batch.get("output_router_logits")):
        raise ConfigError(
            f"the ranks take different batches, and {type(model).__name__} adds a loss of its routers "
            f"(router_aux_loss_coef={weight}), which is not a mean over samples or tokens: one process would compute "
            "another on the global batch. Set router_aux_loss_coef to 0 (in TRL: SFTConfig(router_aux_loss_coef=0.0), "
            "since TRL sets output_router_logits by itself), or share sequences by a schedule in place of "
            f'"{SECTION}.batch".'
        )


def expect_no_statistics(model: nn.Module) -> None:
    """Refuse layers that mix samples of a micro-batch. Raises `ModelError`: batch normalization in training."""
    names = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm) and module.training]
    if names:
        raise ModelError(
            f"{names[0]} of {type(model).__name__} is {type(model.get_submodule(names[0])).__name__}: it normalizes by "
            "the micro-batch of its rank, and the ranks take different ones. Use nn.GroupNorm, freeze it by eval(), or "
            "give all replicas the same batches."
        )
