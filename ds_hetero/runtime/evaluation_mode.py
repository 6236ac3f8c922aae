"""Put modules into evaluation mode for a while, and restore their modes afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode inside the context, and restore the modes of its modules afterwards.

    Layers that could not be trained any more afterwards (`packs_in_evaluation`) stay in training mode.
    """
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
    """Whether a layer in evaluation mode converts its weights to a format that cannot be trained.

    bitsandbytes' 4-bit layers do so on CPUs with AVX-512.
    """
    return hasattr(module, "support_avx512bf16_for_cpu")
