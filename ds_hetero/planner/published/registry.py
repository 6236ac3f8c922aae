"""All published planners, in the order in which they are shown. A new one is a module here and its name below."""

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
    """Return the planners that make plans of a kind of `KINDS`."""
    return [planner for planner in PLANNERS if kind in planner.kinds]


def find_planner(name: str, kind: str) -> PublishedPlanner:
    """A published planner by name, for a kind of plan of `KINDS`. Raises `PlanError`: none, or of other kinds only."""
    planner = next((planner for planner in PLANNERS if planner.name == name), None)
    if planner is None:
        listed = ", ".join(f"{each.name} ({', '.join(each.kinds)})" for each in PLANNERS)
        raise PlanError(f"planner {shortened(name)} is unknown; published planners are {listed}.")
    if kind not in planner.kinds:
        makes = "; ".join(KINDS[each] for each in planner.kinds)
        others = ", ".join(each.name for each in planners_of(kind))
        raise PlanError(f"planner {name} makes {makes}. Here a planner of {kind} is needed: {others}.")
    return planner


def expect_describable(planner: PublishedPlanner, cluster: Cluster, model: ModelSpec) -> None:
    """Refuse a cluster or a model that a planner's paper cannot describe. Raises `PlanError`: the rule of the paper."""
    if (rule := planner.forbids(cluster, model)) is not None:
        raise PlanError(
            f"{planner.title} cannot plan this: {rule}. Leave the planner out for ours, or choose another one."
        )
