"""Run a model without side effects: random states, buffers and attributes of its modules are restored afterwards."""

from __future__ import annotations

import collections
import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_ATTRIBUTES_OF_TORCH = frozenset(vars(nn.Module()))  # attributes of every module: parameters, buffers, hooks
# Attributes of these classes and their subclasses are restored.
_VALUES = (bool, int, float, str, torch.Generator, Tensor, np.random.Generator, random.Random)
# Containers of exactly these classes are restored; a subclass may have another ``copy()``.
_CONTAINERS = (list, dict, set, collections.deque)


@contextlib.contextmanager
def restoring_state(model: nn.Module) -> Iterator[None]:
    """Restore random states, buffers, and other attributes of the modules of ``model`` afterwards, not parameters."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    python_state, numpy_state = random.getstate(), np.random.get_state()
    buffers = []
    attributes = []
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                buffers.append((module, name, buffer, buffer.clone()))
        for name, value in _attributes(module):
            attributes.append((module, name, _copied(value)))
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        with torch.no_grad():
            for module, name, buffer, value_before in buffers:
                buffer.copy_(value_before)
                module._buffers[name] = buffer  # the run may have put another tensor in its place
        for module, name, value_and_copy in attributes:
            _put_back(module, name, *value_and_copy)


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module that a run may change and that can be restored, as (name, value)."""
    for name, value in list(vars(module).items()):
        if name == "training" or name in _ATTRIBUTES_OF_TORCH:
            continue
        if value is None or type(value) in _CONTAINERS or isinstance(value, _VALUES):
            yield name, value


def _copied(value: Any) -> tuple[Any, Any]:
    """Return a value, and a copy of its content; None instead of a copy for a value that cannot change."""
    if isinstance(value, torch.Generator):
        return value, value.get_state()
    if isinstance(value, np.random.Generator):
        return value, value.bit_generator.state
    if isinstance(value, random.Random):
        return value, value.getstate()
    if isinstance(value, Tensor):
        return value, value.detach().clone()
    if type(value) in _CONTAINERS:
        return value, value.copy()
    return value, None


def _put_back(module: nn.Module, name: str, value: Any, value_before: Any) -> None:
    """Restore the content of ``value`` from its copy by `_copied`, and set it as the module's attribute again."""
    if isinstance(value, torch.Generator):
        value.set_state(value_before)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = value_before
    elif isinstance(value, random.Random):
        value.setstate(value_before)
    elif isinstance(value, Tensor):
        with torch.no_grad():
            value.detach().copy_(value_before)
    elif isinstance(value, list | collections.deque):
        value.clear()
        value.extend(value_before)
    elif isinstance(value, dict | set):
        value.clear()
        value.update(value_before)
    vars(module)[name] = value
