"""Asymmetric gradient synchronization: replicas that cut their parameters differently train as one model.

    from ds_hetero.gradient_sync import AsymmetricGradientSync, Cut, ParameterLayout

Names are loaded when they are first used, so that the arithmetic here can be imported without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_hetero.gradient_sync.chunks import fit_owner_weights
    from ds_hetero.gradient_sync.model_layouts import pipeline_layouts, tensor_parallel_layouts
    from ds_hetero.gradient_sync.parameter_cuts import Cut, ParameterLayout
    from ds_hetero.gradient_sync.sync import AsymmetricGradientSync

__all__ = [
    "AsymmetricGradientSync",
    "Cut",
    "ParameterLayout",
    "fit_owner_weights",
    "pipeline_layouts",
    "tensor_parallel_layouts",
]

_MODULES = {
    "AsymmetricGradientSync": "sync",
    "Cut": "parameter_cuts",
    "ParameterLayout": "parameter_cuts",
    "fit_owner_weights": "chunks",
    "pipeline_layouts": "model_layouts",
    "tensor_parallel_layouts": "model_layouts",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
