"""The self-check: run a piece of a batch unsharded and sharded on all ranks, and refuse a model if the runs differ.

Both runs go through the user's model, forward and backward: "whole", as one process runs it, and sharded, as training
will run it. If they differ by more than rounding, every rank refuses the model with the name of the first module that
differs. Rules by model type cannot cover every model; this comparison finds a difference without knowing its reason.

The first batch is checked, every later batch with new features (`features_of`), and one batch every so many steps, see
`ComparisonPace`.

    the runs are equal in evaluation mode    compare in training mode, then look at labels after left padding
    they differ, one document                refuse
    they differ, several documents           compare inside one document: refuse if that differs too, else warn that one
                                             process lets documents see each other (or refuses them)
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ds_hetero.engine.arguments import OF_RESULTS
from ds_hetero.errors import HeteroError, ModelError
from ds_hetero.frameworks.transformers.model.shard_arguments import expect_arguments_of_shards, has_module_around
from ds_hetero.frameworks.transformers.model.sharded_model import ShardedModel
from ds_hetero.frameworks.transformers.self_check.comparison import (
    GRADIENT,
    INPUT,
    LOSS,
    PARAMETER,
    Difference,
    ErrorKey,
    Errors,
    Fault,
    compare_runs,
    find_faults,
    noise_of,
    smaller_errors,
    worst_differences,
)
from ds_hetero.frameworks.transformers.self_check.features import features_of
from ds_hetero.frameworks.transformers.self_check.piece import has_left_padding, marks_documents, piece_of
from ds_hetero.frameworks.transformers.self_check.recorded_run import RecordedRun
from ds_hetero.frameworks.transformers.self_check.runs import Runs, WindowRuns
from ds_hetero.frameworks.transformers.self_check.traceless import traceless
from ds_hetero.frameworks.transformers.self_check.training_mode import InTraining, is_same_run, without_randomness
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.data.shards import Batch, Entries

logger = logging.getLogger(__name__)

# Pairs of runs (whole, sharded), all of which must show a difference that counts as a fault. A difference from a tie of
# a router moves to other tokens from pair to pair, but a fault stays. Chosen, never measured.
_MAX_RUN_PAIRS = 4
_NOT_IN_TRAINING = (
    "are compared with one process in evaluation mode only. Operations that the model does only in training mode are "
    "not checked."
)


class SelfCheck:
    """The self-check of one model. Implements `ds_hetero.engine.trained.split_model.BatchChecks`."""

    def __init__(self, model: ShardedModel) -> None:
        self._model = model

    def is_due(self, batch: Batch) -> bool:
        """Return True if the model has to be checked with a batch from the wrapped loader; the same on every rank."""
        return self._model.needs_check(features_of(self._model, batch))

    def check_batches_of_ranks(self, batches: Sequence[Batch]) -> None:
        """Check the model with every batch of any rank that has new features. Raises `ModelError`.

        Args:
            batches: this rank's batches from the wrapped loader.

        Caller: every rank of the world, between two forwards.
        Collectives: one `on_all_ranks`, and those of `check_batch` for every batch that is checked.
        """
        features_by_rank = on_all_ranks(lambda: [features_of(self._model, batch) for batch in batches])
        # With "compare_every": "always", batches without new features are checked, too. If several ranks have batches
        # with the same features, one of these batches is enough.
        seen_features: set[frozenset[str]] = set()
        for rank, features_of_batches in enumerate(features_by_rank):
            for index, features in enumerate(features_of_batches):
                if features not in seen_features and self._model.needs_check(features):
                    batch = batches[index] if rank == dist.get_rank() else None
                    with self._model.pace.comparing(shows_new=self._model.shows_new(features)):
                        check_batch(self._model, batch)
                    self._model.note_checked(features)
                seen_features.add(features)

    def check_same_batch(self, batch: Batch) -> None:
        """Check the model with a batch that all ranks of a replica share, if its features are new. Raises `ModelError`.

        With several replicas, only the first batch is checked: they exchange no features here, and would disagree on
        whether a check is due.

        Caller: every rank of the world, between two forwards.
        Collectives: those of `check_batch`, if the batch is checked.
        """
        features = frozenset({"the first batch"})
        if self._model.replica.num_replicas == 1:
            features = features_of(self._model, batch)
        if self._model.needs_check(features):
            with self._model.pace.comparing(shows_new=self._model.shows_new(features)):
                check_batch(self._model, batch, is_of_call=True)
            self._model.note_checked(features)

    def check_again(self) -> None:
        """Repeat the last comparison, because the model may have changed. Raises `ModelError`.

        Caller: every rank of the world, between a backward and the optimizer's step.
        Collectives: those of `check_batch`; none if nothing has been compared yet, and with "off" or "first_batch" for
            ``"compare_every"``.
        """
        model = self._model
        if model.compare_again is None or model.pace.every in ("off", "first_batch") or not model.is_split:
            return
        with model.pace.comparing():
            model.compare_again()
        model.note_checked(frozenset())


def check_batch(model: ShardedModel, batch: Batch | None, *, is_of_call: bool = False) -> None:
    """Compare the unsharded and the sharded run of a piece of a batch on every rank. Raises `ModelError`.

    Args:
        model: the trained model; unchanged afterwards.
        batch: this rank's batch from the wrapped loader; None if it has none. The batch of the first rank that has one
            is used.
        is_of_call: True for a sharded call, which shards the arguments of the transformers model. A module of the
            script around that model may pass it any arguments, so only the model itself is run.

    Caller: every rank of the world, between two forwards.
    Collectives: one `on_all_ranks` to agree on the piece and one after each pair of runs, one for packed documents;
        those of the forwards.
    """
    module: nn.Module = model.model
    if is_of_call and has_module_around(model) and isinstance(model.pretrained, nn.Module):
        module = model.pretrained
    if batch is not None:
        parameters = model.names_taken(module)
        batch = {name: entry for name, entry in batch.items() if name not in OF_RESULTS and name in parameters}
    if model.cuts_inputs:
        _check_window(model, batch)
        return
    if module is model.model:
        expect_arguments_of_shards(model)
    elif not on_all_ranks(lambda: batch is not None and bool(batch.keys() & {"input_ids", "inputs_embeds"}))[0]:
        _warn(
            f"{type(model.model).__name__} gets no input_ids, so {type(model.pretrained).__name__} inside it cannot be "
            "run on a piece of a batch. No piece is compared with one process."
        )
        return
    piece = _first_piece(model, batch)
    runs = Runs(model, piece, module)
    marking_entry = marks_documents(piece)
    refusal = _refusal_of_one_process(model, runs) if marking_entry else ""
    comparison = _Comparison([], None) if refusal else _compare(model, runs)
    faults = comparison.faults
    if not faults and not refusal:
        _compare_in_training(model, runs, comparison)
        model.compare_again = lambda: _expect_same(model, Runs(model, piece, module))
        if has_left_padding(piece):
            _warn_of_padding_labels(model, batch, module)
        return
    if marking_entry:
        # One process may let documents see each other, which this engine does not. Inside one document both compute the
        # same, so a difference there is a fault.
        piece_of_document = _first_piece(model, batch, inside_document=True)
        runs = Runs(model, piece_of_document, module)
        faults = _compare(model, runs).faults
        model.compare_again = lambda: _expect_same(model, Runs(model, piece_of_document, module))
    if faults:
        raise ModelError(_refusal(model, runs, faults[0]))
    action = f"refuses a packed batch ({refusal})" if refusal else "lets the documents of a packed batch see each other"
    _warn(
        f"{type(model.pretrained).__name__} {action} in one process; with ds_hetero, documents do not see each other, "
        f"as {marking_entry} of the batch says."
    )


def _check_window(model: ShardedModel, batch: Batch | None) -> None:
    """Do the work of `check_batch` for a model with towers: compare a window of the inputs of its text decoder."""
    has_batch = on_all_ranks(lambda: batch is not None)
    first_rank = has_batch.index(True)
    shared_batch = on_all_ranks(lambda: dict(batch or {}) if dist.get_rank() == first_rank else None)[first_rank]
    assert shared_batch is not None
    _expect_same(model, WindowRuns(model, shared_batch))
    model.compare_again = lambda: _expect_same(model, WindowRuns(model, shared_batch))


def _expect_same(model: ShardedModel, runs: Runs) -> None:
    """Compare a piece in evaluation mode, then in training mode. Raises `ModelError` with the module that differs."""
    comparison = _compare(model, runs)
    if comparison.faults:
        raise ModelError(_refusal(model, runs, comparison.faults[0]))
    _compare_in_training(model, runs, comparison)


def _compare_in_training(model: ShardedModel, runs: Runs, comparison: _Comparison) -> None:
    """Compare a piece in training mode, if the model computes something else there than in evaluation mode.

    Args:
        comparison: the comparison in evaluation mode, which has passed. Its unsharded run is freed as early as
            possible.

    Collectives: up to five `on_all_ranks`, and those of one or two forwards; if the piece is compared in training
        mode, also those of a comparison in evaluation mode.

    Raises:
        ModelError: on every rank; the runs differ in training mode, although they agree in evaluation mode.
    """
    mode, error = _mode_of_training(model, runs, comparison)
    name = type(model.pretrained).__name__
    if mode is InTraining.FAILS:
        _warn_once(model, f"{name} fails on a piece of a batch in training mode. Pieces {_NOT_IN_TRAINING}", error)
    elif mode is InTraining.RANDOM:
        _warn_once(
            model,
            f"{name} computes something else in training mode than in evaluation mode, and something else every time, "
            f"although every rate of dropout and noise that ds_hetero knows was zero. Pieces {_NOT_IN_TRAINING}",
        )
    elif mode is InTraining.OTHER:
        training_comparison = _compare(model, runs, in_training=True)
        if training_comparison.faults:
            raise ModelError(_refusal(model, runs, training_comparison.faults[0], mode=" in training mode"))


def _mode_of_training(model: ShardedModel, runs: Runs, comparison: _Comparison) -> tuple[InTraining, str]:
    """Run the unsharded piece in training mode, and compare it with the run in evaluation mode (`InTraining`).

    Returns:
        How the runs relate, the same on every rank; and the error's text if the run in training mode fails, else "".

    Collectives: up to five `on_all_ranks`, and those of two forwards.
    """
    training_runs: list[RecordedRun] = []

    def run_whole() -> str:
        try:
            with _without_trace(model, runs, in_training=True):
                training_runs.append(runs.run_whole(None))
        except HeteroError:
            raise
        except Exception as error:  # the model's code may raise any: batch norm needs more than one row, for example
            return f"{type(error).__name__}: {error}"
        return ""

    is_training = on_all_ranks(lambda: any(module.training for module in model.model.modules()))
    if not any(is_training):
        return InTraining.SAME, ""
    if any(errors := on_all_ranks(run_whole)):
        return InTraining.FAILS, next(filter(None, errors))
    evaluation_run, comparison.whole_run = comparison.whole_run, None
    if all(on_all_ranks(lambda: is_same_run(evaluation_run, training_runs[0]))):
        return InTraining.SAME, ""
    evaluation_run = None  # free its tensors before the next run
    if any(errors := on_all_ranks(run_whole)):
        return InTraining.FAILS, next(filter(None, errors))
    repeats = all(on_all_ranks(lambda: is_same_run(training_runs[0], training_runs[1])))
    return InTraining.OTHER if repeats else InTraining.RANDOM, ""


@contextlib.contextmanager
def _without_trace(model: ShardedModel, runs: Runs, *, in_training: bool) -> Iterator[None]:
    """Inside the context, run the model without changing it, without recording anything, and without autocast.

    Args:
        in_training: True to run in training mode, without dropout and noise; False for evaluation mode.
    """
    without_rates = without_randomness(model.model) if in_training else contextlib.nullcontext()
    with (
        traceless(model.model, in_training=in_training),
        without_rates,
        model.unrecorded(),
        torch.autocast(runs.device.type, enabled=False),
    ):
        yield


def _warn_of_padding_labels(model: ShardedModel, batch: Batch | None, module: nn.Module) -> None:
    """Warn if whole and sharded runs differ when the last token of left padding predicts the first real token.

    They differ in a model that computes attention for padding, because this engine computes none.
    """
    faults = _compare(model, Runs(model, _first_piece(model, batch, padding_predicts=True), module)).faults
    if faults:
        error = max(fault.difference.error for fault in faults)
        _warn(
            "padding on the left predicts the first token of each row. In one process, "
            f"{type(model.pretrained).__name__} computes attention for padding, but ds_hetero computes none: on a "
            f"piece of a batch, loss and gradients differ by up to {error:.1g}. Set the labels of first tokens to "
            "-100, or pad on the right."
        )


def _warn(text: str) -> None:
    """Log a warning on rank 0."""
    if dist.get_rank() == 0:
        logger.warning("%s", text)


def _warn_once(model: ShardedModel, text: str, reason: str = "") -> None:
    """Log a warning and its reason, unless the same ``text`` was logged before, with whatever reason."""
    if text not in model.logged_warnings:
        _warn(f"{text} ({reason})" if reason else text)
    model.logged_warnings.add(text)


def _first_piece(model: ShardedModel, batch: Batch | None, **options: bool) -> Entries:
    """Cut the piece for the self-check out of the batch of the first rank that has a batch; send it to all ranks.

    Args:
        batch: this rank's batch; None if it has none.
        options: keyword arguments of `piece_of`.

    Caller: every rank of the world.
    Collectives: one `on_all_ranks`.
    """

    def cut_piece() -> Entries | None:
        return None if batch is None else piece_of(batch, model.replica.schedule, **options)

    return next(piece for piece in on_all_ranks(cut_piece) if piece is not None)


def _refusal_of_one_process(model: ShardedModel, runs: Runs) -> str:
    """Return the text of the ValueError with which one process refuses packed documents; empty if it runs them."""

    def run_whole() -> str:
        try:
            with _without_trace(model, runs, in_training=False):
                runs.run_whole(None)
        except HeteroError:
            raise
        except ValueError as error:
            return str(error)
        return ""

    return next((text for text in on_all_ranks(run_whole) if text), "")


@dataclass
class _Comparison:
    """Result of comparing a whole and a sharded run of a piece."""

    faults: list[Fault]  # of modules, the first nearest to the cause; the same on every rank
    whole_run: RecordedRun | None  # the unsharded run; None once its memory has been freed


def _compare(model: ShardedModel, runs: Runs, *, in_training: bool = False) -> _Comparison:
    """Run a piece whole and sharded, and compare the runs; up to `_MAX_RUN_PAIRS` times if they differ.

    Args:
        in_training: see `_without_trace`.

    Caller: every rank of the world.
    Collectives: those of the forwards and backwards, and one `on_all_ranks` for each pair of runs.
    """
    # An fp64 model still computes its loss in fp32.
    eps = max(torch.finfo(model.pretrained.dtype).eps, torch.finfo(torch.float32).eps)
    with _without_trace(model, runs, in_training=in_training):
        whole_run, sharded_run = runs.run_pair(None)
        if 0.0 in whole_run.sizes.values():
            model.pace.note_zeros()  # a gradient of exactly zero is right in both runs, so it has to be compared later
        perturbed_run = runs.run_whole(runs.perturbation(7, eps, None))  # 7: any seed but those of the pairs
        noise = noise_of(whole_run, perturbed_run, runs.local_tokens)
        errors = compare_runs(whole_run, sharded_run, runs.local_tokens)
        faults = _faults_of_all(errors, noise, eps)
        for seed in range(1, _MAX_RUN_PAIRS):
            if not faults:
                break
            errors = smaller_errors(errors, compare_runs(*runs.run_pair(seed), runs.local_tokens))
            faults = _faults_of_all(errors, noise, eps)
    if not model.pace.is_comparing_early:
        return _Comparison(faults, whole_run)
    # An early comparison is for gradients of parameters that were zero at the comparison before, such as those below a
    # head that began at zero. After one step, the gradients at tokens are sums of terms that nearly cancel: a right
    # model showed 41 units of fp32 where 17 are allowed (draw 246 of seed 11, without its mixing layers). Skip these.
    return _Comparison([fault for fault in faults if fault.difference.kind != GRADIENT], whole_run)


def _faults_of_all(errors: Errors, noise: Mapping[ErrorKey, float], eps: float) -> list[Fault]:
    """Return the faults that the errors of all ranks show; the same on every rank."""
    differences_by_rank: list[list[Difference]] = on_all_ranks(lambda: worst_differences(errors, noise, eps))
    return find_faults(differences_by_rank)


def _refusal(model: ShardedModel, runs: Runs, fault: Fault, mode: str = "") -> str:
    """Return the message about the first fault. ``mode``: " in training mode", or empty."""
    difference = fault.difference
    num_tokens = runs.local_tokens.real.shape[1]
    hint = ""
    if difference.kind == LOSS:
        finding = "the loss differs"
    elif difference.kind == PARAMETER:
        finding = f"the gradient of the parameter {difference.module} differs"
    elif difference.kind == INPUT:
        finding = f"the input of {difference.module}, from which the gradient of its weight is computed, differs"
    elif difference.kind == GRADIENT:
        finding = f"the gradient at {difference.module} differs"
        hint = (
            " If the outputs agree and the gradient differs from the top on, the labels are not those that the model "
            "expects of a shard, or its loss is more than a mean over tokens."
        )
    else:
        finding = f"the output of {difference.module} differs"
    return (
        f"{type(model.pretrained).__name__} computes something else when it is split over the sequence{mode}: on "
        f"{num_tokens} tokens of a batch, {finding} by {difference.error:.2g} on rank {fault.rank}, where rounding "
        f"accounts for {difference.allowed:.1g}.{hint} Training would go on without a sign, so it is refused. Train "
        'this model without sequence parallelism ("sequence_parallel_size": 1), or, if you know better, set '
        '"heterogeneity": {"checks": {"compare_every": "off"}}.'
    )
