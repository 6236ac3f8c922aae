"""Keep parts of a flat vector, and of its optimizer state, unchanged during an optimizer's step.

ZeRO's optimizers step on flat vectors of many parameters, with zeros for gradients that no rank has. Weight decay and
momentum would change such parameters; one process, where their ``grad`` is None, leaves them and their state alone. So
their values are copied before the step and written back after it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

# Names of states that do not begin at zero: Rprop's and Adagrad's. A gradient of zero does not change them, so a state
# that the optimizer made in this step has its initial value already.
_NONZERO_INITIAL_STATE = ("step_size", "sum")


@contextlib.contextmanager
def keep_parts(optimizer: Optimizer, flat: Tensor, parts: Sequence[slice]) -> Iterator[None]:
    """Restore ``parts`` of ``flat``, and their optimizer state, after an optimizer step inside the context."""
    if not parts:
        yield
        return
    state_copies = {name: _copy_parts(value, parts) for name, value in _elementwise_state(optimizer, flat).items()}
    value_copies = _copy_parts(flat, parts)
    yield
    with torch.no_grad():
        _write_parts(flat, parts, value_copies)
        for name, value in _elementwise_state(optimizer, flat).items():
            if name in state_copies:
                _write_parts(value, parts, state_copies[name])
            elif name not in _NONZERO_INITIAL_STATE:  # the optimizer made this state in this step
                for part in parts:
                    value.view(-1)[part].zero_()


def _elementwise_state(optimizer: Optimizer, flat: Tensor) -> dict[str, Tensor]:
    """Return the optimizer's tensors that have a value for every element of ``flat``, by name."""
    state = optimizer.state.get(flat, {})
    return {
        name: value for name, value in state.items() if isinstance(value, Tensor) and value.numel() == flat.numel() > 1
    }


def _copy_parts(value: Tensor, parts: Sequence[slice]) -> list[Tensor]:
    """Return a copy of each of ``parts`` of a tensor, flat."""
    return [value.detach().view(-1)[part].clone() for part in parts]


def _write_parts(value: Tensor, parts: Sequence[slice], copies: Sequence[Tensor]) -> None:
    """Write the ``copies`` that `_copy_parts` made back into ``parts`` of a tensor."""
    for part, copy in zip(parts, copies, strict=True):
        value.detach().view(-1)[part] = copy
