"""Runs of a model that leave nothing behind: random states, buffers and attributes of modules are put back."""

from __future__ import annotations

import collections
import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))  # attributes of torch's own: parameters, buffers, hooks
# Objects of these classes are put back. Of containers these classes alone: others need not copy by ``copy()``.
_VALUES = (bool, int, float, str, torch.Generator, Tensor, np.random.Generator, random.Random)
_CONTAINERS = (list, dict, set, collections.deque)


@contextlib.contextmanager
def leaving_nothing(model: nn.Module) -> Iterator[None]:
    """Put back random states, buffers, and what modules keep beside their parameters."""
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
            for module, name, buffer, before in buffers:
                buffer.copy_(before)
                module._buffers[name] = buffer  # the run may have put another tensor in its place
        for module, name, value_and_copy in attributes:
            _put_back(module, name, *value_and_copy)


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module that a run may change, and that can be put back."""
    for name, value in list(vars(module).items()):
        if name == "training" or name in _OF_EVERY_MODULE:
            continue
        if value is None or type(value) in _CONTAINERS or isinstance(value, _VALUES):
            yield name, value


def _copied(value: Any) -> tuple[Any, Any]:
    """Return a value, and a copy of its content; None in the place of the copy where a value cannot change."""
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


def _put_back(module: nn.Module, name: str, value: Any, before: Any) -> None:
    """Give a value the content that it had, and put it into its place in the module."""
    if isinstance(value, torch.Generator):
        value.set_state(before)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = before
    elif isinstance(value, random.Random):
        value.setstate(before)
    elif isinstance(value, Tensor):
        with torch.no_grad():
            value.detach().copy_(before)
    elif isinstance(value, list | collections.deque):
        value.clear()
        value.extend(before)
    elif isinstance(value, dict | set):
        value.clear()
        value.update(before)
    vars(module)[name] = value
