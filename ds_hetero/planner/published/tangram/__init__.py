"""Tangram as described (a review of arXiv:2606.16907), for comparison under any cost model.

islands      groups of nodes that are alike enough to be planned as equal ones                     (Algorithm 1)
interface    what an inner parallelizer is asked and what it answers                               (component 2)
uniform_parallelizer   an inner parallelizer of equal devices                                      (component 2)
questions    which questions need not be asked: four rules                                         (component 3)
composition  one answer per island put together: Algorithm 2, and the exact form of it             (component 4)
planner      all of it, over the orders of the islands
"""

from ds_hetero.planner.published.tangram.planner import TangramPlan, TangramVariant, plan_tangram

__all__ = ["TangramPlan", "TangramVariant", "plan_tangram"]
