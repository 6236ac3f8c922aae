"""Advice on batches of several documents that are cut by their length, as they are by default."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from ds_hetero.common.announce import announce
from ds_hetero.cost.calibrated import CalibratedCostModel
from ds_hetero.decision.decide import Forecast
from ds_hetero.errors import HeteroError
from ds_hetero.planner.document_search.placement_loads import placement_loads
from ds_hetero.planner.documents import (
    place_documents,
    unit_costs,
)
from ds_hetero.runtime.attention.batch_layout import BatchLayout
from ds_hetero.values.section import HeterogeneitySection

logger = logging.getLogger(__name__)
WORTH_SAYING = 0.05  # of the time of a layer


class DocumentAdvice:
    """Says once what placing documents is predicted to save, at the first batch that has several.

    It is silent where the section has ``"placement"``, where nothing is known of the devices, which is so on all ranks
    but 0, and from the first batch on that is placed by its documents.

    Args:
        forecasts: one per replica, this rank's first; none where nothing is known of the devices.
    """

    def __init__(self, section: HeterogeneitySection, forecasts: Sequence[Forecast]) -> None:
        is_open = "placement" not in section.model_fields_set
        self._forecast = forecasts[0] if is_open and forecasts else None

    def record_batch(self, batch: BatchLayout) -> None:
        """Take note that a sharded forward begins."""
        rows, forecast = batch.placement.rows, self._forecast
        if forecast is None or len(rows) != 1 or len(rows[0].documents) < 2 or not torch.is_grad_enabled():
            return
        self._forecast = None
        if not batch.placement.is_stream:
            return
        cost, documents, length = forecast.cost, rows[0].documents, batch.placement.length
        if not isinstance(cost, CalibratedCostModel):
            return
        schedule = forecast.schedule.shifted(0)
        costs = unit_costs(cost, schedule)
        try:
            placed = place_documents(schedule, documents, length, costs)
        except HeteroError as error:
            logger.debug("its documents cannot be placed: %s", error)
            return
        cut_s, placed_s = (placement_loads(p, documents, costs).predicted_s for p in (batch.placement, placed))
        if placed_s < (1 - WORTH_SAYING) * cut_s:
            announce(
                f"a batch of {len(documents)} documents is cut by its length. Placed by them, its layers are predicted "
                f'to take {1 - placed_s / cut_s:.0%} less time: set "placement" to "documents" in the "heterogeneity" '
                'section, or to "stream" to hear no more of it.'
            )
