"""Asymmetric gradient synchronization: replicas that cut their parameters differently train as one model.

from ds_hetero.gradient_sync import AsymmetricGradientSync, Cut, ParameterLayout
"""

from ds_hetero.gradient_sync.model_layouts import pipeline_layouts, tensor_parallel_layouts
from ds_hetero.gradient_sync.sync import AsymmetricGradientSync
from ds_hetero.sharding.gradient_chunks import fit_owner_weights
from ds_hetero.sharding.parameter_layouts import Cut, ParameterLayout

__all__ = [
    "AsymmetricGradientSync",
    "Cut",
    "ParameterLayout",
    "fit_owner_weights",
    "pipeline_layouts",
    "tensor_parallel_layouts",
]
