"""Interface of published planners: planning algorithms of papers, which users can run instead of ours or beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds_hetero.cluster.topology import Cluster
from ds_hetero.cost.model import CostModel
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.planner.published.profile_table import ProfileTable
from ds_hetero.values.schedule import Schedule

if TYPE_CHECKING:
    from ds_hetero.cost.objective import Objective
    from ds_hetero.cost.stages.stage import StageCosts
    from ds_hetero.planner.document_search.unit_costs import Pieces, UnitCosts
    from ds_hetero.planner.pipeline_search.evaluate import PlanCandidate

    PlanPipelines = Callable[[StageCosts, Objective, int, Sequence[int]], PlanCandidate | None]
    """Function that plans pipelines. It takes a cost model, an objective, the samples of a global batch, and the sizes
    of micro-batches to try. It returns a plan with exact times, or None if no plan fits into memory."""


KINDS = {
    "schedule": 'schedules of replicas: --parallel sequence, or "parallel": "sequence"',
    "pipelines": 'pipelines: --parallel full, or "parallel": "full"',
    "documents": 'placements of documents: "placement": {"planner": ...}',
}
"""Kinds of plans, each with the option by which users ask for it. A key is also the name of a `PublishedPlanner` field.
"""


def no_recurrence(rule: str) -> Callable[[Cluster, ModelSpec], str | None]:
    """Make the ``forbids`` of a planner for attention layers alone: it returns ``rule`` for models with recurrent ones.

    Args:
        rule: sentence without its end; ``{model}`` in it stands for the model's name.
    """
    return lambda _, model: None if model.recurrent is None else rule.format(model=model.name)


def only_alike_layers(rule: str) -> Callable[[Cluster, ModelSpec], str | None]:
    """Make the ``forbids`` of a planner for equal layers: it returns ``rule`` for models with several kinds of layers.

    Args:
        rule: sentence without its end; ``{model}`` in it stands for the model's name.
    """
    return lambda _, model: None if model.unlike_layers is None else rule.format(model=model.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedPlanner:
    """A planner that a paper describes: one function for every kind of plan that it makes, None for other kinds.

    Args:
        pipelines: plans pipelines of unequal stages; such planners are rows of ``ds-hetero compare --parallel full``.
        first_pipelines: plans pipelines as well, but returns None on clusters where its search takes long. Our search
            begins at these plans, so it is never worse than they are.
        schedule: makes the schedule of one replica from a cost model and a table of measured times. It is called with
            None if there is no such table, and then takes predicted times.
        documents: places documents of given lengths on the units of a schedule, and returns the units of every document
            with their tokens; such planners are rows of ``ds-hetero show --documents``.
        forbids: returns why the paper's algorithm cannot plan a cluster or a model, with the rule; None if it can.
    """

    name: str  # as in ``"planner"`` of the section and ``ds-hetero plan --planner``
    title: str  # name for people
    source: str  # the paper
    pipelines: PlanPipelines | None = None
    first_pipelines: PlanPipelines | None = None
    schedule: Callable[[CostModel, ProfileTable | None], Schedule] | None = None
    documents: Callable[[Sequence[int], UnitCosts], list[Pieces]] | None = None
    forbids: Callable[[Cluster, ModelSpec], str | None] = lambda cluster, model: None

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of plans that the planner makes; they are keys of `KINDS`."""
        return tuple(kind for kind in KINDS if getattr(self, kind) is not None)
