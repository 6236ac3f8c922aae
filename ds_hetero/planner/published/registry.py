"""List of all published planners, in the order in which they are shown; a new planner is added to it."""

from __future__ import annotations

from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.reading import shortened
from ds_hetero.errors import PlanError
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.planner.published.hetero_ring import FORMULA, LUT
from ds_hetero.planner.published.hexiscale.planner import HEXISCALE
from ds_hetero.planner.published.hexiseq import HEXISEQ
from ds_hetero.planner.published.interface import KINDS, PublishedPlanner
from ds_hetero.planner.published.tangram.planner import TANGRAM
from ds_hetero.planner.published.zeppelin import ZEPPELIN

PLANNERS: list[PublishedPlanner] = [HEXISEQ, HEXISCALE, TANGRAM, ZEPPELIN, LUT, FORMULA]


def planners_of(kind: str) -> list[PublishedPlanner]:
    """Return the planners that make plans of ``kind``, one of `KINDS`."""
    return [planner for planner in PLANNERS if kind in planner.kinds]


def find_planner(name: str, kind: str) -> PublishedPlanner:
    """Return the published planner ``name`` for plans of ``kind``, one of `KINDS`.

    Raises:
        PlanError: the planner is unknown, or makes other kinds of plans only.
    """
    planner = next((planner for planner in PLANNERS if planner.name == name), None)
    if planner is None:
        planners_text = ", ".join(f"{other.name} ({', '.join(other.kinds)})" for other in PLANNERS)
        raise PlanError(f"planner {shortened(name)} is unknown; published planners are {planners_text}.")
    if kind not in planner.kinds:
        kinds_text = "; ".join(KINDS[planner_kind] for planner_kind in planner.kinds)
        suitable_text = ", ".join(other.name for other in planners_of(kind))
        raise PlanError(f"planner {name} makes {kinds_text}. Here a planner of {kind} is needed: {suitable_text}.")
    return planner


def expect_describable(planner: PublishedPlanner, cluster: Cluster, model: ModelSpec) -> None:
    """Check that a published planner can plan a cluster and a model. Raises `PlanError`, with its rule, if not."""
    if (rule := planner.forbids(cluster, model)) is not None:
        raise PlanError(
            f"{planner.title} cannot plan this: {rule}. Leave the planner out for ours, or choose another one."
        )
