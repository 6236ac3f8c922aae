"""Run one piece of a batch for the self-check, unsharded ("whole") and sharded.

A model with towers cannot run a piece of a batch, because images and their placeholder tokens belong together. It runs
the full batch, and the inputs of its text decoder are cut to a window.
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
from ds_hetero.frameworks.transformers.self_check.comparison import LocalTokens
from ds_hetero.frameworks.transformers.self_check.parameter_gradients import compared_parameters
from ds_hetero.frameworks.transformers.self_check.piece import real_tokens, window_of
from ds_hetero.frameworks.transformers.self_check.recorded_run import RecordedRun, record_run
from ds_hetero.planner.documents import DocumentPlacer
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.data.batch_documents import with_documents
from ds_hetero.runtime.data.shard_info import attach, shard_info
from ds_hetero.runtime.data.shards import IGNORE_INDEX, Batch, Entries, PlacedBatch, model_inputs, place, read_batch
from ds_hetero.runtime.loss import cross_entropy_sum, has_loss_of_batch, sequence_parallel_loss
from ds_hetero.values.placement import stream_placement

# Relative change of embeddings between two pairs of runs. Chosen, never measured: it is large enough that a tie between
# two experts in one pair of runs is no tie in the next.
_TIE_BREAK = 0.05


class Runs:
    """Runs one piece unsharded and sharded.

    Args:
        piece: the same on every rank.
        module: the module that runs; None for the trained module.

    Attributes:
        local_tokens: the tokens that this rank computes in a sharded run.
        device: of the model.
    """

    def __init__(self, model: ShardedModel, piece: Batch, module: nn.Module | None = None) -> None:
        self._model = model
        self._piece = piece
        self._module = model.model if module is None else module
        replica = model.replica
        placed = self._place()
        intervals = placed.placement.intervals(replica.rank)
        self.local_tokens = LocalTokens(intervals, self._real_tokens())
        self.device = next(model.model.parameters()).device
        self._shard = model_inputs(self._mark(placed.shard(replica.rank)), self.device)
        self._shape = (placed.batch.batch_size, placed.batch.length)
        self._shard_shape = tuple(self._shard["position_ids"].shape[:2])
        # Gradients add up over the ranks of a replica and are averaged over the world, see `ds_hetero.runtime.loss`.
        self._gradient_scale = dist.get_world_size() / replica.num_replicas
        self._parameters = compared_parameters(self._module, self._trained_part(), model.num_comparisons)
        self._options = {"use_cache": False} if _takes_use_cache(model, self._module) else {}  # further arguments

    def run_pair(self, seed: int | None) -> tuple[RecordedRun, RecordedRun]:
        """Run the piece whole and sharded.

        Args:
            seed: of a random change of the embeddings, the same in both runs; None for no change.
        """
        if seed is None:
            return self.run_whole(None), self._run_sharded(None)
        whole_run = self.run_whole(self.perturbation(seed, _TIE_BREAK, None))
        sharded_run = self._run_sharded(self.perturbation(seed, _TIE_BREAK, self.local_tokens.intervals))
        return whole_run, sharded_run

    def run_whole(self, perturb: Callable[[Tensor], Tensor] | None) -> RecordedRun:
        """Run the unsharded piece, as one process does.

        Args:
            perturb: changes the embeddings; None for no change.
        """
        # Divided experts run for all ranks at once, and every rank runs the piece now.
        with sharding(False), comparing_forwards(), self._window_only():
            return self._record(self._whole_inputs(), self._shape, self._whole_loss, perturb)

    def perturbation(
        self, seed: int, amplitude: float, intervals: tuple[tuple[int, int], ...] | None
    ) -> Callable[[Tensor], Tensor]:
        """Return a function that multiplies embeddings by random factors between 1 - amplitude and 1 + amplitude.

        The factors of all tokens are drawn on every rank, so a token gets the same ones in a whole and a sharded run.

        Args:
            intervals: positions of the tokens of the run; None for all. A rank without tokens runs one dummy token.
        """

        def perturb(embeddings: Tensor) -> Tensor:
            generator = torch.Generator().manual_seed(seed)
            uniform = torch.rand((*self._shape, *embeddings.shape[2:]), generator=generator)
            factors = 1 + amplitude * (2 * uniform - 1)
            if intervals is not None:
                parts = [factors[:, start:stop] for start, stop in intervals] or [factors[:, :1]]
                factors = torch.cat(parts, dim=1)
            return embeddings * factors.to(embeddings)

        return perturb

    def _run_sharded(self, perturb: Callable[[Tensor], Tensor] | None) -> RecordedRun:
        """Run this rank's shard of the piece; its gradients are scaled like those of an unsharded run."""
        inputs = dict(self._shard) | self._options
        # The loss functions of transformers take ``shift_labels``, but a model calls them only if it gets ``labels``.
        model_loss = self._model.model_loss
        model_computes_loss = not model_loss.shifts_labels_itself and not model_loss.custom_function
        if "shift_labels" in inputs and model_computes_loss:
            inputs["labels"] = inputs["shift_labels"]
        with sharding(True), comparing_forwards(), self._window_only():
            run = self._record(inputs, self._shard_shape, self._sharded_loss, perturb)
        gradients = {place: gradient / self._gradient_scale for place, gradient in run.gradients.items()}
        projections, sizes = self._sums_over_ranks(run)
        return replace(run, gradients=gradients, projections=projections, sizes=sizes)

    def _sums_over_ranks(self, run: RecordedRun) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Sum the projected gradients of parameters, and their sizes, over the ranks of the replica.

        Returns:
            Both by name of the parameter, for each parameter that any rank used, scaled like the other gradients.
        """
        by_rank = on_all_ranks(lambda: (run.projections, run.sizes))
        sums: dict[str, Tensor] = {}
        sizes: dict[str, float] = {}
        for rank in self._model.replica.ranks:
            projections, sizes_of_rank = by_rank[rank]
            for name, projection in projections.items():
                scaled = projection / self._gradient_scale
                sums[name] = sums[name] + scaled if name in sums else scaled
                sizes[name] = sizes.get(name, 0.0) + sizes_of_rank[name] / self._gradient_scale
        return sums, sizes

    def _sharded_loss(self, outputs: Any) -> Tensor | None:
        """Return the loss of the piece from the outputs for a shard; None if the piece has no labels."""
        labels: Tensor | None = self._shard.get("shift_labels")
        if labels is None:
            return None
        if self._model.model_loss.custom_function and has_loss_of_batch(outputs):
            loss: Tensor = outputs.loss
            return loss
        num_labels = labels.ne(IGNORE_INDEX).sum()
        mean = getattr(outputs, "loss", None)
        if self._model.model_loss.shifts_labels_itself:
            loss_sum = cross_entropy_sum(outputs.logits, labels)
        elif mean is None:
            return None
        else:
            loss_sum = mean * num_labels
        return sequence_parallel_loss(loss_sum, num_labels, self._model.replica)

    def _whole_inputs(self) -> Entries:
        return {name: self._on_device(entry) for name, entry in self._piece.items()} | self._options

    def _whole_loss(self, outputs: Any) -> Tensor | None:
        return getattr(outputs, "loss", None)

    def _record(self, inputs: Batch, shape: tuple[int, int], loss_of: Any, perturb: Any) -> RecordedRun:
        return record_run(self._module, inputs, shape, loss_of, perturb, parameters=self._parameters)

    # `WindowRuns` overrides the following methods.

    def _trained_part(self) -> nn.Module:
        """Return the part of the model whose gradients of parameters are compared."""
        return self._module

    def _window_only(self) -> contextlib.AbstractContextManager[None]:
        """Inside the context, let forwards compute only the window of the piece, if there is one."""
        return contextlib.nullcontext()

    def _place(self) -> PlacedBatch:
        """Return the piece, with its tokens divided among the ranks of the replica."""
        return _place_piece(self._model, self._piece)

    def _mark(self, shard: Entries) -> Entries:
        """Return the shard of the piece; `WindowRuns` notes in it at which position of the batch its window begins."""
        return shard

    def _real_tokens(self) -> Tensor:
        """Return [B, n], True for tokens that are not padding."""
        return real_tokens(self._piece)

    def _on_device(self, entry: Any) -> Any:
        return entry.to(self.device) if isinstance(entry, Tensor) else entry


def _takes_use_cache(model: ShardedModel, module: nn.Module) -> bool:
    """Return True if both the model and the module that runs take ``use_cache``.

    They differ if the training script has a module of its own around the model.
    """
    if "use_cache" not in inspect.signature(model.pretrained.forward).parameters:
        return False
    parameters = inspect.signature(module.forward).parameters
    takes_any_keyword = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return "use_cache" in parameters or takes_any_keyword


class WindowRuns(Runs):
    """Runs the full batch through a model with towers, and compares a window of the text decoder's inputs.

    Args:
        piece: the full batch, the same on every rank.
    """

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

    def _window_only(self) -> contextlib.AbstractContextManager[None]:
        return self._model.computing_window(self._window)

    def _record(self, inputs: Batch, shape: tuple[int, int], loss_of: Any, perturb: Any) -> RecordedRun:
        decoder = self._model.decoder
        return record_run(self._model.model, inputs, shape, loss_of, perturb, decoder, self._parameters)

    def _trained_part(self) -> nn.Module:
        return self._model.decoder

    def _whole_inputs(self) -> Entries:
        inputs = super()._whole_inputs()
        if self._labels is not None:
            inputs["shift_labels"] = self._on_device(self._labels)
            inputs["labels"] = None if self._model.model_loss.shifts_labels_itself else inputs["shift_labels"]
        return inputs

    def _whole_loss(self, outputs: Any) -> Tensor | None:
        if self._labels is None or not self._model.model_loss.shifts_labels_itself:
            return super()._whole_loss(outputs)
        labels = self._on_device(self._labels)
        mean: Tensor = cross_entropy_sum(outputs.logits, labels) / labels.ne(IGNORE_INDEX).sum()
        return mean


def _place_piece(model: ShardedModel, piece: Batch) -> PlacedBatch:
    """Divide a piece among the ranks as the model's batches are, but with every document over all groups of ranks.

    A piece with several rows, or with padding, is divided by length instead. Placed by documents, it would become one
    row without padding, whose tokens could not be compared with those of the unsharded run.
    """
    schedule = model.replica.schedule
    batch = read_batch(model.complete(dict(piece)), keep_labels=not model.model_loss.moves_labels)
    if isinstance(model.placement.placer, DocumentPlacer):
        by_documents = with_documents(batch)
        has_one_row = by_documents.batch_size == 1 and len(by_documents.rows) == 1
        if has_one_row and by_documents.length == batch.length:
            placed = place(model.placement.placer.everywhere, schedule, by_documents)
            info = shard_info(placed.shard(model.replica.rank)["position_ids"])
            assert info is not None
            model.placement.note_shard(info)
            return placed
    return place(stream_placement, schedule, batch)
