"""Parts of a decoder for pipeline stages: embedding, layers, final norm, and placeholders for other stages' parts.

transformers lists the modules that a decoder runs, in order, in ``base_model_pp_plan`` of the configuration. Llama's:

    embed_tokens    before the layers; on the first stage
    layers          the only nn.ModuleList; divided among the stages
    norm            after the layers; on the last stage
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ds_hetero.errors import ModelError
from ds_hetero.frameworks.transformers.protocols import PretrainedModel
from ds_hetero.frameworks.transformers.stages.packed_weights import free_constants


class Absent(nn.Module):
    """Placeholder for a module of another stage. It returns its input."""

    def forward(self, hidden: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Return ``hidden``."""
        return hidden


NO_PIPELINES = 'Share its sequences by a schedule: leave "parallel": "full" and pipelines out.'


class DecoderParts(NamedTuple):
    """Names of a decoder's modules, in the order in which it runs them."""

    before: tuple[str, ...]  # modules before the layers, on the first stage
    layers: str  # the list of layers
    after: tuple[str, ...]  # modules after the layers, on the last stage


def parts_of(pretrained: PretrainedModel) -> DecoderParts:
    """Return the parts of a model's decoder.

    Raises:
        ModelError: the configuration has no pipeline plan, names a module that the decoder lacks, or names not exactly
            one list of layers.
    """
    plan = list(getattr(pretrained.config.get_text_config(), "base_model_pp_plan", None) or ())
    decoder = pretrained.base_model
    lists = [name for name in plan if isinstance(getattr(decoder, name, None), nn.ModuleList)]
    has_all_parts = all(hasattr(decoder, name) for name in plan)
    if len(lists) != 1 or not has_all_parts:
        raise ModelError(
            f"{type(pretrained).__name__} cannot be cut into pipeline stages: its configuration does not say in "
            f"base_model_pp_plan which modules come before and after one list of layers (it says {plan}). "
            f"{NO_PIPELINES}"
        )
    layers = lists[0]
    index = plan.index(layers)
    return DecoderParts(before=tuple(plan[:index]), layers=layers, after=tuple(plan[index + 1 :]))


def without_memory(layer: nn.Module) -> nn.Module:
    """Free the parameters of a layer, and return it. They move to the meta device; `with_memory` brings them back.

    Weights of 4 bits do not come back: `expect_movable` refuses to move layers that have them.
    """
    for module in layer.modules():
        free_constants(module)
        for name, parameter in module.named_parameters(recurse=False):
            # The shape of a DTensor is that of the full parameter, so the layer can be sharded again later.
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            setattr(module, name, nn.Parameter(empty, requires_grad=parameter.requires_grad))
    return layer


def with_memory(layer: nn.Module, device: torch.device) -> nn.Module:
    """Give the parameters of a layer memory on a device, filled with zeros, and return the layer."""
    for module in layer.modules():
        for name, parameter in module.named_parameters(recurse=False):
            empty = torch.zeros_like(parameter, device=device)
            setattr(module, name, nn.Parameter(empty, requires_grad=parameter.requires_grad))
    return layer
