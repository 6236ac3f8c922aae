"""Cut a short piece out of a batch for the self-check: two rows, a few dozen tokens per rank, all keys of the batch.

The piece has to contain what can reveal a fault, so each part of it is chosen for a reason:

    start       where left padding ends, or around the second document: both code paths run in the piece
    length      a prime, so that no rank's share is a round number
    last row    sorted by token id, so that no statistic of a shard equals that of the row
    labels      taken from elsewhere in the batch where the piece lies in a prompt without labels

Dimension key: B rows of the batch, n tokens of a piece.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_hetero.frameworks.transformers.model.towers import Window
from ds_hetero.runtime.data.shards import IGNORE_INDEX, Batch, Entries, read_batch
from ds_hetero.runtime.documents import BOUNDARIES, MASK, POSITIONS, documents_from_cu_seqlens, documents_from_positions
from ds_hetero.values.placement import Range
from ds_hetero.values.schedule import Schedule

ROWS = 2
# Lengths are chosen, never measured: a piece costs less than a micro-batch, and every rank has several tokens.
TOKENS_PER_RANK = 24
TOKENS_OF_SMALLEST_RANK = 4
MOST_TOKENS = 512
_PACKING_PREFIXES = ("cu_seq_lens_", "max_length_", "seq_idx")  # of entries that only mark documents


def piece_of(
    batch: Batch, schedule: Schedule, *, inside_document: bool = False, padding_predicts: bool = False
) -> Entries:
    """Cut a piece of at most `ROWS` rows out of a batch, in the form that a collator produces; copied to the CPU.

    Args:
        batch: from the wrapped loader, so ``labels`` are not shifted and position ids are not added yet.
        schedule: its ranks share the tokens of the piece.
        inside_document: take one long document per row of a packed batch, without the entries that mark documents.
        padding_predicts: keep the label of the first token after left padding, which a padding token predicts.
    """
    tensors = {name: entry for name, entry in batch.items() if isinstance(entry, Tensor)}
    tokens = tensors["input_ids"] if "input_ids" in tensors else tensors["inputs_embeds"]
    batch_size, length = tokens.shape[:2]
    count = min(length, _next_prime(_num_tokens(schedule)))
    if inside_document:
        documents = _longest_documents(tensors, (batch_size, length))
        for _, interval in documents:
            count = min(count, _size(interval))
        places = [(row, start) for row, (start, _) in documents]
        batch = {name: entry for name, entry in batch.items() if not name.startswith(_PACKING_PREFIXES)}
    else:
        start = _start(tensors, length, count)
        places = [(row, start) for row in range(min(ROWS, batch_size))]
    piece = {name: _cut_entry(name, entry, (batch_size, length), places, count) for name, entry in batch.items()}
    _sort_last_row(piece)
    _borrow_labels(piece, tensors)
    _mask_labels_of_padding(piece, padding_predicts)
    return piece


def window_of(batch: Batch, schedule: Schedule) -> tuple[Window, Tensor | None]:
    """Choose the part of a batch that the text decoder runs in a self-check of a model with towers.

    It begins before the first image or sound, if the batch marks these by ``mm_token_type_ids``.

    Returns:
        The window, and its shifted labels [rows, n]; None if the batch has no labels.
    """
    tensors = {name: entry for name, entry in batch.items() if isinstance(entry, Tensor)}
    tokens = tensors["input_ids"] if "input_ids" in tensors else tensors["inputs_embeds"]
    length = tokens.shape[1]
    count = min(length, _next_prime(_num_tokens(schedule)))
    start = _start(tensors, length, count)
    token_types = tensors.get("mm_token_type_ids")  # [B, L], 0 for text
    if token_types is not None and bool(token_types.any()):
        first_image = int(token_types.ne(0).any(0).nonzero()[0])
        start = min(max(first_image - count // 4, 0), length - count)
    window = Window(min(ROWS, len(tokens)), start, start + count)
    read = read_batch(dict(batch), keep_inputs=True)
    if "shift_labels" not in read.sequences:
        return window, None
    piece = {"shift_labels": read.sequences["shift_labels"][: window.rows, start : window.stop].clone().cpu()}
    _borrow_labels(piece, read.sequences)
    real = real_tokens(batch)[: window.rows, start : window.stop].cpu()
    piece["shift_labels"][~real] = IGNORE_INDEX
    return window, piece["shift_labels"]


def real_tokens(piece: Batch) -> Tensor:
    """Return [B, n], True for tokens of the piece that are not padding."""
    mask = piece.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return mask.ne(0)
    tokens = piece["input_ids"] if piece.get("input_ids") is not None else piece["inputs_embeds"]
    return torch.ones(tokens.shape[:2], dtype=torch.bool)


def marks_documents(piece: Batch) -> str:
    """Return the name of the entry that marks several documents; empty if the piece has one document.

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
    """Return the length at which the average rank and the smallest rank have enough tokens, up to `MOST_TOKENS`.

    Example: weights 1 and 15. 24 tokens per rank would be 48, of which the first rank has 3; 64 give it 4.
    """
    weights: list[float] = []
    for group in schedule.groups:
        weights.extend(weight for weight in group.tokens if weight)
    for_smallest = -(-TOKENS_OF_SMALLEST_RANK * sum(weights) // min(weights))
    return min(max(TOKENS_PER_RANK * len(weights), int(for_smallest)), MOST_TOKENS)


def _next_prime(number: int) -> int:
    """Return the smallest prime that is at least ``number``."""
    while any(number % divisor == 0 for divisor in range(2, int(number**0.5) + 1)):
        number += 1
    return number


def _start(tensors: Mapping[str, Tensor], length: int, count: int) -> int:
    """Return the first position of the piece, chosen so that left padding or a document ends inside the piece."""
    mask = tensors.get("attention_mask")
    if mask is not None and mask.dim() == 2:
        padding = int(mask[:ROWS].ne(0).int().argmax(1).max())  # argmax: index of the first real token
        if padding:
            return min(max(padding - count // 4, 0), length - count)
    restart = first_restart(tensors, length)
    if restart is not None and restart >= count:
        return min(restart - count // 2, length - count)
    return 0


def first_restart(tensors: Mapping[str, Tensor], length: int) -> int | None:
    """Return the position at which the second document of the first row begins; None if there is only one."""
    if BOUNDARIES in tensors:
        inside = [boundary for boundary in tensors[BOUNDARIES].tolist() if 0 < boundary < length]
        return min(inside, default=None)
    positions = tensors.get(POSITIONS)
    if positions is None or positions.shape[-1] != length:
        return None
    restarts = positions.reshape(-1, length)[0].diff().ne(1).nonzero()
    return int(restarts[0]) + 1 if len(restarts) else None


def _longest_documents(tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> list[tuple[int, Range]]:
    """Return (row, longest document of the row) for the `ROWS` rows with the longest ones."""
    batch_size, length = shape
    if BOUNDARIES in tensors:
        documents = documents_from_cu_seqlens(tensors[BOUNDARIES].tolist(), length, batch_size)
    else:
        by_row = documents_from_positions(tensors[POSITIONS].reshape(-1, length))
        # Position ids of one row may stand for all rows.
        documents = [by_row[row % len(by_row)] for row in range(batch_size)]
    longest = [(row, max(intervals, key=_size)) for row, intervals in enumerate(documents)]
    longest.sort(key=lambda place: -_size(place[1]))
    return longest[:ROWS]


def _size(interval: Range) -> int:
    start, stop = interval
    return stop - start


def _cut_entry(name: str, entry: Any, shape: tuple[int, int], places: Sequence[tuple[int, int]], count: int) -> Any:
    """Cut one entry of a batch.

    Args:
        shape: [B, L] of the batch; an entry that begins with these dimensions is cut in both.
        places: (row, first position) of each row of the piece.
        count: tokens of each row, n.
    """
    batch_size, length = shape
    start = places[0][1]
    if not isinstance(entry, Tensor):
        return min(int(entry), count) if name.startswith("max_length_") else entry
    if name.startswith("cu_seq_lens_"):
        # Boundaries 0 5 9 16 of a piece at 3 with 8 tokens: 0 2 6 8.
        inside = [int(boundary) - start for boundary in entry if start < int(boundary) < start + count]
        return torch.tensor(sorted({0, count, *inside}), dtype=entry.dtype)
    if tuple(entry.shape[:2]) == shape:
        part = torch.stack([entry[row, begin : begin + count] for row, begin in places])
    elif name == POSITIONS and entry.shape[-1] == length:
        part = entry[..., start : start + count]
    elif entry.dim() and entry.shape[0] == batch_size:
        part = entry[[row for row, _ in places]]
    else:
        part = entry
    return part.detach().clone().cpu()


def _sort_last_row(piece: Entries) -> None:
    """Sort the tokens of the last row by id, and its labels with them.

    A piece with a mask, position ids or boundaries stays as it is, because these give positions a meaning.
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

    Every third position stays as it is, so that ignored labels (-100) occur in the piece, too.
    """
    for name in {"labels", "shift_labels"} & set(piece):
        labels = piece[name]
        is_ignored = labels.eq(IGNORE_INDEX)
        batch_labels = tensors[name]
        real_labels = batch_labels[batch_labels.ne(IGNORE_INDEX)][: labels.numel()].cpu()
        has_enough = int((~is_ignored).sum()) >= labels.numel() // 8
        if has_enough or not len(real_labels):
            continue
        indices = torch.arange(labels.numel()).view_as(labels)
        is_filled = is_ignored & indices.remainder(3).ne(0)
        labels[is_filled] = real_labels[indices.remainder(len(real_labels))][is_filled]


def has_left_padding(piece: Batch) -> bool:
    """Return True if padding precedes a real token in any row."""
    return bool(_follows_padding(real_tokens(piece)).any())


def _mask_labels_of_padding(piece: Entries, padding_predicts: bool) -> None:
    """Ignore the labels of padding and, unless ``padding_predicts``, of tokens that padding predicts.

    This engine's attention output of a padding token is zero, as flash-attention's is; eager attention's is not.
    """
    real = real_tokens(piece)
    for name in {"labels", "shift_labels"} & set(piece):
        piece[name][~real] = IGNORE_INDEX
        if name == "labels" and not padding_predicts:
            piece[name][_follows_padding(real)] = IGNORE_INDEX


def _follows_padding(real: Tensor) -> Tensor:
    """Return [B, n], True for a real token right after padding: real 0 0 1 1 gives 0 0 1 0."""
    is_padding_before = torch.cat([torch.zeros_like(real[:, :1]), ~real[:, :-1]], dim=1)
    return is_padding_before & real
