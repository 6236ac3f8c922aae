"""Which slices an inner parallelizer is asked about: Tangram's four rules (component 3).

    1  slices of equal length on one island are one question, apart from the embedding and the head       Eq. 3
    2  a slice within a factor beta of the island's share of the layers by compute                   Eqs. 4 and 5
    3  a slice whose parameters fit into the island's memory under the highest stage of ZeRO              Eq. 6
    4  neighbours whose hand-over of activations takes at most a part of their period

Rules 1 to 3 decide before a question is asked, rule 4 between two answers. Without rule 1, every interval of layers is
asked about on every island; with it, one interval of every length that the island's place in the pipeline allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from ds_hetero.cost.stages.stage import StageCosts
from ds_hetero.planner.published.tangram.interface import Parallelizer, PartialPlan, Slice
from ds_hetero.planner.published.tangram.islands import Island

# The rules name these three; what of them is ours and not the paper's is unknown, and none was measured.
BETA = 2.0  # imbalance up to which a slice is asked about
SAFETY = 0.1  # of memory, kept for activations
INTERFACE = 1.0  # of the period, up to which a hand-over is accepted
ELEMENT_BYTES = 2  # of 16-bit activations
Z_MAX = 3  # ZeRO's highest stage, by which Eq. 6 as printed divides the memory

ByBatch = dict[tuple[int, int], dict[tuple[int, int], PartialPlan]]


@dataclass(frozen=True, slots=True)
class Rules:
    """Which of the four rules hold."""

    equal_lengths: bool = True  # rule 1
    balanced: bool = True  # rule 2
    memory: bool = True  # rule 3
    interface: bool = True  # rule 4


class Answers:
    """Asks an inner parallelizer for plans of the cluster's islands, as seldom as the rules allow."""

    def __init__(
        self, costs: StageCosts, islands: Sequence[Island], parallelizer: Parallelizer, rules: Rules | None = None
    ) -> None:
        self._costs, self._parallelizer, self._rules = costs, parallelizer, rules or Rules()
        self._whole = sum(island.flops_per_s for island in islands)
        self._known: dict[tuple[object, ...], Sequence[PartialPlan]] = {}
        self._by_place: dict[tuple[Island, bool, bool], ByBatch] = {}

    def by_batch(self, island: Island, first: bool, last: bool) -> ByBatch:
        """Return the answers for all slices on an island in its place, by degree and micro-batch, then slice."""
        place = island, first, last
        if place not in self._by_place:
            by_batch: ByBatch = {}
            for at in combinations(range(self._costs.model.num_layers + 1), 2):
                for plan in self(at, *place):
                    by_batch.setdefault((plan.data_parallel, plan.micro_batch_size), {})[at] = plan
            self._by_place[place] = by_batch
        return self._by_place[place]

    def __call__(self, at: tuple[int, int], island: Island, first: bool, last: bool) -> Sequence[PartialPlan]:
        """Return the partial plans of a slice on an island; none if a rule excludes them.

        Args:
            first: the island is the first of the pipeline, so that its slices begin at layer 0, and no others do.
            last: the island is the last one, likewise.
        """
        start, stop = at
        part, rules = Slice(stop - start, start == 0, stop == self._costs.model.num_layers), self._rules
        fits_in = (part.first, part.last) == (first, last)
        if rules.equal_lengths and not fits_in:
            return ()
        if (rules.balanced and not self._is_balanced(part, island)) or (rules.memory and not self._fits(part, island)):
            return ()
        key = (part, island) if rules.equal_lengths else (start, stop, island)
        if key not in self._known:
            self._known[key] = self._parallelizer.plan(part, island)
        return self._known[key] if fits_in else ()

    def _is_balanced(self, part: Slice, island: Island) -> bool:
        share = self._costs.model.num_layers * island.flops_per_s / self._whole
        return share / BETA <= part.layers <= share * BETA

    def _fits(self, part: Slice, island: Island) -> bool:
        """Eq. 6: the parameters against the memory of the whole island over ``Z_MAX``."""
        memory = self._costs.pools.kinds[island.weakest].device.memory_bytes
        needed = part.layers * self._costs.model.layer_parameters * ELEMENT_BYTES
        return needed <= island.num_devices * memory * (1 - SAFETY) / Z_MAX

    def compatible(self, plan: PartialPlan, hand_over_s: float) -> bool:
        """Rule 4: whether a hand-over to this plan is short enough."""
        return not self._rules.interface or hand_over_s <= INTERFACE * plan.period_s


def interface_s(costs: StageCosts, source: tuple[Island, PartialPlan], target: tuple[Island, PartialPlan]) -> float:
    """Return the time of handing the activations of a micro-batch from one partial plan to the next, one direction."""
    (a, before), (b, after) = source, target
    cluster = costs.cluster
    classes = {int(cluster.link_class[x.node, y.node]) for x in a.pools for y in b.pools}
    fastest = max(sorted(classes), key=lambda link: cluster.link_classes[link].bytes_per_s)
    blocks = [plan.block(costs.pools.largest[island.weakest]) for island, plan in ((a, before), (b, after))]
    return costs.hop_s(fastest, blocks[0], blocks[1], after.micro_batch_size)
