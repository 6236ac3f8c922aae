"""All published planners, in the order in which they are shown. A new one is a module here and its name below."""

from __future__ import annotations

from ds_hetero.planner.published.hetero_ring import FORMULA, LUT
from ds_hetero.planner.published.hexiscale.planner import HEXISCALE
from ds_hetero.planner.published.interface import PublishedPlanner
from ds_hetero.planner.published.tangram.planner import TANGRAM
from ds_hetero.planner.published.zeppelin.rings import ZEPPELIN

PLANNERS: tuple[PublishedPlanner, ...] = (HEXISCALE, TANGRAM, ZEPPELIN, LUT, FORMULA)
