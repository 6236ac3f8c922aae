"""Strategies to place documents, by name: published planners, and every document over all units."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ds_hetero.planner.document_search.simple_placements import over_all_units
from ds_hetero.planner.document_search.unit_costs import Pieces, UnitCosts
from ds_hetero.planner.published.registry import PLANNERS


def placement_strategies() -> dict[str, Callable[[Sequence[int], UnitCosts], list[Pieces]]]:
    """Return functions that place documents, by name; our own planner is not among them.

    A function takes the lengths of the documents and the costs of the units, and returns the units of every document.
    """
    published = {planner.name: planner.documents for planner in PLANNERS if planner.documents is not None}
    return {**published, "everywhere": over_all_units}
