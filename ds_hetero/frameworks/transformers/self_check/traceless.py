"""Run a model without changing it: no gradients, no hooks of ZeRO, the same buffers, modes and random states."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy
import torch
from torch import Tensor, nn

from ds_hetero.runtime.evaluation_mode import packs_in_evaluation

# Larger buffers are not restored: they are tables of positions, which never change. Statistics are small. Chosen.
_MAX_RESTORED_BUFFER = 1 << 20  # elements


@contextlib.contextmanager
def traceless(model: nn.Module, *, in_training: bool = False) -> Iterator[None]:
    """Let forwards and backwards inside leave no trace in ``model`` or in the process.

        parameters            require no gradient, so that no hook of ZeRO on a gradient fires
        full backward hooks   are removed inside, because with a mixture of experts ZeRO-3 fills its buckets in them
        modes                 evaluation; set by attribute, because scripts may override ``eval()``, and this engine
                              takes note of calls of ``train()``
        buffers               are restored, such as running statistics
        numbers in modules    are restored: attributes that are numbers, such as a module's count of its forwards
        random states         are restored: torch's, Python's and numpy's

    ZeRO-3 gathers parameters as in any forward.

    Args:
        in_training: keep every module in its mode; dropout is not switched off.
    """
    modules, parameters = list(model.modules()), list(model.parameters())
    modes = [(module, module.training, getattr(module, "gradient_checkpointing", None)) for module in modules]
    requires_grad = [parameter.requires_grad for parameter in parameters]
    saved_buffers: list[tuple[Tensor, Tensor]] = []
    for buffer in model.buffers():
        if buffer.numel() <= _MAX_RESTORED_BUFFER:
            saved_buffers.append((buffer, buffer.detach().clone()))
    hooks = [(module, module._backward_hooks, module._backward_pre_hooks) for module in modules]
    # A module may also replace a buffer: rotary embeddings replace their frequencies when they note a longer sequence.
    attributes = [(module, _numbers_of(module), dict(module._buffers)) for module in modules]
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    devices = sorted({parameter.device.index or 0 for parameter in parameters if parameter.device.type == "cuda"})
    with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):
        try:
            for module, mode, checkpoints in modes:
                module.training = mode and (in_training or packs_in_evaluation(module))
                if checkpoints:
                    module.__dict__["gradient_checkpointing"] = False
            for module, backward, pre_backward in hooks:
                module._backward_hooks, module._backward_pre_hooks = type(backward)(), type(pre_backward)()
            for parameter in parameters:
                parameter.requires_grad_(False)
            with torch.enable_grad():
                yield
        finally:
            for parameter, required in zip(parameters, requires_grad, strict=True):
                parameter.requires_grad_(required)
            for module, backward, pre_backward in hooks:
                module._backward_hooks, module._backward_pre_hooks = backward, pre_backward
            for module, mode, checkpoints in modes:
                module.training = mode
                if checkpoints:
                    module.__dict__["gradient_checkpointing"] = checkpoints
            for module, numbers, buffers in attributes:
                vars(module).update(numbers)
                module._buffers.update(buffers)
            _restore_values(saved_buffers)
            random.setstate(python_state)
            numpy.random.set_state(numpy_state)


def _numbers_of(module: nn.Module) -> dict[str, bool | int | float]:
    """Return the attributes of a module that are numbers."""
    return {name: value for name, value in vars(module).items() if isinstance(value, (bool, int, float))}


@torch.no_grad()
def _restore_values(buffers: list[tuple[Tensor, Tensor]]) -> None:
    """Copy saved values back into the buffers that have changed. ``buffers``: (buffer, saved value)."""
    for buffer, value in buffers:
        if not torch.equal(buffer, value):
            buffer.copy_(value)
