"""Report on a placement: lanes, loads of the units, bytes by link, and times of other ways to place the documents."""

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
    """The placement of one batch row, with its prediction.

    Args:
        bytes_by_link: bytes of keys, values and their gradients that all ranks send in one layer, by
            `ds_hetero.planner.document_search.traffic.LINK_KINDS`.
    """

    placement: Placement
    documents: tuple[Range, ...]  # intervals of the row
    costs: UnitCosts  # costs on the units of the schedule
    loads: Loads  # loads of the units
    ideal_s: float  # time of a layer at perfect balance with free communication
    others_s: dict[str, float | None]  # predicted time of a layer by other ways to place; None if a way is impossible
    bytes_by_link: dict[str, float]

    @property
    def balance(self) -> float:
        """Computing time of the slowest unit over the ideal time; 1 is perfect balance."""
        return self.loads.compute_s / self.ideal_s

    @cached_property
    def zone_tokens(self) -> dict[str, int]:
        """Tokens by zone: in lanes over several nodes, over units of one node, and of single units."""
        tokens = {"cluster": 0, "node": 0, "local": 0}
        for lane in self.placement.lanes:
            tokens[lane.zone(self.costs.node)] += sum(stop - start for start, stop in lane.spans)
        return tokens

    def to_dict(self) -> JsonDict:
        """Plain data for JSON."""
        schedule, loads = self.placement.schedule, self.loads
        index_of_document = {document: j for j, document in enumerate(self.documents)}
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
                    "documents": [index_of_document.get(span) for span in lane.spans],  # None is padding
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
    """Return the intervals of documents that follow one another in a row of ``length`` tokens; the rest is padding.

    Raises:
        PlanError: together the documents are longer than the row.
    """
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
    """Place documents that follow one another in a row of the workload's length, and report on the placement.

    Raises:
        PlanError: the documents do not fit into the row.
        BatchError: the row does not fit into memory.
    """
    length = cost.workload.seq_len
    documents = documents_of(lengths, length)
    costs = unit_costs(cost, schedule)
    rows = (Rows(0, cost.workload.micro_batch, documents),)
    placement = place_documents(schedule, documents, length, costs).with_rows(rows)
    node_of_rank = [int(node) for node in cost.cluster.node_of_rank]
    loads = placement_loads(placement, documents, costs)
    bytes_of_rings = ring_bytes(placement, node_of_rank, kv_bytes(cost))
    bytes_of_exchanges = exchange_bytes(placement, node_of_rank, kv_bytes(cost))
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
        bytes_by_link={kind: bytes_of_rings[kind] + bytes_of_exchanges[kind] for kind in bytes_of_rings},
    )


def _crossing_s(lengths: Sequence[int], costs: UnitCosts, num_heads: int) -> dict[str, float | None]:
    """Predict the times of a layer for two other ways to send documents between nodes; empty with one node.

    ``one ring``: one ring over all units, where all tokens enter a node over the link of one unit. ``by heads``: heads
    are exchanged, see `by_heads`; None if they cannot be. Padding is not counted.
    """
    if costs.num_nodes == 1:
        return {}
    one_ring = place_lengths(lengths, costs.through_one_link())
    by_heads = place_by_heads(lengths, place_lengths(lengths, costs), costs, num_heads, 0)
    return {"one ring": one_ring.predicted_s, "by heads": None if by_heads is None else by_heads.placed.predicted_s}


def _remapped_s(lengths: Sequence[int], costs: UnitCosts, padding: int) -> float:
    """Predict the time with tokens moved between attention and linear layers, whether that is faster or not."""
    best = place_lengths(lengths, costs, padding=padding)
    return place_remapped(lengths, best, costs, padding=padding, min_cut_tokens=2 * LEAST_FRAGMENT_TOKENS).predicted_s


def _others_s(
    schedule: Schedule, lengths: Sequence[int], documents: Sequence[Range], length: int, costs: UnitCosts
) -> dict[str, float | None]:
    """Predict the time of a layer for the stream and for every placement strategy, by name; None if impossible.

    Padding is counted for the stream alone.
    """
    times_s: dict[str, float | None] = {"stream": None}
    try:
        lane = stream_placement(schedule, length).lanes[0]
        times_s["stream"] = stream_loads(lane, documents, costs).predicted_s
    except HeteroError:  # fewer tokens than ranks
        pass
    return times_s | {name: _strategy_s(place, lengths, costs) for name, place in placement_strategies().items()}


def _strategy_s(
    place: Callable[[Sequence[int], UnitCosts], list[Pieces]], lengths: Sequence[int], costs: UnitCosts
) -> float | None:
    """Predict the time of a strategy; None if it cannot place these documents."""
    try:
        return loads_of(lengths, place(lengths, costs), costs).predicted_s
    except HeteroError:  # nodes of unequal size
        return None
