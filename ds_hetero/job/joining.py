"""Does a machine that waits to join an elastic job pay? What the planner says of a step with it, and without."""

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

# Of a step: the pause of some 10 s that letting machines in costs is earned back in 17 minutes.
LEAST_GAIN_OF_JOINING = 0.01


def gain_of_joining(start: JobStart, cards: Mapping[str, Sequence[str]]) -> float | None:
    """Share of a step's time that machines would save; below 0 where they would make it longer.

    Args:
        cards: names of the cards of each machine, by its name.

    Returns:
        -1 where nothing fits with them. None where the planner cannot say: the job has no forecast of one replica, a
        card is not in the catalogue, or all ranks are on one machine, so that nothing is known of the network.
    """
    if len(start.forecasts) != 1 or start.is_of_pipelines or start.forecasts[0].planned is None:
        return None
    now = start.forecasts[0]
    cluster = now.cost.cluster
    if len(cluster.nodes) == 1:
        return None
    try:
        nodes = [_node(name, of_node) for name, of_node in cards.items()]
        without = _step_s(now, cluster)
    except HeteroError as error:
        logger.info("the planner cannot say what machines that wait would bring: %s", error)
        return None
    try:
        return 1 - _step_s(now, replace(cluster, nodes=(*cluster.nodes, *nodes))) / without
    except PlanError as error:
        logger.info("nothing fits with the machines that wait: %s", error)
        return -1.0


def _step_s(now: Forecast, cluster: Cluster) -> float:
    """Seconds of a step by the best plan of a cluster."""
    work = replace(now.cost.workload, zero_weights=None)
    planned = planning.plan(cluster, now.cost.model, work, cost_model=now.cost.name, layout=now.schedule.layout)
    return planned.prediction.iteration_s


def _node(name: str, cards: Sequence[str]) -> Node:
    """A machine with such cards, joined to each other as such cards usually are."""
    described = cluster_from_dict(read_notation(",".join(cards)).content).nodes[0]
    return replace(described, name=name, group=name)
