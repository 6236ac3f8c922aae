"""Ways to place documents, by name: the planner's, published planners', and every document over all units."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ds_hetero.planner.documents.costs.units import Pieces, UnitCosts
from ds_hetero.planner.documents.search.baselines import over_all_units
from ds_hetero.planner.documents.search.candidates import place_lengths
from ds_hetero.planner.published.registry import PLANNERS


def _plan(lengths: Sequence[int], costs: UnitCosts) -> list[Pieces]:
    return place_lengths(lengths, costs).pieces


def placement_strategies() -> dict[str, Callable[[Sequence[int], UnitCosts], list[Pieces]]]:
    """Return all of them; each takes the lengths of the documents and the costs of the units."""
    published = {planner.name: planner.documents for planner in PLANNERS if planner.documents is not None}
    return {"plan": _plan, **published, "everywhere": over_all_units}
