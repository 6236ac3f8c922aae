"""The interface of planners that papers describe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.arrays import Floats
from ds_hetero.cost.model import CostModel
from ds_hetero.errors import PlanError
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.values.schedule import Schedule

if TYPE_CHECKING:
    from ds_hetero.cost.objective import Objective
    from ds_hetero.cost.stages.stage import StageCosts
    from ds_hetero.planner.document_search.unit_costs import Pieces, UnitCosts
    from ds_hetero.planner.pipeline_search.evaluate import PlanCandidate

    PlanPipelines = Callable[[StageCosts, Objective, int, Sequence[int]], PlanCandidate | None]
    """Plan of pipelines under a cost model for an objective, a global batch and sizes of micro-batches, judged by the
    last word of the cost model; None if nothing fits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileTable:
    """Time of self-attention by length and speed setting."""

    lengths: tuple[int, ...]  # tokens, ascending
    speeds: tuple[float, ...]  # relative to the fastest, ascending; the last is 1
    seconds: tuple[tuple[float, ...], ...]  # ``seconds[i][j]`` for ``lengths[i]`` at ``speeds[j]``

    def __post_init__(self) -> None:
        for name, values in (("lengths", self.lengths), ("speeds", self.speeds)):
            if not values or any(a >= b for a, b in pairwise(values)) or values[0] <= 0:
                raise PlanError(f"{name} of a profile table must be positive and ascending, got {values}.")
        shape = {len(row) for row in self.seconds}
        if len(self.seconds) != len(self.lengths) or shape != {len(self.speeds)}:
            raise PlanError("seconds of a profile table needs a row per length and a column per speed.")
        if any(not 0 < value < float("inf") for row in self.seconds for value in row):
            raise PlanError("seconds of a profile table must be positive and finite.")

    def seconds_at(self, length: Floats, speed: float) -> Floats:
        """Interpolated between the measured points, both axes and the time on a logarithmic scale.

        Beyond the table the last slope goes on; between two speeds the time of the slower one is never undercut.
        """
        lengths, speeds = np.log(self.lengths), np.log(self.speeds)
        column = np.array([np.interp(np.log(speed), speeds, row) for row in np.log(self.seconds)])
        x = np.log(length)
        out = np.interp(x, lengths, column)
        if len(lengths) > 1:
            slopes = np.diff(column) / np.diff(lengths)
            out = np.where(x < lengths[0], column[0] + slopes[0] * (x - lengths[0]), out)
            out = np.where(x > lengths[-1], column[-1] + slopes[-1] * (x - lengths[-1]), out)
        return np.asarray(np.exp(out))


KINDS = {
    "schedule": 'schedules of replicas: --parallel sequence, or "parallel": "sequence"',
    "pipelines": 'pipelines: --parallel full, or "parallel": "full"',
    "documents": 'placements of documents: "placement": {"planner": ...}',
}
"""Kinds of plans, and where a planner of one is chosen."""


def no_recurrence(rule: str) -> Callable[[Cluster, ModelSpec], str | None]:
    """The ``forbids`` of a paper without layers that carry a state; ``{model}`` in its rule is a model with some."""
    return lambda _, model: None if model.recurrent is None else rule.format(model=model.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedPlanner:
    """A planner that a paper describes, and the kinds of plans that it makes; None where the paper has no answer.

    Args:
        pipelines: of unequal stages; such a planner is a row of ``ds-hetero compare --parallel full``.
        first_pipelines: likewise, None on clusters where that is not cheap; our search begins at these plans, so that
            it is never worse.
        schedule: of one replica, under a cost model and by measured times; without these, by predicted ones.
        documents: pieces of documents of some lengths on the units of a schedule; others than ours are compared by
            ``ds-hetero show --documents``.
        forbids: why the paper cannot plan a cluster or a model, with its rule; None where it can.
    """

    name: str  # by which it is chosen: ``"planner"`` of the section, ``ds-hetero plan --planner``
    title: str  # for people
    source: str  # the paper
    pipelines: PlanPipelines | None = None
    first_pipelines: PlanPipelines | None = None
    schedule: Callable[[CostModel, ProfileTable | None], Schedule] | None = None
    documents: Callable[[Sequence[int], UnitCosts], list[Pieces]] | None = None
    forbids: Callable[[Cluster, ModelSpec], str | None] = lambda cluster, model: None

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of plans that it makes, of `KINDS`."""
        return tuple(kind for kind in KINDS if getattr(self, kind) is not None)
