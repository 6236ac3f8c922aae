"""Whether a model draws random numbers while it trains: dropout, of modules or by the configuration."""

from __future__ import annotations

from torch import nn

from ds_hetero.frameworks.transformers.protocols import PretrainedModel


def draws_randomly(pretrained: PretrainedModel) -> bool:
    """Whether a forward in training draws random numbers: dropout, of modules or by the configuration."""
    options = pretrained.config.get_text_config().to_dict()
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in pretrained.modules()) or any(
        "drop" in key and isinstance(share, float) and share > 0 for key, share in options.items()
    )
