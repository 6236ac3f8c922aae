"""Ring table of a lane: which KV every group works on, receives and sends in each ring step.

A `RingTable` is computed once per batch layout and kind of mask, in plain integers. It combines the blocks that two
groups compute (`ds_hetero.batch.visible_blocks`) with the routes of KV between groups (`ds_hetero.batch.routes`).

Positions of tokens are global, indices are local. Ranges are half open.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ds_hetero.batch.routes import Round, Routes, Transfer
from ds_hetero.batch.visible_blocks import Block, DocumentPiece, PiecesByDocument, blocks_of_pieces, pieces_by_document
from ds_hetero.values.placement import Lane, Placement, Range, Rows

PiecesByPosition = Mapping[int, Sequence[DocumentPiece]]
"""Pieces of one document by position; positions that hold no token of the document are not in the mapping."""


@dataclass(frozen=True, eq=False)
class RingTable:
    """Work and messages of every ring step, for one lane of a placement and one kind of mask.

    A position in this table is the number of a group among the lane's members; `ds_hetero.batch.routes` says which way
    KV travels between them. In every forward step a position works on the KV of one source position, on its own first.
    Backward step j works on the KV of forward step ``steps - 1 - j``, so on its own last: the KV that arrived last in
    the forward is still in memory, and dK/dV travel home while the local block is computed.

    Sender and receiver post a transfer in the same round. That costs nothing if all blocks are needed everywhere; if
    they are not, it keeps backends with stream-ordered point-to-point calls (NCCL) free of deadlocks.

    A group computes its own blocks and rounds only. But it must know which keys of all groups travel, and to whom; the
    time for that is in proportion to the number of pieces into which the lane's documents are cut.
    """

    placement: Placement
    lane: Lane
    causal: bool
    window: int | None

    @cached_property
    def size(self) -> int:
        """Members of the lane: K."""
        return len(self.lane.members)

    def blocks_between(self, q_position: int, kv_position: int) -> tuple[tuple[Rows, tuple[Block, ...]], ...]:
        """List the visible blocks of the queries at one ring position and the keys at another.

        Batch rows with the same documents have the same blocks, so the list has one entry for each such set of rows.
        """
        return tuple(
            (rows, blocks_of_pieces(pieces[q_position], pieces[kv_position], self.causal, self.window))
            for rows, pieces in zip(self.placement.rows, self._pieces, strict=True)
        )

    def travelling_keys(self, source: int) -> tuple[Range, ...]:
        """Return the local keys of ``source`` that travel because other groups need them, as ascending ranges."""
        return self._travelling_keys[source]

    def reads(self, position: int, source: int) -> bool:
        """Whether the group at ``position`` needs KV of another group, at ``source``."""
        return position in self._readers[source]

    def num_keys_of(self, transfer: Transfer) -> int:
        """Count the keys whose KV, or gradient, a transfer carries."""
        if transfer.part is not None:
            return transfer.part.stop - transfer.part.start
        return self._widths[transfer.source]

    @cached_property
    def steps(self) -> int:
        """Number of steps of the forward, and of the backward: as many as members, or more if nodes differ in size."""
        return self._routes.steps

    def forward_source(self, position: int, step: int) -> int | None:
        """Return the position whose KV ``position`` works on in a forward step, first its own; None in an idle step."""
        return self._routes.source_at(position, step)

    def kept_source(self, position: int) -> int | None:
        """Return the source whose KV ``position`` keeps from the forward for the backward; None if it received none."""
        return self._routes.kept_source(position)

    def forward_rounds(self, position: int) -> tuple[Round, ...]:
        """Return the KV that ``position`` receives and sends in every round of the forward."""
        return self._routes.forward(position)

    def backward_kv_rounds(self, position: int) -> tuple[Round, ...]:
        """Return the KV that ``position`` receives and sends in every round of the backward."""
        return self._routes.backward_kv(position)

    def backward_grad_rounds(self, position: int) -> tuple[Round, ...]:
        """Return the gradients dK/dV that ``position`` receives and sends in every round of the backward."""
        return self._routes.backward_grads(position)

    @cached_property
    def _routes(self) -> Routes:
        nodes = self.lane.nodes or (0,) * self.size
        return Routes(nodes, self._readers, self._widths, proxies=self.lane.proxies)

    @cached_property
    def _widths(self) -> list[int]:
        """Number of keys of each source that travel to other positions."""
        return [sum(stop - start for start, stop in ranges) for ranges in self._travelling_keys]

    @cached_property
    def _pieces(self) -> tuple[tuple[PiecesByDocument, ...], ...]:
        """Pieces of documents, ``[set of batch rows][position]``."""
        pieces = []
        for rows in self.placement.rows:
            pieces.append(tuple(pieces_by_document(intervals, rows.documents) for intervals in self.lane.intervals))
        return tuple(pieces)

    @property
    def _readers(self) -> tuple[set[int], ...]:
        """For each source, the other positions whose queries need some of its keys."""
        readers, _ = self._readers_and_travelling_keys
        return readers

    @property
    def _travelling_keys(self) -> tuple[tuple[Range, ...], ...]:
        """For each source, the local indices of its keys that travel to other positions, as ranges."""
        _, key_ranges = self._readers_and_travelling_keys
        return key_ranges

    @cached_property
    def _readers_and_travelling_keys(self) -> tuple[tuple[set[int], ...], tuple[tuple[Range, ...], ...]]:
        """`_readers` and `_travelling_keys`, which are computed together."""
        readers: tuple[set[int], ...] = tuple(set() for _ in range(self.size))
        key_ranges: tuple[list[Range], ...] = tuple([] for _ in range(self.size))
        for pieces in self._pieces:
            for parts in _shared_documents(pieces):
                if self.window is None:
                    self._add_prefixes(parts, readers, key_ranges)
                else:
                    self._add_windows(parts, readers, key_ranges)
        return readers, tuple(map(_joined, key_ranges))

    def _add_prefixes(
        self, parts: PiecesByPosition, readers: Sequence[set[int]], key_ranges: Sequence[list[Range]]
    ) -> None:
        """Add readers and travelling keys of one document without a window.

        A position needs all keys of the document up to its own last query; without causality, up to the document's end.
        A key therefore travels if any other position's last query is behind it.

        Args:
            parts: pieces of the document by position.
        """
        # Position after the last key that a position needs.
        reach = {position: pieces[-1].stop for position, pieces in parts.items()}
        if not self.causal:
            reach = dict.fromkeys(parts, max(reach.values()))
        # A source's keys travel up to the furthest reach of the other positions. That is the furthest reach of all
        # positions, or, for the position that has it, the second furthest.
        furthest, second = sorted(reach, key=reach.__getitem__, reverse=True)[:2]
        for source, pieces in parts.items():
            first_key = pieces[0].start
            if len(readers[source]) < self.size - 1:  # otherwise all positions read the source already
                readers[source].update(reader for reader in parts if reach[reader] > first_key and reader != source)
            furthest_reader = second if source == furthest else furthest
            key_ranges[source].extend(_clipped(pieces, 0, reach[furthest_reader]))

    def _add_windows(
        self, parts: PiecesByPosition, readers: Sequence[set[int]], key_ranges: Sequence[list[Range]]
    ) -> None:
        """Add readers and travelling keys of one document in which a query sees the last ``window`` tokens only.

        Args:
            parts: pieces of the document by position.
        """
        assert self.window is not None
        for reader, queries in parts.items():
            for source, keys in parts.items():
                if reader == source:
                    continue
                visible: list[Range] = []
                for query in queries:
                    visible.extend(_clipped(keys, query.start - self.window + 1, query.stop))
                key_ranges[source].extend(visible)
                if visible:
                    readers[source].add(reader)


def _shared_documents(pieces_by_position: Sequence[PiecesByDocument]) -> Iterator[PiecesByPosition]:
    """Yield the pieces by position of every document that several positions hold."""
    pieces_of_document: dict[int, dict[int, Sequence[DocumentPiece]]] = defaultdict(dict)
    for position, by_document in enumerate(pieces_by_position):
        for document, pieces in by_document.items():
            pieces_of_document[document][position] = pieces
    return (parts for parts in pieces_of_document.values() if len(parts) > 1)


def _clipped(pieces: Sequence[DocumentPiece], first: int, last: int) -> Iterator[Range]:
    """Yield the local ranges of those tokens of ``pieces`` that have positions in ``[first, last)``."""
    for start, stop, local in pieces:
        low, high = max(start, first), min(stop, last)
        if low < high:
            yield local + low - start, local + high - start


def _joined(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """Return the union of ``ranges`` in ascending order; ranges that touch or overlap become one."""
    union: list[Range] = []
    for start, stop in sorted(ranges):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], stop))
        else:
            union.append((start, stop))
    return tuple(union)
