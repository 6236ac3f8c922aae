"""Refuse settings, layers and losses that do not work with a module that runs whole on every rank."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ds_hetero.errors import ConfigError, ModelError
from ds_hetero.runtime.data.loss_units import Batch, UnitCounts
from ds_hetero.values.section import SECTION, HeterogeneitySection


def expect_section_of_whole_model(name: str, section: HeterogeneitySection, *, takes_unlike_batches: bool) -> None:
    """Check that the section has no keys for split sequences.

    Args:
        name: name of the module's class.
        takes_unlike_batches: whether replicas take different batches.

    Raises:
        ConfigError: on every rank: the section has such a key; see also `_expect_convention`.
    """
    _expect_convention(name, section.loss, takes_unlike_batches=takes_unlike_batches)
    if section.tile_tokens is not None:
        raise ConfigError(
            f'"tile_tokens": {section.tile_tokens} tiles models of transformers that are split over a sequence, '
            f"and {name} is not. Leave the key out."
        )
    if section.keep_attention is not False:
        raise ConfigError(
            f'"keep_attention" is for models of transformers that can be split over a sequence, and {name} is not one. '
            "Leave the key out."
        )
    if section.ring_gradients != "fp32":
        raise ConfigError(
            f'"ring_gradients": "{section.ring_gradients}" is for messages between ranks that share sequences in a '
            f"ring, and {name} runs whole on every rank. Leave the key out."
        )
    if section.evaluation == "sharded":
        raise ConfigError(
            f'"{SECTION}.evaluation": "sharded" splits the sequences of an evaluation over ranks, but {name} runs '
            "whole on every rank. Leave the key out."
        )
    if section.replan.enabled and not section.sets_batch_by_rank:
        raise ConfigError(
            f'"replan": {{"enabled": true}} moves tokens between the ranks of a replica, but {name} runs whole on '
            'every rank. Set "replan": {"report_only": true} to get slow ranks named, and give each rank samples in '
            'proportion to its speed with "batch", such as [6, 2].'
        )


def _expect_convention(name: str, convention: str | None, *, takes_unlike_batches: bool) -> None:
    """Check that the section's loss convention has a meaning for a module that runs whole.

    Args:
        name: name of the module's class.
        convention: ``"loss"`` of the section, if it is set.
        takes_unlike_batches: whether replicas take different batches.

    Raises:
        ConfigError: on every rank: the convention is for split models, or it is a unit and all replicas take equal
            batches.
    """
    if convention not in (None, "replica_mean", *UnitCounts._fields):
        supported = ("replica_mean", *UnitCounts._fields) if takes_unlike_batches else ("replica_mean",)
        raise ConfigError(
            f'"{SECTION}.loss": "{convention}" is for models whose sequences are split over ranks, and {name} runs '
            f"whole on every rank. Leave the key out, or give {' or '.join(supported)}."
        )
    if not takes_unlike_batches and convention in UnitCounts._fields:
        raise ConfigError(
            f'"{SECTION}.loss": "{convention}" weighs the losses of replicas that take different batches, but the '
            "schedule has no micro_batch_size and micro_batches. Leave the key out."
        )


def raise_whole_documents(name: str) -> NoReturn:
    """Raise `ConfigError` for ``"placement": "documents"`` with a module that runs whole.

    Args:
        name: name of the module's class.
    """
    raise ConfigError(
        f'"{SECTION}.placement": "documents" places the tokens of split batches, but {name} runs whole on every rank. '
        "Leave the key out."
    )


def expect_no_router_loss(model: nn.Module, batch: Batch) -> None:
    """Check that the model adds no auxiliary loss of its routers. Raises `ConfigError`: it does.

    This loss is a product of two means over a rank's tokens, which cannot be weighed to be that of the global batch.
    """
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
    """Check that no layer mixes the samples of a micro-batch. Raises `ModelError`: batch normalization does."""
    names = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm) and module.training]
    if names:
        raise ModelError(
            f"{names[0]} of {type(model).__name__} is {type(model.get_submodule(names[0])).__name__}: it normalizes by "
            "the micro-batch of its rank, and the ranks take different ones. Use nn.GroupNorm, freeze it by eval(), or "
            "give all replicas equal batches."
        )
