"""Place the documents of every batch on ranks of unequal speed, as Zeppelin does on equal ranks (EuroSys 2026)."""

from ds_hetero.planner.document_search.calibrated_costs import unit_costs
from ds_hetero.planner.document_search.unit_costs import UnitCosts
from ds_hetero.planner.documents.placing import DocumentPlacer, expect_places, least_gain, place_documents

__all__ = ["DocumentPlacer", "UnitCosts", "expect_places", "least_gain", "place_documents", "unit_costs"]
