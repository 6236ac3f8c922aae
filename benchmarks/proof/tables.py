"""Check single tables against their definitions: what a rank computes, holds, sends and receives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from ds_hetero.batch.head_table import HeadTable, members_of
from ds_hetero.batch.ring_steps import KernelCall, Ring, make_rings
from ds_hetero.batch.ring_table import RingTable
from ds_hetero.batch.visible_blocks import Block
from ds_hetero.planner.document_search.traffic import KVBytes, exchange_bytes
from ds_hetero.values.placement import Placement, Range, Rows
from ds_hetero.values.schedule import Schedule


def visible_keys(length: int, documents: Iterable[Range], causal: bool, window: int | None) -> list[int]:
    """Return by query position the bitmask of the key positions that it sees: the definition of the mask."""
    masks = [0] * length
    for start, stop in documents:
        for q in range(start, stop):
            first = start if window is None else max(start, q - window + 1)
            masks[q] = (1 << (q + 1 if causal else stop)) - (1 << first)
    return masks


def block_violations(table: RingTable, visible: Sequence[int]) -> Iterator[str]:
    """Check that blocks cover each visible pair of the lane once, and that exactly the keys that others read are sent.

    Args:
        table: of a lane whose batch has one set of rows.
        visible: see `visible_keys`.
    """
    positions = [[p for a, b in chunks for p in range(a, b)] for chunks in table.lane.intervals]
    prefixes = [list(accumulate((1 << p for p in held), initial=0)) for held in positions]
    seen = dict.fromkeys((p for held in positions for p in held), 0)
    lane_mask = sum(1 << p for p in seen)
    needed: list[set[int]] = [set() for _ in positions]
    for q, queries in enumerate(positions):
        for k, prefix in enumerate(prefixes):
            ((_, blocks),) = table.blocks_between(q, k)
            if q != k and bool(blocks) != table.reads(q, k):
                yield f"position {q} has {len(blocks)} blocks of {k}, but reads says {table.reads(q, k)}"
            for block in blocks:
                if q != k:
                    needed[k].update(range(*block.k))
                for i, (first, last) in enumerate(_keys_by_row(block), block.q[0]):
                    keys, at = prefix[last] - prefix[first], queries[i]
                    if seen[at] & keys:
                        yield f"query {at} is computed twice with the keys {seen[at] & keys:b}"
                    seen[at] |= keys
    for at, keys in seen.items():
        if keys != visible[at] & lane_mask:
            yield f"query {at} sees {keys:b}, and should see {visible[at] & lane_mask:b}"
    for k, read in enumerate(needed):
        travel = [i for a, b in table.travelling_keys(k) for i in range(a, b)]
        if travel != sorted(read):
            yield f"of position {k} the keys {travel} travel, and {sorted(read)} are read"


def _keys_by_row(block: Block) -> Iterator[Range]:
    """Yield the local keys ``[first, last)`` of every query of a block."""
    (q0, q1), (k0, k1), lo, hi = block
    for i in range(q1 - q0):
        first = k0 if lo is None else min(max(k0, k0 + i + lo), k1)
        last = k1 if hi is None else max(min(k1, k0 + i + hi + 1), first)
        yield first, last


def token_violations(placement: Placement) -> Iterator[str]:
    """Check that every position is on one rank, and that a group's tokens in rank order are its unit's in the ring."""
    all_positions = [p for rank in placement.schedule.ranks for p in placement.positions(rank)]
    if sorted(all_positions) != list(range(placement.length)):
        yield f"ranks hold the positions {sorted(all_positions)} of {placement.length}"
    for rank in placement.schedule.ranks:
        if len(placement.positions(rank)) != placement.tokens(rank):
            yield f"rank {rank} holds {len(placement.positions(rank))} tokens, not {placement.tokens(rank)}"
    for part in placement.parts:
        inner = part.placement
        for unit, group in enumerate(inner.schedule.ring_groups):
            by_rank = [p for rank in sorted(group.ranks) for p in inner.positions(rank)]
            by_lane = [
                p
                for lane in inner.lanes
                if unit in lane.members
                for a, b in lane.intervals[lane.members.index(unit)]
                for p in range(a, b)
            ]
            if by_rank != by_lane:
                yield f"unit {unit} has {by_rank} by its ranks, and {by_lane} by its lanes"


def head_violations(placement: Placement) -> Iterator[str]:
    """Check that in every group each head is on one rank with its KV head; all-to-alls receive what is sent."""
    schedule = placement.schedule
    unit = 3  # elements of a head
    for group in schedule.groups:
        owners = Counter(h for rank in group.ranks for h in range(*group.head_range(rank)))
        if owners != Counter(range(schedule.num_heads)):
            yield f"heads of {group} are computed {dict(owners)} times"
        ranks = sorted(group.ranks)
        members = members_of(placement, group, ranks)
        tables = [HeadTable(members, i, schedule.num_heads, schedule.num_kv_heads) for i in range(len(ranks))]
        for i, table in enumerate(tables):
            for j, other in enumerate(tables):
                for sizes in (HeadTable.qkv_sizes, HeadTable.output_sizes):
                    if sizes(table, unit)[0][j] != sizes(other, unit)[1][i]:
                        yield f"{sizes.__name__}: rank {ranks[i]} sends {ranks[j]} {sizes(table, unit)[0][j]} elements"
            for q in range(*members[i].q):
                if not members[i].kv[0] <= q // schedule.queries_per_kv_head < members[i].kv[1]:
                    yield f"rank {ranks[i]} computes head {q} without its KV head"
        yield from _shared_kv_violations(tables[0])
    sent = _exchanged_elements(placement)
    planned = exchange_bytes(placement.with_rows((Rows(0, 1, ()),)), [0] * schedule.sp_size, KVBytes(2, 2, 2))
    if planned["inside_nodes"] != 2 * sent:  # the backward sends as much
        yield f"{2 * sent} elements are exchanged, {planned['inside_nodes']} are planned"


def _exchanged_elements(placement: Placement) -> int:
    """Return the elements sent between different ranks in the forward, with one element per head."""
    total = 0
    for group in placement.schedule.groups:
        members = members_of(placement, group, sorted(group.ranks))
        for i in range(len(members)):
            table = HeadTable(members, i, placement.schedule.num_heads, placement.schedule.num_kv_heads)
            for sizes in (table.qkv_sizes(1)[0], table.output_sizes(1)[0]):
                total += sum(size for j, size in enumerate(sizes) if j != i)
    return total


def _shared_kv_violations(table: HeadTable) -> Iterator[str]:
    """Check that the gradient of a KV head is written first, then added to once by every member that has the head."""
    written: Counter[int] = Counter()
    for index, shared in table.shared_kv_heads():
        first, last = table.members[index].kv
        for head in range(first, last):
            if (written[head] > 0) != (head < first + shared):
                yield f"the gradient of KV head {head} is written over, or added to nothing"
            written[head] += 1
    expected_counts = Counter(head for member in table.members for head in range(*member.kv))
    if written != expected_counts or set(expected_counts) != set(range(table.num_kv_heads)):
        yield f"gradients of KV heads come {dict(written)} times, not {dict(expected_counts)}"


def sub_ring_violations(placement: Placement) -> Iterator[str]:
    """Check that sub-rings hold every head once for each pair of groups, and pair queries with their KV head."""
    schedule = placement.schedule
    (lane,) = placement.lanes
    table = RingTable(placement, lane, True, None)
    of_rank = {rank: make_rings([table], rank)[0] for rank in schedule.ranks}
    tasks = schedule.sub_ring_tasks(lane.members)
    if [h for piece in tasks for h in range(piece.start, piece.stop)] != list(range(schedule.num_heads)):
        yield f"sub-rings {tasks} do not hold {schedule.num_heads} heads once"
    by_tag: dict[int, list[tuple[int, tuple[int, ...], int]]] = {}
    for rank, ring in of_rank.items():
        computed: list[int] = []
        for sub in ring.sub_rings:
            if sub.ranks[ring.position] != rank:
                yield f"rank {rank} takes part in a sub-ring of {sub.ranks}"
            by_tag.setdefault(sub.tag, []).append((rank, sub.ranks, sub.kv_heads.stop - sub.kv_heads.start))
            for pair in _paired_heads(schedule, rank, sub.segments, sub.kv_heads):
                computed.append(pair[0])
                if pair[1] != pair[0] // schedule.queries_per_kv_head:
                    yield f"rank {rank} computes head {pair[0]} with KV head {pair[1]}"
        group = schedule.ring_groups[lane.members[ring.position]]
        if computed != list(range(*group.head_range(rank))):
            yield f"rank {rank} computes the heads {computed} of {group.head_range(rank)}"
    for tag, parts in by_tag.items():
        ranks = parts[0][1]
        if sorted(ranks) != sorted(rank for rank, _, _ in parts) or len({part[1:] for part in parts}) != 1:
            yield f"the ranks of sub-ring {tag} differ in it: {parts}"


def _paired_heads(
    schedule: Schedule, rank: int, segments: Sequence[tuple[slice, slice]], kv_heads: slice
) -> Iterator[tuple[int, int]]:
    """Yield ``(query head, KV head)`` of all segments.

    A kernel pairs them in order, equally many queries per KV head.
    """
    first_q, last_q = schedule.ring_groups[schedule.ring_position(rank)].head_range(rank)
    first_kv, _ = schedule.kv_heads(first_q, last_q)
    for q, kv in segments:
        per_kv, rest = divmod(q.stop - q.start, kv.stop - kv.start)
        assert not rest, (q, kv)
        for i in range(q.stop - q.start):
            yield first_q + q.start + i, first_kv + kv_heads.start + kv.start + i // per_kv


def composite_violations(placement: Placement, causal: bool, window: int | None) -> Iterator[str]:
    """Check that all ranks' kernel calls compute every visible pair of every query head once, with its KV head."""
    schedule = placement.schedule
    visible = visible_keys(placement.length, placement.rows[0].documents, causal, window)
    computed: Counter[tuple[int, int, int]] = Counter()
    for part in placement.parts:
        inner = part.placement
        tables = [RingTable(inner, lane, causal, window) for lane in inner.lanes]
        for rank in schedule.ranks:
            for ring in make_rings(tables, rank):
                for head, kv_head, q, k in _computed(inner, ring, rank):
                    if kv_head != head // schedule.queries_per_kv_head:
                        yield f"rank {rank} computes head {head} with KV head {kv_head}"
                    computed[head, part.outer((q, q + 1))[0], part.outer((k, k + 1))[0]] += 1
    expected_counts = Counter(
        (head, q, k)
        for head in range(schedule.num_heads)
        for q, keys in enumerate(visible)
        for k in range(placement.length)
        if keys >> k & 1
    )
    if computed != expected_counts:
        superfluous, missing = computed - expected_counts, expected_counts - computed
        yield f"computed more than once or in vain: {dict(superfluous)}, never: {dict(missing)}"


def _computed(placement: Placement, ring: Ring, rank: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield ``(query head, KV head, query position, key position)`` of all kernel calls of a rank in a lane."""
    schedule, table = placement.schedule, ring.table
    positions = [[p for a, b in chunks for p in range(a, b)] for chunks in table.lane.intervals]
    for source, by_sub_ring in enumerate(ring.calls):
        keys = positions[source]
        if source != ring.position:  # as they have travelled, one behind the other
            keys = [keys[i] for a, b in table.travelling_keys(source) for i in range(a, b)]
        for sub, calls in zip(ring.sub_rings, by_sub_ring, strict=True):
            for call in calls:
                pairs = list(_paired_heads(schedule, rank, [(call.queries[1], call.keys[1])], sub.kv_heads))
                for q, k in _pairs_of(call):
                    for head, kv_head in pairs:
                        yield head, kv_head, positions[ring.position][q], keys[k]


def _pairs_of(call: KernelCall) -> Iterator[tuple[int, int]]:
    (_, _, queries), (_, _, keys), band, _ = call
    for i, q in enumerate(range(queries.start, queries.stop)):
        for j, k in enumerate(range(keys.start, keys.stop)):
            if (band.lo is None or j - i >= band.lo) and (band.hi is None or j - i <= band.hi):
                yield q, k
