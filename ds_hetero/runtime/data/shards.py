"""Cut the part of a whole batch that one rank holds, without communication.

The name and shape of an entry decide what happens to it:

    input_ids, inputs_embeds    cut; one of them must be there and gives B and L
    position_ids                cut; 0 .. L - 1 is made where missing; [L] and [1, L] are spread over the batch
    attention_mask              cut; [B, L] only
    labels                      moved left by one over the whole sequence, -100 at its end, and cut: ``shift_labels``
    shift_labels                cut without being moved; `labels` in the same batch are then not moved again
    any other tensor            cut if its first two dimensions are B and L (token_type_ids, seq_idx), else passed whole
                                to every rank (cu_seq_lens_q, pixel_values)
    anything else               passed to every rank unchanged

With ``keep_inputs``, for a model whose own forward cuts the inputs of its decoder, only labels are cut here, and the
``position_ids`` by which ranks agree; all other entries go whole to every rank.

Dimension key: B batch, L tokens of the sequence, s tokens that one rank holds.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_hetero.errors import BatchError, ScheduleError
from ds_hetero.runtime.data.shard_info import WHOLE_POSITIONS, ShardInfo, attach, loaded_sums, shard_info
from ds_hetero.runtime.documents import MASK, POSITIONS, PositionRuns, expect_one_set_of_boundaries, position_runs
from ds_hetero.values.placement import Placement, Placer, Rows
from ds_hetero.values.schedule import Schedule

IGNORE_INDEX = -100  # label of a token that is not trained on, as in torch and transformers

Batch = Mapping[str, Any]
"""Entries of a batch, or arguments of a model, by name."""

Entries = dict[str, Any]
"""Entries of a batch in a dict that its owner may change."""

# Entries that tell flash attention where packed documents begin; they are valid for one length of a batch alone.
PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")

_CHECKED_ELEMENTS = 1 << 20  # of a tensor, for its checksum

_ALWAYS_CUT = ("position_ids", "labels", "shift_labels")  # even with ``keep_inputs``

# A rank without tokens gets one placeholder token, since a model cannot run on none.
PLACEHOLDER_POSITION = -1  # its position id

# Its entries; those not listed are 0.
_PLACEHOLDER = {"position_ids": PLACEHOLDER_POSITION, "shift_labels": IGNORE_INDEX}


@dataclass(frozen=True, kw_only=True, eq=False)
class WholeBatch:
    """A batch of whole sequences, ready to be cut."""

    batch_size: int  # B
    length: int  # L
    sequences: dict[str, Tensor]  # [B, L, ...] tensors; each rank gets the part at its positions
    constants: dict[str, Tensor]  # tensors without a sequence dimension, for every rank
    objects: Entries  # entries that are not tensors, for every rank
    rows: tuple[Rows, ...] = ()  # documents of every row; empty if the model's forward is to find the documents
    documents_from: str | None = None  # the entry that showed the documents, one of `ds_hetero.runtime.documents`
    position_runs: PositionRuns = ()  # the position ids, where the documents are known
    keeps_inputs: bool = False  # the model takes whole sequences and cuts them itself; they are in ``constants``

    def shard(self, intervals: Sequence[tuple[int, int]]) -> Entries:
        """Return the batch of the rank that holds ``intervals``: sequences [B, s, ...] copied to the CPU."""
        sequences = {name: cut(tensor, intervals) for name, tensor in self.sequences.items()}
        return {**sequences, **{name: tensor.cpu() for name, tensor in self.constants.items()}, **self.objects}

    def num_labels(self) -> int | None:
        """Return the number of labels that count in the loss; None for a batch without labels."""
        labels = self.sequences.get("labels", self.sequences.get("shift_labels"))
        return None if labels is None else int(labels.ne(IGNORE_INDEX).sum())

    def fingerprints(self) -> dict[str, str]:
        """Return type, shape and checksum of every tensor, equal where two ranks hold the same batch.

        The checksum covers up to 2^20 elements, evenly spaced: the ids of a million tokens, a sample of embeddings.
        """
        tensors = {**self.sequences, **self.constants}
        return {name: shard_fingerprint(tensor) for name, tensor in sorted(tensors.items())}


class PlacedBatch(NamedTuple):
    """A batch, and its placement: which of its positions each rank holds."""

    batch: WholeBatch
    placement: Placement

    def fingerprints(self) -> dict[str, str]:
        """Return the fingerprints of the batch's tensors and of the placement."""
        return {**self.batch.fingerprints(), "placement": f"#{self.placement.fingerprint & 0xFFFFFFFF:08x}"}

    def shard(self, rank: int, *, num_items: int | None = None, is_filler: bool = False) -> Entries:
        """Return the batch of ``rank``, with a `ShardInfo` attached to its ``position_ids``."""
        shard = self.batch.shard(self.placement.intervals(rank))
        info = ShardInfo(
            placement=self.placement,
            documents_from=self.batch.documents_from,
            position_runs=self.batch.position_runs,
            num_items=num_items,
            is_filler=is_filler,
            inputs_are_whole=self.batch.keeps_inputs,
            whole_positions=shard.pop(WHOLE_POSITIONS, None),
            sums=loaded_sums(shard),
        )
        attach(shard["position_ids"], info)
        return shard


def place(placer: Placer, schedule: Schedule, batch: WholeBatch) -> PlacedBatch:
    """Decide which positions of ``batch`` each rank holds. Raises `BatchError`: the batch does not fit the schedule."""
    try:
        return PlacedBatch(batch, placer(schedule, batch.length, batch.rows))
    except ScheduleError as error:
        raise BatchError(str(error)) from None


def read_batch(batch: Any, keep_labels: bool = False, keep_inputs: bool = False) -> WholeBatch:
    """Sort the entries of a batch by the rules in the table at the top of this module.

    Args:
        batch: a mapping as collators make it.
        keep_labels: keep ``labels``, unmoved, beside ``shift_labels``. A model that is not given ``shift_labels`` would
            move ``labels`` inside its shard and lose the labels at the borders.
        keep_inputs: leave everything but labels whole, for a model that cuts the inputs of its decoder itself.

    Raises:
        BatchError: an entry cannot be cut; the message names it.
    """
    if not isinstance(batch, Mapping):
        raise BatchError(f"a batch must be a mapping from names to tensors, got {type(batch).__name__}.")
    tensors = {name: entry for name, entry in batch.items() if isinstance(entry, Tensor)}
    objects = {name: entry for name, entry in batch.items() if not isinstance(entry, Tensor)}
    batch_size, length = _batch_and_length(tensors)
    expect_one_set_of_boundaries(batch)
    positions = tensors.pop("position_ids", None)
    objects.pop("position_ids", None)  # None, as some collators put it
    if keep_inputs and positions is not None:
        tensors[WHOLE_POSITIONS] = positions
        positions = text_positions(positions)
    tensors["position_ids"] = _positions(positions, batch_size, length)
    _expect_one_per_token(tensors, "attention_mask", batch_size, length)
    _expect_one_per_token(tensors, "labels", batch_size, length)
    _expect_one_per_token(tensors, "shift_labels", batch_size, length)
    if "labels" in tensors and "shift_labels" not in tensors:
        tensors["shift_labels"] = _moved_left(tensors["labels"])
    if not keep_labels:
        tensors.pop("labels", None)
    is_sequence = {
        name: tuple(tensor.shape[:2]) == (batch_size, length) and (not keep_inputs or name in _ALWAYS_CUT)
        for name, tensor in tensors.items()
    }
    return WholeBatch(
        batch_size=batch_size,
        length=length,
        sequences={name: tensor for name, tensor in tensors.items() if is_sequence[name]},
        constants={name: tensor for name, tensor in tensors.items() if not is_sequence[name]},
        objects=objects,
        keeps_inputs=keep_inputs,
    )


def text_positions(positions: Tensor) -> Tensor | None:
    """Return the positions of tokens in their text, [B, L], from position ids with axes of images; None for 0 .. L - 1.

    Args:
        positions: [B, L]; [3, B, L] time, height and width; or [4, B, L], the positions in the text before these.
    """
    if positions.dim() == 3:
        return positions[0] if positions.shape[0] == 4 else None
    return positions


def filler_batch(batch: WholeBatch | None, length: int) -> WholeBatch:
    """Return a batch of one short row without labels, for a rank that must run a forward but has no batch.

    Args:
        batch: a batch whose entries the filler repeats; None for a filler of tokens, positions and labels alone.
        length: tokens of the row.
    """
    if batch is not None and batch.keeps_inputs:  # not shortened: images and their tokens belong together
        labels = {name: torch.full_like(batch.sequences["position_ids"], IGNORE_INDEX) for name in batch.sequences}
        return replace(batch, sequences={**labels, "position_ids": batch.sequences["position_ids"]})
    if batch is None:
        batch = read_batch({"input_ids": torch.zeros(1, length, dtype=torch.int64)})
    num_copied = min(length, batch.length)
    repeats = -(-length // num_copied)
    sequences = {
        name: tensor[:1, :num_copied].repeat(1, repeats, *[1] * (tensor.dim() - 2))[:, :length]
        for name, tensor in batch.sequences.items()
        if name not in PACKING
    }
    sequences["position_ids"] = torch.arange(length)[None]
    if "attention_mask" in sequences:
        sequences["attention_mask"] = torch.ones_like(sequences["attention_mask"])
    for name in {"shift_labels", *sequences} & {"labels", "shift_labels"}:
        sequences[name] = torch.full((1, length), IGNORE_INDEX)
    is_by_documents = bool(batch.rows)
    return WholeBatch(
        batch_size=1,
        length=length,
        sequences=sequences,
        constants={name: tensor for name, tensor in batch.constants.items() if name not in PACKING},
        objects={name: entry for name, entry in batch.objects.items() if name not in PACKING},
        rows=(Rows(0, 1, ((0, length),)),) if is_by_documents else (),
        documents_from=(MASK if MASK in sequences else POSITIONS) if is_by_documents else None,
        position_runs=position_runs(sequences[POSITIONS]) if is_by_documents else (),
    )


def model_inputs(shard: Batch, device: torch.device) -> Entries:
    """Return the arguments of a model for a shard, with its `ShardInfo` and labels attached to ``position_ids``.

    A model cannot run on zero tokens, so a rank without tokens gets one placeholder token. ``labels`` that the loader
    kept, of a model that predicts each token at its own position, become ``shift_labels``.
    """
    entries = dict(shard)
    if "labels" in entries:
        entries["shift_labels"] = entries.pop("labels")
    inputs = {name: _model_input(name, entry, device) for name, entry in entries.items()}
    info = shard_info(shard["position_ids"])
    assert info is not None
    whole = None if info.whole_positions is None else info.whole_positions.to(device)
    attach(inputs["position_ids"], replace(info, labels=inputs.get("shift_labels"), whole_positions=whole))
    return inputs


def cut(tensor: Tensor, intervals: Sequence[tuple[int, int]]) -> Tensor:
    """Copy the positions in ``intervals``, [B, L, ...] -> [B, s, ...], to the CPU, so that the whole can be freed."""
    parts = [tensor[:, start:stop] for start, stop in intervals] or [tensor[:, :0]]
    return torch.cat(parts, dim=1).cpu()


def _model_input(name: str, entry: Any, device: torch.device) -> Any:
    """Return an entry of a shard on ``device``; one of zero tokens gets the placeholder's column."""
    if not isinstance(entry, Tensor):
        return entry
    if entry.dim() > 1 and entry.shape[1] == 0:
        entry = entry.new_full((entry.shape[0], 1, *entry.shape[2:]), _PLACEHOLDER.get(name, 0))
    return entry.to(device)


def _batch_and_length(tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    """Return B and L of a batch. Raises `BatchError`: its tokens are missing, or have no such shape."""
    shapes = {name: tuple(tensors[name].shape) for name in ("input_ids", "inputs_embeds") if name in tensors}
    if not shapes:
        raise BatchError(
            f"a batch needs input_ids [B, L] or inputs_embeds [B, L, H] to be cut along the sequence, got tensors "
            f"{sorted(tensors)}."
        )
    if any(len(shape) < 2 for shape in shapes.values()) or len({shape[:2] for shape in shapes.values()}) > 1:
        raise BatchError(f"tokens must be input_ids [B, L] or inputs_embeds [B, L, H], got shapes {shapes}.")
    batch_size, length = next(iter(shapes.values()))[:2]
    if not batch_size * length:
        raise BatchError(f"a batch without tokens has nothing to train on, got shapes {shapes}. Leave it out.")
    return batch_size, length


def _positions(positions: Tensor | None, batch_size: int, length: int) -> Tensor:
    """Return ``position_ids`` as [B, L]; 0 .. L - 1 if missing. Raises `BatchError`: they have another shape."""
    if positions is None:
        positions = torch.arange(length)
    shape = tuple(positions.shape)
    if shape in ((length,), (1, length), (batch_size, length)):
        return positions.expand(batch_size, length)
    raise BatchError(
        f"position_ids of shape {shape} cannot be cut along the sequence: "
        f"they must be [B, L], [1, L] or [L] with B={batch_size}, L={length}. "
        "Positions of several axes (mrope) are for models with images."
    )


def _expect_one_per_token(tensors: Mapping[str, Tensor], name: str, batch_size: int, length: int) -> None:
    """Refuse the entry ``name`` unless it is missing or [B, L]. Raises `BatchError`."""
    if name not in tensors or tuple(tensors[name].shape) == (batch_size, length):
        return
    remedy = "Give a [B, L] padding mask; mark packed documents by position_ids that restart." if "mask" in name else ""
    raise BatchError(
        f"{name} of shape {tuple(tensors[name].shape)} cannot be cut along the sequence: "
        f"it must be [B, L] with B={batch_size}, L={length}. {remedy}".rstrip()
    )


def _moved_left(labels: Tensor) -> Tensor:
    """Move labels [B, L] left by one, so that position i has the label of i + 1, which it predicts; -100 at the end.

    Packed documents need no more: collators put -100 at a document's first token, so that no token has to predict it.
    """
    end = labels.new_full((labels.shape[0], 1), IGNORE_INDEX)
    return torch.cat([labels[:, 1:], end], dim=1)


def shard_fingerprint(tensor: Tensor) -> str:
    """Return type, shape and checksum of a tensor, such as "int64[1, 8] #0a1b2c3d"; see `WholeBatch.fingerprints`."""
    flat = tensor.detach().reshape(-1)
    stride = max(1, -(-flat.numel() // _CHECKED_ELEMENTS))
    sample = flat[::stride].cpu().contiguous()
    checksum = zlib.crc32(sample.view(torch.uint8).numpy().data)
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} #{checksum:08x}"
