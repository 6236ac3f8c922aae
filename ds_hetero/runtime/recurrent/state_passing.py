"""A scan over shards, by passing states on: every rank scans its own tokens of all heads.

A piece is the part of one interval of a rank's that lies in one document. Each is scanned from a state of zeros; the
pieces of a document that several ranks hold are a chain. What a piece leaves of the state before it (a number per head)
and its own last state go to the ranks of later pieces of the chain, which combine them to the state before theirs and
add what it contributes to their output. So the payload does not grow with the sequence.

    state after piece k = decay_k x state before it + own_k

The combination is linear: gradients of a piece's state before it go back to all earlier pieces of the chain, each times
the decays between.

Dimension key: b rows of one piece, n tokens of it, G heads of the reader, P width of the output, N width of the reader;
a state is [b, H, P, N].
Source: the chunks of Mamba-2 (arXiv:2405.21060, section 6), of which a piece is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ds_hetero.runtime.attention.batch_layout import BatchLayout
from ds_hetero.runtime.recurrent.head_trade import HeadTrade, head_trade
from ds_hetero.runtime.recurrent.scan_call import PassedState, Scan
from ds_hetero.runtime.recurrent.sequences import pieces_of, sequences_of
from ds_hetero.runtime.replica import Replica
from ds_hetero.runtime.step_clock import ALL_TO_ALL, Clock
from ds_hetero.values.placement import Range

Place = tuple[int, int]
"""A chain, and where in it a piece is."""


class _Piece(NamedTuple):
    """Batch rows and own tokens of one document; ``place`` is None where the rank holds all of it."""

    rows: Range
    tokens: Range
    place: Place | None


class _Chain(NamedTuple):
    """Pieces of a document that several ranks, by index in the replica, hold, in the order of the sequence."""

    num_rows: int
    owners: tuple[int, ...]

    def needs(self, index: int) -> range:
        """Pieces whose states a rank needs, its own among them: those before its last one."""
        held = [place for place, owner in enumerate(self.owners) if owner == index]
        return range(held[-1] if held else 0)


@dataclass(frozen=True, eq=False)
class Chains:
    """Who passes which states to whom, of one batch."""

    chains: tuple[_Chain, ...]  # of all documents that several pieces make up
    pieces: tuple[_Piece, ...]  # of this rank, by rows and tokens
    give: tuple[tuple[Place, ...], ...]  # for each rank, the own pieces whose states it needs
    take: tuple[tuple[Place, ...], ...]  # for each rank, its pieces whose states this one needs
    moved_states: int  # states of one row that all ranks together send forward

    def goes_on(self, piece: _Piece) -> bool:
        """Whether a piece of this rank has later ones in its chain."""
        return piece.place is not None and piece.place[1] + 1 < len(self.chains[piece.place[0]].owners)

    @cached_property
    def sent(self) -> tuple[Place, ...]:
        """Pieces of this rank that have later ones in their chains."""
        return tuple(piece.place for piece in self.pieces if piece.place is not None and self.goes_on(piece))

    @cached_property
    def received(self) -> tuple[Place, ...]:
        """Pieces of this rank that have earlier ones in their chains."""
        return tuple(piece.place for piece in self.pieces if piece.place is not None and piece.place[1])

    def num_rows(self, places: Iterable[Place]) -> list[int]:
        """Batch rows of each of these pieces."""
        return [self.chains[chain].num_rows for chain, _ in places]


@lru_cache(maxsize=64)
def chains_of(replica: Replica, batch: BatchLayout) -> Chains:
    """Return the tables of a batch; every rank derives them from its layout."""
    chains: list[_Chain] = []
    pieces: list[_Piece] = []
    for rows in sequences_of(batch):
        by_document: dict[int, list[tuple[int, int]]] = {}  # start of the document -> (start of the piece, owner)
        own: list[tuple[int, int, Range]] = []  # starts of document and piece, tokens
        for index, rank in enumerate(replica.ranks):
            intervals = batch.placement.intervals(rank)
            begins = dict(zip(intervals, accumulate((b - a for a, b in intervals), initial=0), strict=False))
            for first, start, stop in pieces_of(intervals, rows.documents):
                by_document.setdefault(first, []).append((start, index))
                if rank == replica.rank:
                    low, at = next((a, begin) for (a, b), begin in begins.items() if a <= start < b)
                    own.append((first, start, (at + start - low, at + stop - low)))
        chain_of: dict[int, int] = {}
        for first, held in by_document.items():
            if len(held) > 1:
                chain_of[first] = len(chains)
                chains.append(_Chain(rows.stop - rows.start, tuple(index for _, index in sorted(held))))
        for first, start, tokens in own:
            order = sorted(by_document[first])
            place = order.index((start, replica.sp_rank)) if first in chain_of else None
            pieces.append(_Piece((rows.start, rows.stop), tokens, None if place is None else (chain_of[first], place)))
    ranks = range(len(replica.ranks))
    moves = [[_moves(chains, source, target) for target in ranks] for source in ranks]
    me = replica.sp_rank
    count = sum(chains[chain].num_rows for sent in moves for places in sent for chain, _ in places)
    return Chains(tuple(chains), tuple(pieces), tuple(moves[me]), tuple(sent[me] for sent in moves), count)


def _moves(chains: Sequence[_Chain], source: int, target: int) -> tuple[Place, ...]:
    """Pieces of ``source`` whose states ``target`` needs."""
    if source == target:
        return ()
    return tuple(
        (number, place)
        for number, chain in enumerate(chains)
        for place in chain.needs(target)
        if chain.owners[place] == source
    )


def pass_states(call: Scan, passed: PassedState, replica: Replica, batch: BatchLayout, clock: Clock) -> Tensor:
    """Run a scan over the whole sequence; return this rank's tokens of the output, [B, s, H, P].

    Caller: every rank of the replica, once per layer.
    Collectives: one all_to_all_single forward, one backward; none where no document is held by several ranks.
    Sends: for every later piece of another rank one state [b, H, P, N] and one decay [b, H] in float32.
    """
    chains = chains_of(replica, batch)
    parts, states, decays, logs = [], [], [], {}
    for piece in chains.pieces:
        inputs = {name: x[slice(*piece.rows), slice(*piece.tokens)] for name, x in call.inputs.items()}
        if piece.place is not None:
            logs[piece.place] = passed.log_decay(inputs, call.parameters)
        if chains.goes_on(piece):
            assert piece.place is not None
            part, state = passed.compute(inputs, call.parameters)
            states.append(state.to(torch.float32))
            decays.append(logs[piece.place].sum(1).exp().to(torch.float32))
        else:
            part = call.compute(inputs, call.parameters)
        parts.append(part)
    like, reader = call.inputs[call.output_like], call.inputs[passed.reader]
    if not parts:  # in the graph: the others wait for this rank's backward, and ZeRO for gradients of all parameters
        parts = [_nothing(call)]
    before: list[Tensor] = []
    if chains.chains:
        size, trade = (*like.shape[2:], reader.shape[-1]), head_trade(replica, batch)
        apply: Any = _PassStates.apply
        parts[0], *before = apply(chains, trade, clock, size, parts[0], *states, *decays)
    later = [i for i, piece in enumerate(chains.pieces) if piece.place is not None and piece.place[1]]
    for i, state in zip(later, before, strict=True):
        piece = chains.pieces[i]
        assert piece.place is not None
        left = logs[piece.place].cumsum(1).exp()
        read = _read(reader[slice(*piece.rows), slice(*piece.tokens)], state)
        parts[i] = parts[i] + (read * left[..., None]).to(parts[i].dtype)
    return _joined(parts, chains.pieces, like)


def _nothing(call: Scan) -> Tensor:
    """Zeros of the output's shape that depend on all inputs and parameters."""
    return 0 * (
        call.inputs[call.output_like] + sum(x.sum() for x in (*call.inputs.values(), *call.parameters.values()))
    )


def _read(reader: Tensor, state: Tensor) -> Tensor:
    """[b, n, G, N] of [b, H, P, N]: [b, n, H, P]."""
    rows, tokens, groups, width = reader.shape
    by_group = state.reshape(rows, groups, -1, width)  # no view: a rank's own state is in the order of its kernel
    out = reader.to(state.dtype).transpose(1, 2) @ by_group.transpose(2, 3)
    return out.transpose(1, 2).reshape(rows, tokens, *state.shape[1:3])


def _joined(parts: Sequence[Tensor], pieces: Sequence[_Piece], like: Tensor) -> Tensor:
    """The output of all rows of the batch from that of the pieces; zero outside of every document."""
    if not pieces or parts[0].shape == like.shape:
        return parts[0]
    rows: dict[Range, list[Tensor]] = {}
    filled: dict[Range, int] = {}
    for part, piece in zip(parts, pieces, strict=True):
        gap = piece.tokens[0] - filled.get(piece.rows, 0)
        rows.setdefault(piece.rows, []).append(nn.functional.pad(part, (0, 0, 0, 0, gap, 0)) if gap else part)
        filled[piece.rows] = piece.tokens[1]
    out, at = [], 0
    for (start, stop), held in sorted(rows.items()):
        if start > at:
            out.append(parts[0].new_zeros(start - at, *like.shape[1:]))
        joined = torch.cat(held, 1)
        out.append(nn.functional.pad(joined, (0, 0, 0, 0, 0, like.shape[1] - joined.shape[1])))
        at = stop
    if at < like.shape[0]:
        out.append(parts[0].new_zeros(like.shape[0] - at, *like.shape[1:]))
    return torch.cat(out)


class _PassStates(torch.autograd.Function):
    """Own states and decays to the states before own pieces; one node of the graph on every rank.

    An output goes through unchanged, so that the backward of a rank that needs no state is run as well.
    """

    @staticmethod
    def forward(
        ctx: Any, chains: Chains, trade: HeadTrade, clock: Clock, size: tuple[int, ...], out: Tensor, *own: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.chains, ctx.trade, ctx.clock, ctx.size = chains, trade, clock, size
        ctx.set_materialize_grads(False)
        heads, count = size[0], len(own) // 2
        known = {place: pair for place, *pair in zip(chains.sent, own[:count], own[count:], strict=True)}
        with clock.phase(ALL_TO_ALL, "pass_states"):
            message = [_packed([x for place in places for x in known[place]], out.device) for places in chains.give]
            counts = [chains.num_rows(places) for places in chains.take]
            width = heads * size[1] * size[2] + heads
            got = trade.exchange(message, [(sum(rows) * width,) for rows in counts])
        for places, rows, flat in zip(chains.take, counts, got, strict=True):
            sizes = [x for b in rows for x in (b * (width - heads), b * heads)]
            pairs = iter(flat.split_with_sizes(sizes))
            for place, b in zip(places, rows, strict=True):
                known[place] = [next(pairs).view(b, *size), next(pairs).view(b, heads)]
        before = [_state_before(place, known) for place in chains.received]
        ctx.known = tuple(known)
        ctx.save_for_backward(*before, *(decay for _, decay in known.values()))
        return out.view_as(out), *before

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        chains: Chains = ctx.chains
        saved = ctx.saved_tensors  # once: a checkpoint recomputes them at that
        before = dict(zip(chains.received, saved, strict=False))
        decays = dict(zip(ctx.known, saved[len(before) :], strict=True))
        device = next(x.device for x in (dout, *grads) if x is not None)
        dstates: dict[Place, Tensor] = {}
        for (chain, place), grad in zip(chains.received, grads, strict=True):
            shape = (chains.chains[chain].num_rows, *ctx.size)
            dstate = torch.zeros(shape, dtype=torch.float32, device=device) if grad is None else grad
            for earlier in range(place - 1, -1, -1):
                key = chain, earlier
                dstates[key] = dstates[key] + dstate if key in dstates else dstate
                if earlier:
                    dstate = decays[key][..., None, None] * dstate
        with ctx.clock.phase(ALL_TO_ALL, "pass_states"):
            message = [_packed([dstates[place] for place in places], device) for places in chains.take]
            counts = [chains.num_rows(places) for places in chains.give]
            got = ctx.trade.exchange(message, [(sum(rows), *ctx.size) for rows in counts])
        for places, rows, part in zip(chains.give, counts, got, strict=True):
            for key, dstate in zip(places, part.split_with_sizes(rows), strict=True):
                dstates[key] = dstates[key] + dstate if key in dstates else dstate
        own = [dstates[place] for place in chains.sent]
        ddecays = [(before[place] * dstates[place]).sum((2, 3)) if place in before else None for place in chains.sent]
        return None, None, None, None, dout, *own, *ddecays


def _packed(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    return (
        torch.cat([x.reshape(-1) for x in tensors]) if tensors else torch.empty(0, dtype=torch.float32, device=device)
    )


def _state_before(place: Place, known: dict[Place, list[Tensor]]) -> Tensor:
    """The state before a piece, from states and decays of all pieces before it in its chain."""
    chain, stop = place
    state = known[chain, 0][0]
    for earlier in range(1, stop):
        own, decay = known[chain, earlier]
        state = own + decay[..., None, None] * state
    return state
