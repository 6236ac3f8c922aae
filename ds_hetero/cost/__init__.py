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
    """Make the cost model ``"calibrated"`` or ``"published"``.

    Raises:
        PlanError: the name is unknown, or this cost model has no formulas for the model or for adapters.
    """
    if name not in COST_MODELS:
        raise PlanError(f"cost model {shortened(name)} is unknown; it is one of {', '.join(COST_MODELS)}.")
    if model.window_layers and not workload.causal:
        raise PlanError(
            f"{model.name} has layers whose attention sees a window, which is planned for causal attention alone. "
            "Leave --full out."
        )
    if workload.adapter_rank and (name != "calibrated" or model.recurrent is not None):
        where = "the published cost model" if name != "calibrated" else "linear-attention and SSM layers"
        raise PlanError(f"adapters have no cost in {where}. Plan full training (--train full), or another model.")
    if workload.experts is not None and name != "calibrated":
        raise PlanError(
            "experts that are divided among ranks have no time in the published cost model. Leave --cost-model or "
            "--experts out."
        )
    if name == "calibrated":
        return CalibratedCostModel(cluster, model, workload)
    kinds = model.unlike_layers or ("layers whose attention sees a window" if model.window_layers else None)
    if kinds:
        raise PlanError(
            f"{model.name} has {kinds}, which HexiSeq's equations do not cover. Use --cost-model calibrated."
        )
    from ds_hetero.cost.published import PublishedCostModel

    return PublishedCostModel(cluster, model, workload)
