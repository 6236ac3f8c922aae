"""Kernel calls and messages of one rank in every ring step, for each lane of its group.

A `Ring` is made once per batch layout and kind of mask, and every layer uses it. It consists of slices and bands;
nothing here touches a tensor.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple

from ds_hetero.batch.ring_table import RingTable
from ds_hetero.batch.routes import Round
from ds_hetero.batch.tiles import Band
from ds_hetero.values.schedule import Schedule


class KernelCall(NamedTuple):
    """One call of an attention kernel: some queries against some keys."""

    queries: tuple[slice, slice, slice]  # rows, heads, tokens: index into this rank's [B, h, S, ...] of the lane
    keys: tuple[slice, slice, slice]  # rows, heads, tokens: index into one sub-ring's [B, heads, tokens, D]
    band: Band  # mask: the keys that each query sees
    first: bool  # whether no earlier call of the forward has these queries: its result is stored, later ones are merged


@dataclass(frozen=True)
class SubRing:
    """This rank's part of one sub-ring task: a range of heads that one rank of every group in the lane computes."""

    tag: int  # tag of its messages: the same on all its ranks, different for every task of the placement
    ranks: tuple[int, ...]  # global rank at every position of the lane's ring
    kv_heads: slice  # this task's KV heads among those of this rank
    segments: tuple[tuple[slice, slice], ...]  # (this rank's query heads, the task's KV heads), see `_uniform_segments`


@dataclass(frozen=True, eq=False)
class Ring:
    """Ring steps of one rank in one lane, for one batch layout and one kind of mask.

    Args:
        call_cache: kernel calls that `ds_hetero.runtime.attention.lane_passes` has prepared from ``calls`` in the first
            layer, for all later layers; by (source, whether the kernel takes packed blocks).
    """

    table: RingTable  # blocks and transfers of all members of the lane
    position: int  # position of this rank's group in the ring
    tokens: slice  # the lane's tokens among those of the group
    num_q: int  # query heads of this rank
    sub_rings: tuple[SubRing, ...]  # sub-rings of this rank
    call_cache: dict[tuple[int, bool], Any] = field(default_factory=dict, repr=False)

    @property
    def size(self) -> int:
        """Number of members of the lane: K."""
        return self.table.size

    @property
    def steps(self) -> int:
        """Number of steps of the forward, and of the backward."""
        return self.table.steps

    def forward_source(self, step: int) -> int | None:
        """Return the ring position whose KV this rank works on in a forward step; None if the rank is idle.

        The first step is on this rank's own KV.
        """
        return self.table.forward_source(self.position, step)

    def backward_source(self, step: int) -> int | None:
        """Return the ring position whose KV this rank works on in a backward step; None if the rank is idle.

        The last step is on this rank's own KV.
        """
        return self.table.forward_source(self.position, self.steps - 1 - step)

    @property
    def kept_source(self) -> int | None:
        """Ring position whose KV stays on this rank from the forward to the backward; None if there is none."""
        return self.table.kept_source(self.position)

    @property
    def num_kept_blocks(self) -> int:
        """Number of tensors of this KV, one for each sub-ring."""
        return 0 if self.kept_source is None else len(self.sub_rings)

    @property
    def _num_rows(self) -> int:
        """Number of rows of the batch."""
        return self.table.placement.rows[-1].stop

    def num_travelling_keys(self, source: int) -> int:
        """Count the tokens whose KV travels from a ring position to others."""
        return sum(stop - start for start, stop in self.table.travelling_keys(source))

    @cached_property
    def calls(self) -> tuple[tuple[tuple[KernelCall, ...], ...], ...]:
        """Kernel calls ``[source][sub-ring]``, in the order of the forward steps."""
        # Ranges of queries that have a result so far, by first head and first row: only their first call stores.
        covered: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        calls_of_source: dict[int, tuple[tuple[KernelCall, ...], ...]] = {}
        for step in range(self.steps):
            source = self.forward_source(step)
            if source is not None:
                calls_of_source[source] = tuple(tuple(self._calls_of(source, sub, covered)) for sub in self.sub_rings)
        return tuple(calls_of_source[source] for source in range(self.size))

    def _calls_of(
        self, source: int, sub: SubRing, covered: dict[tuple[int, int], list[tuple[int, int]]]
    ) -> Iterator[KernelCall]:
        """Yield the kernel calls on the keys of ``source`` in one sub-ring.

        Args:
            covered: ranges of queries that have a result already, by (first head, first row); gets those of the calls.
        """
        # The rank's own keys are read from its tensor; of other keys only the travelling ones have arrived.
        packed = _PackedKeys(() if source == self.position else self.table.travelling_keys(source))
        for q_heads, kv_heads in sub.segments:
            for rows, blocks in self.table.blocks_between(self.position, source):
                batch = slice(rows.start, rows.stop)
                for block in blocks:
                    yield KernelCall(
                        queries=(batch, q_heads, slice(*block.q)),
                        keys=(batch, kv_heads, packed.place(block.k)),
                        band=Band(block.lo, block.hi),
                        first=_claim(covered[q_heads.start, rows.start], block.q),
                    )

    @cached_property
    def single_call(self) -> KernelCall | None:
        """The kernel call that computes all of this rank's attention; None if there are several calls.

        A single call needs no slices of tensors, and its result is not merged with others.
        """
        if self.size > 1:
            return None
        all_calls = self._all_calls()
        if len(all_calls) != 1:
            return None
        (call,) = all_calls
        tokens = slice(0, self.tokens.stop - self.tokens.start)
        all_queries = (slice(0, self._num_rows), slice(0, self.num_q), tokens)
        return call if call.queries == all_queries and call.keys[2] == tokens else None

    @cached_property
    def first_calls_cover_queries(self) -> bool:
        """Whether every query is in a call that is its first one: then ``out`` and ``lse`` need no initial values."""
        # First calls are disjoint, so that sizes tell.
        covered = sum(_volume(call.queries) for call in self._all_calls() if call.first)
        return covered == self._num_rows * self.num_q * _size(self.tokens)

    @cached_property
    def sources_with_each_key_once(self) -> frozenset[int]:
        """Sources of whose KV block every key is in exactly one call of each sub-ring.

        The gradient of such a block is written by the calls, without zeros before.
        """
        sources = set()
        for source, calls_of_source in enumerate(self.calls):
            is_own = source == self.position
            num_keys = _size(self.tokens) if is_own else self.num_travelling_keys(source)
            if all(
                _fill_once([call.keys for call in calls], (self._num_rows, _size(sub.kv_heads), num_keys))
                for sub, calls in zip(self.sub_rings, calls_of_source, strict=True)
            ):
                sources.add(source)
        return frozenset(sources)

    @cached_property
    def stores_own_key_gradients(self) -> bool:
        """Whether this rank's calls write the gradient of its own KV before any other part of it arrives.

        Then it needs no zeros before. Two sub-rings that share a KV head both have a part of its gradient.
        """
        heads = sorted((sub.kv_heads.start, sub.kv_heads.stop) for sub in self.sub_rings)
        shares_a_head = any(earlier[1] > later[0] for earlier, later in pairwise(heads))
        arrives_early = any(
            transfer.source == self.position and transfer.due < self.steps
            for round_ in self.backward_grad_rounds
            for transfer in round_.receives
        )
        return self.position in self.sources_with_each_key_once and not shares_a_head and not arrives_early

    @cached_property
    def pairs(self) -> int:
        """Number of query-key pairs that this rank computes, over all heads and rows."""
        total = 0
        for call in self._all_calls():
            rows, heads, queries = map(_size, call.queries)
            total += rows * heads * call.band.pairs(queries, _size(call.keys[2]))
        return total

    def _all_calls(self) -> list[KernelCall]:
        """List the calls of all sources and sub-rings."""
        all_calls: list[KernelCall] = []
        for calls_of_source in self.calls:
            for calls_of_sub_ring in calls_of_source:
                all_calls += calls_of_sub_ring
        return all_calls

    @cached_property
    def forward_rounds(self) -> tuple[Round, ...]:
        """KV that this rank receives and sends during each forward step."""
        return self.table.forward_rounds(self.position)

    @cached_property
    def backward_kv_rounds(self) -> tuple[Round, ...]:
        """KV that this rank receives and sends during each backward step."""
        return self.table.backward_kv_rounds(self.position)

    @cached_property
    def backward_grad_rounds(self) -> tuple[Round, ...]:
        """Gradients dK/dV that this rank receives and sends during each backward step."""
        return self.table.backward_grad_rounds(self.position)

    @cached_property
    def needed_after_forward_step(self) -> tuple[frozenset[int], ...]:
        """Sources whose KV is still needed after each forward step: to work on, to send, or for the backward."""
        sources = list(map(self.forward_source, range(self.steps)))
        return self._needed_after(sources, self.forward_rounds, self.kept_source)

    @cached_property
    def needed_after_backward_step(self) -> tuple[frozenset[int], ...]:
        """Sources whose KV is still needed after each backward step: to work on or to send."""
        sources = list(map(self.backward_source, range(self.steps)))
        return self._needed_after(sources, self.backward_kv_rounds, None)

    def _needed_after(
        self, sources: Sequence[int | None], rounds: Sequence[Round], kept_source: int | None
    ) -> tuple[frozenset[int], ...]:
        """Return the sources whose KV buffer must stay after each step, collected from the last step to the first.

        The rank's own KV counts only while it is sent: kernel calls read it from the tensor itself, not from a buffer.

        Args:
            sources: the source that the rank works on, by step.
            rounds: messages of the rank, by step.
            kept_source: source whose KV stays after the last step; None for none.
        """
        needed_later = set[int]() if kept_source is None else {kept_source}
        needed = []
        for source, messages in zip(reversed(sources), reversed(rounds), strict=True):
            needed.append(frozenset(needed_later))
            if source is not None and source != self.position:
                needed_later.add(source)
            needed_later.update(transfer.source for transfer in messages.sends)
        return tuple(reversed(needed))


class _PackedKeys:
    """Translates token ranges of a group into ranges of a buffer that holds only some keys of the group, in ``ranges``.

    Ranges (2, 5) and (8, 10) are packed at (0, 3) and (3, 5), so tokens (8, 9) are at (3, 4). Without ranges the
    buffer is the group's tensor itself, and ranges stay as they are.
    """

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        self._starts = [start for start, _ in ranges] or [0]
        sizes = (stop - start for start, stop in ranges)
        packed_starts = accumulate(sizes, initial=0)  # and the end, which zip drops
        self._offsets = [packed - start for packed, start in zip(packed_starts, self._starts, strict=False)]

    def place(self, part: tuple[int, int]) -> slice:
        """Return the slice of the buffer for a range inside one of them."""
        offset = self._offsets[bisect_right(self._starts, part[0]) - 1]
        return slice(part[0] + offset, part[1] + offset)


def make_rings(tables: Sequence[RingTable], rank: int) -> tuple[Ring, ...]:
    """Make the rings of a global ``rank``, one for each lane of its group.

    Args:
        tables: ring tables of all lanes of the placement.
    """
    schedule = tables[0].placement.schedule
    unit = schedule.ring_position(rank)
    first_q, last_q = schedule.ring_groups[unit].head_range(rank)
    rings, start = [], 0  # first token of the lane among those of the group
    for number, table in enumerate(tables):
        if unit in table.lane.members:
            position = table.lane.members.index(unit)
            stop = start + sum(tokens[position] for tokens in table.lane.tokens)
            sub_rings = _sub_rings(schedule, table.lane.members, rank, number)
            rings.append(Ring(table, position, slice(start, stop), last_q - first_q, sub_rings))
            start = stop
    return tuple(rings)


def _sub_rings(schedule: Schedule, members: tuple[int, ...], rank: int, lane: int) -> tuple[SubRing, ...]:
    """List the sub-ring tasks of ``rank`` in the lane with number ``lane``."""
    groups = [schedule.ring_groups[member] for member in members]
    first_q, last_q = next(group.head_range(rank) for group in groups if rank in group.ranks)
    first_kv, _ = schedule.kv_heads(first_q, last_q)
    sub_rings = []
    for index, task in enumerate(schedule.sub_ring_tasks(members)):
        if rank not in task.owners:
            continue
        task_first_kv, task_stop_kv = schedule.kv_heads(task.start, task.stop)
        segments = []
        for start, stop in _uniform_segments(task.start, task.stop, schedule.queries_per_kv_head):
            segment_first_kv, segment_stop_kv = schedule.kv_heads(start, stop)
            # Query heads are counted among the rank's, KV heads among the task's.
            q_heads = slice(start - first_q, stop - first_q)
            kv_heads = slice(segment_first_kv - task_first_kv, segment_stop_kv - task_first_kv)
            segments.append((q_heads, kv_heads))
        tag = lane * schedule.num_heads + index  # a lane has at most as many tasks as heads
        kv_heads = slice(task_first_kv - first_kv, task_stop_kv - first_kv)
        sub_rings.append(SubRing(tag, task.owners, kv_heads, tuple(segments)))
    return tuple(sub_rings)


def _uniform_segments(start: int, stop: int, per_kv: int) -> list[tuple[int, int]]:
    """Split a range of query heads into at most three segments with equally many query heads on each KV head.

    Kernels of grouped-query attention need that. With 4 query heads per KV head, heads 2-10 become 2-3 (two on KV head
    0), 4-7 (four on KV head 1) and 8-10 (three on KV head 2).
    """
    first_full = -(-start // per_kv) * per_kv  # first query head of the first complete KV head
    stop_full = stop // per_kv * per_kv  # query head after the last complete KV head
    if first_full >= stop_full:  # no complete KV head inside: one segment, or two around the border of two KV heads
        first_full = stop_full = first_full if start < first_full < stop else stop
    segments = ((start, first_full), (first_full, stop_full), (stop_full, stop))
    return [(first, last) for first, last in segments if first < last]


def _claim(covered: list[tuple[int, int]], new: tuple[int, int]) -> bool:
    """Add a range to sorted disjoint ranges; return True if it overlaps none of them.

    Ranges that it overlaps are merged with it. Example: adding (3, 6) to (0, 4) and (8, 9) gives (0, 6) and (8, 9), and
    returns False.
    """
    low = bisect_left(covered, new)
    if low > 0 and covered[low - 1][1] > new[0]:
        low -= 1
    high = low
    while high < len(covered) and covered[high][0] < new[1]:
        high += 1
    overlapped = covered[low:high]
    if overlapped:
        covered[low:high] = [(min(new[0], overlapped[0][0]), max(new[1], overlapped[-1][1]))]
    else:
        covered[low:high] = [new]
    return not overlapped


def _fill_once(parts: Sequence[tuple[slice, slice, slice]], shape: tuple[int, int, int]) -> bool:
    """Whether the parts (rows, heads, tokens) of an array of this shape are disjoint and fill it.

    Parts with the same rows and heads may be told apart by tokens. Of parts with different rows and heads, which never
    overlap, sizes tell.
    """
    if sum(map(_volume, parts)) != prod(shape):
        return False
    covered: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    return all(_claim(covered[rows.start, heads.start], (part.start, part.stop)) for rows, heads, part in parts)


def _volume(part: tuple[slice, slice, slice]) -> int:
    return prod(map(_size, part))


def _size(part: slice) -> int:
    size: int = part.stop - part.start
    return size
