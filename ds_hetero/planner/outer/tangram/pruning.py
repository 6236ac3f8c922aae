"""Which slices an inner parallelizer is asked about: Tangram's four rules (component 3).

    1  slices of equal length on one island are one question, apart from the embedding and the head       Eq. 3
    2  a slice within a factor beta of the island's share of the layers by compute                   Eqs. 4 and 5
    3  a slice whose parameters fit into the island's memory when they are fully partitioned              Eq. 6
    4  neighbours whose hand-over of activations takes at most a part of their period

Rules 1 to 3 decide before a question is asked, rule 4 between two answers. Without any rule, every interval of layers
is asked about on every island.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ds_hetero.cost.stages.stage import StageCosts
from ds_hetero.planner.outer.blocks import block_of
from ds_hetero.planner.outer.tangram.interface import Parallelizer, PartialPlan, Slice
from ds_hetero.planner.outer.tangram.islands import Island

__all__ = ["Answers", "Rules", "interface_s"]

BETA = 2.0  # imbalance up to which a slice is asked about
SAFETY = 0.1  # of memory, kept for activations
INTERFACE = 1.0  # of the period, up to which a hand-over is accepted
ELEMENT_BYTES = 2


@dataclass(frozen=True, slots=True)
class Rules:
    """Which of the four rules hold.

    Args:
        equal_lengths: rule 1.
        balanced: rule 2.
        memory: rule 3.
        interface: rule 4.
    """

    equal_lengths: bool = True
    balanced: bool = True
    memory: bool = True
    interface: bool = True


class Answers:
    """Asks an inner parallelizer, as seldom as the rules allow.

    Args:
        costs: gives the model.
        islands: of the cluster.
        parallelizer: that is asked.
        rules: which hold.
    """

    def __init__(
        self, costs: StageCosts, islands: Sequence[Island], parallelizer: Parallelizer, rules: Rules | None = None
    ) -> None:
        self._costs, self._parallelizer, self._rules = costs, parallelizer, rules or Rules()
        self._whole = sum(island.flops_per_s for island in islands)
        self._known: dict[tuple[object, ...], Sequence[PartialPlan]] = {}

    def __call__(self, start: int, stop: int, island: Island) -> Sequence[PartialPlan]:
        """Return the partial plans of layers ``[start, stop)`` on an island; none if a rule excludes them."""
        num_layers, rules = self._costs.model.num_layers, self._rules
        part = Slice(stop - start, start == 0, stop == num_layers)
        if (rules.balanced and not self._is_balanced(part, island)) or (rules.memory and not self._fits(part, island)):
            return ()
        key = (part, island) if rules.equal_lengths else (start, stop, island)
        if key not in self._known:
            self._known[key] = self._parallelizer.plan(part, island)
        return self._known[key]

    def _is_balanced(self, part: Slice, island: Island) -> bool:
        share = self._costs.model.num_layers * island.flops_per_s / self._whole
        return share / BETA <= part.layers <= share * BETA

    def _fits(self, part: Slice, island: Island) -> bool:
        """Eq. 6 with every byte of the parameters partitioned over the whole island."""
        memory = self._costs.pools.kinds[island.weakest].device.memory_bytes
        needed = part.layers * self._costs.model.layer_parameters * ELEMENT_BYTES
        return needed <= island.num_devices * memory * (1 - SAFETY)

    def compatible(self, plan: PartialPlan, hand_over_s: float) -> bool:
        """Rule 4: whether a hand-over to this plan is short enough."""
        return not self._rules.interface or hand_over_s <= INTERFACE * plan.period_s


def interface_s(costs: StageCosts, source: tuple[Island, PartialPlan], target: tuple[Island, PartialPlan]) -> float:
    """Return the time of handing the activations of a micro-batch from one partial plan to the next, one direction."""
    (a, before), (b, after) = source, target
    nodes = ((x.node, y.node) for x in a.pools for y in b.pools)
    link = _fastest(costs, nodes)
    blocks = [
        block_of(costs.pools.largest[island.weakest], plan.tensor_parallel)
        for island, plan in ((a, before), (b, after))
    ]
    return costs.hop_s(link, blocks[0], blocks[1], after.micro_batch_size)


def _fastest(costs: StageCosts, nodes: Iterable[tuple[int, int]]) -> int:
    """Class of the fastest link between any of these pairs of nodes."""
    classes = {int(costs.cluster.link_class[pair]) for pair in nodes}
    return max(sorted(classes), key=lambda link: costs.cluster.link_classes[link].bytes_per_s)
