"""Modules in evaluation for a while, with the modes that they had put back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation inside, but for layers that would not train any more after it."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    for module in training:
        module.training = packs_in_evaluation(module)
    try:
        yield
    finally:
        for module in training:
            module.training = True


def packs_in_evaluation(module: nn.Module) -> bool:
    """Whether a layer in evaluation puts its weights into a form for inference that does not train any more.

    bitsandbytes' layers of 4 bits do so on CPUs with AVX-512.
    """
    return hasattr(module, "support_avx512bf16_for_cpu")
