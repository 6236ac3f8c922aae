"""Analytical cost models: how long a schedule takes and how much memory it needs. Imports neither torch nor DeepSpeed."""

from ds_hetero.cost.types import Bottleneck, CostModel, Flat, Prediction, Span, Terms, Workload

__all__ = ["Bottleneck", "CostModel", "Flat", "Prediction", "Span", "Terms", "Workload"]
