"""Analytical cost models: how long a schedule takes and how much memory it needs. No torch, no DeepSpeed."""

from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.reading import shortened
from ds_hetero.cost.calibrated import CalibratedCostModel
from ds_hetero.cost.model import Bottleneck, CostModel, Prediction, Span, Terms
from ds_hetero.cost.terms.grouping import Grouping
from ds_hetero.cost.workload import Workload
from ds_hetero.errors import PlanError
from ds_hetero.models.shapes import ModelSpec

__all__ = [
    "COST_MODELS",
    "Bottleneck",
    "CalibratedCostModel",
    "CostModel",
    "Grouping",
    "Prediction",
    "Span",
    "Terms",
    "Workload",
    "make_cost_model",
]

COST_MODELS = ("calibrated", "published")


def make_cost_model(name: str, cluster: Cluster, model: ModelSpec, workload: Workload) -> CostModel:
    """Make the cost model ``"calibrated"`` or ``"published"``. Raises `PlanError`: unknown, or not for this model."""
    if name not in COST_MODELS:
        raise PlanError(f"cost model {shortened(name)} is unknown; it is one of {', '.join(COST_MODELS)}.")
    if workload.adapter_rank and (name != "calibrated" or model.recurrent is not None):
        kind = "the published cost model" if name != "calibrated" else "layers that carry a state"
        raise PlanError(f"adapters beside frozen weights have no cost in {kind}. Plan --train full, or another model.")
    if name == "calibrated":
        return CalibratedCostModel(cluster, model, workload)
    if model.recurrent is not None:
        raise PlanError(
            f"HexiSeq's equations have no layers that carry a state, as {model.name} has. Use --cost-model calibrated."
        )
    from ds_hetero.cost.published import PublishedCostModel

    return PublishedCostModel(cluster, model, workload)
