"""What several commands share: reading their inputs, and numbers for people."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_hetero.baselines import STRATEGIES
from ds_hetero.cluster.files import load_cluster
from ds_hetero.cluster.topology import Cluster
from ds_hetero.cost import make_cost_model
from ds_hetero.cost.model import CostModel
from ds_hetero.cost.prediction import Prediction
from ds_hetero.cost.workload import Workload
from ds_hetero.errors import PlanError, ScheduleError
from ds_hetero.models import ModelSpec, load_model
from ds_hetero.planner.planning import check_workload
from ds_hetero.planner.strategies import strategy
from ds_hetero.schedule import Schedule

__all__ = ["Job", "check_out", "print_json", "read_schedule", "terms_text"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The inputs of a command: what is trained on what, and by which cost model that is judged."""

    cluster: Cluster
    model: ModelSpec
    workload: Workload
    cost_model: str

    @classmethod
    def read(cls, cluster: str, model: str, cost_model: str, **workload: Any) -> Job:
        """Load the cluster and the model by file or by name.

        Raises:
            ClusterError, ModelError, PlanError: what is wrong with them.
        """
        job = cls(
            cluster=load_cluster(cluster),
            model=load_model(model),
            workload=Workload(**workload),
            cost_model=cost_model,
        )
        check_workload(job.cluster, job.workload)
        return job

    @property
    def cost(self) -> CostModel:
        """The cost model, bound to the rest."""
        return make_cost_model(self.cost_model, self.cluster, self.model, self.workload)


def read_schedule(source: str, cost: CostModel) -> Schedule:
    """A schedule from a schedule file, from what ``ds-hetero plan --json`` printed, or by the name of a strategy.

    Raises:
        ScheduleError: no such file, not JSON, not a schedule, or several replicas.
        PlanError: the strategy has no schedule for this cluster.
    """
    path = Path(source)
    if not path.is_file() and source in STRATEGIES:
        return strategy(source, cost)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ScheduleError(f"{source} is not JSON: {error}.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(
            f"cannot read schedule {source!r}: it is neither a readable file nor a strategy. "
            f"Strategies: {', '.join(STRATEGIES)}."
        ) from error
    if isinstance(data, Mapping) and "schedule" in data:
        data = data["schedule"]
    if isinstance(data, Mapping) and "replicas" in data:
        raise ScheduleError(f"{source} holds several replicas. Give the schedule of one, and the cluster it runs on.")
    return Schedule.from_dict(data)


def check_out(out: Path) -> None:
    """Refuse a file that cannot be written, before anything is computed for it.

    Raises:
        PlanError: its folder does not exist or may not be written to, or it is a folder itself.
    """
    folder = out.resolve().parent
    if out.is_dir() or not os.access(folder, os.W_OK):
        reason = "it is a folder" if out.is_dir() else f"{folder} is no folder that may be written to"
        raise PlanError(f"--out {out} cannot be written: {reason}.")


def print_json(data: Mapping[str, Any]) -> None:
    """One JSON object on stdout."""
    print(json.dumps(data, allow_nan=False))


def terms_text(prediction: Prediction) -> str:
    """The terms of a block as shares of it."""
    terms = prediction.terms
    parts = (("non-attention", terms.non_attention_s), ("all-to-all", terms.all_to_all_s), ("ring", terms.ring_steps_s))
    return ", ".join(f"{name} {100 * seconds / prediction.block_s:.0f} %" for name, seconds in parts)
