"""Context managers for running a model outside of its engine's forward: in evaluation, and with ZeRO-3's parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from ds_hetero.runtime.evaluation_mode import evaluation_mode


@contextlib.contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """Inside the context, set a model to ``eval()`` without gradients; then restore the mode of every module."""
    with evaluation_mode(model), torch.no_grad():
        yield


@contextlib.contextmanager
def gathering_in_forward(model: nn.Module) -> Iterator[None]:
    """Let ZeRO-3 gather, inside, parameters that a module uses but another module owns.

    DeepSpeed's ``ZeROOrderedDict`` gathers such a parameter when it is read, but only while its attribute
    ``_in_forward`` is True. ``DeepSpeedEngine._forward_prologue`` sets it, but a run outside of the engine does not.
    """
    name = "_in_forward"
    outside_forward = []
    for module in model.modules():
        if getattr(module._parameters, name, True) is False:
            outside_forward.append(module._parameters)
    for parameters in outside_forward:
        setattr(parameters, name, True)
    try:
        yield
    finally:
        for parameters in outside_forward:
            setattr(parameters, name, False)
