"""Ways to place documents, by name: the planner's, published planners', and every document over all units."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ds_hetero.planner.documents.costs.units import Pieces, UnitCosts
from ds_hetero.planner.documents.search.baselines import over_all_units
from ds_hetero.planner.documents.search.candidates import place_lengths
from ds_hetero.planner.published.registry import PLANNERS


def _plan(lengths: Sequence[int], costs: UnitCosts) -> list[Pieces]:
    return place_lengths(lengths, costs).pieces


PLACEMENT_STRATEGIES: dict[str, Callable[[Sequence[int], UnitCosts], list[Pieces]]] = {
    "plan": _plan,
    **{planner.name: planner.documents for planner in PLANNERS if planner.documents is not None},
    "everywhere": over_all_units,
}
