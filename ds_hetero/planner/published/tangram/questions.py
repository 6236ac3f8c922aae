"""Ask an inner parallelizer about slices of the model, as seldom as Tangram's four rules allow (component 3).

    1  ask once for slices of equal length on one island, apart from the embedding and the head            Eq. 3
    2  ask for a slice if it is within a factor beta of the island's share of layers by compute       Eqs. 4 and 5
    3  ask for a slice if its parameters fit into the island's memory under the highest ZeRO stage         Eq. 6
    4  let two islands follow each other if the send between them takes at most a part of the period

Rules 1 to 3 apply before a question, rule 4 to two answers. Without rule 1, the parallelizer is asked about every
interval of layers on every island; with rule 1, about one interval of every length that is possible at the island's
place in the pipeline.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from ds_hetero.cost.stages.stage import StageCosts
from ds_hetero.planner.published.tangram.interface import Parallelizer, PartialPlan, Slice
from ds_hetero.planner.published.tangram.islands import Island

# The rules name these three numbers; it is not known whether the values are the paper's, and none was measured.
BETA = 2.0  # rule 2: factor by which a slice may have more, or fewer, layers than the island's share
SAFETY = 0.1  # rule 3: share of memory that is reserved for activations
INTERFACE = 1.0  # rule 4: longest send, as a share of the period
ELEMENT_BYTES = 2  # bytes of a 16-bit element
Z_MAX = 3  # highest ZeRO stage, by which Eq. 6 as printed divides the memory

ByBatch = dict[tuple[int, int], dict[tuple[int, int], PartialPlan]]
"""Partial plans by (degree of data parallelism, size of micro-batches), and then by slice, ``(start, stop)``."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Switches of the four rules: True for a rule that is applied."""

    equal_lengths: bool = True  # rule 1
    balanced: bool = True  # rule 2
    memory: bool = True  # rule 3
    interface: bool = True  # rule 4


class Answers:
    """Asks an inner parallelizer for plans of the islands, as seldom as the rules allow, and remembers the answers.

    Args:
        islands: all islands of the cluster.
        rules: left out, all four.
    """

    def __init__(
        self, costs: StageCosts, islands: Sequence[Island], parallelizer: Parallelizer, rules: Rules | None = None
    ) -> None:
        self._costs, self._parallelizer, self._rules = costs, parallelizer, rules or Rules()
        self._flops_per_s = sum(island.flops_per_s for island in islands)
        self._answers: dict[tuple[object, ...], Sequence[PartialPlan]] = {}
        self._by_place: dict[tuple[Island, bool, bool], ByBatch] = {}

    def by_batch(self, island: Island, first: bool, last: bool) -> ByBatch:
        """Return the answers for all slices on an island.

        Args:
            first: whether the island is the first of the pipeline.
            last: whether it is the last.
        """
        place = island, first, last
        if place not in self._by_place:
            by_batch: ByBatch = {}
            for interval in combinations(range(self._costs.model.num_layers + 1), 2):
                for plan in self(interval, *place):
                    by_batch.setdefault((plan.data_parallel, plan.micro_batch_size), {})[interval] = plan
            self._by_place[place] = by_batch
        return self._by_place[place]

    def __call__(self, interval: tuple[int, int], island: Island, first: bool, last: bool) -> Sequence[PartialPlan]:
        """Return the partial plans of a slice on an island; empty if a rule excludes the slice.

        Args:
            interval: first layer of the slice, and the layer behind its last one.
            first: whether the island is the first of the pipeline; only its slices begin at layer 0.
            last: whether the island is the last; only its slices end at the last layer.
        """
        start, stop = interval
        part, rules = Slice(stop - start, start == 0, stop == self._costs.model.num_layers), self._rules
        is_possible = (part.first, part.last) == (first, last)
        if rules.equal_lengths and not is_possible:
            return ()
        if (rules.balanced and not self._is_balanced(part, island)) or (rules.memory and not self._fits(part, island)):
            return ()
        key = (part, island) if rules.equal_lengths else (start, stop, island)
        if key not in self._answers:
            self._answers[key] = self._parallelizer.plan(part, island)
        return self._answers[key] if is_possible else ()

    def _is_balanced(self, part: Slice, island: Island) -> bool:
        """Rule 2: whether the slice has about as many layers as the island's share, within a factor `BETA`."""
        share = self._costs.model.num_layers * island.flops_per_s / self._flops_per_s
        return share / BETA <= part.layers <= share * BETA

    def _fits(self, part: Slice, island: Island) -> bool:
        """Rule 3 (Eq. 6): whether the slice's parameters fit into the island's memory over ``Z_MAX``."""
        device_bytes = self._costs.pools.kinds[island.weakest].device.memory_bytes
        needed_bytes = part.layers * self._costs.model.layer_parameters * ELEMENT_BYTES
        return needed_bytes <= island.num_devices * device_bytes * (1 - SAFETY) / Z_MAX

    def compatible(self, plan: PartialPlan, hand_over_s: float) -> bool:
        """Rule 4: whether the send of activations to this plan is short enough."""
        return not self._rules.interface or hand_over_s <= INTERFACE * plan.period_s


def interface_s(costs: StageCosts, source: tuple[Island, PartialPlan], target: tuple[Island, PartialPlan]) -> float:
    """Return the time of sending the activations of a micro-batch from one partial plan to the next, one direction."""
    (source_island, source_plan), (target_island, target_plan) = source, target
    cluster = costs.cluster
    pairs = itertools.product(source_island.pools, target_island.pools)
    classes = {int(cluster.link_class[sender.node, receiver.node]) for sender, receiver in pairs}
    fastest = max(sorted(classes), key=lambda link: cluster.link_classes[link].bytes_per_s)
    source_block = source_plan.block(costs.pools.largest[source_island.weakest])
    target_block = target_plan.block(costs.pools.largest[target_island.weakest])
    return costs.hop_s(fastest, source_block, target_block, target_plan.micro_batch_size)
