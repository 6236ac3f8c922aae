"""Which documents of a batch lie on which ranks, batch by batch: Zeppelin (EuroSys 2026) for ranks of unequal speed."""

from ds_hetero.planner.document_search.calibrated_costs import unit_costs
from ds_hetero.planner.document_search.unit_costs import UnitCosts
from ds_hetero.planner.documents.placing import DocumentPlacer, expect_places, least_gain, place_documents

__all__ = ["DocumentPlacer", "UnitCosts", "expect_places", "least_gain", "place_documents", "unit_costs"]
