"""Parts of a flat parameter that an optimizer's step leaves as they are.

ZeRO's optimizers step on flat vectors of many parameters, with zeros for gradients that no rank has. Weight decay and
momentum would move such parameters; one process, where their ``grad`` is None, leaves them and their state alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

_NOT_ZERO_AT_FIRST = ("step_size", "sum")  # of Rprop and Adagrad, which a gradient of zero does not change


@contextlib.contextmanager
def parts_kept(optimizer: Optimizer, flat: Tensor, parts: Sequence[slice]) -> Iterator[None]:
    """Let a step inside change neither ``parts`` of ``flat`` nor the optimizer's state of them."""
    if not parts:
        yield
        return
    before = {name: _copies(value, parts) for name, value in _by_element(optimizer, flat).items()}
    values = _copies(flat, parts)
    yield
    with torch.no_grad():
        _write(flat, parts, values)
        for name, value in _by_element(optimizer, flat).items():
            if name in before:
                _write(value, parts, before[name])
            elif name not in _NOT_ZERO_AT_FIRST:  # made in this step
                for part in parts:
                    value.view(-1)[part].zero_()


def _by_element(optimizer: Optimizer, flat: Tensor) -> dict[str, Tensor]:
    state = optimizer.state.get(flat, {})
    return {
        name: value for name, value in state.items() if isinstance(value, Tensor) and value.numel() == flat.numel() > 1
    }


def _copies(value: Tensor, parts: Sequence[slice]) -> list[Tensor]:
    return [value.detach().view(-1)[part].clone() for part in parts]


def _write(value: Tensor, parts: Sequence[slice], copies: Sequence[Tensor]) -> None:
    for part, copy in zip(parts, copies, strict=True):
        value.detach().view(-1)[part] = copy
