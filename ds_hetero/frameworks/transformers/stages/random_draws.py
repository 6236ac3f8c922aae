"""Detect whether a transformers model draws random numbers while it trains."""

from __future__ import annotations

from torch import nn

from ds_hetero.frameworks.transformers.protocols import PretrainedModel


def draws_randomly(pretrained: PretrainedModel) -> bool:
    """Return True if a training forward draws random numbers.

    It does if a dropout module, or a dropout rate in the configuration, is above 0.
    """
    for module in pretrained.modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            return True
    # Functional dropout has no module: attention_dropout, layerdrop, resid_pdrop are rates in the configuration.
    for key, value in pretrained.config.get_text_config().to_dict().items():
        if "drop" in key and isinstance(value, float) and value > 0:
            return True
    return False
