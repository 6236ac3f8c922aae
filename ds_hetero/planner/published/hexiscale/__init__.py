"""HexiScale's search as its paper describes it (arXiv:2409.01143, section 4), for comparison under any cost model.

partition    divides a graph of devices into balanced groups: coarsening, bisection, refinement      (section 4.2)
pipelines    makes a pipeline of a group: smaller groups, stages by machine, order of the groups     (section 4.3)
planner      repeats both phases over numbers of pipelines and of groups                             (section 4.4)
"""

from ds_hetero.planner.published.hexiscale.planner import plan_hexiscale

__all__ = ["plan_hexiscale"]
