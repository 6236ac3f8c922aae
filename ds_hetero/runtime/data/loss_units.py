"""Units of a loss that is a mean: the samples, labels or next tokens of a micro-batch, by which ranks are weighed.

    unit = unit_of_probes([probe(compute, batch)] of all ranks)      # "token_mean", from two rows and each alone

Ranks that take different micro-batches are exact only if a loss weighs by what it is the mean over, which no framework
says. So two rows of the first batch are computed together and one by one: the unit is the one by whose counts the two
results make up the first. Rows are given unlike numbers of labels, so that no two units fit; a loss that is no mean
over its rows (contrastive, a sum, with a term of routers) fits none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ds_hetero.errors import ConfigError, ModelError
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.data.shards import IGNORE_INDEX
from ds_hetero.values.section import SECTION

_FITS, _FITS_HALF = 2e-5, 4e-3  # relative differences of a loss by the order and the type of its sums
_LABELS_OF_ROWS = (2, 3)  # labels of the two rows
_FEWEST = 6  # labels in a row from which they can be told apart


Batch: TypeAlias = Any
"""Tensors in mappings and sequences, as a loader gives them."""


class UnitCounts(NamedTuple):
    """Units of a micro-batch, or of all micro-batches of a step."""

    sample_mean: int  # samples; of classes, those that count
    label_mean: int = 0  # labels that count, each of the output at its own place; 0 where there is not a row of them
    token_mean: int = 0  # labels that count, each of the output before its place

    @classmethod
    def of(cls, batch: Batch, rows: int) -> UnitCounts:
        """Count a micro-batch of mappings, whose ``labels`` or ``shift_labels`` of -100 do not count."""
        labels, moved = labels_of(batch)
        if labels is None:
            return cls(rows)
        if labels.dim() == 1:
            return cls(int(labels.ne(IGNORE_INDEX).sum()))
        tokens = labels if moved else labels[..., 1:]
        return cls(rows, int(labels.ne(IGNORE_INDEX).sum()), int(tokens.ne(IGNORE_INDEX).sum()))

    @classmethod
    def total(cls, parts: Iterable[Sequence[int]]) -> UnitCounts:
        """Return the sum of several."""
        return cls(*map(sum, zip(cls(0), *parts, strict=True)))


def labels_of(batch: Batch) -> tuple[Tensor | None, bool]:
    """Return whole numbers that a batch is trained on, ``[B]`` or ``[B, ...]``, and whether they were moved already."""
    if isinstance(batch, Mapping):
        for name, moved in (("shift_labels", True), ("labels", False)):
            labels = batch.get(name)
            if isinstance(labels, Tensor) and labels.dim() and not labels.is_floating_point():
                return labels, moved
    return None, False


@dataclass(frozen=True)
class Probe:
    """Losses of two rows of a rank's batch."""

    together: float  # of both; nan where there was no loss
    alone: tuple[float, float]  # of the one, and of the other
    counts: tuple[UnitCounts, UnitCounts]
    tells: bool  # whether rows are unlike, so that something can be concluded
    tolerance: float  # relative, of the loss's data type

    @property
    def has_loss(self) -> bool:
        """Whether there was one."""
        return not math.isnan(self.together)

    def fits(self, unit: str) -> bool:
        """Whether the two losses make up the one of both rows, weighed by ``unit``."""
        first, second = (getattr(counts, unit) for counts in self.counts)
        if not first or not second:
            return False
        made_up = (self.alone[0] * first + self.alone[1] * second) / (first + second)
        scale = max(abs(self.together), *map(abs, self.alone))
        return bool(abs(made_up - self.together) <= self.tolerance * scale)


def probe(compute: Callable[[Batch], Tensor | None], batch: Batch, rows: int) -> Probe:
    """Compute the loss of two rows of a batch, and of each alone: three forwards.

    Args:
        compute: the loss of such a batch, without gradients and without randomness; None where there is none.

    Caller: every rank that shares parameters of the model; no collectives of its own.
    """
    chosen = [0, rows - 1]
    both, is_unlike = _unlike_rows(take_rows(batch, chosen, rows))
    parts = [take_rows(both, [row], 2) for row in (0, 1)]
    losses = [compute(part) for part in (both, *parts)]
    values = [float("nan") if loss is None else float(loss.detach()) for loss in losses]
    is_half = any(loss is not None and loss.element_size() < 4 for loss in losses)
    counts = UnitCounts.of(parts[0], 1), UnitCounts.of(parts[1], 1)
    tolerance = _FITS_HALF if is_half or torch.is_autocast_enabled() else _FITS
    return Probe(values[0], (values[1], values[2]), counts, is_unlike or rows > 1, tolerance)


def unit_of_probes(probes: Sequence[Probe], name: str) -> str:
    """The unit of a loss, from the probes of all ranks. Raises `ConfigError`: it is a mean over none, or several."""
    telling = [one for one in probes if one.tells] or list(probes)
    fitting = [unit for unit in UnitCounts._fields if all(one.fits(unit) for one in telling)]
    if len(fitting) == 1:
        return fitting[0]
    one = telling[0]
    seen = f"two rows together {one.together:.6g}, alone {one.alone[0]:.6g} and {one.alone[1]:.6g}"
    if not fitting:
        raise ConfigError(
            f"the ranks take different batches, but the loss of {name} is not a mean over the samples or labels of a "
            f"batch ({seen}): one process would compute another on the global batch. Contrastive losses, sums, and "
            "losses with a term of routers are not: use equal batches for them. A mean that this engine cannot see, "
            f"since rows are not the first axis of the batch, can be declared: {_DECLARE}."
        )
    raise ConfigError(
        f"the ranks take different batches, but whether the loss of {name} is a mean over {' or '.join(fitting)} does "
        f"not show in the first batch ({seen}). Say which: {_DECLARE}."
    )


def expect_documents_apart(compute: Callable[[Batch], Tensor | None], batch: Batch, name: str) -> None:
    """Refuse a model whose packed documents see each other. Raises `ModelError` on every rank: the loss moves.

    Where a rank's batch is a row of several documents, the loss of the last one is computed with two sets of tokens
    before it.

    Caller: every rank of the world.
    Collectives: one `on_all_ranks`; those of two forwards and one `on_all_ranks` more where a rank has such a row.
    """
    pair = _with_other_documents(batch)
    if not any(on_all_ranks(lambda: pair is not None)):
        return

    def losses() -> tuple[float, float] | None:
        found = [compute(one) for one in pair or (batch, batch)]
        if pair is None or any(loss is None for loss in found):
            return None
        first, other = (float(loss) for loss in found if loss is not None)
        is_half = any(loss is not None and loss.element_size() < 4 for loss in found)
        tolerance = _FITS_HALF if is_half or torch.is_autocast_enabled() else _FITS
        return (first, other) if abs(first - other) > tolerance * abs(first) else None

    moved = [of_rank for of_rank in on_all_ranks(losses) if of_rank is not None]
    if moved:
        raise ModelError(
            f"the ranks take different batches, and {name} lets the documents of a packed row see each other: the loss "
            f"of the last one is {moved[0][0]:.6g}, and {moved[0][1]:.6g} after other tokens. One process puts other "
            "documents into a row, so that its loss is another. Set config.use_cache to False (transformers does not "
            'look for documents where there is a cache), use attn_implementation="flash_attention_2" or its like, '
            "leave packing and padding_free out, or share sequences by a schedule in place of "
            f'"{SECTION}.batch", where documents do not see each other.'
        )


def _with_other_documents(batch: Batch) -> tuple[Batch, Batch] | None:
    """A row of several documents with the labels of the last of them, and the same with other tokens before that.

    Returns:
        None where the batch is no such row, or has images or sounds, whose places among the tokens are theirs.
    """
    labels, moved = labels_of(batch)
    if any(part.is_floating_point() for part in tensors_in(batch)):
        return None
    tokens, positions = (
        (batch.get(name) for name in ("input_ids", "position_ids")) if labels is not None else (None,) * 2
    )
    if labels is None or not isinstance(tokens, Tensor) or not isinstance(positions, Tensor):
        return None
    if not labels.shape == tokens.shape == positions.shape == (1, labels.shape[-1]):
        return None
    counting = labels[0].ne(IGNORE_INDEX)
    for start in reversed(positions[0].eq(0).nonzero()[:, 0].tolist()):
        first = start if moved else start + 1
        if start > 1 and bool(counting[first:].any()):
            few, other = labels.clone(), tokens.clone()
            few[0, :first], other[0, :start] = IGNORE_INDEX, tokens[0, start]
            row = {**batch, "shift_labels" if moved else "labels": few}
            return row, {**row, "input_ids": other}
    return None


_DECLARE = (
    f'"{SECTION}": {{"loss": ...}} with "sample_mean" over samples, "label_mean" over labels that count, or '
    '"token_mean" over next tokens'
)


def loss_in(outputs: object) -> Tensor | None:
    """Return the loss that a module returned: ``outputs.loss``, or a scalar; None where there is none."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", outputs)
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point() else None


def tensors_in(entry: Batch) -> Iterator[Tensor]:
    """Yield the tensors in mappings and sequences."""
    if isinstance(entry, Tensor):
        yield entry
    elif isinstance(entry, Mapping | list | tuple):
        for part in entry.values() if isinstance(entry, Mapping) else entry:
            yield from tensors_in(part)


def num_rows(batch: Batch, others: Batch = ()) -> int:
    """Samples of a micro-batch, by its labels or a first tensor, of other arguments too; 1 where none has rows."""
    labels, _ = labels_of(batch)
    if labels is not None:
        return labels.shape[0]
    return next((part.shape[0] for part in tensors_in((others, batch)) if part.dim()), 1)


def take_rows(entry: Batch, chosen: list[int], rows: int) -> Batch:
    """Return the chosen rows of every tensor and list that has ``rows`` of them."""
    if isinstance(entry, Tensor):
        return entry[chosen] if entry.dim() and entry.shape[0] == rows else entry
    if isinstance(entry, Mapping):
        return {name: take_rows(part, chosen, rows) for name, part in entry.items()}
    if isinstance(entry, list | tuple):
        if len(entry) == rows and not any(isinstance(part, Tensor) for part in entry):
            return type(entry)(entry[row] for row in chosen)
        return type(entry)(take_rows(part, chosen, rows) for part in entry)
    return entry


def _unlike_rows(batch: Batch) -> tuple[Batch, bool]:
    """Return two rows with few labels, two (one at its beginning) and three; and whether that could be done."""
    labels, _ = labels_of(batch)
    if labels is None or labels.dim() != 2 or int(labels.ne(IGNORE_INDEX).sum(dim=1).min()) < _FEWEST:
        return batch, False
    few = torch.full_like(labels, IGNORE_INDEX)
    for row, kept in enumerate(_LABELS_OF_ROWS):
        places = labels[row].ne(IGNORE_INDEX).nonzero()[-kept:, 0]
        few[row, places] = labels[row, places]
    few[0, few[0].ne(IGNORE_INDEX).nonzero()[0]] = IGNORE_INDEX
    few[0, 0] = labels[0][labels[0].ne(IGNORE_INDEX)][0]
    name = "shift_labels" if isinstance(batch.get("shift_labels"), Tensor) else "labels"
    return {**batch, name: few}, True
