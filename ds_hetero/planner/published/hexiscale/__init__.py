"""HexiScale's search as its paper describes it (arXiv:2409.01143, section 4), for comparison under any cost model.

partition    a graph of devices cut into balanced groups: coarsening, recursive bisection, refinement  (section 4.2)
pipelines    one group turned into a pipeline: groups of stages, strategies by machine, their order    (section 4.3)
planner      both phases repeated over the number of pipelines and of groups                           (section 4.4)
"""

from ds_hetero.planner.published.hexiscale.planner import plan_hexiscale

__all__ = ["plan_hexiscale"]
