"""The runs that the self-check compares: of one piece, whole and sharded.

A model with towers cannot be given a piece of a batch, since images and the places kept for them belong together. It is
given the whole batch, and what it hands to its text decoder is cut to a window.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hetero.engine.forward_mode import comparing_forwards, sharding
from ds_hetero.frameworks.transformers.model.sharded_model import ShardedModel
from ds_hetero.frameworks.transformers.self_check.comparison import Held
from ds_hetero.frameworks.transformers.self_check.parameter_gradients import compared_parameters
from ds_hetero.frameworks.transformers.self_check.piece import real_tokens, window_of
from ds_hetero.frameworks.transformers.self_check.recorded_run import RecordedRun, record_run
from ds_hetero.planner.documents import DocumentPlacer
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.data.shard_info import attach, shard_info
from ds_hetero.runtime.data.shards import IGNORE_INDEX, Batch, Entries, PlacedBatch, model_inputs, place, read_batch
from ds_hetero.runtime.data.whole_batches import with_documents
from ds_hetero.runtime.loss import cross_entropy_sum, has_loss_of_batch, sequence_parallel_loss
from ds_hetero.values.placement import stream_placement

_TIE_BREAK = 0.05  # relative change of embeddings between two pairs


class Runs:
    """Runs of one piece, which is the same on every rank, whole and sharded.

    Args:
        module: that is run; left out, all of what is trained.
    """

    def __init__(self, model: ShardedModel, piece: Batch, module: nn.Module | None = None) -> None:
        self._model, self._piece = model, piece
        self._module = model.model if module is None else module
        replica = model.replica
        placed = self._place()
        intervals = placed.placement.intervals(replica.rank)
        self.held = Held(intervals, self._real_tokens())
        self.device = next(model.model.parameters()).device
        self._shard = model_inputs(self._mark(placed.shard(replica.rank)), self.device)
        self._shape = (placed.batch.batch_size, placed.batch.length)
        self._own_shape = tuple(self._shard["position_ids"].shape[:2])
        # Gradients add up over the ranks of a replica and are averaged over the world, see `ds_hetero.runtime.loss`.
        self._gradient_scale = dist.get_world_size() / replica.num_replicas
        self._parameters = compared_parameters(self._module, self._trained_part(), model.num_comparisons)
        self._extra = {"use_cache": False} if _takes_use_cache(model, self._module) else {}

    def pair(self, seed: int | None) -> tuple[RecordedRun, RecordedRun]:
        """Run the piece whole and sharded, with embeddings changed alike by the seed if there is one."""
        if seed is None:
            return self.whole(None), self._sharded(None)
        whole = self.whole(self.shake(seed, _TIE_BREAK, None))
        return whole, self._sharded(self.shake(seed, _TIE_BREAK, self.held.intervals))

    def whole(self, shake: Callable[[Tensor], Tensor] | None) -> RecordedRun:
        """Run the piece as one process would."""
        with sharding(False), self._looking():
            return self._record(self._whole_inputs(), self._shape, self._whole_loss, shake)

    def shake(
        self, seed: int, amplitude: float, intervals: tuple[tuple[int, int], ...] | None
    ) -> Callable[[Tensor], Tensor]:
        """A change of embeddings by 1 +- amplitude, alike for a token wherever its interval (None: all) is held."""

        def shake(embeddings: Tensor) -> Tensor:
            generator = torch.Generator().manual_seed(seed)
            factors = 1 + amplitude * (2 * torch.rand((*self._shape, *embeddings.shape[2:]), generator=generator) - 1)
            if intervals is not None:
                factors = torch.cat([factors[:, start:stop] for start, stop in intervals] or [factors[:, :1]], dim=1)
            return embeddings * factors.to(embeddings)

        return shake

    def _sharded(self, shake: Callable[[Tensor], Tensor] | None) -> RecordedRun:
        inputs = dict(self._shard) | self._extra
        if "shift_labels" in inputs and not self._model.shifts_labels_itself and not self._model.own_loss:
            inputs["labels"] = inputs["shift_labels"]
        with sharding(True), comparing_forwards(), self._looking():
            run = self._record(inputs, self._own_shape, self._sharded_loss, shake)
        gradients = {place: gradient / self._gradient_scale for place, gradient in run.gradients.items()}
        projections, sizes = self._sums_over_ranks(run)
        return replace(run, gradients=gradients, projections=projections, sizes=sizes)

    def _sums_over_ranks(self, run: RecordedRun) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Projections and their sizes of all ranks of the replica, scaled as gradients are; of what any rank used."""
        by_rank = on_all_ranks(lambda: (run.projections, run.sizes))
        sums: dict[str, Tensor] = {}
        sizes: dict[str, float] = {}
        for rank in self._model.replica.ranks:
            of_rank, sizes_of_rank = by_rank[rank]
            for name, projection in of_rank.items():
                scaled = projection / self._gradient_scale
                sums[name] = sums[name] + scaled if name in sums else scaled
                sizes[name] = sizes.get(name, 0.0) + sizes_of_rank[name] / self._gradient_scale
        return sums, sizes

    def _sharded_loss(self, outputs: Any) -> Tensor | None:
        labels: Tensor | None = self._shard.get("shift_labels")
        if labels is None:
            return None
        if self._model.own_loss and has_loss_of_batch(outputs):
            loss: Tensor = outputs.loss
            return loss
        num_labels, mean = labels.ne(IGNORE_INDEX).sum(), getattr(outputs, "loss", None)
        if self._model.shifts_labels_itself:
            loss_sum = cross_entropy_sum(outputs.logits, labels)
        elif mean is None:
            return None
        else:
            loss_sum = mean * num_labels
        return sequence_parallel_loss(loss_sum, num_labels, self._model.replica)

    def _whole_inputs(self) -> Entries:
        return {name: self._on_device(entry) for name, entry in self._piece.items()} | self._extra

    def _whole_loss(self, outputs: Any) -> Tensor | None:
        return getattr(outputs, "loss", None)

    def _record(self, inputs: Batch, shape: tuple[int, int], loss_of: Any, shake: Any) -> RecordedRun:
        return record_run(self._module, inputs, shape, loss_of, shake, parameters=self._parameters)

    def _trained_part(self) -> nn.Module:
        return self._module

    def _looking(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def _place(self) -> PlacedBatch:
        return _placed(self._model, self._piece)

    def _mark(self, shard: Entries) -> Entries:
        return shard

    def _real_tokens(self) -> Tensor:
        return real_tokens(self._piece)

    def _on_device(self, entry: Any) -> Any:
        return entry.to(self.device) if isinstance(entry, Tensor) else entry


def _takes_use_cache(model: ShardedModel, module: nn.Module) -> bool:
    """Whether the module that is run, which may be one of the script's around the model, takes the model's argument."""
    if "use_cache" not in inspect.signature(model.pretrained.forward).parameters:
        return False
    parameters = inspect.signature(module.forward).parameters
    return "use_cache" in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


class WindowRuns(Runs):
    """Runs of a window of the batch, for a model with towers. ``piece``: the whole batch, the same on every rank."""

    def __init__(self, model: ShardedModel, piece: Batch) -> None:
        self._window, self._labels = window_of(piece, model.replica.schedule)
        super().__init__(model, piece)

    def _place(self) -> PlacedBatch:
        window = self._window
        whole = read_batch(dict(self._piece), keep_inputs=True)
        positions = torch.arange(window.stop - window.start).expand(window.rows, -1)
        labels = {} if self._labels is None else {"shift_labels": self._labels}
        sequences = {"position_ids": positions, **labels}
        batch = replace(whole, batch_size=window.rows, length=positions.shape[1], sequences=sequences)
        return place(stream_placement, self._model.replica.schedule, batch)

    def _mark(self, shard: Entries) -> Entries:
        info = shard_info(shard["position_ids"])
        assert info is not None
        attach(shard["position_ids"], replace(info, first=self._window.start))
        return shard

    def _real_tokens(self) -> Tensor:
        window = self._window
        return real_tokens(self._piece)[: window.rows, window.start : window.stop].cpu()

    def _looking(self) -> contextlib.AbstractContextManager[None]:
        return self._model.looking_at(self._window)

    def _record(self, inputs: Batch, shape: tuple[int, int], loss_of: Any, shake: Any) -> RecordedRun:
        decoder = self._model.decoder
        return record_run(self._model.model, inputs, shape, loss_of, shake, decoder, self._parameters)

    def _trained_part(self) -> nn.Module:
        return self._model.decoder

    def _whole_inputs(self) -> Entries:
        inputs = super()._whole_inputs()
        if self._labels is not None:
            inputs["shift_labels"] = self._on_device(self._labels)
            inputs["labels"] = None if self._model.shifts_labels_itself else inputs["shift_labels"]
        return inputs

    def _whole_loss(self, outputs: Any) -> Tensor | None:
        if self._labels is None or not self._model.shifts_labels_itself:
            return super()._whole_loss(outputs)
        labels = self._on_device(self._labels)
        mean: Tensor = cross_entropy_sum(outputs.logits, labels) / labels.ne(IGNORE_INDEX).sum()
        return mean


def _placed(model: ShardedModel, piece: Batch) -> PlacedBatch:
    """The piece as the model's batches are placed, but that every document is cut over all groups.

    Several rows, or one with padding, are cut by their length: they would become one row, which could not be compared
    with the whole piece token by token.
    """
    schedule = model.replica.schedule
    batch = read_batch(model.complete(dict(piece)), keep_labels=not model.moves_labels)
    if isinstance(model.placer, DocumentPlacer):
        by_documents = with_documents(batch)
        if (by_documents.batch_size, by_documents.length, len(by_documents.rows)) == (1, batch.length, 1):
            placed = place(model.placer.everywhere, schedule, by_documents)
            info = shard_info(placed.shard(model.replica.rank)["position_ids"])
            assert info is not None
            model.note_shard(info)
            return placed
    return place(stream_placement, schedule, batch)
