"""Cut a short piece out of a batch for the self-check: two rows, a few dozen tokens per rank, all keys of the batch.

The piece is chosen so that it reveals faults:

    start       before the end of left padding, or before the second document, so that the piece has tokens before and
                after this boundary
    length      a prime, so that no rank's share is a round number
    last row    sorted by token id, so that no statistic of a shard equals that of the row
    labels      taken from elsewhere in the batch if the piece lies in a prompt, which has no labels

Dimension key: B rows of the batch, n tokens of a piece.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_hetero.frameworks.transformers.model.towers import Window
from ds_hetero.runtime.data.shards import IGNORE_INDEX, Batch, Entries, read_batch
from ds_hetero.runtime.documents import BOUNDARIES, MASK, POSITIONS, documents_from_cu_seqlens, documents_from_positions
from ds_hetero.values.placement import Range
from ds_hetero.values.schedule import Schedule

ROWS = 2  # of a piece
# Lengths are chosen, never measured: a piece costs less than a micro-batch, and every rank has several tokens.
TOKENS_PER_RANK = 24
TOKENS_OF_SMALLEST_RANK = 4
MAX_PIECE_TOKENS = 512
# Parts of a piece, chosen, never measured: 4 stands for a quarter.
_PADDING_PART = 4  # of left padding, or of text before the first image: most of the piece is what follows
_FIRST_DOCUMENT_PART = 2  # of the first document, where the piece has two
_ENOUGH_LABELS_PART = 8  # of tokens with a label; a piece with fewer gets labels from elsewhere
_IGNORED_PERIOD = 3  # of these labels, every third is left out
_PACKING_PREFIXES = ("cu_seq_lens_", "max_length_", "seq_idx")  # names of entries that only mark documents


def piece_of(
    batch: Batch, schedule: Schedule, *, inside_document: bool = False, padding_predicts: bool = False
) -> Entries:
    """Cut a piece of at most `ROWS` rows out of a batch, in the form that a collator produces; copied to the CPU.

    Args:
        batch: from the wrapped loader, so ``labels`` are not shifted and position ids are not added yet.
        schedule: of the ranks that share the tokens of the piece.
        inside_document: take one long document per row of a packed batch, without the entries that mark documents.
        padding_predicts: keep the label of the first token after left padding, which a padding token predicts.
    """
    tensors = {name: entry for name, entry in batch.items() if isinstance(entry, Tensor)}
    batch_size, length = _shape_of(tensors)
    count = min(length, _next_prime(_num_tokens(schedule)))
    if inside_document:
        documents = _longest_documents(tensors, (batch_size, length))
        for document in documents:
            count = min(count, document.stop - document.start)
        row_starts = [_RowStart(document.row, document.start) for document in documents]
        batch = {name: entry for name, entry in batch.items() if not name.startswith(_PACKING_PREFIXES)}
    else:
        start = _choose_start(tensors, length, count)
        row_starts = [_RowStart(row, start) for row in range(min(ROWS, batch_size))]
    piece = {name: _cut_entry(name, entry, (batch_size, length), row_starts, count) for name, entry in batch.items()}
    _sort_last_row(piece)
    _borrow_labels(piece, tensors)
    _mask_labels_of_padding(piece, padding_predicts)
    return piece


def window_of(batch: Batch, schedule: Schedule) -> tuple[Window, Tensor | None]:
    """Choose the part of a batch that the text decoder computes in a self-check of a model with towers.

    The part begins before the first image or sound, if the batch marks these by ``mm_token_type_ids``.

    Returns:
        The window, and its shifted labels [rows, n]; None if the batch has no labels.
    """
    tensors = {name: entry for name, entry in batch.items() if isinstance(entry, Tensor)}
    batch_size, length = _shape_of(tensors)
    count = min(length, _next_prime(_num_tokens(schedule)))
    start = _choose_start(tensors, length, count)
    token_types = tensors.get("mm_token_type_ids")  # [B, L], 0 for text
    if token_types is not None and bool(token_types.any()):
        first_image = int(token_types.ne(0).any(0).nonzero()[0])
        start = min(max(first_image - count // _PADDING_PART, 0), length - count)
    window = Window(min(ROWS, batch_size), start, start + count)
    sequences = read_batch(dict(batch), keep_inputs=True).sequences
    if "shift_labels" not in sequences:
        return window, None
    piece = {"shift_labels": sequences["shift_labels"][: window.rows, start : window.stop].clone().cpu()}
    _borrow_labels(piece, sequences)
    is_real = real_tokens(batch)[: window.rows, start : window.stop].cpu()
    piece["shift_labels"][~is_real] = IGNORE_INDEX
    return window, piece["shift_labels"]


def _shape_of(batch: Batch) -> tuple[int, int]:
    """Return [B, L], the rows of a batch or piece and their tokens."""
    tokens = batch["input_ids"] if batch.get("input_ids") is not None else batch["inputs_embeds"]
    num_rows, num_tokens = tokens.shape[:2]
    return num_rows, num_tokens


def real_tokens(piece: Batch) -> Tensor:
    """Return [B, n], True for tokens of the piece that are not padding."""
    mask = piece.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return mask.ne(0)
    return torch.ones(_shape_of(piece), dtype=torch.bool)


def marks_documents(piece: Batch) -> str:
    """Return the name of the entry that marks several documents in a piece; empty if it has one document.

    Not every attention of a single process reads such an entry, so one process may let documents see each other.
    """
    if piece.get(BOUNDARIES) is not None:
        has_several_documents = len(piece[BOUNDARIES]) > 2
        return BOUNDARIES if has_several_documents else ""
    positions = piece.get(POSITIONS)
    # transformers looks for restarts of position ids only in a batch without a mask.
    if not isinstance(positions, Tensor) or piece.get(MASK) is not None:
        return ""
    has_restart = bool(positions.reshape(-1, positions.shape[-1]).diff().ne(1).any())
    return POSITIONS if has_restart else ""


def _num_tokens(schedule: Schedule) -> int:
    """Return the length of a row of the piece, in tokens, before it is raised to a prime.

    It gives the ranks `TOKENS_PER_RANK` on average, and the smallest rank `TOKENS_OF_SMALLEST_RANK`, but is at most
    `MAX_PIECE_TOKENS`. Example: two ranks with weights 1 and 15. With 2 * 24 = 48 tokens the first rank has 3, with 64
    it has 4, so the length is 64.
    """
    weights: list[float] = []
    for group in schedule.groups:
        weights.extend(weight for weight in group.tokens if weight)
    tokens_for_smallest = -(-TOKENS_OF_SMALLEST_RANK * sum(weights) // min(weights))
    return min(max(TOKENS_PER_RANK * len(weights), int(tokens_for_smallest)), MAX_PIECE_TOKENS)


def _next_prime(number: int) -> int:
    """Return the smallest prime that is at least ``number``."""
    while any(number % divisor == 0 for divisor in range(2, int(number**0.5) + 1)):
        number += 1
    return number


def _choose_start(tensors: Mapping[str, Tensor], length: int, count: int) -> int:
    """Return the position at which the piece begins, so that left padding, or the first document, ends inside it."""
    mask = tensors.get("attention_mask")
    if mask is not None and mask.dim() == 2:
        padding = int(mask[:ROWS].ne(0).int().argmax(1).max())  # argmax: index of the first real token
        if padding:
            return min(max(padding - count // _PADDING_PART, 0), length - count)
    restart = first_restart(tensors, length)
    if restart is not None and restart >= count:
        return min(restart - count // _FIRST_DOCUMENT_PART, length - count)
    return 0


def first_restart(tensors: Mapping[str, Tensor], length: int) -> int | None:
    """Return the position at which the second document of the first row begins; None if there is only one."""
    if BOUNDARIES in tensors:
        starts = [boundary for boundary in tensors[BOUNDARIES].tolist() if 0 < boundary < length]
        return min(starts, default=None)
    positions = tensors.get(POSITIONS)
    if positions is None or positions.shape[-1] != length:
        return None
    restarts = positions.reshape(-1, length)[0].diff().ne(1).nonzero()
    return int(restarts[0]) + 1 if len(restarts) else None


class _RowStart(NamedTuple):
    """Where a row of the piece begins in the batch."""

    row: int
    position: int


class _Document(NamedTuple):
    """A document of a row of the batch: positions from ``start`` up to, and without, ``stop``."""

    row: int
    start: int
    stop: int


def _longest_documents(tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> list[_Document]:
    """Return the longest document of each of `ROWS` rows: those rows whose longest documents are longest.

    Args:
        tensors: entries of the batch.
        shape: [B, L] of the batch.
    """
    batch_size, length = shape
    if BOUNDARIES in tensors:
        documents = documents_from_cu_seqlens(tensors[BOUNDARIES].tolist(), length, batch_size)
    else:
        documents_by_row = documents_from_positions(tensors[POSITIONS].reshape(-1, length))
        # Position ids of one row may stand for all rows.
        documents = [documents_by_row[row % len(documents_by_row)] for row in range(batch_size)]
    longest_of_rows = [_Document(row, *max(intervals, key=_size)) for row, intervals in enumerate(documents)]
    longest_of_rows.sort(key=lambda document: document.start - document.stop)  # the longest document first
    return longest_of_rows[:ROWS]


def _size(interval: Range) -> int:
    start, stop = interval
    return stop - start


def _cut_entry(name: str, entry: Any, shape: tuple[int, int], row_starts: Sequence[_RowStart], count: int) -> Any:
    """Return the part of one entry of a batch that belongs to the piece.

    Args:
        shape: [B, L] of the batch; an entry that begins with these dimensions is cut in both.
        row_starts: the first token of each row of the piece.
        count: tokens of each row of the piece, n.
    """
    batch_size, length = shape
    start = row_starts[0].position
    if not isinstance(entry, Tensor):
        return min(int(entry), count) if name.startswith("max_length_") else entry
    if name.startswith("cu_seq_lens_"):
        # Boundaries 0 5 9 16 of a piece at 3 with 8 tokens: 0 2 6 8.
        inner_boundaries = [int(boundary) - start for boundary in entry if start < int(boundary) < start + count]
        return torch.tensor(sorted({0, count, *inner_boundaries}), dtype=entry.dtype)
    if tuple(entry.shape[:2]) == shape:
        part = torch.stack([entry[first.row, first.position : first.position + count] for first in row_starts])
    elif name == POSITIONS and entry.shape[-1] == length:
        part = entry[..., start : start + count]
    elif entry.dim() and entry.shape[0] == batch_size:
        part = entry[[first.row for first in row_starts]]
    else:
        part = entry
    return part.detach().clone().cpu()


def _sort_last_row(piece: Entries) -> None:
    """Sort the tokens of the piece's last row by id, and its labels with them.

    A piece with a mask, position ids or document boundaries is not sorted, because these belong to positions.
    """
    ids = piece.get("input_ids")
    if not isinstance(ids, Tensor) or len(ids) < ROWS:
        return
    if {"attention_mask", "position_ids", "cu_seq_lens_q"} & set(piece):
        return
    order = ids[-1].argsort()
    for entry in piece.values():
        if isinstance(entry, Tensor) and entry.shape[:2] == ids.shape:
            entry[-1] = entry[-1][order]


def _borrow_labels(piece: Entries, tensors: Mapping[str, Tensor]) -> None:
    """Give a piece with few labels, such as one that lies in a prompt, labels from elsewhere in the batch.

    Every third position keeps its label, so that ignored labels (-100) occur in the piece, too.

    Args:
        tensors: entries of the whole batch.
    """
    for name in {"labels", "shift_labels"} & set(piece):
        labels = piece[name]
        is_ignored = labels.eq(IGNORE_INDEX)
        batch_labels = tensors[name]
        real_labels = batch_labels[batch_labels.ne(IGNORE_INDEX)][: labels.numel()].cpu()
        has_enough = int((~is_ignored).sum()) >= labels.numel() // _ENOUGH_LABELS_PART
        if has_enough or not len(real_labels):
            continue
        indices = torch.arange(labels.numel()).view_as(labels)
        is_filled = is_ignored & indices.remainder(_IGNORED_PERIOD).ne(0)
        labels[is_filled] = real_labels[indices.remainder(len(real_labels))][is_filled]


def has_left_padding(piece: Batch) -> bool:
    """Return True if padding precedes a real token in any row."""
    return bool(_follows_padding(real_tokens(piece)).any())


def _mask_labels_of_padding(piece: Entries, padding_predicts: bool) -> None:
    """Ignore the labels of padding and, unless ``padding_predicts``, of tokens that padding predicts.

    This engine's attention output of a padding token is zero, as flash-attention's is; eager attention's is not.
    """
    is_real = real_tokens(piece)
    for name in {"labels", "shift_labels"} & set(piece):
        piece[name][~is_real] = IGNORE_INDEX
        if name == "labels" and not padding_predicts:
            piece[name][_follows_padding(is_real)] = IGNORE_INDEX


def _follows_padding(is_real: Tensor) -> Tensor:
    """Return [B, n], True for a real token right after padding: is_real 0 0 1 1 gives 0 0 1 0."""
    is_after_padding = torch.cat([torch.zeros_like(is_real[:, :1]), ~is_real[:, :-1]], dim=1)
    return is_after_padding & is_real
