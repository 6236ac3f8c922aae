"""Predict how much of a step an elastic job would save if machines that wait to join were let in."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ds_hetero.cluster import cluster_from_dict
from ds_hetero.cluster.notation import read_notation
from ds_hetero.cluster.topology import Cluster, Node
from ds_hetero.decision.decide import JobStart
from ds_hetero.decision.forecast import Forecast
from ds_hetero.errors import HeteroError, PlanError
from ds_hetero.planner import planning

logger = logging.getLogger(__name__)

# Share of a step that machines must be predicted to save. Letting them in pauses the job for some 10 s, which 1 % earns
# back in 1,000 s, or 17 minutes.
MIN_JOIN_GAIN = 0.01


def predicted_join_gain(start: JobStart, cards: Mapping[str, Sequence[str]]) -> float | None:
    """Predict the share of a step's time that the job would save with further machines.

    The planner plans for the cluster with and without the machines; the gain compares the predicted steps.

    Args:
        start: what the ranks agreed on for the job.
        cards: by name of the machine, the names of its GPUs.

    Returns:
        Below 0 if a step would take longer; -1 if no plan with the machines fits into memory. None if the planner
        cannot predict the gain: the job has several replicas or no forecast, a GPU is not in the catalogue, or all
        ranks are on one machine, so that no network is described.
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
    """Return the predicted seconds of a step of the forecast's model under the best plan for ``cluster``."""
    cost = forecast.cost
    workload = replace(cost.workload, zero_weights=None)  # the weights are of today's ranks
    planned_schedule = planning.plan(
        cluster, cost.model, workload, cost_model=cost.name, layout=forecast.schedule.layout
    )
    return planned_schedule.prediction.iteration_s


def _node(name: str, cards: Sequence[str]) -> Node:
    """Return a machine with these GPUs and the catalogue's link between them."""
    cluster_of_machine = cluster_from_dict(read_notation(",".join(cards), is_one_machine=True).content)
    return replace(cluster_of_machine.nodes[0], name=name, group=name)
