"""Analytical cost models: how long a schedule takes and how much memory it needs. Imports neither torch nor DeepSpeed."""

from ds_hetero.cost.grouping import Grouping
from ds_hetero.cost.types import Bottleneck, CostModel, Prediction, Span, Terms, Workload

__all__ = ["Bottleneck", "CostModel", "Grouping", "Prediction", "Span", "Terms", "Workload"]
