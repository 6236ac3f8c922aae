"""Walk keys, values and their gradients through the rounds of a lane, in integers, as the runtime does with tensors.

The order inside a step is that of `ds_hetero.runtime.attention.lane_passes`: post, compute, store, release. A block is
a bitmask of the travelling tokens that have arrived. A partial gradient is, for every travelling token, the bitmask of
the readers whose contribution is in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ds_hetero.batch.ring_steps import Ring
from ds_hetero.batch.ring_table import RingTable
from ds_hetero.batch.routes import Round, Transfer


def lane_violations(table: RingTable) -> Iterator[str]:
    """Yield the faults in the forward and the backward of a lane."""
    rings = [Ring(table, position, slice(0, 0), 1, ()) for position in range(table.size)]
    forward = [ring.forward_rounds for ring in rings]
    kv_back = [ring.backward_kv_rounds for ring in rings]
    grads_back = [ring.backward_grad_rounds for ring in rings]
    for name, rounds in (("forward", forward), ("backward, KV", kv_back), ("backward, gradients", grads_back)):
        yield from _unpaired(name, rounds)
    yield from _walk_forward(table, rings)
    yield from _walk_backward(table, rings)


def _unpaired(name: str, rounds: Sequence[Sequence[Round]]) -> Iterator[str]:
    """Check that every message is sent and received in the same round, by both ends in the same order."""
    if len({len(of_position) for of_position in rounds}) != 1:
        yield f"{name}: positions have {[len(of_position) for of_position in rounds]} rounds"
        return
    for number, at_once in enumerate(zip(*rounds, strict=True)):
        sent: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
        received: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
        for position, round_ in enumerate(at_once):
            for transfer in round_.sends:
                sent[position, transfer.receiver].append(transfer)
            for transfer in round_.receives:
                received[transfer.sender, position].append(transfer)
        if sent != received:
            yield f"{name}, round {number}: sent {dict(sent)}, received {dict(received)}"


@dataclass
class _Holder:
    """Blocks of one position, by source, and the parts that it holds as a proxy."""

    complete: dict[int, int] = field(default_factory=dict)
    proxied: dict[tuple[int, int], int] = field(default_factory=dict)
    due: dict[int, list[tuple[Transfer, int]]] = field(default_factory=lambda: defaultdict(list))


def _bits(table: RingTable, transfer: Transfer) -> int:
    if transfer.part is None:
        return (1 << sum(stop - start for start, stop in table.travelling_keys(transfer.source))) - 1
    return (1 << transfer.part.stop) - (1 << transfer.part.start)


def _walk_forward(table: RingTable, rings: Sequence[Ring]) -> Iterator[str]:
    holders = [_Holder({p: _bits(table, Transfer(p, p, p, 0))}) for p in range(table.size)]
    worked: list[set[int]] = [set() for _ in rings]
    for step in range(table.steps):
        yield from _post_kv("forward", table, holders, [ring.forward_rounds[step] for ring in rings], step)
        for p, ring in enumerate(rings):
            yield from _read("forward", table, holders[p], p, ring.forward_source(step), step)
            worked[p].update(() if ring.forward_source(step) is None else (ring.forward_source(step),))  # type: ignore[arg-type]
            yield from _put_away("forward", table, holders[p], p, step + 1)
            holders[p].complete = {
                source: block
                for source, block in holders[p].complete.items()
                if source in ring.needed_after_forward_step[step]
            }
    for p, ring in enumerate(rings):
        if worked[p] != set(range(table.size)):
            yield f"forward: position {p} works on {sorted(worked[p])} of {table.size} blocks"
        if set(holders[p].complete) != ({ring.kept_source} if ring.kept_source is not None else set()):
            yield f"forward: position {p} keeps {sorted(holders[p].complete)}, not {ring.kept_source}"
        yield from _left_over("forward", holders[p], p)


def _walk_backward(table: RingTable, rings: Sequence[Ring]) -> Iterator[str]:
    """Yield the faults of the backward."""
    holders = [_Holder({p: _bits(table, Transfer(p, p, p, 0))}) for p in range(table.size)]
    for p, ring in enumerate(rings):
        if ring.kept_source is not None:
            holders[p].complete[ring.kept_source] = _bits(table, Transfer(ring.kept_source, p, p, 0))
    partial = _Partial(table)
    for step in range(table.steps):
        yield from _post_kv("backward", table, holders, [ring.backward_kv_rounds[step] for ring in rings], step)
        yield from partial.post([ring.backward_grad_rounds[step] for ring in rings], step)
        for p, ring in enumerate(rings):
            source = ring.backward_source(step)
            yield from _read("backward", table, holders[p], p, source, step)
            if source is not None and source != p and table.reads(p, source):
                yield from partial.compute(p, source)
            yield from _put_away("backward", table, holders[p], p, step + 1)
            holders[p].complete = {
                source: block
                for source, block in holders[p].complete.items()
                if source in ring.needed_after_backward_step[step]
            }
        yield from partial.put_away(step + 1)
    for p, holder in enumerate(holders):
        yield from _left_over("backward", holder, p)
    yield from partial.left_over()


def _post_kv(
    name: str, table: RingTable, holders: Sequence[_Holder], rounds: Sequence[Round], step: int
) -> Iterator[str]:
    for p, round_ in enumerate(rounds):
        holder = holders[p]
        for transfer in round_.sends:
            bits_to_send, part = _bits(table, transfer), transfer.part
            if bits_to_send.bit_count() != table.num_keys_of(transfer):
                num_keys = table.num_keys_of(transfer)
                yield f"{name}: {transfer} is counted as {num_keys} tokens, not {bits_to_send.bit_count()}"
            if part is None or part.is_first_hop:
                held_bits = holder.complete.get(transfer.source, 0)
            else:
                held_bits = holder.proxied.pop((transfer.source, part.start), 0)
            if held_bits & bits_to_send != bits_to_send:
                yield f"{name}, step {step}: position {p} sends {transfer} without holding it"
            if not step < transfer.due <= table.steps:
                yield f"{name}, step {step}: {transfer} is due when it cannot be"
            holders[transfer.receiver].due[transfer.due].append((transfer, bits_to_send))


def _read(name: str, table: RingTable, holder: _Holder, p: int, source: int | None, step: int) -> Iterator[str]:
    if source is None or source == p or not table.reads(p, source):
        return
    wanted_bits = _bits(table, Transfer(source, p, p, 0))
    if holder.complete.get(source, 0) != wanted_bits:
        yield f"{name}, step {step}: position {p} reads the block of {source} without holding it"


def _put_away(name: str, table: RingTable, holder: _Holder, p: int, step: int) -> Iterator[str]:
    for transfer, block in holder.due.pop(step, ()):
        part, source = transfer.part, transfer.source
        if part is not None and not part.is_last_hop:
            holder.proxied[source, part.start] = block
        elif holder.complete.get(source, 0) & block:
            yield f"{name}, step {step}: position {p} gets what it has of {source} once more"
        else:
            holder.complete[source] = holder.complete.get(source, 0) | block


def _left_over(name: str, holder: _Holder, p: int) -> Iterator[str]:
    if holder.proxied or holder.due:
        yield f"{name}: position {p} never passes on {holder.proxied}, never takes {dict(holder.due)}"


class _Partial:
    """Partial gradients of all positions on their way home."""

    def __init__(self, table: RingTable) -> None:
        self._table, size = table, table.size
        self._width = [sum(b - a for a, b in table.travelling_keys(s)) for s in range(size)]
        self._whole: list[dict[int, list[int]]] = [{} for _ in range(size)]
        self._home = [[0] * width for width in self._width]
        self._proxied: list[dict[tuple[int, int], list[int]]] = [{} for _ in range(size)]
        self._due: list[dict[int, list[tuple[Transfer, list[int]]]]] = [defaultdict(list) for _ in range(size)]

    def post(self, rounds: Sequence[Round], step: int) -> Iterator[str]:
        for p, round_ in enumerate(rounds):
            for transfer in round_.sends:
                part, source = transfer.part, transfer.source
                if part is not None and not part.is_first_hop:
                    block = self._proxied[p].pop((source, part.start), [])
                else:
                    block = self._whole[p].get(source, [])
                    block = block if part is None else block[part.start : part.stop]
                if len(block) != self._table.num_keys_of(transfer):
                    yield f"backward, step {step}: position {p} sends the gradient {transfer} without holding it"
                self._due[transfer.receiver][transfer.due].append((transfer, block))
            for transfer in round_.sends:
                if transfer.part is None or transfer.part.is_first_hop:
                    self._whole[p].pop(transfer.source, None)

    def compute(self, p: int, source: int) -> Iterator[str]:
        if source in self._whole[p]:
            yield f"backward: position {p} begins the gradient of {source} anew"
        self._whole[p][source] = [1 << p] * self._width[source]

    def put_away(self, step: int) -> Iterator[str]:
        for p, due in enumerate(self._due):
            for transfer, block in due.pop(step, ()):
                part, source = transfer.part, transfer.source
                if part is not None and not part.is_last_hop:
                    self._proxied[p][source, part.start] = block
                    continue
                target = self._home[p] if source == p else self._whole[p].get(source)
                if target is None:
                    yield f"backward, step {step}: position {p} has nothing to add the gradient of {source} to"
                    continue
                first = 0 if part is None else part.start
                for i, readers in enumerate(block, first):
                    if target[i] & readers:
                        yield f"backward, step {step}: a gradient of {source} arrives twice at position {p}"
                    target[i] |= readers

    def left_over(self) -> Iterator[str]:
        for p in range(self._table.size):
            readers_of_p = (r for r in range(self._table.size) if r != p and self._table.reads(r, p))
            reader_bits = sum(1 << reader for reader in readers_of_p)
            if any(readers != reader_bits for readers in self._home[p]):
                yield f"backward: gradients of {p} come home from {self._home[p]}, not from {reader_bits:b}"
            if self._whole[p] or self._proxied[p] or self._due[p]:
                yield f"backward: position {p} still has gradients of {sorted(self._whole[p])}"
