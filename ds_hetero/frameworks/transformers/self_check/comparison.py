"""Compare two runs of a piece, token by token and module by module, relative to the model's rounding noise.

    error of a token    = rms(actual - expected at this token) / rms(expected over all tokens)
    noise of a module   = largest such error of an unsharded run whose embeddings were changed by one unit of rounding
    allowed             = FACTOR * noise + FLOOR * eps of the model's dtype + FLOOR_OF_ORDER * eps of fp32

For example, an output in bf16 (eps 0.0078) with noise 0.01 may differ by 8 * 0.01 + 2 * 0.0078 = 0.096.

Dimension key: B rows and n tokens of the piece, s tokens of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from ds_hetero.frameworks.transformers.self_check.recorded_run import ModuleOutput, RecordedRun
from ds_hetero.runtime.data.shards import cut

# Chosen, never measured: one random change of embeddings samples the noise, but does not bound it.
FACTOR = 8.0
# Units of the model's dtype. Chosen, never measured: one rounding of the result in each run.
FLOOR = 2.0
# Units of fp32, for everything but gradients of parameters. A matmul over another number of rows, and attention over
# parts, add their terms up in another order, which a change of embeddings by one unit need not show. Without this term,
# Cohere with LoRA was refused for 6 units.
FLOOR_OF_ORDER = 8.0
# Units of the model's dtype, for gradients of parameters. Such a gradient is a sum over tokens, of terms that are each
# rounded in the model's dtype and may nearly cancel. 12 units were seen in bf16, at the bias of a norm of
# RoBERTa-PreLayerNorm; a change of embeddings by one unit shows a tenth of that.
FLOOR_OF_TERMS = 16.0
# Units of fp32, for gradients of parameters: a sum over a hundred tokens is added up in another order. 168 were seen
# in the best of four pairs of runs, at the decays of Qwen3-Next's recurrence over 27 tokens (draw 24 of seed 7). There
# the ranks differ from one process by 4e-13 in fp64, and one process in fp32 differs from itself in fp64 by 100 units.
FLOOR_OF_SUMS = 256.0

OUTPUT, GRADIENT, INPUT, PARAMETER, LOSS = "output", "gradient", "input", "parameter", "loss"


class ErrorKey(NamedTuple):
    """Identifies the compared quantity: an output, a gradient, an input, a parameter's gradient, or the loss."""

    kind: str  # one of the five above
    place: ModuleOutput  # for a parameter's gradient, with the name of the parameter as ``module``


Errors = dict[ErrorKey, Tensor]
"""Errors of this rank's tokens, in the order in which faults are reported."""


@dataclass(frozen=True)
class LocalTokens:
    """The tokens of the piece that this rank computes in the sharded run."""

    intervals: tuple[tuple[int, int], ...]  # (first, end) positions; empty for a rank without tokens
    real: Tensor  # [B, n], True for tokens of the unsharded piece that are not padding

    @property
    def local_real(self) -> Tensor:
        """[B, s], True for tokens of this rank that are not padding."""
        return cut(self.real, self.intervals)


@dataclass(frozen=True)
class Difference:
    """The largest error of one module on this rank, and the error that is allowed there."""

    kind: str  # ``"output"``, ``"gradient"``, ``"input"``, ``"parameter"`` or ``"loss"``
    module: str  # name of the module, or of the parameter
    error: float  # relative, of the worst token
    allowed: float  # relative error that rounding can cause
    ratio: float  # error / allowed; a fault above 1


class Fault(NamedTuple):
    """A difference that is larger than rounding can explain."""

    rank: int  # the rank on which the difference is largest
    difference: Difference


def compare_runs(whole_run: RecordedRun, sharded_run: RecordedRun, tokens: LocalTokens) -> Errors:
    """Return the errors of a sharded run.

    They are in the order of the computation, so that the first fault is nearest to its cause: outputs in the order of
    the forward, gradients in that of the backward, then inputs, parameters and the loss.
    """
    errors: Errors = {}
    gradients_from_the_top = dict(reversed(whole_run.gradients.items()))
    for kind, expected, actual in (
        (OUTPUT, whole_run.outputs, sharded_run.outputs),
        (GRADIENT, gradients_from_the_top, sharded_run.gradients),
        (INPUT, whole_run.inputs, sharded_run.inputs),
    ):
        for place, reference in expected.items():
            if place in actual:
                errors[ErrorKey(kind, place)] = _token_errors(reference, actual[place], tokens)
    return {**errors, **_parameter_errors(whole_run, sharded_run), **_loss_error(whole_run, sharded_run)}


def noise_of(whole_run: RecordedRun, perturbed_run: RecordedRun, tokens: LocalTokens) -> dict[ErrorKey, float]:
    """Return the rounding noise of every module.

    Args:
        perturbed_run: a second unsharded run, whose embeddings were changed by one unit of rounding.
    """
    num_tokens = tokens.real.shape[1]
    all_tokens = LocalTokens(((0, num_tokens),), tokens.real)
    return {key: _largest(errors) for key, errors in compare_runs(whole_run, perturbed_run, all_tokens).items()}


def smaller_errors(errors: Errors, errors_of_next_pair: Errors) -> Errors:
    """Return, for each token, the smaller of its errors in two pairs of runs (whole, sharded).

    The pairs have different embeddings. An error from a tie between two experts of a router moves to other tokens, but
    an error from a fault stays.
    """
    smaller: Errors = {}
    for key, first in errors.items():
        second = errors_of_next_pair.get(key)
        is_comparable = second is not None and second.shape == first.shape
        smaller[key] = torch.minimum(first, second) if second is not None and is_comparable else first
    return smaller


def worst_differences(errors: Errors, noise: Mapping[ErrorKey, float], eps: float) -> list[Difference]:
    """Return the largest error of every module on this rank, in the order of ``errors``.

    Args:
        eps: unit of rounding of the model's dtype.
    """
    eps_fp32 = torch.finfo(torch.float32).eps
    differences = []
    for key, token_errors in errors.items():
        error = _largest(token_errors)
        floor = FLOOR * eps + FLOOR_OF_ORDER * eps_fp32
        if key.kind == PARAMETER:
            floor = FLOOR_OF_TERMS * eps + FLOOR_OF_SUMS * eps_fp32
        allowed = FACTOR * noise.get(key, 0.0) + floor
        differences.append(Difference(key.kind, key.place.module, error, allowed, error / allowed))
    return differences


def find_faults(differences_by_rank: Sequence[Sequence[Difference]]) -> list[Fault]:
    """Return a fault for each module that differs by more than rounding on any rank.

    Args:
        differences_by_rank: of all modules, in the same order on every rank; the list of a rank may be shorter.
    """
    num_modules = max(len(differences) for differences in differences_by_rank)
    faults = []
    for index in range(num_modules):
        worst: Fault | None = None
        for rank, differences in enumerate(differences_by_rank):
            if index >= len(differences):
                continue
            if worst is None or differences[index].ratio > worst.difference.ratio:
                worst = Fault(rank, differences[index])
        assert worst is not None
        # "not <=" rather than ">": NaN is a fault.
        if not worst.difference.ratio <= 1:
            faults.append(worst)
    return faults


def _token_errors(reference: Tensor, actual: Tensor, tokens: LocalTokens) -> Tensor:
    """Return the relative error of each token of this rank that is not padding; infinity if the shapes differ.

    Args:
        reference: [B, n, ...] of the unsharded run.
        actual: [B, s, ...] of the other run.
    """
    if not tokens.intervals:
        return torch.zeros(1)
    expected = cut(reference.double(), tokens.intervals)
    if expected.shape != actual.shape:
        return torch.full((1,), torch.inf)
    size = _rms_by_token(reference.double().cpu())[tokens.real].square().mean().sqrt().clamp(min=1e-30)
    errors = _rms_by_token(actual.double().cpu() - expected) / size
    # A token that is not finite in one process either is the model's own fault, not the sharding's.
    errors = errors.masked_fill(~_rms_by_token(expected).isfinite(), 0)
    return errors[tokens.local_real]


def _parameter_errors(whole_run: RecordedRun, sharded_run: RecordedRun) -> Errors:
    """Return one error per parameter, of its projected gradient.

    The error is relative to the unsharded gradient, or to the sum of the ranks' sizes if that is larger, as it is when
    the ranks' gradients nearly cancel each other.

    Args:
        sharded_run: with projections and sizes that were summed over all ranks.
    """
    # A gradient that is not finite in one process either is the model's own fault.
    finite_sizes = {name: size for name, size in whole_run.sizes.items() if isfinite(size)}
    # About one unit of fp32 relative to the largest gradient; smaller gradients are rounding alone.
    smallest_size = 1e-7 * max(finite_sizes.values(), default=0.0)
    errors: Errors = {}
    for name, size in finite_sizes.items():
        reference = whole_run.projections[name]
        actual = sharded_run.projections.get(name, torch.zeros_like(reference))
        scale = max(size, sharded_run.sizes.get(name, 0.0), smallest_size, 1e-30)
        error = (actual - reference).square().mean().sqrt() / scale
        errors[ErrorKey(PARAMETER, ModuleOutput(name, 0, 0))] = error[None]
    return errors


def _loss_error(whole_run: RecordedRun, sharded_run: RecordedRun) -> Errors:
    """Return the relative error of the loss; nothing if a run has no loss, or the unsharded one no finite loss."""
    if whole_run.loss is None or sharded_run.loss is None or not isfinite(whole_run.loss):
        return {}
    error = abs(sharded_run.loss - whole_run.loss) / max(abs(whole_run.loss), 1e-30)
    return {ErrorKey(LOSS, ModuleOutput("the loss", 0, 0)): torch.tensor([error])}


def _rms_by_token(tensor: Tensor) -> Tensor:
    """Return the root mean square of each token: [B, n, ...] -> [B, n]."""
    return tensor.reshape(*tensor.shape[:2], -1).square().mean(2).sqrt()


def _largest(errors: Tensor) -> float:
    """Return the largest error; infinity if one is NaN."""
    if not errors.numel():
        return 0.0
    return float(errors.nan_to_num(torch.inf).max())
