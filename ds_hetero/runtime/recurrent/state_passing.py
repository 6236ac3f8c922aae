"""A scan over shards, by passing states on: every rank scans its own tokens of all heads.

A piece is a run of one rank's tokens that lies in one document. Each piece is scanned from a state of zeros. The pieces
of a document that several ranks hold are a chain, numbered from 0. A piece leaves two things: its own last state, and
its decay, the factor (one per head) that it leaves of the state before it. Both go to the ranks of later pieces, so the
payload does not grow with the sequence:

    state after piece k = decay_k x state before it + own_k

Example: a document on ranks 0, 1, 2, one piece each. Rank 2 gets own_0 from rank 0, and own_1 and decay_1 from rank 1;
the state before its piece is decay_1 x own_0 + own_1. It adds what this state contributes to its output.

The combination is linear: the gradient of the state before a piece goes back to all earlier pieces of the chain, each
times the decays between. In the example own_1 gets the gradient itself, own_0 gets decay_1 times it.

Dimension key: b rows of one piece, n tokens of it, G heads of the reader, P width of the output, N width of the reader;
a state is [b, H, P, N].
Source: the chunks of Mamba-2 (arXiv:2405.21060, section 6), of which a piece is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
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
"""Number of a chain, and of a piece in it."""


class _Piece(NamedTuple):
    """A piece of this rank."""

    rows: Range  # of the batch
    tokens: Range  # among the rank's tokens of a row
    place: Place | None  # None where the rank holds the whole document in one piece


class _Chain(NamedTuple):
    """A document that several pieces make up."""

    num_rows: int  # batch rows that have these documents
    owners: tuple[int, ...]  # of each piece, in the order of the sequence: the rank's index in the replica

    def needs(self, index: int) -> range:
        """Return the pieces whose states a rank needs, its own among them: all before its last piece."""
        own = [number for number, owner in enumerate(self.owners) if owner == index]
        return range(own[-1] if own else 0)


@dataclass(frozen=True, eq=False)
class Chains:
    """The states that ranks of a replica pass on in one batch."""

    chains: tuple[_Chain, ...]
    pieces: tuple[_Piece, ...]  # of this rank, by rows and tokens
    give: tuple[tuple[Place, ...], ...]  # by rank of the replica: this rank's pieces whose states it needs
    take: tuple[tuple[Place, ...], ...]  # by rank of the replica: its pieces whose states this rank needs
    moved_states: int  # states of one row that all ranks together send forward

    def goes_on(self, piece: _Piece) -> bool:
        """Whether a piece of this rank has later ones in its chain."""
        return piece.place is not None and piece.place[1] + 1 < len(self.chains[piece.place[0]].owners)

    @cached_property
    def sent(self) -> tuple[Place, ...]:
        """Pieces of this rank that have later ones in their chains."""
        return tuple(piece.place for piece in self.pieces if piece.place is not None and self.goes_on(piece))

    @staticmethod
    def takes_state(piece: _Piece) -> bool:
        """Whether a piece of this rank has earlier ones in its chain."""
        return piece.place is not None and piece.place[1] > 0

    @cached_property
    def received(self) -> tuple[Place, ...]:
        """Pieces of this rank that have earlier ones in their chains."""
        return tuple(piece.place for piece in self.pieces if piece.place is not None and self.takes_state(piece))

    def num_rows(self, places: Iterable[Place]) -> list[int]:
        """Batch rows of each of these pieces."""
        return [self.chains[chain].num_rows for chain, _ in places]


@lru_cache(maxsize=64)
def chains_of(replica: Replica, batch: BatchLayout) -> Chains:
    """Return the tables of a batch; every rank of the replica derives the same chains from the batch's layout."""
    chains: list[_Chain] = []
    pieces: list[_Piece] = []
    for rows in sequences_of(batch):
        pieces_by_document: dict[int, list[tuple[int, int]]] = {}  # by its start: (start of a piece, index of its rank)
        for index, rank in enumerate(replica.ranks):
            for document, start, _ in pieces_of(batch.placement.intervals(rank), rows.documents):
                pieces_by_document.setdefault(document, []).append((start, index))
        chain_of_document: dict[int, int] = {}
        for document, parts in pieces_by_document.items():
            parts.sort()
            if len(parts) > 1:
                chain_of_document[document] = len(chains)
                chains.append(_Chain(rows.stop - rows.start, tuple(index for _, index in parts)))
        for document, start, tokens in _own_pieces(replica, batch, rows.documents):
            place = None
            if document in chain_of_document:
                number = pieces_by_document[document].index((start, replica.sp_rank))
                place = chain_of_document[document], number
            pieces.append(_Piece((rows.start, rows.stop), tokens, place))

    ranks = range(len(replica.ranks))
    own_index = replica.sp_rank
    give = tuple(_moves(chains, own_index, target) for target in ranks)
    take = tuple(_moves(chains, source, own_index) for source in ranks)
    moved_states = 0
    for chain in chains:
        for target in ranks:
            moved_states += chain.num_rows * sum(chain.owners[number] != target for number in chain.needs(target))
    return Chains(tuple(chains), tuple(pieces), give, take, moved_states)


def _own_pieces(replica: Replica, batch: BatchLayout, documents: Sequence[Range]) -> Iterator[tuple[int, int, Range]]:
    """Yield the pieces of this rank: where their documents and they begin in the sequence, and their own tokens.

    Example: a rank holds the positions 4 to 8 and 12 to 16, one document of 16. Its second piece begins at position 12,
    and has the own tokens 4 to 8.
    """
    intervals = batch.placement.intervals(replica.rank)
    first_token = 0
    for low, high in intervals:
        for document, start, stop in pieces_of([(low, high)], documents):
            yield document, start, (first_token + start - low, first_token + stop - low)
        first_token += high - low


def _moves(chains: Sequence[_Chain], source: int, target: int) -> tuple[Place, ...]:
    """Return the pieces of ``source`` whose states ``target`` needs."""
    if source == target:
        return ()
    places = []
    for number, chain in enumerate(chains):
        places += [(number, piece) for piece in chain.needs(target) if chain.owners[piece] == source]
    return tuple(places)


def pass_states(call: Scan, passed: PassedState, replica: Replica, batch: BatchLayout, clock: Clock) -> Tensor:
    """Run a scan over the whole sequence; return this rank's tokens of the output, [B, s, H, P].

    Caller: every rank of the replica, once per layer.
    Collectives: one all_to_all_single forward, one backward; none where no document is held by several ranks.
    Sends: for every later piece of another rank one state [b, H, P, N] and one decay [b, H] in float32.
    """
    chains = chains_of(replica, batch)

    # Scan every own piece from a state of zeros.
    outputs = []  # of each piece, [b, n, H, P]
    states, decays = [], []  # of pieces that go on, [b, H, P, N] and [b, H]
    log_decays: dict[Place, Tensor] = {}  # [b, n, H]: what each token leaves of the state before it
    for piece in chains.pieces:
        inputs = _inputs_of(call, piece)
        if piece.place is not None:
            log_decays[piece.place] = passed.log_decay(inputs, call.parameters)
        if not chains.goes_on(piece):
            outputs.append(call.compute(inputs, call.parameters))
            continue
        assert piece.place is not None
        output, state = passed.compute(inputs, call.parameters)
        outputs.append(output)
        # float32: errors of a state add up over the pieces behind it.
        states.append(state.to(torch.float32))
        decays.append(log_decays[piece.place].sum(1).exp().to(torch.float32))
    if not chains.pieces:
        # In the graph: the others wait for this rank's backward, and ZeRO for gradients of all parameters.
        outputs = [_zeros_in_graph(call)]

    # Trade states, and add what the state before a piece contributes to its output.
    like, reader = call.inputs[call.output_like], call.inputs[passed.reader]
    states_before: list[Tensor] = []
    if chains.chains:
        size = (*like.shape[2:], reader.shape[-1])  # H, P, N
        apply: Any = _PassStates.apply
        outputs[0], *states_before = apply(
            chains, head_trade(replica, batch), clock, size, outputs[0], *states, *decays
        )
    taking = [number for number, piece in enumerate(chains.pieces) if chains.takes_state(piece)]
    for number, state in zip(taking, states_before, strict=True):
        piece = chains.pieces[number]
        assert piece.place is not None
        left = log_decays[piece.place].cumsum(1).exp()  # of the state before the piece, after each of its tokens
        contribution = _read(reader[slice(*piece.rows), slice(*piece.tokens)], state) * left[..., None]
        outputs[number] = outputs[number] + contribution.to(outputs[number].dtype)
    return _joined(outputs, chains.pieces, like)


def _inputs_of(call: Scan, piece: _Piece) -> dict[str, Tensor]:
    """Return the inputs of the tokens of a piece: [b, n, ...] of [B, s, ...]."""
    rows, tokens = slice(*piece.rows), slice(*piece.tokens)
    return {name: x[rows, tokens] for name, x in call.inputs.items()}


def _zeros_in_graph(call: Scan) -> Tensor:
    """Return zeros of the output's shape that depend on all inputs and parameters."""
    dependence = sum(x.sum() for x in (*call.inputs.values(), *call.parameters.values()))
    return 0 * (call.inputs[call.output_like] + dependence)


def _read(reader: Tensor, state: Tensor) -> Tensor:
    """Return what the reader of each token reads from a state.

    reader  [b, n, G, N], each of its heads for H / G heads of the state
    state   [b, H, P, N]
    result  [b, n, H, P]
    """
    rows, tokens, groups, width = reader.shape
    by_group = state.reshape(rows, groups, -1, width)  # no view: a rank's own state is in the order of its kernel
    out = reader.to(state.dtype).transpose(1, 2) @ by_group.transpose(2, 3)
    return out.transpose(1, 2).reshape(rows, tokens, *state.shape[1:3])


def _joined(outputs: Sequence[Tensor], pieces: Sequence[_Piece], like: Tensor) -> Tensor:
    """Return the output of all rows of the batch from that of the pieces; zeros outside of every document.

    outputs  [b, n, H, P] each
    result   [B, s, H, P], the shape of ``like``
    """
    if not pieces or outputs[0].shape == like.shape:
        return outputs[0]
    parts_of_rows: dict[Range, list[Tensor]] = {}
    filled: dict[Range, int] = {}  # tokens of the rows so far
    for output, piece in zip(outputs, pieces, strict=True):
        gap = piece.tokens[0] - filled.get(piece.rows, 0)
        part = nn.functional.pad(output, (0, 0, 0, 0, gap, 0)) if gap else output
        parts_of_rows.setdefault(piece.rows, []).append(part)
        filled[piece.rows] = piece.tokens[1]
    blocks = []
    num_rows = 0  # in the blocks so far
    for (start, stop), parts in sorted(parts_of_rows.items()):
        if start > num_rows:
            blocks.append(outputs[0].new_zeros(start - num_rows, *like.shape[1:]))
        block = torch.cat(parts, 1)
        blocks.append(nn.functional.pad(block, (0, 0, 0, 0, 0, like.shape[1] - block.shape[1])))
        num_rows = stop
    if num_rows < like.shape[0]:
        blocks.append(outputs[0].new_zeros(like.shape[0] - num_rows, *like.shape[1:]))
    return torch.cat(blocks)


class _PassStates(torch.autograd.Function):
    """Own states and decays to the states before own pieces; one node of the graph on every rank.

        own     states of own pieces that go on, [b, H, P, N] each, then their decays, [b, H] each
        result  ``out``, then the state before each own piece that takes one, [b, H, P, N]

    ``out`` goes through unchanged, so that the backward of a rank that needs no state is run as well: its collective
    is the other ranks' too.
    """

    @staticmethod
    def forward(
        ctx: Any, chains: Chains, trade: HeadTrade, clock: Clock, size: tuple[int, ...], out: Tensor, *own: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.chains, ctx.trade, ctx.clock, ctx.size = chains, trade, clock, size
        ctx.set_materialize_grads(False)
        heads = size[0]
        state_size, decay_size = prod(size), heads  # numbers of one batch row
        num_own = len(own) // 2
        known = dict(zip(chains.sent, zip(own[:num_own], own[num_own:], strict=True), strict=True))
        # A message to a rank has the state and the decay of one piece after the other.
        messages = []
        for places in chains.give:
            tensors = [tensor for place in places for tensor in known[place]]
            messages.append(_packed(tensors, out.device))
        rows_of_ranks = [chains.num_rows(places) for places in chains.take]
        shapes = [(sum(rows) * (state_size + decay_size),) for rows in rows_of_ranks]
        with clock.phase(ALL_TO_ALL, "pass_states"):
            received = trade.exchange(messages, shapes)
        for places, rows, message in zip(chains.take, rows_of_ranks, received, strict=True):
            start = 0
            for place, num_rows in zip(places, rows, strict=True):
                middle = start + num_rows * state_size
                stop = middle + num_rows * decay_size
                known[place] = message[start:middle].view(num_rows, *size), message[middle:stop].view(num_rows, heads)
                start = stop
        before = [_state_before(place, known) for place in chains.received]
        ctx.known = tuple(known)
        ctx.save_for_backward(*before, *(decay for _, decay in known.values()))
        return out.view_as(out), *before

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        chains: Chains = ctx.chains
        saved = ctx.saved_tensors  # asked for once: under activation checkpointing that runs the forward again
        before = dict(zip(chains.received, saved, strict=False))
        decays = dict(zip(ctx.known, saved[len(before) :], strict=True))
        device = next(x.device for x in (dout, *grads) if x is not None)
        dstates: dict[Place, Tensor] = {}  # gradients of the pieces' own states, as far as this rank knows them

        def add(place: Place, dstate: Tensor) -> None:
            dstates[place] = dstates[place] + dstate if place in dstates else dstate

        # Of the states before own pieces: back along the chain, past one decay after the other.
        for (chain, number), grad in zip(chains.received, grads, strict=True):
            shape = (chains.chains[chain].num_rows, *ctx.size)
            dstate = torch.zeros(shape, dtype=torch.float32, device=device) if grad is None else grad
            for earlier in range(number - 1, -1, -1):
                add((chain, earlier), dstate)
                if earlier:
                    dstate = decays[chain, earlier][..., None, None] * dstate
        # To the owners of these pieces: the way of the forward, backwards.
        messages = [_packed([dstates[place] for place in places], device) for places in chains.take]
        rows_of_ranks = [chains.num_rows(places) for places in chains.give]
        shapes = [(sum(rows), *ctx.size) for rows in rows_of_ranks]
        with ctx.clock.phase(ALL_TO_ALL, "pass_states"):
            received = ctx.trade.exchange(messages, shapes)
        for places, rows, message in zip(chains.give, rows_of_ranks, received, strict=True):
            for place, dstate in zip(places, message.split_with_sizes(rows), strict=True):
                add(place, dstate)
        own_dstates = [dstates[place] for place in chains.sent]
        ddecays: list[Tensor | None] = []
        for place in chains.sent:  # the first piece of a chain has no state before it for its decay to act on
            ddecays.append((before[place] * dstates[place]).sum((2, 3)) if place in before else None)
        return None, None, None, None, dout, *own_dstates, *ddecays


def _packed(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the tensors as one flat one; an empty one where there are none."""
    if not tensors:
        return torch.empty(0, dtype=torch.float32, device=device)
    return torch.cat([x.reshape(-1) for x in tensors])


def _state_before(place: Place, known: Mapping[Place, tuple[Tensor, Tensor]]) -> Tensor:
    """Return the state before a piece, from the states and decays of all pieces before it in its chain."""
    chain, stop = place
    state = known[chain, 0][0]
    for earlier in range(1, stop):
        own, decay = known[chain, earlier]
        state = own + decay[..., None, None] * state
    return state
