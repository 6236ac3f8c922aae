"""Switches of a model that ranks which train it together must have alike: what is trained, and autocast.

They are compared before a forward that ranks share (`ds_hetero.runtime.attention.batch_layout`), since unlike ones
change the sizes of messages in it, and once a step (`ds_hetero.runtime.step_checks.same_switches`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from zlib import crc32

import torch
from torch import nn

from ds_hetero.errors import ModelError

REQUIRES_GRAD, TRAINING, AUTOCAST = "requires_grad", "training", "autocast"
"""Names of switches."""

NO_GRADIENT = -1
"""Stands for what is trained in a forward that takes no gradient."""

_WHAT = {
    REQUIRES_GRAD: "requires_grad of the model's parameters is not the same on all ranks",
    TRAINING: "train() and eval() of the model's modules are not the same on all ranks",
    AUTOCAST: "autocast, and its dtype, is not the same on all ranks in the forwards of a step",
}
_REMEDY = {
    REQUIRES_GRAD: "Freeze and unfreeze parameters, and use torch.no_grad(), on every rank alike.",
    TRAINING: "Call train() and eval() on every rank alike; an evaluation on one rank has to end with train().",
    AUTOCAST: "Enter torch.autocast on every rank alike.",
}


def checksum(numbers: Iterable[int]) -> int:
    """Return a checksum of small numbers in their order, 32 bits; numbers above 255 count as 255."""
    return crc32(bytes(min(int(number), 255) for number in numbers))


def what_is_trained(parameters: Iterable[nn.Parameter]) -> int:
    """Return a checksum of requires_grad by parameter; `NO_GRADIENT` where gradients are off."""
    if not torch.is_grad_enabled():
        return NO_GRADIENT
    return checksum(parameter.requires_grad for parameter in parameters)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype of autocast on such a device; None where it is off."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def unlike(switch: str, by_rank: Sequence[str]) -> ModelError:
    """Return the error of ranks whose models are switched differently.

    Args:
        switch: its name.
        by_rank: what it is on each of the ranks.
    """
    return ModelError(
        f"{_WHAT[switch]}: by rank {list(by_rank)}. One process trains one model, and the ranks would train unlike "
        f"ones. {_REMEDY[switch]}"
    )


def by_checksum(checksums: Iterable[float]) -> list[str]:
    """Checksums as messages show them: equal ones are read as equal."""
    return [f"checksum {int(number):08x}" if number != NO_GRADIENT else "no gradient" for number in checksums]
