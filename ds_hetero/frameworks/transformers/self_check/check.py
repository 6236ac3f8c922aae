"""The self-check: what all ranks do together with a piece of a batch, and the verdict.

The piece runs whole on every rank, as one process would run it, and sharded, as it will be trained on; both through
the user's model, forward and backward. What differs beyond rounding is refused on every rank, naming the first module
that differs. Rules cannot know every model; this finds what one process and the ranks compute differently, whatever
the reason. The first batch is looked at, any later one that can show what none before it could, see `features`, and one
every so many steps, see `ComparisonPace`.
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

_MOST_PAIRS = 4  # of runs, before a difference is believed: ties of routers move, faults stay
_NOT_IN_TRAINING = (
    "are compared with one process in evaluation alone: what the model does to tokens in training alone is not checked."
)


class SelfCheck:
    """The self-check of one model; `ds_hetero.engine.adapters.BatchChecks`."""

    def __init__(self, model: ShardedModel) -> None:
        self._model = model

    def is_due(self, batch: Batch) -> bool:
        """Whether a batch, as the wrapped loader gave it, is to be compared; the same on every rank."""
        return self._model.needs_check(features_of(self._model, batch))

    def check_batches_of_ranks(self, batches: Sequence[Batch]) -> None:
        """Check a model with this rank's batches, if any can show something new. Raises `ModelError`.

        Args:
            batches: of this rank, as the wrapped loader gave them.

        Caller: every rank of the world, between two forwards.
        Collectives: one `on_all_ranks`, and those of `check_batch` for every batch that is looked at.
        """
        features_of_ranks = on_all_ranks(lambda: [features_of(self._model, batch) for batch in batches])
        seen: set[frozenset[str]] = set()  # where every batch is to be checked, ranks may still hold the same one
        for rank, of_rank in enumerate(features_of_ranks):
            for number, features in enumerate(of_rank):
                if features not in seen and self._model.needs_check(features):
                    with self._model.pace.comparing(shows_new=self._model.shows_new(features)):
                        check_batch(self._model, batches[number] if rank == dist.get_rank() else None)
                    self._model.note_checked(features)
                seen.add(features)

    def check_same_batch(self, batch: Batch) -> None:
        """Check a model with a replica's common batch, if that can show something new. Raises `ModelError`.

        Replicas learn nothing of each other's batches here, so that of several only the first batches are checked.

        Caller: every rank of the world, between two forwards.
        Collectives: those of `check_batch`, if it is looked at.
        """
        features = (
            features_of(self._model, batch) if self._model.replica.num_replicas == 1 else frozenset({"the first batch"})
        )
        if self._model.needs_check(features):
            with self._model.pace.comparing(shows_new=self._model.shows_new(features)):
                check_batch(self._model, batch, is_of_call=True)
            self._model.note_checked(features)


def check_batch(model: ShardedModel, batch: Batch | None, *, is_of_call: bool = False) -> None:
    """Compare a piece of a batch, whole and sharded, on every rank. Raises `ModelError`: names the module.

    Args:
        model: what is trained; nothing is left behind in it.
        batch: of this rank, as the wrapped loader gave it; None if it has none. The first that a rank has is taken.
        is_of_call: whether it is for a sharded call, which cuts what the model is given inside a module around it. That
            module may give it anything, so the model alone is compared.

    Caller: every rank of the world, between two forwards.
    Collectives: one `on_all_ranks` to agree on the piece and one after each pair of runs, one for packed documents;
        those of the forwards.
    """
    module: nn.Module = model.model
    if is_of_call and is_around(model) and isinstance(model.pretrained, nn.Module):
        module = model.pretrained
    if batch is not None:
        taken = model.names_taken(module)
        batch = {name: entry for name, entry in batch.items() if name not in OF_RESULTS and name in taken}
    if model.cuts_inputs:
        _check_window(model, batch)
        return
    if module is model.model:
        expect_arguments_of_shards(model)
    elif not on_all_ranks(lambda: batch is not None and bool(batch.keys() & {"input_ids", "inputs_embeds"}))[0]:
        _warn(
            f"{type(model.model).__name__} is given no input_ids, of which {type(model.pretrained).__name__} inside "
            "could be run whole and sharded: no piece of a batch is compared with one process."
        )
        return
    piece = _first_piece(model, batch)
    runs = Runs(model, piece, module)
    marked_by = marks_documents(piece)
    refusal = _refusal_of_one_process(model, runs) if marked_by else ""
    compared = _Compared([], None) if refusal else _compare(model, runs)
    differences = compared.differences
    if not differences and not refusal:
        _compare_in_training(model, runs, compared)
        if has_left_padding(piece):
            _look_at_padding(model, batch, module)
        return
    if marked_by:
        runs = Runs(model, _first_piece(model, batch, inside_document=True), module)
        differences = _differences(model, runs)
    if differences:
        raise ModelError(_refusal(model, runs, *differences[0]))
    does = f"refuses a packed batch ({refusal})" if refusal else "lets the documents of a packed batch see each other"
    _warn(
        f"{type(model.pretrained).__name__} {does} where one process runs it; here documents do not see each other, as "
        f"its {marked_by} say."
    )


def _check_window(model: ShardedModel, batch: Batch | None) -> None:
    """`check_batch` of a model with towers: with a window of what its text decoder is given."""
    has_batch = on_all_ranks(lambda: batch is not None)
    first = has_batch.index(True)
    whole = on_all_ranks(lambda: dict(batch or {}) if dist.get_rank() == first else None)[first]
    assert whole is not None
    runs = WindowRuns(model, whole)
    compared = _compare(model, runs)
    if compared.differences:
        raise ModelError(_refusal(model, runs, *compared.differences[0]))
    _compare_in_training(model, runs, compared)


def _compare_in_training(model: ShardedModel, runs: Runs, compared: _Compared) -> None:
    """Compare a piece that passed in evaluation in training, too, if the model computes something else there.

    Args:
        compared: what the piece made in evaluation; its whole run is given up as soon as it is not needed.

    Collectives: up to five `on_all_ranks`, and those of one or two forwards; as many as in evaluation where something
        is compared in training.

    Raises:
        ModelError: the model computes something else when it is split, in training alone; on every rank.
    """
    mode, error = _mode_of_training(model, runs, compared)
    name = type(model.pretrained).__name__
    if mode is InTraining.FAILS:
        _warn_once(model, f"{name} cannot run a piece of a batch in training, so that pieces {_NOT_IN_TRAINING}", error)
    elif mode is InTraining.RANDOM:
        _warn_once(
            model,
            f"{name} computes something else in training than in evaluation, another thing every time, with every rate "
            f"of dropout and noise that is known at zero. Pieces of batches {_NOT_IN_TRAINING}",
        )
    elif mode is InTraining.OTHER:
        in_training = _compare(model, runs, in_training=True)
        if in_training.differences:
            raise ModelError(_refusal(model, runs, *in_training.differences[0], mode=" in training mode"))


def _mode_of_training(model: ShardedModel, runs: Runs, compared: _Compared) -> tuple[InTraining, str]:
    """What a whole run in training is beside the one in evaluation, the same on every rank, and why it fails."""
    made: list[RecordedRun] = []  # in training, whole

    def run_whole() -> str:
        try:
            with _quiet(model, runs, in_training=True):
                made.append(runs.whole(None))
        except HeteroError:
            raise
        except Exception as error:  # of the model: batch norm wants more than one row, for one
            return f"{type(error).__name__}: {error}"
        return ""

    if not any(on_all_ranks(lambda: any(module.training for module in model.model.modules()))):
        return InTraining.SAME, ""
    if any(errors := on_all_ranks(run_whole)):
        return InTraining.FAILS, next(filter(None, errors))
    evaluation, compared.whole = compared.whole, None
    if all(on_all_ranks(lambda: is_same_run(evaluation, made[0]))):
        return InTraining.SAME, ""
    evaluation = None  # before another run
    if any(errors := on_all_ranks(run_whole)):
        return InTraining.FAILS, next(filter(None, errors))
    is_same = all(on_all_ranks(lambda: is_same_run(made[0], made[1])))
    return InTraining.OTHER if is_same else InTraining.RANDOM, ""


@contextlib.contextmanager
def _quiet(model: ShardedModel, runs: Runs, *, in_training: bool) -> Iterator[None]:
    """Let runs inside leave nothing behind, without autocast, dropout and noise."""
    without_rates = without_randomness(model.model) if in_training else contextlib.nullcontext()
    with (
        traceless(model.model, in_training=in_training),
        without_rates,
        model.unrecorded(),
        torch.autocast(runs.device.type, enabled=False),
    ):
        yield


def _look_at_padding(model: ShardedModel, batch: Batch | None, module: nn.Module) -> None:
    """Warn where labels that padding predicts make a difference: the attention of padding is zero here."""
    differences = _differences(model, Runs(model, _first_piece(model, batch, padding_predicts=True), module))
    if differences:
        error = max(difference.error for _, difference in differences)
        _warn(
            f"padding on the left predicts the first token of each row, and {type(model.pretrained).__name__} in one "
            "process computes attention for padding, where ds_hetero computes none: on a piece of a batch, "
            f"loss and gradients differ by up to {error:.1g}. Set the labels of first tokens to -100, or pad on the "
            "right."
        )


def _warn(text: str) -> None:
    if dist.get_rank() == 0:
        logger.warning("%s", text)


def _warn_once(model: ShardedModel, text: str, reason: str = "") -> None:
    """Say ``text`` the first time, and its reason behind it, which may differ from time to time."""
    if text not in model.told:
        _warn(f"{text} ({reason})" if reason else text)
    model.told.add(text)


def _first_piece(model: ShardedModel, batch: Batch | None, **kind: bool) -> Entries:
    """Return the piece of the first rank that has a batch, cut as `piece_of` does; the same on every rank."""

    def cut() -> Entries | None:
        return None if batch is None else piece_of(batch, model.replica.schedule, **kind)

    return next(piece for piece in on_all_ranks(cut) if piece is not None)


def _refusal_of_one_process(model: ShardedModel, runs: Runs) -> str:
    """Message of one process on packed documents if it cannot keep them apart; empty if it runs them."""

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
class _Compared:
    """What a piece made, whole and sharded."""

    differences: list[tuple[int, Difference]]  # rank and module, beyond rounding; the same on every rank
    whole: RecordedRun | None  # the whole run; None when it has been given up


def _differences(model: ShardedModel, runs: Runs) -> list[tuple[int, Difference]]:
    return _compare(model, runs).differences


def _compare(model: ShardedModel, runs: Runs, *, in_training: bool = False) -> _Compared:
    """Run a piece whole and sharded, and compare.

    Args:
        in_training: compare runs in training mode without dropout and noise, and not in evaluation.
    """
    eps = max(torch.finfo(dtype).eps for dtype in (model.pretrained.dtype, torch.float32))  # losses are fp32 at best
    with _quiet(model, runs, in_training=in_training):
        whole, sharded = runs.pair(None)
        if 0.0 in whole.sizes.values():  # which shows nothing of how it is made
            model.pace.note_zeros()
        noise = noise_of(whole, runs.whole(runs.shake(7, eps, None)), runs.held)
        errors = compare_runs(whole, sharded, runs.held)
        differences = _faults_of_all(errors, noise, eps)
        for seed in range(1, _MOST_PAIRS):
            if not differences:
                break
            errors = least(errors, compare_runs(*runs.pair(seed), runs.held))
            differences = _faults_of_all(errors, noise, eps)
    if not model.pace.is_comparing_early:
        return _Compared(differences, whole)
    # What has just left zero (a head after one step) makes gradients of tokens of terms that nearly cancel: 41 units of
    # fp32 were seen where 17 are allowed, of a right model (draw 246 of seed 11, without its mixing layers). What was
    # zero at the comparison before, and is looked at now, are the gradients of parameters.
    kept = [(rank, difference) for rank, difference in differences if difference.kind != GRADIENT]
    return _Compared(kept, whole)


def _faults_of_all(errors: Any, noise: Any, eps: float) -> list[tuple[int, Difference]]:
    return faults(on_all_ranks(lambda: worst(errors, noise, eps)))


def _refusal(model: ShardedModel, runs: Runs, rank: int, difference: Difference, mode: str = "") -> str:
    tokens = runs.held.real.shape[1]
    if difference.kind == LOSS:
        what = "the loss differs"
    elif difference.kind == PARAMETER:
        what = f"the gradient of the parameter {difference.module} differs"
    elif difference.kind == INPUT:
        what = f"the input of {difference.module}, of which the gradient of its weight is made, differs"
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
        f"{type(model.pretrained).__name__} computes something else when it is split over the sequence{mode}: on "
        f"{tokens} tokens of a batch, {what} by {difference.error:.2g} on rank {rank}, where rounding accounts for "
        f"{difference.allowed:.1g}.{hint} Training would go on without a sign, so it is refused. Train this model "
        'without sequence parallelism ("sequence_parallel_size": 1), or, if you know better, set '
        '"heterogeneity": {"checks": {"compare_every": "off"}}.'
    )
