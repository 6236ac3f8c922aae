"""The self-check: what all ranks do together with a piece of the first batch, and the verdict.

The piece runs whole on every rank, as one process would run it, and sharded, as it will be trained on; both through
the user's model, forward and backward. What differs beyond rounding is refused on every rank, naming the first module
that differs. Rules cannot know every model; this finds what one process and the ranks compute differently, whatever
the reason.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hetero.errors import ModelError
from ds_hetero.integrations.transformers.attention import comparing_forwards
from ds_hetero.integrations.transformers.autocast import without_autocast
from ds_hetero.integrations.transformers.forward_mode import sharding
from ds_hetero.integrations.transformers.self_check.comparison import (
    GRADIENT,
    LOSS,
    Difference,
    Held,
    compare,
    faults,
    least,
    noise_of,
    worst,
)
from ds_hetero.integrations.transformers.self_check.piece import has_left_padding, has_restarts, piece_of, real_tokens
from ds_hetero.integrations.transformers.self_check.recorded_run import RecordedRun, record_run
from ds_hetero.integrations.transformers.self_check.traceless import traceless
from ds_hetero.integrations.transformers.sharded_model import ShardedModel
from ds_hetero.placement import stream_placement
from ds_hetero.planner.documents import DocumentPlacer
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.data.batch_documents import with_documents
from ds_hetero.runtime.data.shard_info import shard_info
from ds_hetero.runtime.data.shards import IGNORE_INDEX, PlacedBatch, model_inputs, place, read_batch
from ds_hetero.runtime.loss import sequence_parallel_loss

__all__ = ["check_first_batch"]

logger = logging.getLogger(__name__)

_MOST_PAIRS = 4  # of runs, before a difference is believed: ties of routers move, faults stay
_TIE_BREAK = 0.05  # relative change of embeddings between two pairs


def check_first_batch(model: ShardedModel, batch: Mapping[str, Any] | None) -> bool:
    """Compare a piece of the batch, run whole and sharded, on every rank.

    Args:
        model: what is trained; nothing is left behind in it.
        batch: this rank's first batch, as the wrapped loader gave it; None if it has none.

    Returns:
        Whether there was a batch on any rank, and so a verdict.

    Caller: every rank of the world, between two forwards.
    Collectives: one `on_all_ranks` to agree on the piece and one after each pair of runs; those of the forwards.

    Raises:
        ModelError: the sharded run computes something else; on every rank, naming the module.
    """
    piece = _first_piece(model, batch)
    if piece is None:
        return False
    differences = _differences(model, piece)
    if not differences:
        if has_left_padding(piece):
            _look_at_padding(model, batch)
        return True
    if has_restarts(piece) and not _differences(model, _first_piece(model, batch, inside_document=True) or {}):
        _warn(
            f"{type(model.pretrained).__name__} lets the documents of a packed batch see each other where one process "
            "runs it; here they do not, as their position_ids say."
        )
        return True
    raise ModelError(_refusal(model, piece, *differences[0]))


def _look_at_padding(model: ShardedModel, batch: Mapping[str, Any] | None) -> None:
    """Warn where labels that padding predicts make a difference: the attention of padding is zero here."""
    differences = _differences(model, _first_piece(model, batch, padding_predicts=True) or {})
    if differences:
        error = max(difference.error for _, difference in differences)
        _warn(
            f"padding on the left predicts the first token of each row, and {type(model.pretrained).__name__} in one "
            "process computes attention for padding, where ds_hetero computes none: on a piece of the first batch, "
            f"loss and gradients differ by up to {error:.1g}. Set the labels of first tokens to -100, or pad on the "
            "right."
        )


def _warn(text: str) -> None:
    if dist.get_rank() == 0:
        logger.warning("%s", text)


def _first_piece(model: ShardedModel, batch: Mapping[str, Any] | None, **kind: bool) -> dict[str, Any] | None:
    """Return the piece of the first rank that has a batch, cut as `piece_of` does; the same on every rank."""

    def cut() -> dict[str, Any] | None:
        return None if batch is None else piece_of(batch, model.replica.schedule, **kind)

    return next((piece for piece in on_all_ranks(cut) if piece is not None), None)


def _differences(model: ShardedModel, piece: Mapping[str, Any]) -> list[tuple[int, Difference]]:
    """Return (rank, difference) of every module that differs beyond rounding; the same on every rank."""
    runs = _Runs(model, piece)
    eps = max(torch.finfo(dtype).eps for dtype in (model.pretrained.dtype, torch.float32))  # losses are fp32 at best
    with traceless(model.model), model.unrecorded(), without_autocast(runs.device):
        whole, sharded = runs.pair(None)
        noise = noise_of(whole, runs.whole(runs.shake(7, eps, None)), runs.held)
        errors = compare(whole, sharded, runs.held)
        differences = _faults_of_all(errors, noise, eps)
        for seed in range(1, _MOST_PAIRS):
            if not differences:
                break
            errors = least(errors, compare(*runs.pair(seed), runs.held))
            differences = _faults_of_all(errors, noise, eps)
    return differences


def _faults_of_all(errors: Any, noise: Any, eps: float) -> list[tuple[int, Difference]]:
    return faults(on_all_ranks(lambda: worst(errors, noise, eps)))


class _Runs:
    """Runs of one piece, whole and sharded.

    Args:
        model: what is trained.
        piece: the same on every rank.
    """

    def __init__(self, model: ShardedModel, piece: Mapping[str, Any]) -> None:
        self._model, self._piece = model, piece
        replica = model.replica
        placed = _placed(model, piece)
        intervals = placed.placement.intervals(replica.rank)
        self.held = Held(intervals, real_tokens(piece))
        self.device = next(model.model.parameters()).device
        self._shard = model_inputs(placed.shard(replica.rank), self.device)
        self._shape = (placed.batch.batch_size, placed.batch.length)
        self._own_shape = tuple(self._shard["position_ids"].shape[:2])
        # Gradients add up over the ranks of a replica and are averaged over the world, see `ds_hetero.runtime.loss`.
        self._gradient_scale = dist.get_world_size() / replica.num_replicas
        accepts = inspect.signature(model.pretrained.forward).parameters
        self._extra = {"use_cache": False} if "use_cache" in accepts else {}

    def pair(self, seed: int | None) -> tuple[RecordedRun, RecordedRun]:
        """Run the piece whole and sharded, with embeddings changed alike by the seed if there is one."""
        if seed is None:
            return self.whole(None), self._sharded(None)
        whole = self.whole(self.shake(seed, _TIE_BREAK, None))
        return whole, self._sharded(self.shake(seed, _TIE_BREAK, self.held.intervals))

    def whole(self, shake: Callable[[Tensor], Tensor] | None) -> RecordedRun:
        """Run the piece as one process would."""
        inputs = {name: self._on_device(entry) for name, entry in self._piece.items()} | self._extra
        with sharding(False):
            return record_run(self._model.model, inputs, self._shape, lambda out: getattr(out, "loss", None), shake)

    def shake(
        self, seed: int, amplitude: float, intervals: tuple[tuple[int, int], ...] | None
    ) -> Callable[[Tensor], Tensor]:
        """Return a change of embeddings by 1 +- amplitude, alike for a token wherever it is held.

        Args:
            seed: of the change.
            amplitude: of the change, relative.
            intervals: of the tokens that are held; None for all.
        """

        def shake(embeddings: Tensor) -> Tensor:
            generator = torch.Generator().manual_seed(seed)
            factors = 1 + amplitude * (2 * torch.rand((*self._shape, *embeddings.shape[2:]), generator=generator) - 1)
            if intervals is not None:
                factors = torch.cat([factors[:, start:stop] for start, stop in intervals] or [factors[:, :1]], dim=1)
            return embeddings * factors.to(embeddings)

        return shake

    def _sharded(self, shake: Callable[[Tensor], Tensor] | None) -> RecordedRun:
        inputs = dict(self._shard) | self._extra
        if "shift_labels" in inputs:
            inputs["labels"] = inputs["shift_labels"]
        with sharding(True), comparing_forwards():
            run = record_run(self._model.model, inputs, self._own_shape, self._sharded_loss, shake)
        gradients = {place: gradient / self._gradient_scale for place, gradient in run.gradients.items()}
        return replace(run, gradients=gradients)

    def _sharded_loss(self, outputs: Any) -> Tensor | None:
        mean = getattr(outputs, "loss", None)
        if mean is None or "shift_labels" not in self._shard:
            return None
        num_labels = self._shard["shift_labels"].ne(IGNORE_INDEX).sum()
        return sequence_parallel_loss(mean * num_labels, num_labels, self._model.replica)

    def _on_device(self, entry: Any) -> Any:
        return entry.to(self.device) if isinstance(entry, Tensor) else entry


def _placed(model: ShardedModel, piece: Mapping[str, Any]) -> PlacedBatch:
    """The piece as the model's batches are placed, but that every document is cut over all groups.

    Several rows, or one with padding, are cut by their length: they would become one row, which could not be compared
    with the whole piece token by token.
    """
    schedule, batch = model.replica.schedule, read_batch(dict(piece), keep_labels=not model.moves_labels)
    if isinstance(model.placer, DocumentPlacer):
        by_documents = with_documents(batch)
        if (by_documents.batch_size, by_documents.length, len(by_documents.rows)) == (1, batch.length, 1):
            placed = place(model.placer.everywhere, schedule, by_documents)
            info = shard_info(placed.shard(model.replica.rank)["position_ids"])
            assert info is not None
            model.note_shard(info)
            return placed
    return place(stream_placement, schedule, batch)


def _refusal(model: ShardedModel, piece: Mapping[str, Any], rank: int, difference: Difference) -> str:
    tokens = real_tokens(piece).shape[1]
    if difference.kind == LOSS:
        what = "the loss differs"
    elif difference.kind == GRADIENT:
        what = f"the gradient at {difference.module} differs"
    else:
        what = f"the output of {difference.module} differs"
    hint = (
        " Where the outputs agree and the gradient differs from the top on, the labels are not those that the model "
        "expects of a shard, or its loss is more than a mean over tokens."
        if difference.kind == GRADIENT
        else ""
    )
    return (
        f"{type(model.pretrained).__name__} computes something else when it is split over the sequence: on {tokens} "
        f"tokens of the first batch, {what} by {difference.error:.2g} on rank {rank}, where rounding accounts for "
        f"{difference.noise:.1g}.{hint} Training would go on without a sign, so it is refused. Train this model "
        'without sequence parallelism ("sequence_parallel_size": 1), or, if you know better, set '
        '"heterogeneity": {"verify": "off"}.'
    )
