"""The interface of planners that papers describe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_hetero.cluster.topology import Cluster
    from ds_hetero.cost.model import CostModel
    from ds_hetero.cost.price import Objective
    from ds_hetero.cost.stages.stage import StageCosts
    from ds_hetero.models.shapes import ModelSpec
    from ds_hetero.planner.documents.costs.units import Pieces, UnitCosts
    from ds_hetero.planner.pipelines.search.evaluate import PlanCandidate
    from ds_hetero.planner.published.hetero_ring import ProfileTable
    from ds_hetero.values.schedule import Schedule

    PlanPipelines = Callable[[StageCosts, Objective, int, Sequence[int]], PlanCandidate | None]
    """Plan of pipelines under a cost model for an objective, a global batch and sizes of micro-batches, judged by the
    last word of the cost model; None if nothing fits."""


KINDS = {
    "schedule": 'schedules of replicas: --parallel sequence, or "parallel": "sequence"',
    "pipelines": 'pipelines: --parallel full, or "parallel": "full"',
    "documents": 'placements of documents: "placement": {"planner": ...}',
}
"""Kinds of plans, and where a planner of one is chosen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedPlanner:
    """A planner that a paper describes, and the kinds of plans that it makes; None where the paper has no answer.

    Args:
        name: by which it is chosen: ``"planner"`` of the section, ``ds-hetero plan --planner``.
        title: for people.
        source: the paper.
        pipelines: of unequal stages; such a planner is a row of ``ds-hetero compare --parallel full``.
        first_pipelines: likewise, None on clusters where that is not cheap; our search begins at these plans, so that
            it is never worse.
        schedule: of one replica, under a cost model and by measured times; without these, by predicted ones.
        documents: pieces of documents of some lengths on the units of a schedule; others than ours are compared by
            ``ds-hetero show --documents``.
        forbids: why the paper cannot plan a cluster or a model, with its rule; None where it can.
    """

    name: str
    title: str
    source: str
    pipelines: PlanPipelines | None = None
    first_pipelines: PlanPipelines | None = None
    schedule: Callable[[CostModel, ProfileTable | None], Schedule] | None = None
    documents: Callable[[Sequence[int], UnitCosts], list[Pieces]] | None = None
    forbids: Callable[[Cluster, ModelSpec], str | None] = lambda cluster, model: None

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of plans that it makes, of `KINDS`."""
        return tuple(kind for kind in KINDS if getattr(self, kind) is not None)
