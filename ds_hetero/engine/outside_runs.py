"""Runs of a model outside of its engine's forward: in evaluation, and with the parameters that ZeRO-3 shards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from ds_hetero.runtime.evaluation_mode import evaluation_mode


@contextlib.contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """Run a model inside without gradients and without dropout, and put back the modes of its parts."""
    with evaluation_mode(model), torch.no_grad():
        yield


@contextlib.contextmanager
def gathering_in_forward(model: nn.Module) -> Iterator[None]:
    """Let modules on ZeRO-3 get the parameters of other modules that they use, inside.

    DeepSpeed's ``ZeROOrderedDict`` gathers such a parameter where it is read, but only after
    ``DeepSpeedEngine._forward_prologue`` has said that a forward runs, which a run past the engine leaves out.
    """
    name = "_in_forward"
    dictionaries = [module._parameters for module in model.modules()]
    told = [parameters for parameters in dictionaries if getattr(parameters, name, True) is False]
    for parameters in told:
        setattr(parameters, name, True)
    try:
        yield
    finally:
        for parameters in told:
            setattr(parameters, name, False)
