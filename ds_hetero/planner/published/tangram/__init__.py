"""Tangram, as a review of its paper describes it (arXiv:2606.16907), for comparison under any cost model.

islands                groups similar nodes into islands, which are planned as if their devices were equal (Algorithm 1)
interface              states what an inner parallelizer plans, and checks its answers                     (component 2)
uniform_parallelizer   is an inner parallelizer: it plans some layers on the devices of one island         (component 2)
questions              asks the parallelizer, as seldom as four rules allow                                (component 3)
composition            joins one answer of every island to a pipeline: Algorithm 2, and an exact form      (component 4)
planner                runs all of these, over the orders of the islands
"""

from ds_hetero.planner.published.tangram.planner import TangramPlan, TangramVariant, plan_tangram

__all__ = ["TangramPlan", "TangramVariant", "plan_tangram"]
