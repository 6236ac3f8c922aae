"""Check that all ranks run and train one model: what is trained, train() and eval(), hooks on gradients, autocast.

In one process there is one model. Ranks hold a copy each, which a script may switch on one of them alone. DeepSpeed
averages gradients of the copies whatever they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple
from zlib import crc32

import torch
from torch import nn

from ds_hetero.errors import ModelError
from ds_hetero.runtime.step_checks.protocol import Undecided, Verdict


class _Switches(NamedTuple):
    """Checksums of one rank about one step."""

    requires_grad: float
    training: float
    autocast: float
    hooks: float


class SameSwitches:
    """`ds_hetero.runtime.step_checks.protocol.StepCheck` of the model's switches; on the host alone.

    Args:
        module: what is trained.
        is_split: ranks exchange activations, whose precision has to be the same; else autocast moves rounding alone.
    """

    width = len(_Switches._fields)

    def __init__(self, module: nn.Module, *, is_split: bool) -> None:
        self._modules, self._parameters = list(module.modules()), list(module.parameters())
        self._is_split = is_split
        self._autocast: set[str] = set()  # under which forwards of the step ran

    def note_forward(self, device_type: str) -> None:
        """The script calls the engine."""
        is_on = torch.is_autocast_enabled(device_type)
        self._autocast.add(str(torch.get_autocast_dtype(device_type)) if is_on else "off")

    def numbers(self) -> Sequence[float]:
        """See `StepCheck`."""
        autocast, self._autocast = sorted(self._autocast), set()
        return _Switches(
            requires_grad=_checksum(parameter.requires_grad for parameter in self._parameters),
            training=_checksum(module.training for module in self._modules),
            autocast=float(crc32(repr(autocast).encode())),
            hooks=_checksum(_num_hooks(parameter) for parameter in self._parameters),
        )

    def verdict(self, rows: Sequence[Sequence[float]]) -> Verdict:
        """See `StepCheck`."""
        by_rank = dict(zip(_Switches._fields, zip(*rows, strict=True), strict=True))
        refused = ["requires_grad", "training"]
        if self._is_split:
            refused.append("autocast")
        for switch in refused:
            if len(set(by_rank[switch])) > 1:
                what, remedy = _REFUSED[switch]
                return ModelError(
                    f"{what} on all ranks: {_listed(by_rank[switch])}. One process trains one model, and the "
                    f"ranks would train unlike ones. {remedy}"
                )
        for switch in ("hooks", "autocast"):
            if len(set(by_rank[switch])) > 1:
                return Undecided(_TOLD[switch].format(_listed(by_rank[switch])), subject=switch)
        return None


_REFUSED = {
    "requires_grad": (
        "requires_grad of the model's parameters is not the same",
        "Freeze and unfreeze parameters on every rank alike.",
    ),
    "training": (
        "train() and eval() of the model's modules are not the same",
        "Call train() and eval() on every rank alike; an evaluation on one rank has to end with train().",
    ),
    "autocast": (
        "autocast, and its dtype, is not the same in the forwards of a step",
        "Enter torch.autocast on every rank alike.",
    ),
}
# What may be right: a hook that only looks, as loggers register on one rank; the dtype that a device has.
_TOLD = {
    "hooks": (
        "the hooks on gradients of the model's parameters are not the same on all ranks: {}. If they change gradients, "
        "one process has them once and the ranks train by unlike ones: register such hooks on every rank alike"
    ),
    "autocast": (
        "autocast, and its dtype, is not the same in the forwards of a step on all ranks: {}. Their gradients are "
        "averaged, and are rounded by rank"
    ),
}


def _listed(checksums: Iterable[float]) -> str:
    return f"checksums by rank are {[f'{int(checksum):08x}' for checksum in checksums]}"


def _num_hooks(parameter: nn.Parameter) -> int:
    """Hooks that see or change its gradient."""
    on_gradient = getattr(parameter, "_backward_hooks", None) or ()
    on_accumulated = getattr(parameter, "_post_accumulate_grad_hooks", None) or ()
    return len(on_gradient) + len(on_accumulated)


def _checksum(numbers: Iterable[int]) -> float:
    return float(crc32(bytes(min(int(number), 255) for number in numbers)))
