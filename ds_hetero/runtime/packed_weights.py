"""Weights that bitsandbytes packs in 4 bits: which parameters they are, and a checksum to tell them apart.

A packed weight is a ``Params4bit``, whose constants are outside of the tensor, in its ``quant_state``. So copying its
elements copies no weight.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn


def is_packed(parameter: object) -> bool:
    """Return True for a weight that bitsandbytes holds, or is to hold, in 4 bits."""
    return type(parameter).__name__ == "Params4bit"


def packed_names(model: nn.Module) -> Iterator[str]:
    """Yield the names of the packed weights of a model."""
    return (name for name, parameter in model.named_parameters() if is_packed(parameter))


def checksum_of_packed(packed: Tensor) -> Tensor:
    """Return a sum over the bytes of a packed weight, ``int64 []``, which differs if other weights were quantized."""
    data = packed.detach().data.reshape(-1).view(torch.uint8)
    num_in_words = data.numel() // 8 * 8
    words, rest = data[:num_in_words].view(torch.int64), data[num_in_words:]  # eight bytes at a time are faster to add
    return words.sum() + rest.sum(dtype=torch.int64)
