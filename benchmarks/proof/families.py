"""The families of cases: what is enumerated, in portions that processes share, and which check each case gets.

Symmetries; tests/unit/test_proof.py asserts them but for those of hops and of pipelines, which are read from the code:

    a member without tokens changes no other member's blocks (blocks: members hold at least one token each)
    rounds depend on who reads whom, on nodes and on widths only (routes: every pattern of readers, reachable or not)
    heads and tokens do not know of each other (tokens with one head, heads with one token; calls: both, smaller)
    a hop depends on the two cuts of the positions only (hops: one schedule for all that cut alike)
    pipelines depend on each other by their batches only (plans: two of every kind, or three of single ranks)
    remapping depends on surpluses only (remap: what both sides have is left out)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, permutations, product
from typing import Any

from benchmarks.proof import plans, scopes, tables
from benchmarks.proof.chance import large_pipelines, large_replicas
from benchmarks.proof.messages import PipelineJob, ReplicasJob
from benchmarks.proof.scopes import Scope, cuts
from benchmarks.proof.walk import lane_violations
from ds_hetero.batch.ring_table import RingTable
from ds_hetero.planner.documents import UnitCosts
from ds_hetero.sharding.parameter_layouts import Cut, ParameterLayout
from ds_hetero.sharding.zero_partition import FlatGroup, cut_flat_group, cut_parameter
from ds_hetero.values.placement import Placement, Rows, stream_placement
from ds_hetero.values.plans import BatchSplit, Pipeline, Plan, PlannedModel, Stage
from ds_hetero.values.plans.activation_transfers import held_intervals
from ds_hetero.values.schedule import LAYOUTS, Group, Schedule

Case = tuple[str, Iterator[str]]  # what it is, and what is wrong with it


@dataclass(frozen=True)
class Family:
    """Cases of one kind.

    Args:
        name: one word.
        says: the statement that holds in all cases.
        portions: arguments of ``cases``, one for each task of a process.
        cases: yields the cases of a portion.
    """

    name: str
    says: str
    portions: Callable[[Scope], Iterator[tuple[Any, ...]]]
    cases: Callable[..., Iterator[Case]]


def _block_portions(scope: Scope) -> Iterator[tuple[Any, ...]]:
    for length in range(1, scope.tokens + 1):
        for members in range(1, scope.ranks + 1):
            for tokens in cuts(length, members, 1):
                for layout in LAYOUTS:
                    yield tokens, layout, scope.documents


def _block_cases(tokens: tuple[int, ...], layout: str, most_documents: int) -> Iterator[Case]:
    length, lane = sum(tokens), scopes.one_lane(tokens, layout)
    bare = scopes.placement_of([lane], len(tokens), ())
    for documents in scopes.documents_of(length, most_documents):
        placement = bare.with_rows((Rows(0, 1, documents),))
        for causal, window in scopes.masks_of(length):
            table = RingTable(placement, lane, causal, window)
            visible = tables.visible_keys(length, documents, causal, window)
            yield f"{tokens} {layout} {documents} {causal} {window}", tables.block_violations(table, visible)


_PATTERNS = 512  # of readers in a portion


def _route_portions(scope: Scope) -> Iterator[tuple[Any, ...]]:
    for size in range(1, scope.ranks + 1):
        patterns = 1 << (size * (size - 1))
        for nodes in scopes.set_partitions(size):
            for proxies, widths in ((False, (1,) * size), (True, (2,) * size), (True, tuple(range(1, size + 1)))):
                if not proxies or max(nodes):
                    for first in range(0, patterns, _PATTERNS):
                        yield size, nodes, proxies, widths, first


def _route_cases(
    size: int, nodes: tuple[int, ...], proxies: bool, widths: tuple[int, ...], first: int
) -> Iterator[Case]:
    for pattern in range(first, min(first + _PATTERNS, 1 << (size * (size - 1)))):
        table = table_of_readers(size, nodes, proxies, widths, pattern)
        yield f"{nodes} {proxies} {widths} pattern {pattern}", lane_violations(table)


def table_of_readers(size: int, nodes: Sequence[int], proxies: bool, widths: Sequence[int], pattern: int) -> RingTable:
    """Return a ring table in which the bits of ``pattern`` say who reads whom.

    ``widths`` are the keys of each source.
    """
    lane = scopes.one_lane((max(widths),) * size, "contiguous", nodes, proxies=proxies)
    table = RingTable(scopes.placement_of([lane], size, ()), lane, True, None)
    pairs = [(source, reader) for source in range(size) for reader in range(size) if source != reader]
    readers: tuple[set[int], ...] = tuple(set() for _ in range(size))
    for bit, (source, reader) in enumerate(pairs):
        if pattern >> bit & 1:
            readers[source].add(reader)
    columns = tuple(((0, width),) if readers[source] else () for source, width in enumerate(widths))
    table.__dict__["_readers_and_travelling_keys"] = readers, columns
    return table


def _token_portions(scope: Scope) -> Iterator[tuple[Any, ...]]:
    for ranks in range(1, scope.ranks + 1):
        for length in range(1, scope.tokens + 1):
            yield from ((ranks, tokens) for tokens in cuts(length, ranks))


def _token_cases(ranks: int, tokens: tuple[int, ...]) -> Iterator[Case]:
    for schedule in scopes.schedules_by_tokens(ranks, tokens):
        yield schedule.to_json(), tables.token_violations(stream_placement(schedule, sum(tokens)))


def _head_portions(scope: Scope) -> Iterator[tuple[Any, ...]]:
    yield from product(range(1, scope.ranks + 1), range(1, scope.heads + 1))


def _head_cases(ranks: int, num_heads: int) -> Iterator[Case]:
    for schedule in scopes.schedules_by_heads(ranks, num_heads):
        placement = stream_placement(schedule, ranks, (Rows(0, 1, ((0, ranks),)),))
        yield schedule.to_json(), _both(tables.head_violations(placement), tables.sub_ring_violations(placement))


def _both(*checks: Iterator[str]) -> Iterator[str]:
    for check in checks:
        yield from check


def _document_portions(scope: Scope) -> Iterator[tuple[Any, ...]]:
    for length in range(1, scope.tokens + 1):
        for units in range(1, scope.ranks + 1):
            for number in range(1, scope.documents + 1):
                for lengths in cuts(length, number, 1):
                    yield from ((units, lengths, layout) for layout in LAYOUTS)


def _document_cases(units: int, lengths: tuple[int, ...], layout: str) -> Iterator[Case]:
    for placement in scopes.document_placements(units, lengths, layout):
        text = f"{lengths} {layout} {[(lane.members, lane.tokens) for lane in placement.lanes]}"
        yield text, tables.token_violations(placement)
        documents = placement.rows[0].documents
        for causal, window in ((False, None), (True, None), (True, 2)):
            visible = tables.visible_keys(placement.length, documents, causal, window)
            yield f"{text} {causal} {window}", _lanes(placement, causal, window, visible)


def _lanes(placement: Placement, causal: bool, window: int | None, visible: Sequence[int]) -> Iterator[str]:
    for lane in placement.lanes:
        yield from tables.block_violations(RingTable(placement, lane, causal, window), visible)


def _call_portions(scope: Scope) -> Iterator[tuple[Any, ...]]:
    for ranks in range(1, scope.ranks):
        for length in range(1, 5):
            yield from ((ranks, tokens) for tokens in cuts(length, ranks))


def _call_cases(ranks: int, tokens: tuple[int, ...]) -> Iterator[Case]:
    length = sum(tokens)
    some = {((0, length),), ((0, length // 2), (length // 2, length - 1)) if length > 2 else ((length - 1, length),)}
    for schedule in scopes.schedules_by_heads(ranks, 3):
        of_rank = dict(enumerate(tokens))
        groups = tuple(
            Group(ranks=g.ranks, tokens=tuple(of_rank[r] for r in g.ranks), heads=g.heads) for g in schedule.groups
        )
        for layout, documents in product(LAYOUTS, sorted(some)):
            case_schedule = Schedule(
                num_heads=3, num_kv_heads=schedule.num_kv_heads, groups=groups, ring=schedule.ring, layout=layout
            )
            placement = stream_placement(case_schedule, length, (Rows(0, 1, documents),))
            for causal, window in ((False, None), (True, None), (True, 2)):
                text = f"{case_schedule.to_json()} {documents} {causal} {window}"
                lane = RingTable(placement, placement.lanes[0], causal, window)
                yield text, _both(tables.composite_violations(placement, causal, window), lane_violations(lane))


def _plan_portions(scope: Scope) -> Iterator[tuple[Any, ...]]:
    one = list(_pipelines(scope, 0, ((1, 1), (1, 3))))
    for first in range(len(one)):
        yield scope, "two", first
    for layers in product(_layer_cuts(scope), repeat=min(3, scope.pipelines)):
        yield scope, "single", layers


def _layer_cuts(scope: Scope) -> list[tuple[int, ...]]:
    return [cut for stages in range(1, scope.stages + 1) for cut in cuts(scope.layers, stages, 1)]


def _pipelines(scope: Scope, first_rank: int, tokens: Sequence[Sequence[int]]) -> Iterator[tuple[Stage, ...]]:
    for sizes in _layer_cuts(scope):
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        kinds = [
            list(scopes.stage_kinds(first_rank + 2 * i, (start, start + size), tokens))
            for i, (start, size) in enumerate(zip(starts, sizes, strict=True))
        ]
        yield from product(*kinds)


def _plan_cases(scope: Scope, kind: str, which: Any) -> Iterator[Case]:
    for plan in _plans(scope, kind, which):
        yield str(plan.to_dict()), plans.plan_violations(plan)


def _plans(scope: Scope, kind: str, which: Any) -> Iterator[Plan]:
    model = PlannedModel(num_layers=scope.layers, num_heads=2, num_kv_heads=2)
    if kind == "two":
        first = next(islice(_pipelines(scope, 0, ((1, 1), (1, 3))), which, None))
        for second in _pipelines(scope, 2 * scope.stages, ((2, 1),)):
            a = Pipeline(stages=first, micro_batch_size=1, micro_batches=3)
            b = Pipeline(stages=second, micro_batch_size=2, micro_batches=2)
            yield Plan(pipelines=(a, b), model=model, seq_len=scope.tokens)
        return
    for batches in product((1, 2, 3), repeat=len(which)):
        pipelines = []
        for i, (sizes, count) in enumerate(zip(which, batches, strict=True)):
            starts = [sum(sizes[:j]) for j in range(len(sizes))]
            stages = tuple(
                Stage(ranks=(i * scope.stages + j,), layers=(start, start + size), in_flight=(1, 2, None)[count - 1])
                for j, (start, size) in enumerate(zip(starts, sizes, strict=True))
            )
            pipelines.append(Pipeline(stages=stages, micro_batch_size=1 + i % 2, micro_batches=count))
        yield Plan(pipelines=tuple(pipelines), model=model, seq_len=scope.tokens)


def _batch_portions(scope: Scope) -> Iterator[tuple[Any, ...]]:
    for pipelines in range(1, scope.pipelines + 1):
        yield from ((sizes,) for sizes in product((1, 2, 3), repeat=pipelines))


def _batch_cases(sizes: tuple[int, ...]) -> Iterator[Case]:
    for counts in product((1, 2, 3, 4), repeat=len(sizes)):
        split = BatchSplit(micro_batch_sizes=sizes, micro_batches=counts)
        for samples in range(split.samples + 1):
            yield f"{split} {samples}", plans.batch_violations(split, samples)


def _hop_portions(scope: Scope) -> Iterator[tuple[Any, ...]]:
    for length in range(1, scope.tokens - 2):
        yield from ((length, tokens, scope.ranks - 1) for tokens in cuts(length, scope.ranks - 1))


def _hop_cases(length: int, tokens: tuple[int, ...], ranks: int) -> Iterator[Case]:
    copies = [Stage(ranks=tuple(range(9, 9 + n)), inner="tensor" if n > 1 else "one") for n in (1, 2, 3, 4)]
    targets = [*copies, *(s for cut in cuts(length, ranks) for s in _sequence_stages(length, cut, 9))]
    for source in _sequence_stages(length, tokens, 0):
        for target in targets:
            yield f"{source} {target}", plans.hop_violations(source, target, length)
            if target in copies:
                yield f"{target} {source}", plans.hop_violations(target, source, length)


def _sequence_stages(length: int, tokens: Sequence[int], first_rank: int) -> Iterator[Stage]:
    """Yield sequence stages with these tokens by rank, one for each distinct division of the positions."""
    seen_divisions = set()
    for schedule in scopes.schedules_by_tokens(len(tokens), tokens):
        shifted_schedule = schedule.shifted(first_rank)
        stage = Stage(ranks=shifted_schedule.ranks, inner="sequence", schedule=shifted_schedule)
        parts = tuple(held_intervals(stage, length, rank) for rank in stage.ranks)
        if parts not in seen_divisions:
            seen_divisions.add(parts)
            yield stage


_SHAPES = ((5,), (2, 3), (3, 2))


def _cuts_of(shape: tuple[int, ...], first_rank: int) -> list[Cut]:
    """Return every way to shard a parameter over one rank or two, copies included."""
    pair = (first_rank, first_rank + 1)
    all_cuts = [Cut.whole(shape, first_rank), Cut.whole(shape, *pair), Cut.whole(shape, *pair, partial=True)]
    elements = 1
    for dim, size in enumerate(shape):
        elements *= size
        all_cuts += [Cut.along(dim, pair, sizes) for sizes in cuts(size, 2)]
    return all_cuts + [Cut.along(None, pair, sizes) for sizes in cuts(elements, 2)]


def _gradient_portions(scope: Scope) -> Iterator[tuple[Any, ...]]:
    for shape in _SHAPES:
        for number in range(1, scope.pipelines + 1):
            yield from ((shape, number, first) for first in range(len(_cuts_of(shape, 0))))


def _gradient_cases(shape: tuple[int, ...], number: int, first: int) -> Iterator[Case]:
    others = [_cuts_of(shape, 2 * i) for i in range(1, number)]
    elements = _elements(shape)
    for of_others in product(*others):
        all_cuts = (_cuts_of(shape, 0)[first], *of_others)
        ranks = [rank for cut in all_cuts for rank in cut.ranks]
        owners = (None, Cut.along(None, ranks[:2], (1, elements - 1)) if len(ranks) > 1 else None)
        for owner in dict.fromkeys(owners):
            layout = ParameterLayout(shape, all_cuts, owner)
            settings = ((1, None), (1, {rank: 1.0 + rank for rank in ranks}), (2, None))
            for alignment, weights in settings if number < 3 else settings[:2]:
                if owner is None or weights is None:
                    yield f"{layout} {alignment} {weights}", plans.chunk_violations(layout, alignment, weights)


def _elements(shape: Sequence[int]) -> int:
    elements = 1
    for size in shape:
        elements *= size
    return elements


def _zero_portions(scope: Scope) -> Iterator[tuple[Any, ...]]:
    for ranks in range(1, scope.ranks + 1):
        yield from ((weights,) for weights in product(range(4), repeat=ranks) if any(weights))


def _zero_cases(weights: tuple[int, ...]) -> Iterator[Case]:
    for sizes in ((1,), (2, 3), (5, 1, 2), (7, 9), (16, 1, 40)):
        for order in permutations(range(len(sizes))):
            saved = _flat_group(sizes, order, weights, padding=0)
            for others in ((1,), (1, 1), (3, 1), (1, 0, 2), (1, 2, 3, 4)):
                target_group = _flat_group(sizes, tuple(range(len(sizes))), others, padding=2)
                yield f"{sizes} {order} {weights} {others}", plans.partition_violations(saved, target_group)
    if all(weights):
        for elements in range(1, 40):
            yield f"cut_parameter({elements}, {weights})", _parameter_violations(elements, weights)


def _flat_group(sizes: Sequence[int], order: Sequence[int], weights: Sequence[float], padding: int) -> FlatGroup:
    starts, at = [0] * len(sizes), 0
    for parameter in order:
        starts[parameter] = at
        at += sizes[parameter]
    return FlatGroup(tuple(starts), tuple(sizes), cut_flat_group(at + padding, weights))


def _parameter_violations(elements: int, weights: Sequence[float]) -> Iterator[str]:
    split = cut_parameter(elements, weights)
    if split.total != max(elements, len(weights)) or min(split.sizes) < 1:
        yield f"{split} of {elements} elements"


def _remap_portions(scope: Scope) -> Iterator[tuple[Any, ...]]:
    for units in range(1, scope.ranks + 1):
        yield from ((nodes, scope.tokens) for nodes in scopes.set_partitions(units))


def _remap_cases(nodes: tuple[int, ...], most: int) -> Iterator[Case]:
    units, num_nodes = len(nodes), max(nodes) + 1
    for cross_s in (0.1, 1.0):
        costs = UnitCosts(
            token_s=(1.0,) * units,
            square_s=(1.0,) * units,
            most_tokens=(100,) * units,
            node=nodes,
            receive_s=(0.1,) * num_nodes,
            cross_s=(cross_s,) * num_nodes,
        )
        for surplus in product(range(-most, most + 1), repeat=units):
            if sum(surplus) == 0 and sum(map(abs, surplus)) <= 2 * most:
                have, want = [max(s, 0) for s in surplus], [max(-s, 0) for s in surplus]
                yield f"{nodes} {surplus} {cross_s}", plans.remap_violations(have, want, costs)


def _owner_portions(scope: Scope) -> Iterator[tuple[Any, ...]]:
    yield from ((shape,) for shape in _SHAPES)


def _owner_cases(shape: tuple[int, ...]) -> Iterator[Case]:
    """Yield cases of owners before and after layers move: the elements that two layouts give them."""
    layouts = [ParameterLayout(shape, (a, b)) for a, b in product(_cuts_of(shape, 0), _cuts_of(shape, 2))]
    owned = []
    for layout in layouts:
        by_rank: list[list[Any]] = [[] for _ in range(4)]
        for chunk in plans.chunks_of("p", layout, 1):
            by_rank[chunk.owner] += chunk.boxes
        owned.append(by_rank)
    for old, new in product(owned[::3], owned[::5]):
        yield f"{old} {new}", plans.owner_move_violations(old, new)


_LARGE = 10  # plans in a portion
_EVERY = 3  # of placements, and of patterns of readers, one of so many has its messages ordered


def _order_portions(scope: Scope) -> Iterator[tuple[Any, ...]]:
    """Yield the portions of the order of calls."""
    yield from (("large", first, min(first + _LARGE, scope.large)) for first in range(0, scope.large, _LARGE))
    yield from (("plans", *portion) for portion in _plan_portions(scope))
    yield from (("heads", *portion) for portion in _head_portions(scope))
    yield from (("lanes", *portion) for portion in _document_portions(scope))
    yield from (("routes", *portion) for portion in _route_portions(scope))


def _order_cases(kind: str, *portion: Any) -> Iterator[Case]:
    jobs = {"plans": _plan_jobs, "heads": _head_jobs, "lanes": _lane_jobs, "routes": _route_jobs, "large": _large_jobs}
    for text, job in jobs[kind](*portion):
        for by_order in (True, False):
            yield f"{text}, messages meet by {'order' if by_order else 'tag'}", job.violations(by_order)


_Job = tuple[str, PipelineJob | ReplicasJob]


def _plan_jobs(scope: Scope, kind: str, which: Any) -> Iterator[_Job]:
    for number, plan in enumerate(_plans(scope, kind, which)):
        lengths = tuple((scope.tokens,) * (pipeline.micro_batches or 1) for pipeline in plan.pipelines)
        yield (
            str(plan.to_dict()),
            PipelineJob(plan=plan, lengths=lengths, tied=number % 2 > 0, recompute=number % 3 > 1),
        )


def _head_jobs(ranks: int, num_heads: int) -> Iterator[_Job]:
    for schedule in scopes.schedules_by_heads(ranks, num_heads):
        placement = stream_placement(schedule, ranks, (Rows(0, 1, ((0, ranks),)),))
        yield str(schedule.to_json()), ReplicasJob(placements=((placement,),))


def _lane_jobs(units: int, lengths: tuple[int, ...], layout: str) -> Iterator[_Job]:
    for placement in islice(scopes.document_placements(units, lengths, layout), 0, None, _EVERY):
        if len(placement.lanes) > 1:  # one is a ring, of which there are enough
            text = f"{lengths} {layout} {[(lane.members, lane.tokens) for lane in placement.lanes]}"
            yield text, ReplicasJob(placements=((placement,),), layers=1, recompute=False)


def _route_jobs(
    size: int, nodes: tuple[int, ...], proxies: bool, widths: tuple[int, ...], first: int
) -> Iterator[_Job]:
    for pattern in range(first, min(first + _PATTERNS, 1 << (size * (size - 1))), _EVERY):
        table = table_of_readers(size, nodes, proxies, widths, pattern)
        job = ReplicasJob(placements=((table.placement.with_rows((Rows(0, 1, ()),)),),), layers=1, recompute=False)
        job.tables[0][0].__dict__["_parts"] = [(table.placement, (table,))]
        yield f"{nodes} {proxies} {widths} pattern {pattern}", job


def _large_jobs(first: int, stop: int) -> Iterator[_Job]:
    for seed in range(first, stop):
        job: PipelineJob | ReplicasJob = large_replicas(seed) if seed % 2 else large_pipelines(seed)
        yield f"large plan {seed}", job


_SAYS = {
    "blocks": "every visible pair is in one block; keys travel if another rank reads them",
    "routes": "what is read is there, what is sent is received, gradients come home once",
    "tokens": "every token is on one rank, in the order that the exchange gives",
    "heads": "every head is on one rank of a group with its KV head; exchanged bytes are the planned ones",
    "documents": "placements of documents: every token once, every visible pair once",
    "calls": "kernel calls of all ranks together: every pair of every head once",
    "plans": "every layer once in a pipeline, hops and order of passes of its stages",
    "batches": "every sample of a step is in one micro-batch",
    "hops": "between two stages every token gets to each rank that needs it, once",
    "gradients": "every contribution to a gradient arrives once; bytes are the planned ones",
    "zero": "every element of optimizer state has one place, also after a change of weights",
    "owners": "every element goes once from its old owner to its new one",
    "order": "no call of a step waits for itself, in whatever order messages arrive",
    "remap": "remapping gives every unit its tokens, and nobody sends what he keeps",
}
FAMILIES = (
    Family("blocks", _SAYS["blocks"], _block_portions, _block_cases),
    Family("routes", _SAYS["routes"], _route_portions, _route_cases),
    Family("tokens", _SAYS["tokens"], _token_portions, _token_cases),
    Family("heads", _SAYS["heads"], _head_portions, _head_cases),
    Family("documents", _SAYS["documents"], _document_portions, _document_cases),
    Family("calls", _SAYS["calls"], _call_portions, _call_cases),
    Family("plans", _SAYS["plans"], _plan_portions, _plan_cases),
    Family("batches", _SAYS["batches"], _batch_portions, _batch_cases),
    Family("hops", _SAYS["hops"], _hop_portions, _hop_cases),
    Family("gradients", _SAYS["gradients"], _gradient_portions, _gradient_cases),
    Family("zero", _SAYS["zero"], _zero_portions, _zero_cases),
    Family("owners", _SAYS["owners"], _owner_portions, _owner_cases),
    Family("order", _SAYS["order"], _order_portions, _order_cases),
    Family("remap", _SAYS["remap"], _remap_portions, _remap_cases),
)
