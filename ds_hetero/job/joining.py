"""Gain of letting waiting machines join an elastic job: the planner's step with them against the step without."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ds_hetero.cluster import cluster_from_dict
from ds_hetero.cluster.notation import read_notation
from ds_hetero.cluster.topology import Cluster, Node
from ds_hetero.decision.decide import Forecast, JobStart
from ds_hetero.errors import HeteroError, PlanError
from ds_hetero.planner import planning

logger = logging.getLogger(__name__)

# Share of a step. To let machines in pauses the job for some 10 s, which 1 % earns back in 1,000 s, or 17 minutes.
LEAST_GAIN_OF_JOINING = 0.01


def gain_of_joining(start: JobStart, cards: Mapping[str, Sequence[str]]) -> float | None:
    """Return the share of a step's time that the machines would save; below 0 if they would make it longer.

    Args:
        cards: names of the cards of each machine, by the machine's name.

    Returns:
        -1 if no plan with them fits into memory. None if the planner cannot predict it: the job has several replicas or
        no forecast, a card is not in the catalogue, or all ranks are on one machine, so that no network is described.
    """
    if len(start.forecasts) != 1 or start.is_of_pipelines or start.forecasts[0].planned is None:
        return None
    forecast = start.forecasts[0]
    cluster = forecast.cost.cluster
    if len(cluster.nodes) == 1:
        return None
    try:
        joining_nodes = [_node(name, node_cards) for name, node_cards in cards.items()]
        step_s_without = _step_s(forecast, cluster)
    except HeteroError as error:
        logger.info("the planner cannot predict the gain of the machines that wait to join: %s", error)
        return None
    try:
        grown_cluster = replace(cluster, nodes=(*cluster.nodes, *joining_nodes))
        return 1 - _step_s(forecast, grown_cluster) / step_s_without
    except PlanError as error:
        logger.info("no plan with the machines that wait to join fits into memory: %s", error)
        return -1.0


def _step_s(forecast: Forecast, cluster: Cluster) -> float:
    """Seconds of a step by the best plan for a cluster, of the model and batches of ``forecast``."""
    cost = forecast.cost
    workload = replace(cost.workload, zero_weights=None)  # the weights are of today's ranks
    planned = planning.plan(cluster, cost.model, workload, cost_model=cost.name, layout=forecast.schedule.layout)
    return planned.prediction.iteration_s


def _node(name: str, cards: Sequence[str]) -> Node:
    """A machine with these cards and their usual link, from the catalogue."""
    described = cluster_from_dict(read_notation(",".join(cards)).content).nodes[0]
    return replace(described, name=name, group=name)
