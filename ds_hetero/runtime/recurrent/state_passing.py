"""Run a scan over shards by passing states between ranks: every rank scans its own tokens, with all heads.

A piece is a run of one rank's tokens that lies in one document. Each piece is scanned from a state of zeros. If several
ranks hold pieces of a document, these are a chain, numbered from 0. A piece produces two results: its own last state,
and its decay, the factor (one per head) by which it multiplies the state before it. Both are sent to the ranks of later
pieces, so messages do not grow with the sequence:

    state after piece k = decay_k x state before it + own_k

Example: a document on ranks 0, 1, 2, one piece each. Rank 2 gets own_0 from rank 0, and own_1 and decay_1 from rank 1;
the state before its piece is decay_1 x own_0 + own_1. It adds the contribution of this state to its output.

The combination is linear, so the gradient of the state before a piece goes back to all earlier pieces of the chain,
each time multiplied by the decays between. In the example own_1 gets the gradient itself, own_0 gets decay_1 times it.

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
from ds_hetero.runtime.recurrent.replica_all_to_all import ReplicaAllToAll, all_to_all_of
from ds_hetero.runtime.recurrent.scan_call import PassedState, Scan
from ds_hetero.runtime.recurrent.sequences import pieces_of, sequences_of
from ds_hetero.runtime.replica import Replica
from ds_hetero.runtime.step_clock import ALL_TO_ALL, Clock
from ds_hetero.values.placement import Range

Place = tuple[int, int]
"""Place of a piece: the index of its chain, and the index of the piece in the chain."""


class _Piece(NamedTuple):
    """A run of consecutive tokens of one document that this rank holds, in all batch rows with these documents."""

    rows: Range  # of the batch
    tokens: Range  # among the rank's tokens of a row
    place: Place | None  # None if the rank holds the whole document in one piece


class _Chain(NamedTuple):
    """A document that consists of several pieces."""

    num_rows: int  # batch rows with this document
    owners: tuple[int, ...]  # for each piece, in the order of the sequence: the index of its rank in the replica

    def needs(self, index: int) -> range:
        """Return the numbers of the pieces whose states the replica's rank ``index`` needs: all before its last."""
        pieces_of_rank = [number for number, owner in enumerate(self.owners) if owner == index]
        return range(pieces_of_rank[-1] if pieces_of_rank else 0)


@dataclass(frozen=True, eq=False)
class Chains:
    """Tables of the states that the ranks of a replica pass to each other in one batch.

    Attributes:
        chains: of the batch; a `Place` refers to them.
        pieces: of this rank, in the order of rows and tokens.
        places_to_send: for each rank of the replica, this rank's pieces whose states that rank needs.
        places_to_receive: for each rank of the replica, its pieces whose states this rank needs.
        moved_states: number of states, of one row each, that all ranks together send in a forward.
    """

    chains: tuple[_Chain, ...]
    pieces: tuple[_Piece, ...]
    places_to_send: tuple[tuple[Place, ...], ...]
    places_to_receive: tuple[tuple[Place, ...], ...]
    moved_states: int

    def has_later_piece(self, piece: _Piece) -> bool:
        """Whether a piece of this rank has later pieces in its chain."""
        return piece.place is not None and piece.place[1] + 1 < len(self.chains[piece.place[0]].owners)

    @cached_property
    def places_before_others(self) -> tuple[Place, ...]:
        """Pieces of this rank with later pieces in their chains."""
        return tuple(piece.place for piece in self.pieces if piece.place is not None and self.has_later_piece(piece))

    @staticmethod
    def has_earlier_piece(piece: _Piece) -> bool:
        """Whether a piece of this rank has earlier pieces in its chain."""
        return piece.place is not None and piece.place[1] > 0

    @cached_property
    def places_after_others(self) -> tuple[Place, ...]:
        """Pieces of this rank with earlier pieces in their chains."""
        return tuple(piece.place for piece in self.pieces if piece.place is not None and self.has_earlier_piece(piece))

    def num_rows(self, places: Iterable[Place]) -> list[int]:
        """Return the number of batch rows of each of these pieces."""
        return [self.chains[chain].num_rows for chain, _ in places]


@lru_cache(maxsize=64)
def chains_of(replica: Replica, batch: BatchLayout) -> Chains:
    """Return the tables for a batch; every rank of the replica derives the same chains from the batch's layout."""
    chains: list[_Chain] = []
    pieces: list[_Piece] = []
    for rows in sequences_of(batch):
        # By the document's start: (start, index of the rank in the replica) of each of its pieces.
        pieces_by_document: dict[int, list[tuple[int, int]]] = {}
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
    places_to_send = tuple(_places_to_send(chains, own_index, target) for target in ranks)
    places_to_receive = tuple(_places_to_send(chains, source, own_index) for source in ranks)
    moved_states = 0
    for chain in chains:
        for target in ranks:
            moved_states += chain.num_rows * sum(chain.owners[number] != target for number in chain.needs(target))
    return Chains(tuple(chains), tuple(pieces), places_to_send, places_to_receive, moved_states)


def _own_pieces(replica: Replica, batch: BatchLayout, documents: Sequence[Range]) -> Iterator[tuple[int, int, Range]]:
    """Yield (first position of the document, first position of the piece, its range of local tokens) of each piece.

    Example: a rank holds the positions [4, 8) and [12, 16) of one document. Its second piece is (0, 12, (4, 8)).
    """
    intervals = batch.placement.intervals(replica.rank)
    first_token = 0
    for low, high in intervals:
        for document, start, stop in pieces_of([(low, high)], documents):
            yield document, start, (first_token + start - low, first_token + stop - low)
        first_token += high - low


def _places_to_send(chains: Sequence[_Chain], source: int, target: int) -> tuple[Place, ...]:
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
    Collectives: one all_to_all_single forward, one backward; none if every document is on one rank.
    Sends: to each other rank, for each piece whose state it needs, a state [b, H, P, N] and a decay [b, H] in float32.
    """
    chains = chains_of(replica, batch)

    # Scan every piece of this rank from a state of zeros.
    outputs = []  # of each piece, [b, n, H, P]
    states, decays = [], []  # of pieces with later ones in their chains, [b, H, P, N] and [b, H]
    log_decays: dict[Place, Tensor] = {}  # [b, n, H], of each token
    for piece in chains.pieces:
        inputs = _inputs_of(call, piece)
        if piece.place is not None:
            log_decays[piece.place] = passed.log_decay(inputs, call.parameters)
        if not chains.has_later_piece(piece):
            outputs.append(call.compute(inputs, call.parameters))
            continue
        assert piece.place is not None
        output, state = passed.compute(inputs, call.parameters)
        outputs.append(output)
        # In float32, since errors of a state add up over the pieces behind it.
        states.append(state.to(torch.float32))
        decays.append(log_decays[piece.place].sum(1).exp().to(torch.float32))
    if not chains.pieces:
        # Part of the graph: other ranks wait for this rank's backward, and ZeRO for gradients of all parameters.
        outputs = [_zeros_in_graph(call)]

    # Exchange states, and add the contribution of the state before a piece to its output.
    like, reader = call.inputs[call.output_like], call.inputs[passed.reader]
    states_before: list[Tensor] = []
    if chains.chains:
        size = (*like.shape[2:], reader.shape[-1])  # H, P, N
        apply: Any = _PassStates.apply
        outputs[0], *states_before = apply(
            chains, all_to_all_of(replica, batch), clock, size, outputs[0], *states, *decays
        )
    taking = [number for number, piece in enumerate(chains.pieces) if chains.has_earlier_piece(piece)]
    for number, state in zip(taking, states_before, strict=True):
        piece = chains.pieces[number]
        assert piece.place is not None
        decay_so_far = log_decays[piece.place].cumsum(1).exp()  # of the state before the piece, after each token
        contribution = _read_state(reader[slice(*piece.rows), slice(*piece.tokens)], state) * decay_so_far[..., None]
        outputs[number] = outputs[number] + contribution.to(outputs[number].dtype)
    return _join_outputs(outputs, chains.pieces, like)


def _inputs_of(call: Scan, piece: _Piece) -> dict[str, Tensor]:
    """Return the inputs [b, n, ...] of the tokens of a piece, out of [B, s, ...]."""
    rows, tokens = slice(*piece.rows), slice(*piece.tokens)
    return {name: x[rows, tokens] for name, x in call.inputs.items()}


def _zeros_in_graph(call: Scan) -> Tensor:
    """Return zeros of the output's shape that depend on all inputs and parameters."""
    dependence = sum(x.sum() for x in (*call.inputs.values(), *call.parameters.values()))
    return 0 * (call.inputs[call.output_like] + dependence)


def _read_state(reader: Tensor, state: Tensor) -> Tensor:
    """Multiply a state with the reader of each token.

    reader  [b, n, G, N], one head for H / G heads of the state
    state   [b, H, P, N]
    result  [b, n, H, P]
    """
    rows, tokens, groups, width = reader.shape
    by_group = state.reshape(rows, groups, -1, width)  # not a view: a kernel may return a state with other strides
    out = reader.to(state.dtype).transpose(1, 2) @ by_group.transpose(2, 3)
    return out.transpose(1, 2).reshape(rows, tokens, *state.shape[1:3])


def _join_outputs(outputs: Sequence[Tensor], pieces: Sequence[_Piece], like: Tensor) -> Tensor:
    """Join the outputs of the pieces to one output of all rows of the batch; zeros outside of all documents.

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
    """Exchanges the states and decays of pieces, and computes the states before this rank's pieces.

        own     states [b, H, P, N] of this rank's pieces that are not the last of their chain, then their decays [b, H]
        result  ``out``, then the state [b, H, P, N] before each of this rank's pieces that are not the first

    ``out`` goes through unchanged. So autograd runs this node's backward, with its collective, on a rank that needs no
    state as well.
    """

    @staticmethod
    def forward(
        ctx: Any,
        chains: Chains,
        all_to_all: ReplicaAllToAll,
        clock: Clock,
        size: tuple[int, ...],
        out: Tensor,
        *own: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.chains, ctx.all_to_all, ctx.clock, ctx.size = chains, all_to_all, clock, size
        ctx.set_materialize_grads(False)
        heads = size[0]
        state_size, decay_size = prod(size), heads  # numbers of one batch row
        num_states = len(own) // 2
        states, decays = own[:num_states], own[num_states:]
        # State and decay of each piece, by its place: those of this rank, and then those that it receives.
        known = dict(zip(chains.places_before_others, zip(states, decays, strict=True), strict=True))
        # A message to a rank has the state and the decay of one piece after the other.
        messages = []
        for places in chains.places_to_send:
            tensors: list[Tensor] = []
            for place in places:
                tensors += known[place]
            messages.append(_flatten(tensors, out.device))
        rows_of_ranks = [chains.num_rows(places) for places in chains.places_to_receive]
        shapes = [(sum(rows) * (state_size + decay_size),) for rows in rows_of_ranks]
        with clock.phase(ALL_TO_ALL, "pass_states"):
            received = all_to_all.exchange(messages, shapes)
        for places, rows, message in zip(chains.places_to_receive, rows_of_ranks, received, strict=True):
            start = 0
            for place, num_rows in zip(places, rows, strict=True):
                middle = start + num_rows * state_size
                stop = middle + num_rows * decay_size
                known[place] = message[start:middle].view(num_rows, *size), message[middle:stop].view(num_rows, heads)
                start = stop
        before = [_state_before(place, known) for place in chains.places_after_others]
        ctx.known = tuple(known)
        ctx.save_for_backward(*before, *(decay for _, decay in known.values()))
        return out.view_as(out), *before

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        chains: Chains = ctx.chains
        saved = ctx.saved_tensors  # read once: under activation checkpointing, reading runs the forward again
        before = dict(zip(chains.places_after_others, saved, strict=False))
        decays = dict(zip(ctx.known, saved[len(before) :], strict=True))
        device = next(x.device for x in (dout, *grads) if x is not None)
        dstates: dict[Place, Tensor] = {}  # gradients of the pieces' own states, as far as they come from this rank

        def add(place: Place, dstate: Tensor) -> None:
            dstates[place] = dstates[place] + dstate if place in dstates else dstate

        # From the states before this rank's pieces, go back along the chain, multiplying by one decay after the other.
        for (chain, number), grad in zip(chains.places_after_others, grads, strict=True):
            shape = (chains.chains[chain].num_rows, *ctx.size)
            dstate = torch.zeros(shape, dtype=torch.float32, device=device) if grad is None else grad
            for earlier in range(number - 1, -1, -1):
                add((chain, earlier), dstate)
                if earlier:
                    dstate = decays[chain, earlier][..., None, None] * dstate
        # Send the gradients to the owners of the pieces, the reverse of the forward.
        messages = [_flatten([dstates[place] for place in places], device) for places in chains.places_to_receive]
        rows_of_ranks = [chains.num_rows(places) for places in chains.places_to_send]
        shapes = [(sum(rows), *ctx.size) for rows in rows_of_ranks]
        with ctx.clock.phase(ALL_TO_ALL, "pass_states"):
            received = ctx.all_to_all.exchange(messages, shapes)
        for places, rows, message in zip(chains.places_to_send, rows_of_ranks, received, strict=True):
            for place, dstate in zip(places, message.split_with_sizes(rows), strict=True):
                add(place, dstate)
        own_dstates = [dstates[place] for place in chains.places_before_others]
        ddecays: list[Tensor | None] = []
        for (
            place
        ) in chains.places_before_others:  # the first piece of a chain has no state before it for its decay to act on
            ddecays.append((before[place] * dstates[place]).sum((2, 3)) if place in before else None)
        return None, None, None, None, dout, *own_dstates, *ddecays


def _flatten(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Concatenate tensors to a flat one; an empty one without tensors."""
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
