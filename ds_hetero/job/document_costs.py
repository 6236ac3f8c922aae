"""What documents cost on the units of every replica: rank 0, which has read the cluster, hands the numbers to all."""

from __future__ import annotations

from collections.abc import Sequence

from ds_hetero.config import PlacementSection
from ds_hetero.cost.calibrated import CalibratedCostModel
from ds_hetero.job.start import JobStart, World
from ds_hetero.planner.documents import DocumentPlacer, UnitCosts, unit_costs

__all__ = ["agree_on_placer", "document_placer"]


def agree_on_placer(world: World, start: JobStart, replica_id: int) -> DocumentPlacer | None:
    """Return what places the batches of one replica by their documents; None where the section does not ask for it.

    Where the devices are not known, the schedule's token weights stand for their speeds.

    Args:
        world: the ranks of the job.
        start: what they have agreed on.
        replica_id: index of this rank's replica.

    Caller: every rank of the world.
    Collectives: one `on_all_ranks`, where the section asks for it.

    Raises:
        HeteroError: the cost model cannot be asked; on every rank.
    """
    if start.section.placement.mode == "stream":
        return None
    flat = world.on_all_ranks(lambda: [c.to_floats() for c in _unit_costs(start)] if world.rank == 0 else None)[0]
    assert flat is not None
    return document_placer(start.section.placement, UnitCosts.from_floats(flat[replica_id]))


def _unit_costs(start: JobStart) -> Sequence[UnitCosts]:
    if not start.forecasts:
        return [UnitCosts.from_weights(schedule) for schedule in start.plan.schedules]
    costs = []
    for forecast in start.forecasts:
        assert isinstance(forecast.cost, CalibratedCostModel)
        costs.append(unit_costs(forecast.cost, forecast.schedule.shifted(0)))
    return costs


def document_placer(section: PlacementSection, costs: UnitCosts) -> DocumentPlacer:
    """Return what places the batches of one replica by their documents.

    Args:
        section: of the configuration.
        costs: of the replica's units.
    """
    limited = costs if section.max_tokens is None else costs.limited(section.max_tokens)
    return DocumentPlacer(limited, section.min_cut_tokens)
