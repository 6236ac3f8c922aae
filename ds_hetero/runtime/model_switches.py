"""Switches of a model that must be the same on all ranks that train it together: requires_grad, train(), autocast.

They are compared before a forward that ranks share (`ds_hetero.runtime.attention.batch_layout`), since unlike switches
change the sizes of its messages, and once per step (`ds_hetero.runtime.step_checks.same_switches`).
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
"""Checksum of the trained parameters in a forward without gradients."""

_PROBLEMS = {
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


def checksum_of_trained(parameters: Iterable[nn.Parameter]) -> int:
    """Return a checksum of ``requires_grad`` of the parameters in order; `NO_GRADIENT` if gradients are off."""
    if not torch.is_grad_enabled():
        return NO_GRADIENT
    return checksum(parameter.requires_grad for parameter in parameters)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype of autocast for a type of device; None if autocast is off."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def differing_switch_error(switch: str, by_rank: Sequence[str]) -> ModelError:
    """Return the error for ranks on which a switch differs.

    Args:
        switch: name of the switch, such as `AUTOCAST`.
        by_rank: value of the switch on each rank, for people.
    """
    return ModelError(
        f"{_PROBLEMS[switch]}: by rank {list(by_rank)}. One process trains one model, and the ranks would train unlike "
        f"ones. {_REMEDY[switch]}"
    )


def checksum_texts(checksums: Iterable[float]) -> list[str]:
    """Return checksums as texts for a message, such as "checksum 0a1b2c3d"."""
    return [f"checksum {int(number):08x}" if number != NO_GRADIENT else "no gradient" for number in checksums]
