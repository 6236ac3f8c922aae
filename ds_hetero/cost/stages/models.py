"""Cost models of stages by name."""

from __future__ import annotations

from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.reading import shortened
from ds_hetero.cost.stages.calibrated import CalibratedStageCosts
from ds_hetero.cost.stages.hexiscale import HexiScaleStageCosts
from ds_hetero.cost.stages.sequence import FindSchedule
from ds_hetero.cost.stages.stage import StageCosts
from ds_hetero.cost.workload import Workload
from ds_hetero.errors import PlanError
from ds_hetero.models.shapes import ModelSpec

STAGE_COSTS = ("calibrated", "hexiscale", "hexiscale-paper")


def make_stage_costs(
    name: str, cluster: Cluster, model: ModelSpec, workload: Workload, find: FindSchedule | None = None
) -> StageCosts:
    """Return the cost model ``name`` for one cluster, model and workload.

    Args:
        name: one of `STAGE_COSTS`; ``hexiscale`` is its public code, ``hexiscale-paper`` its equations as printed.
        cluster: all devices.
        model: what is trained.
        workload: HexiScale's take its length and whether activations are computed again.
        find: schedules for stages of unlike devices, for ``calibrated``.

    Raises:
        PlanError: the name is unknown.
    """
    if name == "calibrated":
        return CalibratedStageCosts(cluster, model, workload, find=find)
    if name in STAGE_COSTS:
        code, recomputation = name == "hexiscale", workload.activation_checkpointing
        return HexiScaleStageCosts(cluster, model, workload.seq_len, code_constants=code, recomputation=recomputation)
    raise PlanError(f"cost model {shortened(name)} is unknown for pipelines; it is one of {', '.join(STAGE_COSTS)}.")
