"""A short piece of a batch: a few dozen tokens a rank, of two rows, with the batch's own keys.

It must have what shows a fault: labels; padding, if the batch is padded; a border between documents, if it is packed;
and no part that looks like the whole. So its length is a prime (no share of it is a round number), and one row is
sorted by token id (no statistic of a part is that of the whole).
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
TOKENS_PER_RANK = 24
TOKENS_OF_SMALLEST_RANK = 4
MOST_TOKENS = 512
_OF_PACKING = ("cu_seq_lens_", "max_length_", "seq_idx")  # how the names of entries begin that mark documents alone


def piece_of(
    batch: Batch, schedule: Schedule, *, inside_document: bool = False, padding_predicts: bool = False
) -> Entries:
    """Cut a piece of at most `ROWS` rows out of a batch, as a collator would have made it; copies on the CPU.

    Args:
        batch: as the wrapped loader gave it: ``labels`` not moved, no position ids made.
        schedule: whose ranks are to have tokens of the piece.
        inside_document: take the longest documents of a packed batch, of one row each, without what marks documents.
        padding_predicts: keep the labels that padding predicts, of the first tokens after left padding.
    """
    tensors = {name: entry for name, entry in batch.items() if isinstance(entry, Tensor)}
    tokens = tensors["input_ids"] if "input_ids" in tensors else tensors["inputs_embeds"]
    batch_size, length = tokens.shape[:2]
    count = min(length, _next_prime(_num_tokens(schedule)))
    if inside_document:
        longest = _longest_documents(tensors, (batch_size, length))
        count = min(count, *(stop - start for _, (start, stop) in longest))
        places = [(row, start) for row, (start, _) in longest]
        batch = {name: entry for name, entry in batch.items() if not name.startswith(_OF_PACKING)}
    else:
        start = _start(tensors, length, count)
        places = [(row, start) for row in range(min(ROWS, batch_size))]
    piece = {name: _cut_entry(name, entry, (batch_size, length), places, count) for name, entry in batch.items()}
    _sort_last_row(piece)
    _borrow_labels(piece, tensors)
    _mask_labels_of_padding(piece, padding_predicts)
    return piece


def window_of(batch: Batch, schedule: Schedule) -> tuple[Window, Tensor | None]:
    """Choose the part of a whole batch that is run whole and sharded, for a model with towers.

    It begins before the first image or sound where the batch tells by ``mm_token_type_ids``.

    Returns:
        The window, and the moved labels in it, [rows, n]; None if the batch has no labels.
    """
    tensors = {name: entry for name, entry in batch.items() if isinstance(entry, Tensor)}
    tokens = tensors["input_ids"] if "input_ids" in tensors else tensors["inputs_embeds"]
    length = tokens.shape[1]
    count = min(length, _next_prime(_num_tokens(schedule)))
    kinds = tensors.get("mm_token_type_ids")
    start = _start(tensors, length, count)
    if kinds is not None and bool(kinds.any()):
        first = int(kinds.ne(0).any(0).nonzero()[0])
        start = min(max(first - count // 4, 0), length - count)
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
    """Return [B, n], true where a token of the piece is no padding."""
    mask = piece.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return mask.ne(0)
    tokens = piece["input_ids"] if piece.get("input_ids") is not None else piece["inputs_embeds"]
    return torch.ones(tokens.shape[:2], dtype=torch.bool)


def marks_documents(piece: Batch) -> str:
    """The entry that marks several documents, which not every attention of one process reads; empty without."""
    if piece.get(BOUNDARIES) is not None:
        return BOUNDARIES if len(piece[BOUNDARIES]) > 2 else ""
    positions = piece.get(POSITIONS)
    if not isinstance(positions, Tensor) or piece.get(MASK) is not None:  # a mask rules out that they are searched
        return ""
    return POSITIONS if bool(positions.reshape(-1, positions.shape[-1]).diff().ne(1).any()) else ""


def _num_tokens(schedule: Schedule) -> int:
    weights = [weight for group in schedule.groups for weight in group.tokens if weight]
    for_smallest = -(-TOKENS_OF_SMALLEST_RANK * sum(weights) // min(weights))
    return min(max(TOKENS_PER_RANK * len(weights), int(for_smallest)), MOST_TOKENS)


def _next_prime(number: int) -> int:
    while any(number % divisor == 0 for divisor in range(2, int(number**0.5) + 1)):
        number += 1
    return number


def _start(tensors: Mapping[str, Tensor], length: int, count: int) -> int:
    """Return where the piece begins: so that padding on the left ends inside, or a document."""
    mask = tensors.get("attention_mask")
    if mask is not None and mask.dim() == 2:
        padding = int(mask[:ROWS].ne(0).int().argmax(1).max())
        if padding:
            return min(max(padding - count // 4, 0), length - count)
    restart = first_restart(tensors, length)
    return min(restart - count // 2, length - count) if restart is not None and restart >= count else 0


def first_restart(tensors: Mapping[str, Tensor], length: int) -> int | None:
    """Return where the second document of the first row begins; None if there is none."""
    if BOUNDARIES in tensors:
        inside = [cut for cut in tensors[BOUNDARIES].tolist() if 0 < cut < length]
        return min(inside, default=None)
    positions = tensors.get(POSITIONS)
    if positions is None or positions.shape[-1] != length:
        return None
    restarts = positions.reshape(-1, length)[0].diff().ne(1).nonzero()
    return int(restarts[0]) + 1 if len(restarts) else None


def _longest_documents(tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> list[tuple[int, Range]]:
    """Return the longest document of each row, with its row: those of the `ROWS` rows where they are longest."""
    batch_size, length = shape
    if BOUNDARIES in tensors:
        documents = documents_from_cu_seqlens(tensors[BOUNDARIES].tolist(), length, batch_size)
    else:
        of_rows = documents_from_positions(tensors[POSITIONS].reshape(-1, length))
        documents = [of_rows[row % len(of_rows)] for row in range(batch_size)]
    longest = [(row, max(of_row, key=_size)) for row, of_row in enumerate(documents)]
    return sorted(longest, key=lambda place: -_size(place[1]))[:ROWS]


def _size(interval: Range) -> int:
    start, stop = interval
    return stop - start


def _cut_entry(name: str, entry: Any, shape: tuple[int, int], places: Sequence[tuple[int, int]], count: int) -> Any:
    """Take ``count`` tokens at each of the places, of a row and the position of its first token."""
    (batch_size, length), start = shape, places[0][1]
    if not isinstance(entry, Tensor):
        return min(int(entry), count) if name.startswith("max_length_") else entry
    if name.startswith("cu_seq_lens_"):
        inside = sorted({0, count, *(int(cut) - start for cut in entry if start < int(cut) < start + count)})
        return torch.tensor(inside, dtype=entry.dtype)
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
    """Sort the last row by token id, labels along with it; not where padding or documents give positions a meaning."""
    ids = piece.get("input_ids")
    if (
        not isinstance(ids, Tensor)
        or len(ids) < ROWS
        or {"attention_mask", "position_ids", "cu_seq_lens_q"} & set(piece)
    ):
        return
    order = ids[-1].argsort()
    for entry in piece.values():
        if isinstance(entry, Tensor) and entry.shape[:2] == ids.shape:
            entry[-1] = entry[-1][order]


def _borrow_labels(piece: Entries, tensors: Mapping[str, Tensor]) -> None:
    """Give a piece that lies in a prompt labels from elsewhere in the batch, in two of three places."""
    for name in {"labels", "shift_labels"} & set(piece):
        labels = piece[name]
        lacking = labels.eq(IGNORE_INDEX)
        known = tensors[name][tensors[name].ne(IGNORE_INDEX)][: labels.numel()].cpu()
        if not len(known) or int((~lacking).sum()) >= labels.numel() // 8:
            continue
        places = torch.arange(labels.numel()).view_as(labels)
        lacking &= places.remainder(3).ne(0)
        labels[lacking] = known[places.remainder(len(known))][lacking]


def has_left_padding(piece: Batch) -> bool:
    """Whether padding stands before real tokens."""
    return bool(_follows_padding(real_tokens(piece)).any())


def _mask_labels_of_padding(piece: Entries, padding_predicts: bool) -> None:
    """Take out what padding predicts: with this engine the output of padding is zero, as with flash-attention."""
    real = real_tokens(piece)
    for name in {"labels", "shift_labels"} & set(piece):
        piece[name][~real] = IGNORE_INDEX
        if name == "labels" and not padding_predicts:
            piece[name][_follows_padding(real)] = IGNORE_INDEX


def _follows_padding(real: Tensor) -> Tensor:
    """[B, n], true for the first real token after padding."""
    return torch.cat([torch.zeros_like(real[:, :1]), ~real[:, :-1]], dim=1) & real
