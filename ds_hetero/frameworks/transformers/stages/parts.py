"""The parts of a decoder by transformers' own pipeline plan: embedding, layers, last norm; and a part that is absent.

A model that is to be cut says in ``base_model_pp_plan`` of its configuration which modules its decoder runs in order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ds_hetero.errors import ModelError
from ds_hetero.frameworks.transformers.protocols import PretrainedModel


class Absent(nn.Module):
    """A module of another stage: it gives back what it is given."""

    def forward(self, hidden: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Return ``hidden``."""
        return hidden


NO_PIPELINES = 'Share its sequences by a schedule: leave "parallel": "full" and pipelines out.'


class DecoderParts(NamedTuple):
    """Names of a decoder's modules."""

    before: tuple[str, ...]  # of those before the layers, which the first stage holds
    layers: str  # of the list of layers
    after: tuple[str, ...]  # of those after the layers, which the last stage holds


def parts_of(pretrained: PretrainedModel) -> DecoderParts:
    """Return the parts of a model's decoder. Raises `ModelError`: it has no pipeline plan, or another one."""
    plan = list(getattr(pretrained.config.get_text_config(), "base_model_pp_plan", None) or ())
    decoder = pretrained.base_model
    lists = [name for name in plan if isinstance(getattr(decoder, name, None), nn.ModuleList)]
    if len(lists) != 1 or any(not hasattr(decoder, name) for name in plan):
        raise ModelError(
            f"{type(pretrained).__name__} cannot be cut into pipeline stages: its configuration does not say in "
            f"base_model_pp_plan which modules come before and after one list of layers (it says {plan}). "
            f"{NO_PIPELINES}"
        )
    at = plan.index(lists[0])
    return DecoderParts(tuple(plan[:at]), lists[0], tuple(plan[at + 1 :]))


def without_memory(layer: nn.Module) -> nn.Module:
    """Put the parameters of a layer on the meta device, so that it can come back."""
    for module in layer.modules():
        for name, parameter in module.named_parameters(recurse=False):
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")  # whole, where it was a shard
            setattr(module, name, nn.Parameter(empty, requires_grad=parameter.requires_grad))
    return layer


def with_memory(layer: nn.Module, device: torch.device) -> nn.Module:
    """Give the parameters of a layer memory on a device, filled with zeros."""
    for module in layer.modules():
        for name, parameter in module.named_parameters(recurse=False):
            empty = torch.zeros_like(parameter, device=device)
            setattr(module, name, nn.Parameter(empty, requires_grad=parameter.requires_grad))
    return layer
