"""Calls and waits of every rank in a training step, in the order of the runtime, computed without tensors.

The tables are the package's: rounds of lanes, split sizes of all-to-alls, sends between stages and the order of their
passes, chunks of gradients and their buckets. The order in which the runtime's modules use them is written here a
second time, in short. tests/dist/test_message_order.py records steps of the real modules and compares them call by call
and wait by wait, so that the two cannot diverge.

Each layer of these steps is a linear layer, attention and a linear layer, with the weights ``layers.0.qkv`` and
``layers.0.out``; the first stage has an ``embedding``, the last a ``head``.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import NamedTuple

from benchmarks.proof.events import Call, Event, Message, Wait
from benchmarks.proof.order import violations
from ds_hetero.batch.head_table import HeadTable, members_of
from ds_hetero.batch.ring_colours import num_ring_colours, ring_colour
from ds_hetero.batch.ring_steps import Ring, make_rings
from ds_hetero.batch.ring_table import RingTable
from ds_hetero.batch.routes import Transfer
from ds_hetero.batch.token_moves import move_table
from ds_hetero.sharding.buckets import Bucket, fuse
from ds_hetero.sharding.gradient_chunks import Chunk, chunks_of
from ds_hetero.sharding.parameter_layouts import Cut, ParameterLayout
from ds_hetero.sharding.zero_partition import ALIGNMENT
from ds_hetero.values.placement import Placement, Rows, stream_placement
from ds_hetero.values.plans import Plan, Stage
from ds_hetero.values.plans.activation_transfers import transfers
from ds_hetero.values.plans.timetable import BACKWARD, FORWARD, gradients_due, one_f_one_b
from ds_hetero.values.schedule import Schedule
from ds_hetero.values.splits import share

HEAD_DIM, ITEM_BYTES, DTYPE = 8, 4, "float32"
FAR, COLOUR = "between nodes", "ring colour"
ACTIVATIONS, GRADIENTS, COPIES, SYNC = "activations", "gradients", "copies", "gradient sync"
_GATHERS_IN_FLIGHT = 4
_KV, _GRADIENT_TAG = 0, 1 << 30


class Log:
    """Events of one rank.

    Args:
        rank: global.
        by_order: messages of a communicator match in the order of posting, and those of a round are posted together, as
            for NCCL. Otherwise every message is posted alone, and matches by its ends and its tag, as for gloo.
    """

    def __init__(self, rank: int, by_order: bool) -> None:
        self.rank, self.by_order = rank, by_order
        self.events: list[Event] = []
        self._calls = 0
        self._waited: set[int] = set()

    def collective(
        self,
        name: str,
        ranks: Sequence[int],
        purpose: str = "",
        shape: tuple[object, ...] = (),
        splits: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> int:
        """Post a collective of these ranks, ascending; return its number."""
        both = None if splits is None else (tuple(splits[0]), tuple(splits[1]))
        return self._call(name, ranks, purpose, shape, both, ())

    def messages(self, ranks: Sequence[int], purpose: str, messages: Sequence[Message]) -> list[int]:
        """Post messages with global peers in a group of these ranks; return the numbers of their calls."""
        in_group = [message._replace(peer=ranks.index(message.peer)) for message in messages]
        if not messages:
            return []
        if self.by_order:
            return [self._call("", ranks, purpose, (), None, tuple(in_group))]
        return [self._call("", ranks, f"{purpose} {_ends(self, m, ranks)}", (), None, (m,)) for m in in_group]

    def wait(self, *calls: int) -> None:
        """Wait for calls; calls that were waited for before are skipped."""
        for call in calls:
            if call not in self._waited:
                self._waited.add(call)
                self.events.append(Wait(call))

    def _call(
        self,
        name: str,
        ranks: Sequence[int],
        purpose: str,
        shape: tuple[object, ...],
        splits: tuple[tuple[int, ...], tuple[int, ...]] | None,
        messages: tuple[Message, ...],
    ) -> int:
        self._calls += 1
        communicator, index = communicator_of(ranks, purpose), ranks.index(self.rank)
        self.events.append(
            Call(self._calls, communicator, index, len(ranks), name, shape, splits, messages, "a step's tables")
        )
        return self._calls


@cache
def _name(ranks: tuple[int, ...], purpose: str) -> str:
    return f"{purpose} {list(ranks)}".strip()


def communicator_of(ranks: Sequence[int], purpose: str) -> str:
    """Return the name of a group's communicator."""
    return _name(tuple(ranks), purpose)


def _ends(log: Log, message: Message, ranks: Sequence[int]) -> str:
    local_index = ranks.index(log.rank)
    sender, receiver = (local_index, message.peer) if message.sends else (message.peer, local_index)
    return f"from {sender} to {receiver} with tag {message.tag}"


# --- attention ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class AttentionTables:
    """One layer's attention of a batch, on all ranks of a stage or replica.

    Args:
        placement: with the rows and their documents.
        head_dim: D.
        kv_bytes: of an element of keys, values and their all-to-alls.
        gradient_bytes: of an element of their partial gradients.
    """

    placement: Placement
    causal: bool = True
    window: int | None = None
    head_dim: int = HEAD_DIM
    kv_bytes: int = ITEM_BYTES
    gradient_bytes: int = ITEM_BYTES
    _rings: dict[tuple[int, int], tuple[Ring, ...]] = field(default_factory=dict)

    @cached_property
    def _parts(self) -> list[tuple[Placement, tuple[RingTable, ...]]]:
        parts = []
        for placement, _ in self.placement.parts:
            window = None if self.window is not None and self.window >= placement.length else self.window
            parts.append((placement, tuple(RingTable(placement, x, self.causal, window) for x in placement.lanes)))
        return parts

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return self.placement.rows[-1].stop

    def post(self, log: Log, backward: bool) -> None:
        """Post the calls of `ds_hetero.runtime.attention.attention`, in the forward or in the backward."""
        schedule = self.placement.schedule
        before, after = schedule.num_heads + 2 * schedule.num_kv_heads, schedule.num_heads
        self._post_moves(log, after if backward else before, back=False)
        self._post_parts(log, backward)
        self._post_moves(log, before if backward else after, back=True)

    def _post_moves(self, log: Log, heads: int, back: bool) -> None:
        if self.placement.moves:
            sizes = move_table(self.placement, log.rank).sizes(self.rows * self.head_dim * heads, back=back)
            log.wait(_all_to_all(log, self.placement.schedule.ranks, sizes))

    def _post_parts(self, log: Log, backward: bool) -> None:
        for number, (placement, tables) in list(enumerate(self._parts))[:: -1 if backward else 1]:
            if (log.rank, number) not in self._rings:
                self._rings[log.rank, number] = make_rings(tables, log.rank)
            exchange, ranks = self._exchange(placement, log.rank)
            unit = self.rows * self.head_dim
            if exchange is not None and backward:
                log.wait(_all_to_all(log, ranks, exchange.output_sizes(unit)[::-1]))
            elif exchange is not None:
                log.wait(_all_to_all(log, ranks, exchange.qkv_sizes(unit)))
            self._post_rings(log, self._rings[log.rank, number], placement.schedule, backward)
            if exchange is not None and backward:
                log.wait(_all_to_all(log, ranks, exchange.qkv_sizes(unit)[::-1]))
            elif exchange is not None:
                log.wait(_all_to_all(log, ranks, exchange.output_sizes(unit)))

    def _exchange(self, placement: Placement, rank: int) -> tuple[HeadTable | None, tuple[int, ...]]:
        """Return the table of a rank's all-to-all, and the ranks of its group; no table if it has none."""
        schedule = placement.schedule
        group = schedule.ring_groups[schedule.ring_position(rank)]
        ranks = tuple(sorted(group.ranks)) if schedule == self.placement.schedule else schedule.ranks
        if len(ranks) == 1:
            return None, ranks
        members = members_of(placement, group, ranks)
        return HeadTable(members, ranks.index(rank), schedule.num_heads, schedule.num_kv_heads), ranks

    def _post_rings(self, log: Log, rings: Sequence[Ring], schedule: Schedule, backward: bool) -> None:
        """Post lanes in the order of `ds_hetero.runtime.attention.channel`.

        Where tags match messages, lanes may overtake.
        """
        unfinished: list[int] = []
        num_colours = num_ring_colours(self.placement.schedule)  # groups are made for the replica's own schedule
        groups = _RingGroups(schedule, log.rank, num_colours)
        lanes = [self._rounds(log, ring, groups, backward, unfinished) for ring in rings]
        for lane in lanes:
            next(lane)
        for lane in lanes:
            for works in lane:
                log.wait(*works)
        if any(ring.size > 1 for ring in rings):
            log.wait(*unfinished)

    def _rounds(
        self, log: Log, ring: Ring, groups: _RingGroups, backward: bool, unfinished: list[int]
    ) -> Iterator[list[int]]:
        """Post a lane's rounds; yield after the first one, and then before every step its required waits."""
        kv, gradients = (
            2 * self.rows * self.head_dim * self.kv_bytes,
            2 * self.rows * self.head_dim * self.gradient_bytes,
        )
        if backward:
            traffic = [(ring.backward_kv_rounds, kv, _KV), (ring.backward_grad_rounds, gradients, _GRADIENT_TAG)]
        else:
            traffic = [(ring.forward_rounds, kv, _KV)]
        pending: dict[int, list[int]] = defaultdict(list)
        for step in range(ring.steps):
            posted = [
                _Due(m, t.due, t.due > step + 1)
                for sends in (False, True)
                for rounds, unit, tag in traffic
                for t in rounds[step][sends]
                for m in _moved(ring, t, unit, tag, sends)
            ]
            for due, works in _post_round(log, groups, posted, unfinished):
                pending[due] += works
            if step == 0:
                yield []
            yield pending.pop(step + 1, [])


def _all_to_all(log: Log, ranks: Sequence[int], splits: tuple[Sequence[int], Sequence[int]], purpose: str = "") -> int:
    return log.collective("all_to_all", ranks, purpose, (), splits)


class _Due(NamedTuple):
    message: Message  # with a global rank as its peer
    due: int
    is_far: bool


def _moved(ring: Ring, transfer: Transfer, unit: int, tag: int, sends: bool) -> Iterator[Message]:
    """Yield the messages of one transfer, by sub-ring; ``unit`` bytes for a token of a head."""
    tokens, position = ring.table.num_keys_of(transfer), transfer.receiver if sends else transfer.sender
    for sub in ring.sub_rings:
        num_bytes = unit * (sub.kv_heads.stop - sub.kv_heads.start) * tokens
        yield Message(sends, sub.ranks[position], num_bytes, DTYPE, tag + sub.tag)


class _RingGroups:
    """Names the communicator of every message of a ring.

    Args:
        schedule: of the part of the placement that the ring belongs to.
        rank: which posts the messages.
        num_colours: that have a communicator.
    """

    def __init__(self, schedule: Schedule, rank: int, num_colours: int) -> None:
        self.ranks = schedule.ranks
        self._schedule, self._position, self._num_colours = schedule, schedule.ring_position(rank), num_colours

    def purpose_of(self, posted: _Due) -> tuple[int, str]:
        """Return the purpose of a message's communicator, and the place of the communicator in a round."""
        if posted.is_far:
            return self._num_colours, FAR
        peer = self._schedule.ring_position(posted.message.peer)
        colour = ring_colour(self._position, peer, len(self._schedule.groups))
        if colour in range(1, self._num_colours):
            return colour, f"{COLOUR} {colour}"
        return 0, ""


def _post_round(
    log: Log, groups: _RingGroups, posted: Sequence[_Due], unfinished: list[int]
) -> Iterator[tuple[int, list[int]]]:
    """Post a round; yield step by step the calls that have to end before the step."""
    if not log.by_order:
        for message, due, _ in posted:
            works = log.messages(groups.ranks, "", [message])
            if message.sends:
                unfinished += works
            else:
                yield due, works
        return
    batches: dict[tuple[bool, int, tuple[int, str]], list[Message]] = defaultdict(list)
    for of_round in posted:
        batches[of_round.is_far, of_round.due, groups.purpose_of(of_round)].append(of_round.message)
    for batch in sorted(batches):
        _, due, (_, purpose) = batch
        messages = batches[batch]
        works = log.messages(groups.ranks, purpose, messages)
        unfinished += works
        if not all(message.sends for message in messages):
            yield due, works


# --- gradients ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class GradientBuckets:
    """Buckets of all ranks, in the order in which they are sent."""

    world: tuple[int, ...]  # all ranks
    layouts: dict[str, ParameterLayout]
    bucket_bytes: int = 64
    alignment: int = ALIGNMENT

    @cached_property
    def reductions(self) -> tuple[Bucket, ...]:
        """Transfers to the owners."""
        return self._fused(lambda chunk: chunk.contributors)

    @cached_property
    def gathers(self) -> tuple[Bucket, ...]:
        """Transfers to the holders."""
        return self._fused(lambda chunk: chunk.holders)[::-1]

    def _fused(self, members: object) -> tuple[Bucket, ...]:
        names = list(reversed(self.layouts))
        chunks: list[Chunk] = [c for name in names for c in chunks_of(name, self.layouts[name], self.alignment)]
        alike, sizes = dict.fromkeys(names, DTYPE), dict.fromkeys(names, ITEM_BYTES)
        return fuse(chunks, members, alike, sizes, self.bucket_bytes)  # type: ignore[arg-type]


class Sync:
    """One rank's part in a step of `ds_hetero.gradient_sync.sync`."""

    def __init__(self, log: Log, buckets: GradientBuckets) -> None:
        self._log, self._world = log, buckets.world
        self._left = deque(b for b in buckets.reductions if log.rank in b.members)
        self._gathers = [b for b in buckets.gathers if log.rank in b.members]
        self._packed: set[str] = set()
        self.holds_back = False  # what is packed leaves later
        self._in_flight: list[int] = []
        self._held = [
            name for name, layout in buckets.layouts.items() if any(log.rank in cut.ranks for cut in layout.cuts)
        ]

    def gradient(self, name: str) -> None:
        """Record that a parameter's gradient is complete; start full buckets whose turn it is."""
        self._packed.add(name)
        if not self.holds_back:
            self._launch()

    def release(self) -> None:
        """Start buckets that were held back."""
        if self.holds_back:
            self.holds_back = False
            self._launch()

    def _launch(self) -> None:
        while self._left and self._is_full(self._left[0]):
            self._in_flight += _post_bucket(self._log, self._left.popleft(), self._world, gathers=False)

    def finish(self) -> None:
        """Send the remaining buckets, and wait for the sums."""
        self._packed.update(self._held)
        self._launch()
        assert not self._left
        self._log.wait(*self._in_flight)

    def gather(self) -> None:
        """Gather the new values."""
        in_flight: deque[list[int]] = deque()
        for bucket in self._gathers:
            if len(in_flight) == _GATHERS_IN_FLIGHT:
                self._log.wait(*in_flight.popleft())
            in_flight.append(_post_bucket(self._log, bucket, self._world, gathers=True))
        for works in in_flight:
            self._log.wait(*works)

    def _is_full(self, bucket: Bucket) -> bool:
        contributes = self._log.rank in bucket.contributors
        return not contributes or all(chunk.name in self._packed for chunk in bucket.chunks)


def connect_owners(log: Log, buckets: GradientBuckets) -> None:
    """Send one element between contributors and owners, as when the synchronization is made."""
    pairs: dict[tuple[int, ...], set[tuple[int, int]]] = defaultdict(set)
    for bucket in buckets.reductions:
        pairs[bucket.members] |= bucket.pairs()
    for bucket in buckets.gathers:
        pairs[bucket.members] |= {(owner, holder) for holder, owner in bucket.pairs()}
    for members in sorted(pairs):
        connect(log, members, _purpose(members, buckets.world), pairs[members])


def connect(log: Log, ranks: Sequence[int], purpose: str, pairs: set[tuple[int, int]]) -> None:
    """Send one element from every sender to its receiver, as `ds_hetero.runtime.process_groups.Connections` does."""
    elements = []
    for sender, receiver in sorted(pairs):
        if log.rank == sender:
            elements.append(Message(True, receiver, 1, "uint8"))
        elif log.rank == receiver:
            elements.append(Message(False, sender, 1, "uint8"))
    log.wait(*log.messages(ranks, purpose, elements))


def _purpose(members: tuple[int, ...], world: tuple[int, ...]) -> str:
    return "world" if members == world else SYNC


def _post_bucket(log: Log, bucket: Bucket, world: tuple[int, ...], gathers: bool) -> list[int]:
    if len(bucket.members) == 1:
        return []
    sizes = bucket.reduce_sizes(log.rank)
    purpose = _purpose(bucket.members, world)
    return [_all_to_all(log, bucket.members, sizes[::-1] if gathers else sizes, purpose)]


# --- pipelines ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineJob:
    """A step of a plan.

    Args:
        lengths: tokens of every micro-batch, by pipeline.
        tied: whether the head is the embedding.
        recompute: whether layers run again in the backward.
        width: elements of a token between stages.
        vocabulary: rows of embedding and head.
    """

    plan: Plan
    lengths: tuple[tuple[int, ...], ...]
    tied: bool = False
    recompute: bool = False
    width: int = 4
    vocabulary: int = 5
    _tables: dict[tuple[tuple[int, ...], int], AttentionTables] = field(default_factory=dict)

    def violations(self, by_order: bool) -> Iterator[str]:
        """Yield what would hang or be wrong in a step; see `Log` for ``by_order``."""
        by_rank = []
        for rank in self.plan.ranks:
            log = Log(rank, by_order)
            connect_owners(log, self.buckets)
            _post_step(self, log)
            by_rank.append(log.events)
        yield from violations(by_rank, connects=by_order)

    @cached_property
    def buckets(self) -> GradientBuckets:
        """Buckets of the parameters' gradients."""
        return GradientBuckets(self.plan.ranks, self.layouts)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of parameters, in the order in which a forward uses them."""
        model = self.plan.model
        assert model is not None
        heads = (model.num_heads + 2 * model.num_kv_heads) * HEAD_DIM
        shapes: dict[str, tuple[int, ...]] = {"embedding": (self.vocabulary, self.width)}
        for layer in range(model.num_layers):
            shapes[f"layers.{layer}.qkv"] = (heads, self.width)
            shapes[f"layers.{layer}.out"] = (self.width, model.num_heads * HEAD_DIM)
        return shapes if self.tied else shapes | {"head": (self.vocabulary, self.width)}

    @cached_property
    def layouts(self) -> dict[str, ParameterLayout]:
        """Layouts, as `ds_hetero.gradient_sync.model_layouts.pipeline_layouts` makes them without tensor slices."""
        cuts: dict[str, list[Cut]] = defaultdict(list)
        for pipeline in self.plan.pipelines:
            for stage in pipeline.stages:
                for name in self.held(stage):
                    cuts[name].append(self._cut(stage, name))
        order = dict.fromkeys(name for stage in self.plan.pipelines[0].stages for name in self.held(stage))
        return {name: ParameterLayout(self.shapes[name], tuple(cuts[name])) for name in order}

    def _cut(self, stage: Stage, name: str) -> Cut:
        shape, dim = self.shapes[name], 1 if name.endswith("out") else 0
        if stage.inner == "tensor":
            return Cut.along(dim, stage.ranks, share(shape[dim], [1] * len(stage.ranks)))
        return Cut.whole(shape, *stage.ranks, partial=stage.inner == "sequence")

    def held(self, stage: Stage) -> list[str]:
        """Return the parameters of a stage, in the order in which its forward uses them."""
        assert stage.layers is not None and self.plan.model is not None
        names = ["embedding"] if stage.layers[0] == 0 else []
        names += [f"layers.{i}.{part}" for i in range(*stage.layers) for part in ("qkv", "out")]
        if stage.layers[1] == self.plan.model.num_layers:
            names.append("embedding" if self.tied else "head")
        return list(dict.fromkeys(names))

    def attention(self, stage: Stage, pipeline: int, k: int) -> AttentionTables | None:
        """Return the attention of a micro-batch in a stage; None if its ranks hold whole sequences."""
        if stage.schedule is None:
            return None
        length, rows = self.lengths[pipeline][k], self.plan.pipelines[pipeline].micro_batch_size or 1
        if (stage.ranks, length) not in self._tables:
            placement = stream_placement(stage.schedule, length, (Rows(0, rows, ((0, length),)),))
            self._tables[stage.ranks, length] = AttentionTables(placement)
        return self._tables[stage.ranks, length]


def pipeline_step(job: PipelineJob, rank: int, by_order: bool) -> list[Event]:
    """Return all calls and waits of ``rank`` in a step: passes, gradients, loss, norm, new values."""
    log = Log(rank, by_order)
    _post_step(job, log)
    return log.events


def _post_step(job: PipelineJob, log: Log) -> None:
    """Post a step on one rank."""
    sync = Sync(log, job.buckets)
    place = job.plan.place_of(log.rank)
    if place is not None:
        _Passes(job, log, sync, place).run()
    world = job.plan.ranks
    log.wait(log.collective("allreduce", world, "world", ("loss",)))
    sync.finish()
    log.wait(log.collective("allreduce", world, "world", ("norm",)))
    sync.gather()


class _Passes:
    """1F1B of one rank; see `ds_hetero.runtime.pipeline.runner`."""

    def __init__(self, job: PipelineJob, log: Log, sync: Sync, place: tuple[int, int]) -> None:
        self._job, self._log, self._sync = job, log, sync
        self._i, self._j = place
        self._pipeline = job.plan.pipelines[self._i]
        self._stage = self._pipeline.stages[self._j]
        self._before = self._pipeline.stages[self._j - 1] if self._j else None
        last = self._j + 1 == len(self._pipeline.stages)
        self._after = None if last else self._pipeline.stages[self._j + 1]
        self._count = len(job.lengths[self._i])
        self._asked: dict[str, deque[list[int]]] = {FORWARD: deque(), BACKWARD: deque()}
        self._out: deque[list[int]] = deque()
        self._num_asked = {FORWARD: 0, BACKWARD: 0}

    def run(self) -> None:
        """Post all passes."""
        self._connect()
        for kind, k in one_f_one_b(self._pipeline.in_flight(self._j), self._count):
            self._take(kind, k)
            if kind == FORWARD:
                if not self._log.by_order:
                    self._ask(kind, k + 2)
                self._layers(k)
                self._send(self._after, k, ACTIVATIONS)
                if self._after is not None:
                    due = gradients_due(self._pipeline.in_flight(self._j + 1), k + 1, self._count)
                    self._ask(BACKWARD, due)
            else:
                is_last = k == self._count - 1
                self._sync.holds_back = is_last and self._before is not None
                self._backward(k)
                self._send(self._before, k, GRADIENTS)
                if is_last:
                    self._sync.release()
        while self._out:
            self._log.wait(*self._out.popleft())

    def _layers(self, k: int) -> None:
        assert self._stage.layers is not None
        if self._before is None:
            self._sum("hidden")
        for _ in range(*self._stage.layers):
            self._layer(k, backward=False)
        if self._after is None:
            self._sum("largest")
            self._sum("sums")

    def _sum(self, shape: str) -> None:
        """Sum over the ranks of a tensor stage, for their heads, columns or words; other ranks post nothing."""
        if self._stage.inner == "tensor":
            self._log.wait(self._log.collective("allreduce", sorted(self._stage.ranks), "tensor", (shape,)))

    def _layer(self, k: int, backward: bool) -> None:
        """Post the attention of a sequence stage, or the sum of a tensor stage."""
        attention = self._job.attention(self._stage, self._i, k)
        if attention is not None:
            attention.post(self._log, backward)
        else:
            self._sum("hidden")

    def _backward(self, k: int) -> None:
        """Post the backward of a micro-batch."""
        held, is_last = self._job.held(self._stage), k == self._count - 1
        assert self._stage.layers is not None

        def gradient(name: str) -> None:
            if is_last and name in held:
                self._sync.gradient(name)

        if self._after is None and not (self._job.tied and self._before is None):
            gradient("embedding" if self._job.tied else "head")
        if self._after is None:
            self._sum("hidden")
        for layer in reversed(range(*self._stage.layers)):
            if self._job.recompute:
                self._layer(k, backward=False)
            gradient(f"layers.{layer}.out")
            self._layer(k, backward=True)
            gradient(f"layers.{layer}.qkv")
        if self._before is None:
            gradient("embedding")

    def _connect(self) -> None:
        """Send one element between the ranks that a step sends between, by boundary and direction."""
        boundaries = [
            (self._before, self._stage, ACTIVATIONS),
            (self._stage, self._before, GRADIENTS),
            (self._stage, self._after, ACTIVATIONS),
            (self._after, self._stage, GRADIENTS),
        ]
        for source, target, purpose in boundaries:
            if source is None or target is None:
                continue
            of_lengths = [transfers(source, target, length) for length in set(self._job.lengths[self._i])]
            pairs = {(m.sender, m.receiver) for of_length in of_lengths for m in of_length}
            connect(self._log, sorted((*source.ranks, *target.ranks)), purpose, pairs)

    def _ask(self, kind: str, count: int) -> None:
        """Post the receives of the first ``count`` micro-batches that are not posted yet."""
        source, purpose = (self._before, ACTIVATIONS) if kind == FORWARD else (self._after, GRADIENTS)
        if source is None:
            return
        for k in range(self._num_asked[kind], min(count, self._count)):
            self._num_asked[kind] += 1
            self._asked[kind].append(self._hop(source, self._stage, k, purpose))

    def _take(self, kind: str, k: int) -> None:
        self._ask(kind, k + 1)
        if self._asked[kind]:
            self._log.wait(*self._asked[kind].popleft())
            if self._stage.inner == "tensor":
                self._log.wait(self._log.collective("allgather", sorted(self._stage.ranks), COPIES, ("hidden",)))

    def _send(self, target: Stage | None, k: int, purpose: str) -> None:
        if target is not None:
            self._out.append(self._hop(self._stage, target, k, purpose))
            while len(self._out) > 2 * self._pipeline.in_flight(0):
                self._log.wait(*self._out.popleft())

    def _hop(self, source: Stage, target: Stage, k: int, purpose: str) -> list[int]:
        """Post this rank's messages of a send between stages, on its side."""
        rank, rows = self._log.rank, self._pipeline.micro_batch_size or 1
        of_row = self._job.width * ITEM_BYTES * rows
        messages = []
        for message in transfers(source, target, self._job.lengths[self._i][k]):
            if rank in (message.sender, message.receiver):
                sends = message.sender == rank
                peer = message.receiver if sends else message.sender
                messages.append(Message(sends, peer, message.tokens * of_row, DTYPE))
        return self._log.messages(sorted((*source.ranks, *target.ranks)), purpose, messages)


# --- replicas under ZeRO --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplicasJob:
    """A step of replicas of one stage each, whose parameters ZeRO-3 shards over all ranks.

    Args:
        placements: of every micro-batch, by replica.
        layers: with attention.
        recompute: whether layers run again in the backward.
    """

    placements: tuple[tuple[Placement, ...], ...]
    layers: int = 2
    recompute: bool = True

    def violations(self, by_order: bool) -> Iterator[str]:
        """Yield what would hang or be wrong in a step; see `Log` for ``by_order``."""
        yield from violations([replica_step(self, rank, by_order) for rank in self.world], connects=by_order)

    @cached_property
    def world(self) -> tuple[int, ...]:
        """All ranks."""
        return tuple(sorted(rank for of_replica in self.placements for rank in of_replica[0].schedule.ranks))

    @cached_property
    def tables(self) -> list[list[AttentionTables]]:
        """Tables by replica and micro-batch."""
        return [[AttentionTables(placement) for placement in of_replica] for of_replica in self.placements]


def replica_step(job: ReplicasJob, rank: int, by_order: bool) -> list[Event]:
    """Return the calls of a step: headers, layers (weights gathered one ahead, gradients behind), norm, new values."""
    log = Log(rank, by_order)
    tables = next(t for t in job.tables if rank in t[0].placement.schedule.ranks)

    def gather(layer: int) -> int:
        return log.collective("allgather", job.world, "world", ("weights", layer))

    for attention in tables:
        ranks = attention.placement.schedule.ranks
        log.wait(log.collective("allgather", ranks, "", ("header",)))
        coming = gather(0)
        for layer in range(job.layers):
            log.wait(coming)
            coming = gather(min(layer + 1, job.layers - 1))
            attention.post(log, backward=False)
        leaving: list[int] = []
        for layer in reversed(range(job.layers)):
            log.wait(coming)
            coming = gather(max(layer - 1, 0))
            if job.recompute:
                attention.post(log, backward=False)
            attention.post(log, backward=True)
            log.wait(*leaving)
            leaving = [log.collective("reduce_scatter", job.world, "world", ("gradients", layer))]
        log.wait(coming, *leaving)
    log.wait(log.collective("allreduce", job.world, "world", ("norm",)))
    log.wait(log.collective("allgather", job.world, "world", ("values",)))
    return log.events
