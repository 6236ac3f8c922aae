"""Advise jobs that shard their batches by length to place them by documents, if that is predicted to be faster."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from ds_hetero.common.announce import announce
from ds_hetero.cost.calibrated import CalibratedCostModel
from ds_hetero.decision.forecast import Forecast
from ds_hetero.errors import HeteroError
from ds_hetero.planner.document_search.placement_loads import placement_loads
from ds_hetero.planner.documents import (
    place_documents,
    unit_costs,
)
from ds_hetero.runtime.attention.batch_layout import BatchLayout
from ds_hetero.values.section import HeterogeneitySection

logger = logging.getLogger(__name__)
MIN_ADVICE_GAIN = 0.05  # share of a layer's time that placing has to save to be announced; chosen, never measured


class DocumentAdvice:
    """Announces once, at the first batch of several documents, the predicted gain of placing them.

    It announces nothing if the section has ``"placement"``, if the devices are unknown (as on all ranks but 0), or if
    that batch is placed by its documents already.

    Args:
        forecasts: one per replica, this rank's first; empty if the devices are unknown.
    """

    def __init__(self, section: HeterogeneitySection, forecasts: Sequence[Forecast]) -> None:
        is_undecided = "placement" not in section.model_fields_set
        self._forecast = forecasts[0] if is_undecided and forecasts else None  # None once the advice is given

    def record_batch(self, batch: BatchLayout) -> None:
        """Examine the batch of a sharded forward that begins."""
        rows, forecast = batch.placement.rows, self._forecast
        if forecast is None or len(rows) != 1 or len(rows[0].documents) < 2 or not torch.is_grad_enabled():
            return
        self._forecast = None
        if not batch.placement.is_stream:
            return
        cost, documents, length = forecast.cost, rows[0].documents, batch.placement.length
        if not isinstance(cost, CalibratedCostModel) or cost.model.window_layers:
            return
        schedule = forecast.schedule.shifted(0)
        costs = unit_costs(cost, schedule)
        try:
            placed = place_documents(schedule, documents, length, costs)
        except HeteroError as error:
            logger.debug("no advice on documents, because those of the batch cannot be placed: %s", error)
            return
        stream_s = placement_loads(batch.placement, documents, costs).predicted_s
        placed_s = placement_loads(placed, documents, costs).predicted_s
        if placed_s < (1 - MIN_ADVICE_GAIN) * stream_s:
            announce(
                f"a batch of {len(documents)} documents is cut by its length. Placed by its documents, its layers are "
                f'predicted to take {1 - placed_s / stream_s:.0%} less time. To do so, set "placement" to "documents" '
                'in the "heterogeneity" section; to turn this message off, set it to "stream".'
            )
