"""Where the documents of a batch lie, what every unit does, what travels over which links, and how good that is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ds_hetero.common.reading import JsonDict
from ds_hetero.cost.calibrated import CalibratedCostModel
from ds_hetero.errors import HeteroError, PlanError
from ds_hetero.planner.document_search.bins import LEAST_FRAGMENT_TOKENS
from ds_hetero.planner.document_search.by_heads import place_by_heads
from ds_hetero.planner.document_search.calibrated_costs import kv_bytes, unit_costs
from ds_hetero.planner.document_search.candidates import place_lengths
from ds_hetero.planner.document_search.loads import Loads, ideal_s, loads_of
from ds_hetero.planner.document_search.placement_loads import placement_loads, stream_loads
from ds_hetero.planner.document_search.remapping import place_remapped
from ds_hetero.planner.document_search.traffic import exchange_bytes, ring_bytes
from ds_hetero.planner.document_search.unit_costs import Pieces, UnitCosts
from ds_hetero.planner.documents.placing import place_documents
from ds_hetero.planner.documents.strategies import placement_strategies
from ds_hetero.values.placement import Placement, Range, Rows, stream_placement
from ds_hetero.values.schedule import Schedule


@dataclass(frozen=True)
class DocumentsReport:
    """One batch row, placed.

    Args:
        bytes_by_link: what the ranks send of keys, values and their gradients in one block, by
            `ds_hetero.planner.document_search.traffic.LINK_KINDS`.
    """

    placement: Placement  # of the row
    documents: tuple[Range, ...]  # intervals of the row
    costs: UnitCosts  # of the schedule's units
    loads: Loads  # what units and nodes do
    ideal_s: float  # time of a block at perfect balance with free communication
    others_s: dict[str, float | None]  # predicted time of a block, placed in other ways; None: not possible
    bytes_by_link: dict[str, float]

    @property
    def balance(self) -> float:
        """Computing of the slowest unit over the ideal time."""
        return self.loads.compute_s / self.ideal_s

    @cached_property
    def zone_tokens(self) -> dict[str, int]:
        """Tokens of the lanes of every zone."""
        tokens = {"cluster": 0, "node": 0, "local": 0}
        for lane in self.placement.lanes:
            tokens[lane.zone(self.costs.node)] += sum(stop - start for start, stop in lane.spans)
        return tokens

    def to_dict(self) -> JsonDict:
        """Plain data for JSON."""
        schedule, loads = self.placement.schedule, self.loads
        index = {document: j for j, document in enumerate(self.documents)}
        return {
            "schedule": schedule.to_dict(),
            "length": self.placement.length,
            "documents": [stop - start for start, stop in self.documents],
            "lanes": [
                {
                    "zone": lane.zone(self.costs.node),
                    "proxies": lane.proxies,
                    "heads_of_nodes": list(lane.by_heads),
                    "ranks": [list(schedule.ring_groups[unit].ranks) for unit in lane.members],
                    "documents": [index.get(span) for span in lane.spans],
                    "spans": [list(span) for span in lane.spans],
                    "tokens": [list(tokens) for tokens in lane.tokens],
                }
                for lane in self.placement.lanes
            ],
            "moves": list(map(list, self.placement.moves)),
            "rank_tokens": dict(zip(map(str, schedule.ranks), self.placement.rank_tokens, strict=True)),
            "units": [
                {
                    "ranks": list(group.ranks),
                    "node": self.costs.node[unit],
                    "tokens": loads.tokens[unit],
                    "linear_s": loads.linear_s[unit],
                    "attention_s": loads.attention_s[unit],
                    "received_s": loads.received_s[unit],
                    "over_ideal": (loads.linear_s[unit] + loads.attention_s[unit]) / self.ideal_s,
                }
                for unit, group in enumerate(schedule.ring_groups)
            ],
            "predicted_s": loads.predicted_s,
            "ideal_s": self.ideal_s,
            "balance": self.balance,
            "zone_tokens": self.zone_tokens,
            "bytes": self.bytes_by_link,
            "others_s": self.others_s,
        }


def documents_of(lengths: Sequence[int], length: int) -> tuple[Range, ...]:
    """Intervals of documents that follow one another in a row; the rest is padding. Raises `PlanError`: too long."""
    documents, end = [], 0
    for tokens in lengths:
        documents.append((end, end + tokens))
        end += tokens
    if end > length:
        raise PlanError(
            f"{len(lengths)} documents have {end:,} tokens together, the row has {length:,}. Give a longer --seq-len "
            "or fewer documents."
        )
    return tuple(documents)


def report_documents(cost: CalibratedCostModel, schedule: Schedule, lengths: Sequence[int]) -> DocumentsReport:
    """Place documents that follow one another in a row of the workload's length, and say what that means.

    Raises:
        PlanError: the documents do not fit into the row.
        BatchError: the row does not fit into memory.
    """
    length = cost.workload.seq_len
    documents = documents_of(lengths, length)
    costs = unit_costs(cost, schedule)
    rows = (Rows(0, cost.workload.micro_batch, documents),)
    placement = place_documents(schedule, documents, length, costs).with_rows(rows)
    nodes = [int(node) for node in cost.cluster.node_of_rank]
    loads = placement_loads(placement, documents, costs)
    in_rings = ring_bytes(placement, nodes, kv_bytes(cost))
    exchanged = exchange_bytes(placement, nodes, kv_bytes(cost))
    return DocumentsReport(
        placement=placement,
        documents=documents,
        costs=costs,
        loads=loads,
        ideal_s=ideal_s(lengths, costs, length - sum(lengths)),
        others_s={
            **_others_s(schedule, lengths, documents, length, costs),
            **_crossing_s(lengths, costs, schedule.num_heads),
            "remapped": _remapped_s(lengths, costs, length - sum(lengths)),
        },
        bytes_by_link={kind: in_rings[kind] + exchanged[kind] for kind in in_rings},
    )


def _crossing_s(lengths: Sequence[int], costs: UnitCosts, num_heads: int) -> dict[str, float | None]:
    """Predicted times, without padding, if documents over several nodes travelled otherwise; see `crossing`.

    In one ring over all units everything enters a node over the link of one of its units.
    """
    if costs.num_nodes == 1:
        return {}
    one_ring = place_lengths(lengths, costs.through_one_link())
    by_heads = place_by_heads(lengths, place_lengths(lengths, costs), costs, num_heads, 0)
    return {"one ring": one_ring.predicted_s, "by heads": None if by_heads is None else by_heads.placed.predicted_s}


def _remapped_s(lengths: Sequence[int], costs: UnitCosts, padding: int) -> float:
    """Predicted time if tokens moved between attention and linear layers, whether that pays or not."""
    best = place_lengths(lengths, costs, padding=padding)
    return place_remapped(lengths, best, costs, padding=padding, min_cut_tokens=2 * LEAST_FRAGMENT_TOKENS).predicted_s


def _others_s(
    schedule: Schedule, lengths: Sequence[int], documents: Sequence[Range], length: int, costs: UnitCosts
) -> dict[str, float | None]:
    """Predicted times of the stream and of the other strategies, without padding."""
    others: dict[str, float | None] = {"stream": None}
    try:
        lane = stream_placement(schedule, length).lanes[0]
        others["stream"] = stream_loads(lane, documents, costs).predicted_s
    except HeteroError:  # fewer tokens than ranks
        pass
    return others | {name: _placed_s(place, lengths, costs) for name, place in placement_strategies().items()}


def _placed_s(
    place: Callable[[Sequence[int], UnitCosts], list[Pieces]], lengths: Sequence[int], costs: UnitCosts
) -> float | None:
    try:
        return loads_of(lengths, place(lengths, costs), costs).predicted_s
    except HeteroError:  # nodes of unequal size
        return None
