"""A short piece of a batch: a few dozen tokens a rank, of two rows, with the batch's own keys.

What it must have to show a fault: labels; padding, if the batch is padded; a border between documents, if it is packed;
and no part that looks like the whole. So its length is a prime (no share of it is a round number), and one row is
sorted by token id (no statistic of a part is that of the whole).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ds_hetero.integrations.transformers.towers import Window
from ds_hetero.runtime.data.shards import IGNORE_INDEX, read_batch
from ds_hetero.schedule import Schedule

__all__ = ["has_left_padding", "has_restarts", "piece_of", "real_tokens", "window_of"]

ROWS = 2
TOKENS_PER_RANK = 24
TOKENS_OF_SMALLEST_RANK = 4
MOST_TOKENS = 512


def piece_of(
    batch: Mapping[str, Any], schedule: Schedule, *, inside_document: bool = False, padding_predicts: bool = False
) -> dict[str, Any]:
    """Cut a piece out of a batch, as a collator would have made it.

    Args:
        batch: as the wrapped loader gave it: ``labels`` not moved, no position ids made.
        schedule: whose ranks are to have tokens of the piece.
        inside_document: take the piece from the inside of the first document of a packed batch.
        padding_predicts: keep the labels that padding predicts, of the first tokens after left padding.

    Returns:
        A batch of at most `ROWS` rows; tensors are copies on the CPU.
    """
    tensors = {name: entry for name, entry in batch.items() if isinstance(entry, Tensor)}
    tokens = tensors["input_ids"] if "input_ids" in tensors else tensors["inputs_embeds"]
    batch_size, length = tokens.shape[:2]
    count = min(length, _next_prime(_num_tokens(schedule)))
    if inside_document:
        start, count = 0, min(count, _first_restart(tensors, length) or length)
    else:
        start = _start(tensors, length, count)
    piece = {
        name: _cut_entry(name, entry, (batch_size, length), (start, start + count)) for name, entry in batch.items()
    }
    _sort_last_row(piece)
    _borrow_labels(piece, tensors)
    _mask_labels_of_padding(piece, padding_predicts)
    return piece


def window_of(batch: Mapping[str, Any], schedule: Schedule) -> tuple[Window, Tensor | None]:
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


def real_tokens(piece: Mapping[str, Any]) -> Tensor:
    """Return [B, n], true where a token of the piece is no padding."""
    mask = piece.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return mask.ne(0)
    tokens = piece["input_ids"] if piece.get("input_ids") is not None else piece["inputs_embeds"]
    return torch.ones(tokens.shape[:2], dtype=torch.bool)


def has_restarts(piece: Mapping[str, Any]) -> bool:
    """Whether position ids alone mark the documents, which not every attention of one process reads."""
    positions = piece.get("position_ids")
    if not isinstance(positions, Tensor) or "cu_seq_lens_q" in piece:
        return False
    return bool(positions.reshape(-1, positions.shape[-1]).diff().ne(1).any())


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
    restart = _first_restart(tensors, length)
    return min(restart - count // 2, length - count) if restart is not None and restart >= count else 0


def _first_restart(tensors: Mapping[str, Tensor], length: int) -> int | None:
    positions = tensors.get("position_ids")
    if positions is None or positions.shape[-1] != length:
        return None
    restarts = positions.reshape(-1, length)[0].diff().ne(1).nonzero()
    return int(restarts[0]) + 1 if len(restarts) else None


def _cut_entry(name: str, entry: Any, shape: tuple[int, int], window: tuple[int, int]) -> Any:
    (batch_size, length), (start, stop) = shape, window
    if not isinstance(entry, Tensor):
        return min(int(entry), stop - start) if name.startswith("max_length_") else entry
    if name.startswith("cu_seq_lens_"):
        inside = sorted({0, stop - start, *(int(cut) - start for cut in entry if start < int(cut) < stop)})
        return torch.tensor(inside, dtype=entry.dtype)
    if tuple(entry.shape[:2]) == (batch_size, length):
        part = entry[:ROWS, start:stop]
    elif name == "position_ids" and entry.shape[-1] == length:
        part = entry[..., start:stop]
    elif entry.dim() and entry.shape[0] == batch_size:
        part = entry[:ROWS]
    else:
        part = entry
    return part.detach().clone().cpu()


def _sort_last_row(piece: dict[str, Any]) -> None:
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


def _borrow_labels(piece: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
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


def has_left_padding(piece: Mapping[str, Any]) -> bool:
    """Whether padding stands before real tokens."""
    return bool(_follows_padding(real_tokens(piece)).any())


def _mask_labels_of_padding(piece: dict[str, Any], padding_predicts: bool) -> None:
    """Take out what padding predicts: with this engine the output of padding is zero, as with flash-attention."""
    real = real_tokens(piece)
    for name in {"labels", "shift_labels"} & set(piece):
        piece[name][~real] = IGNORE_INDEX
        if name == "labels" and not padding_predicts:
            piece[name][_follows_padding(real)] = IGNORE_INDEX


def _follows_padding(real: Tensor) -> Tensor:
    """[B, n], true for the first real token after padding."""
    return torch.cat([torch.zeros_like(real[:, :1]), ~real[:, :-1]], dim=1) & real
