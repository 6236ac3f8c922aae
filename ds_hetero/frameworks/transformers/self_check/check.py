"""The self-check: run a piece of a batch unsharded and sharded on all ranks, and refuse a model if the runs differ.

Both runs go through the user's model, forward and backward: "whole", as one process runs it, and sharded, as training
will run it. A difference beyond rounding is refused on every rank, with the name of the first module that differs.
Rules by model type cannot cover every model; this comparison finds a difference without knowing its reason.

The first batch is checked, every later one with new `features_of`, and one every so many steps, see
`ComparisonPace`.

    the runs are equal in evaluation mode    compare in training mode, then look at labels after left padding
    they differ, one document                refuse
    they differ, several documents           compare inside one document: refuse if that differs too, else warn that one
                                             process lets documents see each other (or refuses them)
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_hetero.engine.arguments import OF_RESULTS
from ds_hetero.errors import HeteroError, ModelError
from ds_hetero.frameworks.transformers.model.shard_arguments import expect_arguments_of_shards, is_around
from ds_hetero.frameworks.transformers.model.sharded_model import ShardedModel
from ds_hetero.frameworks.transformers.self_check.comparison import (
    GRADIENT,
    INPUT,
    LOSS,
    PARAMETER,
    Difference,
    compare_runs,
    faults,
    least,
    noise_of,
    worst,
)
from ds_hetero.frameworks.transformers.self_check.features import features_of
from ds_hetero.frameworks.transformers.self_check.piece import has_left_padding, marks_documents, piece_of
from ds_hetero.frameworks.transformers.self_check.recorded_run import RecordedRun, traceless
from ds_hetero.frameworks.transformers.self_check.runs import Runs, WindowRuns
from ds_hetero.frameworks.transformers.self_check.training_mode import InTraining, is_same_run, without_randomness
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.data.shards import Batch, Entries

logger = logging.getLogger(__name__)

# Pairs of runs before a difference counts as a fault: an error from a tie of a router moves to other tokens from pair
# to pair, a fault stays. Chosen, never measured.
_MOST_PAIRS = 4
_NOT_IN_TRAINING = (
    "are compared with one process in evaluation mode only: operations that the model does in training mode only are "
    "not checked."
)


class SelfCheck:
    """The self-check of one model; `ds_hetero.engine.adapters.BatchChecks`."""

    def __init__(self, model: ShardedModel) -> None:
        self._model = model

    def is_due(self, batch: Batch) -> bool:
        """Return True if a batch from the wrapped loader has to be compared; the same on every rank."""
        return self._model.needs_check(features_of(self._model, batch))

    def check_batches_of_ranks(self, batches: Sequence[Batch]) -> None:
        """Check the model with every batch of any rank that has new features. Raises `ModelError`.

        Args:
            batches: of this rank, from the wrapped loader.

        Caller: every rank of the world, between two forwards.
        Collectives: one `on_all_ranks`, and those of `check_batch` for every batch that is checked.
        """
        features_of_ranks = on_all_ranks(lambda: [features_of(self._model, batch) for batch in batches])
        # When every batch is due, several ranks may have batches with the same features: one of them is enough.
        seen: set[frozenset[str]] = set()
        for rank, features_of_batches in enumerate(features_of_ranks):
            for index, features in enumerate(features_of_batches):
                if features not in seen and self._model.needs_check(features):
                    batch = batches[index] if rank == dist.get_rank() else None
                    with self._model.pace.comparing(shows_new=self._model.shows_new(features)):
                        check_batch(self._model, batch)
                    self._model.note_checked(features)
                seen.add(features)

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
        """Compare what was compared last once more, since the model may have changed. Raises `ModelError`.

        Caller: every rank of the world, between a backward and the optimizer's step.
        Collectives: those of `check_batch`, if something has been compared and comparisons are repeated.
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
        batch: of this rank, from the wrapped loader; None if it has none. The batch of the first rank that has one is
            used.
        is_of_call: True for a sharded call, which shards the inputs of the model inside a module of the script. Such a
            module may pass any arguments to the model, so only the model is run.

    Caller: every rank of the world, between two forwards.
    Collectives: one `on_all_ranks` to agree on the piece and one after each pair of runs, one for packed documents;
        those of the forwards.
    """
    module: nn.Module = model.model
    if is_of_call and is_around(model) and isinstance(model.pretrained, nn.Module):
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
            "run on a piece of a batch: no piece is compared with one process."
        )
        return
    piece = _first_piece(model, batch)
    runs = Runs(model, piece, module)
    marked_by = marks_documents(piece)
    refusal = _refusal_of_one_process(model, runs) if marked_by else ""
    compared = _Comparison([], None) if refusal else _compare(model, runs)
    differences = compared.differences
    if not differences and not refusal:
        _compare_in_training(model, runs, compared)
        model.compare_again = lambda: _expect_same(model, Runs(model, piece, module))
        if has_left_padding(piece):
            _look_at_padding(model, batch, module)
        return
    if marked_by:
        # One process may let documents see each other where this engine does not. Inside one document, both are the
        # same: a difference that is left there is a fault.
        inside = _first_piece(model, batch, inside_document=True)
        runs = Runs(model, inside, module)
        differences = _differences(model, runs)
        model.compare_again = lambda: _expect_same(model, Runs(model, inside, module))
    if differences:
        raise ModelError(_refusal(model, runs, *differences[0]))
    action = f"refuses a packed batch ({refusal})" if refusal else "lets the documents of a packed batch see each other"
    _warn(
        f"{type(model.pretrained).__name__} {action} in one process; here documents do not see each other, as the "
        f"batch's {marked_by} says."
    )


def _check_window(model: ShardedModel, batch: Batch | None) -> None:
    """Do `check_batch` for a model with towers, on a window of the inputs of its text decoder."""
    has_batch = on_all_ranks(lambda: batch is not None)
    first_rank = has_batch.index(True)
    shared_batch = on_all_ranks(lambda: dict(batch or {}) if dist.get_rank() == first_rank else None)[first_rank]
    assert shared_batch is not None
    _expect_same(model, WindowRuns(model, shared_batch))
    model.compare_again = lambda: _expect_same(model, WindowRuns(model, shared_batch))


def _expect_same(model: ShardedModel, runs: Runs) -> None:
    """Compare a piece in evaluation, and in training mode if that differs. Raises `ModelError`: names the module."""
    compared = _compare(model, runs)
    if compared.differences:
        raise ModelError(_refusal(model, runs, *compared.differences[0]))
    _compare_in_training(model, runs, compared)


def _compare_in_training(model: ShardedModel, runs: Runs, compared: _Comparison) -> None:
    """Compare a piece in training mode as well, if the model computes something else there than in evaluation.

    Args:
        compared: the comparison in evaluation, which has passed; its unsharded run is freed as early as possible.

    Collectives: up to five `on_all_ranks`, and those of one or two forwards; if the piece is compared in training mode,
        also those of a comparison in evaluation mode.

    Raises:
        ModelError: on every rank; sharded and unsharded runs differ, but only in training mode.
    """
    mode, error = _mode_of_training(model, runs, compared)
    name = type(model.pretrained).__name__
    if mode is InTraining.FAILS:
        _warn_once(model, f"{name} cannot run a piece of a batch in training mode. Pieces {_NOT_IN_TRAINING}", error)
    elif mode is InTraining.RANDOM:
        _warn_once(
            model,
            f"{name} computes something else in training mode than in evaluation mode, and something else every time, "
            f"although every rate of dropout and noise that ds_hetero knows was zero. Pieces {_NOT_IN_TRAINING}",
        )
    elif mode is InTraining.OTHER:
        in_training = _compare(model, runs, in_training=True)
        if in_training.differences:
            raise ModelError(_refusal(model, runs, *in_training.differences[0], mode=" in training mode"))


def _mode_of_training(model: ShardedModel, runs: Runs, compared: _Comparison) -> tuple[InTraining, str]:
    """Return how an unsharded run in training mode relates to the one in evaluation mode; the same on every rank.

    Returns:
        The relation, and the error text if such a run fails.
    """
    training_runs: list[RecordedRun] = []

    def run_whole() -> str:
        try:
            with _quiet(model, runs, in_training=True):
                training_runs.append(runs.whole(None))
        except HeteroError:
            raise
        except Exception as error:  # of the model's own code: batch norm, for one, requires more than one row
            return f"{type(error).__name__}: {error}"
        return ""

    is_training = on_all_ranks(lambda: any(module.training for module in model.model.modules()))
    if not any(is_training):
        return InTraining.SAME, ""
    if any(errors := on_all_ranks(run_whole)):
        return InTraining.FAILS, next(filter(None, errors))
    evaluation_run, compared.whole = compared.whole, None
    if all(on_all_ranks(lambda: is_same_run(evaluation_run, training_runs[0]))):
        return InTraining.SAME, ""
    evaluation_run = None  # free its tensors before the next run
    if any(errors := on_all_ranks(run_whole)):
        return InTraining.FAILS, next(filter(None, errors))
    repeats = all(on_all_ranks(lambda: is_same_run(training_runs[0], training_runs[1])))
    return InTraining.OTHER if repeats else InTraining.RANDOM, ""


@contextlib.contextmanager
def _quiet(model: ShardedModel, runs: Runs, *, in_training: bool) -> Iterator[None]:
    """Run inside without a trace in the model, without autocast, and in training mode without dropout and noise."""
    without_rates = without_randomness(model.model) if in_training else contextlib.nullcontext()
    with (
        traceless(model.model, in_training=in_training),
        without_rates,
        model.unrecorded(),
        torch.autocast(runs.device.type, enabled=False),
    ):
        yield


def _look_at_padding(model: ShardedModel, batch: Batch | None, module: nn.Module) -> None:
    """Warn if labels that padding predicts make a difference: this engine computes no attention for padding."""
    differences = _differences(model, Runs(model, _first_piece(model, batch, padding_predicts=True), module))
    if differences:
        error = max(difference.error for _, difference in differences)
        _warn(
            "padding on the left predicts the first token of each row. In one process, "
            f"{type(model.pretrained).__name__} computes attention for padding, but ds_hetero computes none: on a "
            f"piece of a batch, loss and gradients differ by up to {error:.1g}. Set the labels of first tokens to "
            "-100, or pad on the right."
        )


def _warn(text: str) -> None:
    if dist.get_rank() == 0:
        logger.warning("%s", text)


def _warn_once(model: ShardedModel, text: str, reason: str = "") -> None:
    """Log ``text`` and a reason, unless the same text was logged before; the reason may differ from time to time."""
    if text not in model.told:
        _warn(f"{text} ({reason})" if reason else text)
    model.told.add(text)


def _first_piece(model: ShardedModel, batch: Batch | None, **kind: bool) -> Entries:
    """Return `piece_of` the batch of the first rank that has one, the same on every rank. ``kind``: its options."""

    def cut() -> Entries | None:
        return None if batch is None else piece_of(batch, model.replica.schedule, **kind)

    return next(piece for piece in on_all_ranks(cut) if piece is not None)


def _refusal_of_one_process(model: ShardedModel, runs: Runs) -> str:
    """Return the error by which one process refuses packed documents; empty if it runs them."""

    def run_whole() -> str:
        try:
            with _quiet(model, runs, in_training=False):
                runs.whole(None)
        except HeteroError:
            raise
        except ValueError as error:
            return str(error)
        return ""

    return next((text for text in on_all_ranks(run_whole) if text), "")


@dataclass
class _Comparison:
    """Result of running a piece whole and sharded."""

    differences: list[tuple[int, Difference]]  # (rank, difference beyond rounding) per module; the same on every rank
    whole: RecordedRun | None  # the unsharded run; None once its memory has been freed


def _differences(model: ShardedModel, runs: Runs) -> list[tuple[int, Difference]]:
    return _compare(model, runs).differences


def _compare(model: ShardedModel, runs: Runs, *, in_training: bool = False) -> _Comparison:
    """Run a piece whole and sharded, and compare.

    Args:
        in_training: run in training mode without dropout and noise, in place of evaluation mode.
    """
    # An fp64 model still computes its loss in fp32.
    eps = max(torch.finfo(model.pretrained.dtype).eps, torch.finfo(torch.float32).eps)
    with _quiet(model, runs, in_training=in_training):
        whole, sharded = runs.pair(None)
        if 0.0 in whole.sizes.values():
            model.pace.note_zeros()  # a gradient of exactly zero is right in both runs, so it has to be compared later
        shaken = runs.whole(runs.shake(7, eps, None))  # 7: any seed but those of the pairs
        noise = noise_of(whole, shaken, runs.local_tokens)
        errors = compare_runs(whole, sharded, runs.local_tokens)
        differences = _faults_of_all(errors, noise, eps)
        for seed in range(1, _MOST_PAIRS):
            if not differences:
                break
            errors = least(errors, compare_runs(*runs.pair(seed), runs.local_tokens))
            differences = _faults_of_all(errors, noise, eps)
    if not model.pace.is_comparing_early:
        return _Comparison(differences, whole)
    # An early comparison is for gradients of parameters that were zero at the comparison before, such as those below a
    # head that began at zero. After one step, the gradients at tokens are sums of terms that nearly cancel: a right
    # model showed 41 units of fp32 where 17 are allowed (draw 246 of seed 11, without its mixing layers). Skip these.
    without_gradients = [(rank, difference) for rank, difference in differences if difference.kind != GRADIENT]
    return _Comparison(without_gradients, whole)


def _faults_of_all(errors: Any, noise: Any, eps: float) -> list[tuple[int, Difference]]:
    return faults(on_all_ranks(lambda: worst(errors, noise, eps)))


def _refusal(model: ShardedModel, runs: Runs, rank: int, difference: Difference, mode: str = "") -> str:
    """Return the message about the first difference. ``mode``: " in training mode", or empty."""
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
        f"{num_tokens} tokens of a batch, {finding} by {difference.error:.2g} on rank {rank}, where rounding accounts "
        f"for {difference.allowed:.1g}.{hint} Training would go on without a sign, so it is refused. Train this model "
        'without sequence parallelism ("sequence_parallel_size": 1), or, if you know better, set '
        '"heterogeneity": {"checks": {"compare_every": "off"}}.'
    )
