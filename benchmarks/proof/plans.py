"""Check the tables of pipelines, gradients, ZeRO and remapping against their definitions: shards and messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise, product

from ds_hetero.planner.document_search.remapping import remap
from ds_hetero.planner.documents import UnitCosts
from ds_hetero.sharding.buckets import fuse
from ds_hetero.sharding.gradient_chunks import Box, Chunk, chunks_of, gathered_elements, overlaps, reduced_elements
from ds_hetero.sharding.parameter_layouts import Cut, ParameterLayout
from ds_hetero.sharding.zero_partition import FlatGroup, repartition_moves
from ds_hetero.values.plans import BatchSplit, Plan, Stage
from ds_hetero.values.plans.activation_transfers import ActivationTransfer, held_intervals, transfers
from ds_hetero.values.plans.timetable import BACKWARD, FORWARD, one_f_one_b

Element = tuple[int, ...]


def hop_violations(source: Stage, target: Stage, length: int) -> Iterator[str]:
    """Check that every token arrives once, in order, from a rank that holds it; at one receiver if they hold copies."""
    messages = transfers(source, target, length)
    yield from hop_message_violations(source, target, length, messages)


def hop_message_violations(
    source: Stage, target: Stage, length: int, messages: Sequence[ActivationTransfer]
) -> Iterator[str]:
    """Check the same for given messages."""
    gathering = [(rank,) for rank in target.ranks] if target.schedule is not None else [target.ranks]
    for ranks in gathering:
        wanted = _positions(held_intervals(target, length, ranks[0]))
        got = [p for message in messages if message.receiver in ranks for p in _positions(message.intervals)]
        if sorted(got) != sorted(wanted):
            yield f"ranks {ranks} get the tokens {sorted(got)} of {sorted(wanted)}"
    if len({(message.sender, message.receiver) for message in messages}) != len(messages):
        yield "two messages of a hop have the same ends"
    for message in messages:
        sent_positions = _positions(held_intervals(source, length, message.sender))
        if not set(_positions(message.intervals)) <= set(sent_positions):
            yield f"rank {message.sender} sends {message.intervals}, and holds {sent_positions}"
        order = _positions(held_intervals(target, length, message.receiver))
        places = [order.index(p) for p in _positions(message.intervals) if p in order]
        if places != sorted(places) or message.tokens != len(places):
            yield f"{message} is not in the order of its receiver, or counts its tokens wrongly"


def _positions(intervals: Sequence[tuple[int, int]]) -> list[int]:
    return [p for start, stop in intervals for p in range(start, stop)]


def timetable_violations(in_flight: int, micro_batches: int) -> Iterator[str]:
    """Check that every micro-batch runs forward once, then backward once, with at most the allowed number between."""
    actions = one_f_one_b(in_flight, micro_batches)
    for kind in (FORWARD, BACKWARD):
        if [k for action, k in actions if action == kind] != list(range(micro_batches)):
            yield f"{kind} of {micro_batches} micro-batches in the order {actions}"
    open_: set[int] = set()
    for kind, k in actions:
        if kind == FORWARD:
            open_.add(k)
        elif k in open_:
            open_.remove(k)
        else:
            yield f"backward of micro-batch {k} before its forward: {actions}"
        if len(open_) > in_flight:
            yield f"{len(open_)} micro-batches between their passes, {in_flight} are allowed"


def batch_violations(split: BatchSplit, samples: int) -> Iterator[str]:
    """Check that each sample of a step is in one micro-batch, of no more than its size, in the order of one process.

    Pipelines with equally many micro-batches share every micro-batch of one process; others take a run of samples each.
    """
    by_pipeline = []
    for pipeline, (size, count) in enumerate(zip(split.micro_batch_sizes, split.micro_batches, strict=True)):
        parts = split.micro_batches_of(pipeline, samples)
        if len(parts) > count or any(not 0 < stop - start <= size for start, stop in parts):
            yield f"pipeline {pipeline} of {split} has the micro-batches {parts} of {samples} samples"
        by_pipeline.append(parts)
    if len(set(split.micro_batches)) == 1:
        in_order = [parts[k : k + 1] for k in range(split.micro_steps) for parts in by_pipeline]
    else:
        in_order = by_pipeline
    taken = [position for parts in in_order for position in _positions(parts)]
    if taken != list(range(samples)):
        yield f"{split} takes the samples {taken} of {samples}"


def plan_violations(plan: Plan) -> Iterator[str]:
    """Check that every layer is once in every pipeline, every rank at one place, and sends between stages are right."""
    assert plan.model is not None and plan.seq_len is not None
    places = [plan.place_of(rank) for rank in plan.ranks]
    if len(set(places)) != sum(len(pipeline.stages) for pipeline in plan.pipelines) or None in places:
        yield f"ranks {plan.ranks} have the places {places}"
    for i, pipeline in enumerate(plan.pipelines):
        layers = [layer for stage in pipeline.stages for layer in range(*(stage.layers or (0, 0)))]
        if layers != list(range(plan.model.num_layers)):
            yield f"pipeline {i} holds the layers {layers}"
        for earlier, later in pairwise(pipeline.stages):
            yield from hop_violations(earlier, later, plan.seq_len)
            yield from hop_violations(later, earlier, plan.seq_len)
        for j in range(len(pipeline.stages)):
            yield from timetable_violations(pipeline.in_flight(j), pipeline.micro_batches or 1)
    if plan.batch_split is not None:
        for samples in range(plan.batch_split.samples + 1):
            yield from batch_violations(plan.batch_split, samples)


def chunk_violations(layout: ParameterLayout, alignment: int, owner_weights: dict[int, float] | None) -> Iterator[str]:
    """Check that the chunks of a parameter hold each element once.

    Each replica's contribution arrives once at its owner.
    """
    yield from given_chunk_violations(layout, chunks_of("p", layout, alignment, owner_weights))


def given_chunk_violations(layout: ParameterLayout, chunks: Sequence[Chunk]) -> Iterator[str]:
    """Check the same for given chunks, and for the buckets that contain them."""
    elements_by_rank = {rank: set(_elements_of(layout.shape, cut, rank)) for cut in layout.cuts for rank in cut.ranks}
    owners = () if layout.owners is None else (layout.owners,)
    owned = {rank: set(_elements_of(layout.shape, cut, rank)) for cut in owners for rank in cut.ranks}
    times: Counter[Element] = Counter()
    for chunk in chunks:
        elements = [element for box in chunk.boxes for element in _elements(box)]
        times.update(elements)
        for cut in layout.cuts:
            inside = [rank for rank in cut.ranks if elements_by_rank[rank].issuperset(elements)]
            sends = [rank for rank in chunk.contributors if rank in cut.ranks]
            if sorted(sends) != sorted(inside) if cut.partial else len(sends) != 1 or sends[0] not in inside:
                yield f"{chunk}: {sends} contribute for the copies on {inside}"
            if sorted(rank for rank in chunk.holders if rank in cut.ranks) != sorted(inside):
                yield f"{chunk}: its values go to {chunk.holders}, and {inside} hold it"
        if layout.owners is not None and not owned.get(chunk.owner, set()).issuperset(elements):
            yield f"{chunk} goes to a rank that does not own it"
        if layout.owners is None and chunk.owner not in chunk.contributors:
            yield f"{chunk} is owned by a rank that does not hold it"
    if times != Counter(_elements(tuple((0, size) for size in layout.shape))):
        yield f"elements are {dict(times)} times in a chunk"
    yield from bucket_violations(chunks)


def bucket_violations(chunks: Sequence[Chunk]) -> Iterator[str]:
    """Check that each chunk is in one bucket, and that members send what others expect, as many bytes as planned."""
    dtypes, item_bytes = ({chunk.name: number for chunk in chunks} for number in (0, 4))
    for contributors, planned in ((_contributors, reduced_elements), (_holders, gathered_elements)):
        for bucket_bytes in (8, 1 << 20):
            buckets = fuse(chunks, contributors, dtypes, item_bytes, bucket_bytes)
            if Counter(chunk for bucket in buckets for chunk in bucket.chunks) != Counter(chunks):
                yield f"chunks are lost or doubled in the buckets {buckets}"
            sent: Counter[int] = Counter()
            for bucket in buckets:
                sizes = {rank: bucket.reduce_sizes(rank) for rank in bucket.members}
                for (i, a), (j, b) in product(enumerate(bucket.members), repeat=2):
                    if sizes[a][0][j] != sizes[b][1][i]:
                        yield f"{a} sends {b} {sizes[a][0][j]} elements, which expects {sizes[b][1][i]}"
                    if a != b:
                        sent[a if planned is reduced_elements else b] += sizes[a][0][j]
            for rank in {rank for bucket in buckets for rank in bucket.members}:
                if sent[rank] != planned(chunks, rank):
                    yield f"rank {rank} sends {sent[rank]} elements, {planned(chunks, rank)} are planned"


def _contributors(chunk: Chunk) -> tuple[int, ...]:
    return chunk.contributors


def _holders(chunk: Chunk) -> tuple[int, ...]:
    return chunk.holders


def _elements(box: Box) -> list[Element]:
    return list(product(*(range(start, stop) for start, stop in box)))


def _elements_of(shape: tuple[int, ...], cut: Cut, rank: int) -> list[Element]:
    """Return the elements that ``rank`` holds, by the definition of a shard."""
    every = _elements(tuple((0, size) for size in shape))
    start, stop = cut.part(rank) or (0, 0)
    if cut.dim is None:
        return every[start:stop]
    return [element for element in every if start <= element[cut.dim] < stop]


def partition_violations(saved: FlatGroup, wanted: FlatGroup) -> Iterator[str]:
    """Check that parts of a weighted partition hold each element once, and that copies fill another partition."""
    total = sum(saved.sizes)
    by_part = []
    for group in (saved, wanted):
        placed = {}
        for part in range(len(group.cut.sizes)):
            for piece in group.fragments(part):
                for i in range(piece.count):
                    key = piece.parameter, piece.in_parameter + i
                    if key in placed or not 0 <= piece.in_part + i < group.cut.sizes[part]:
                        yield f"{key} is in {placed.get(key)} and in part {part}"
                    placed[key] = part, piece.in_part + i
        if len(placed) != total:
            yield f"{len(placed)} of {total} elements are in a part"
        by_part.append(placed)
    where, target = ({at: key for key, at in placed.items()} for placed in by_part)
    filled: Counter[tuple[int, int]] = Counter()
    for part in range(len(wanted.cut.sizes)):
        for move in repartition_moves(saved, wanted, part):
            for i in range(move.count):
                filled[part, move.in_target + i] += 1
                if where.get((move.source, move.in_source + i)) != target.get((part, move.in_target + i)):
                    yield f"{move} brings part {part} other elements"
    if set(filled) != set(target) or any(times > 1 for times in filled.values()):
        yield f"{len(filled)} of {len(target)} elements are moved, {max(filled.values(), default=0)} times at most"


def owner_move_violations(old: Sequence[Sequence[Box]], new: Sequence[Sequence[Box]]) -> Iterator[str]:
    """Check that every element goes once from its old owner to its new one."""
    for wanted in new:
        got = Counter(e for own in old for part in overlaps(own, wanted) for e in _elements(part))
        if got != Counter(e for box in wanted for e in _elements(box)):
            yield f"an owner of {wanted} gets {dict(got)}"


def remap_violations(have: Sequence[int], want: Sequence[int], costs: UnitCosts) -> Iterator[str]:
    """Check that remapping gives every unit its wanted tokens, and that no unit sends tokens that it keeps."""
    tokens = list(have)
    for sender, receiver, count in remap(have, want, costs.node, costs):
        if count <= 0 or sender == receiver:
            yield f"unit {sender} sends {count} tokens to {receiver}"
        tokens[sender] -= count
        tokens[receiver] += count
        if have[sender] <= want[sender] or have[receiver] >= want[receiver]:
            yield f"unit {sender} with {have[sender]} of {want[sender]} sends to {receiver} with {have[receiver]}"
    if tokens != list(want):
        yield f"after remapping units have {tokens}, not {list(want)}"
