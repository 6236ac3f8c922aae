"""Runs of a model that leave everything as it was: gradients, hooks of ZeRO, buffers, modes, random state."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy
import torch
from torch import nn

_LARGEST_KEPT_BUFFER = 1 << 20  # elements; statistics are small, tables of positions never change


@contextlib.contextmanager
def traceless(model: nn.Module) -> Iterator[None]:
    """Let runs and backwards inside leave no trace in ``model`` or in the process.

    Parameters take no gradients inside, so no node of autograd ends at one of them and no gradient hook of any ZeRO
    stage fires. Full backward hooks are taken off, since ZeRO-3 fills its buckets in those of mixtures of experts.
    Modes are set by attribute: ``eval()`` may be overridden, and this engine takes note of it. ZeRO-3's gathering of
    parameters runs as in any forward.
    """
    modules, parameters = list(model.modules()), list(model.parameters())
    modes = [(module, module.training, getattr(module, "gradient_checkpointing", None)) for module in modules]
    wants_gradient = [parameter.requires_grad for parameter in parameters]
    buffers = [(b, b.detach().clone()) for b in model.buffers() if b.numel() <= _LARGEST_KEPT_BUFFER]
    hooks = [(module, module._backward_hooks, module._backward_pre_hooks) for module in modules]
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    devices = sorted({parameter.device.index or 0 for parameter in parameters if parameter.device.type == "cuda"})
    with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):
        try:
            for module, _, checkpoints in modes:
                module.training = False
                if checkpoints:
                    module.__dict__["gradient_checkpointing"] = False
            for module, backward, pre_backward in hooks:
                module._backward_hooks, module._backward_pre_hooks = type(backward)(), type(pre_backward)()
            for parameter in parameters:
                parameter.requires_grad_(False)
            with torch.enable_grad():
                yield
        finally:
            for parameter, wanted in zip(parameters, wants_gradient, strict=True):
                parameter.requires_grad_(wanted)
            for module, backward, pre_backward in hooks:
                module._backward_hooks, module._backward_pre_hooks = backward, pre_backward
            for module, mode, checkpoints in modes:
                module.training = mode
                if checkpoints:
                    module.__dict__["gradient_checkpointing"] = checkpoints
            _put_back(buffers)
            random.setstate(python_state)
            numpy.random.set_state(numpy_state)


@torch.no_grad()
def _put_back(buffers: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for buffer, value in buffers:
        if not torch.equal(buffer, value):
            buffer.copy_(value)
