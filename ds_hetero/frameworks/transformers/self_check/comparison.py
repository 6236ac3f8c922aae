"""Compare two runs of a piece, token by token and module by module, against the rounding noise of the model.

    error of a token    = rms(seen - expected at this token) / rms(expected over all tokens)
    noise of a module   = largest such error of an unsharded run whose embeddings were changed by one unit of rounding
    allowed             = FACTOR * noise + FLOOR * eps of the model's dtype + FLOOR_OF_ORDER * eps of fp32

For example, an output in bf16 (eps 0.0078) with noise 0.01 may differ by 8 * 0.01 + 2 * 0.0078 = 0.096.
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

FACTOR = 8.0  # chosen, never measured; one random change of embeddings samples the noise, but does not bound it
FLOOR = 2.0  # units of the model's dtype; chosen, never measured: one rounding of the result in each run
# Of gradients of parameters. Terms of a sum over tokens that nearly cancel are each rounded in the model's dtype: 12
# units were seen in bf16, of the bias of a norm of RoBERTa-PreLayerNorm; embeddings shaken by one unit show a tenth.
FLOOR_OF_TERMS = 16.0
# Units of fp32: sums over a hundred tokens, in which they are added in another order. 168 were seen in the best of four
# pairs of runs, of the decays of Qwen3-Next's recurrence over 27 tokens (draw 24 of seed 7). In fp64 the ranks differ
# from one process by 4e-13 there, and one process in fp32 from itself in fp64 by 100 units.
FLOOR_OF_SUMS = 256.0
# Units of fp32, of all else. A matmul over other numbers of rows, and attention over parts, add their terms up in
# another order, which embeddings shaken by a unit need not show. Cohere with LoRA was refused for 6 units.
FLOOR_OF_ORDER = 8.0

OUTPUT, GRADIENT, INPUT, PARAMETER, LOSS = "output", "gradient", "input", "parameter", "loss"


class _Key(NamedTuple):
    kind: str
    place: ModuleOutput


Errors = dict[_Key, Tensor]
"""Errors of this rank's tokens, by kind and module, in the order in which faults are reported."""


@dataclass(frozen=True)
class LocalTokens:
    """The tokens of the piece that this rank has in the sharded run."""

    intervals: tuple[tuple[int, int], ...]  # of positions; empty for a rank without tokens
    real: Tensor  # [B, n], True for tokens of the unsharded piece that are not padding

    @property
    def local_real(self) -> Tensor:
        """[B, s], True for tokens of this rank that are not padding."""
        return cut(self.real, self.intervals)


@dataclass(frozen=True)
class Difference:
    """The largest error of one module on this rank, and the error that is allowed there."""

    kind: str  # ``"output"``, ``"gradient"``, ``"input"``, ``"parameter"`` or ``"loss"``
    module: str  # or parameter
    error: float  # relative, of the worst token
    allowed: float  # relative error that rounding can cause
    ratio: float  # error / allowed; a fault above 1


def compare_runs(whole: RecordedRun, sharded: RecordedRun, tokens: LocalTokens) -> Errors:
    """Return the errors of a sharded run.

    The order is that of the computation, so that the first fault is nearest to its cause: outputs in forward order,
    gradients in backward order, then inputs, parameters and the loss.
    """
    errors: Errors = {}
    gradients_from_the_top = dict(reversed(whole.gradients.items()))
    for kind, expected, seen in (
        (OUTPUT, whole.outputs, sharded.outputs),
        (GRADIENT, gradients_from_the_top, sharded.gradients),
        (INPUT, whole.inputs, sharded.inputs),
    ):
        for place, reference in expected.items():
            if place in seen:
                errors[_Key(kind, place)] = _token_errors(reference, seen[place], tokens)
    return {**errors, **_parameter_errors(whole, sharded), **_loss_error(whole, sharded)}


def noise_of(whole: RecordedRun, shaken: RecordedRun, tokens: LocalTokens) -> dict[_Key, float]:
    """Return the rounding noise of every module, from a second unsharded run with slightly changed embeddings."""
    num_tokens = tokens.real.shape[1]
    all_tokens = LocalTokens(((0, num_tokens),), tokens.real)
    return {key: _largest(errors) for key, errors in compare_runs(whole, shaken, all_tokens).items()}


def least(errors: Errors, of_next_pair: Errors) -> Errors:
    """Return each token's smaller error of two pairs of runs.

    The pairs have different embeddings. An error from a tie between two experts of a router moves to other tokens, but
    an error from a fault stays.
    """
    smaller: Errors = {}
    for key, first in errors.items():
        second = of_next_pair.get(key)
        is_comparable = second is not None and second.shape == first.shape
        smaller[key] = torch.minimum(first, second) if second is not None and is_comparable else first
    return smaller


def worst(errors: Errors, noise: Mapping[_Key, float], eps: float) -> list[Difference]:
    """Return the worst token of every module, in the order of ``errors``. ``eps``: of the model's dtype."""
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


def faults(differences_of_ranks: Sequence[Sequence[Difference]]) -> list[tuple[int, Difference]]:
    """Return (rank, difference) for modules that differ by more than rounding, of each the rank with the worst."""
    most_modules = max(len(differences) for differences in differences_of_ranks)
    out = []
    for index in range(most_modules):
        worst_rank, worst_difference = -1, None
        for rank, differences in enumerate(differences_of_ranks):
            if index >= len(differences):
                continue
            if worst_difference is None or differences[index].ratio > worst_difference.ratio:
                worst_rank, worst_difference = rank, differences[index]
        assert worst_difference is not None
        # "not <=" rather than ">": NaN is a fault.
        if not worst_difference.ratio <= 1:
            out.append((worst_rank, worst_difference))
    return out


def _token_errors(reference: Tensor, seen: Tensor, tokens: LocalTokens) -> Tensor:
    """Return the relative error of each real token of this rank; infinity if the shapes differ.

    Args:
        reference: [B, n, ...] of the unsharded run.
        seen: [B, s, ...] of this run.
    """
    if not tokens.intervals:
        return torch.zeros(1)
    expected = cut(reference.double(), tokens.intervals)
    if expected.shape != seen.shape:
        return torch.full((1,), torch.inf)
    size = _rms_by_token(reference.double().cpu())[tokens.real].square().mean().sqrt().clamp(min=1e-30)
    errors = _rms_by_token(seen.double().cpu() - expected) / size
    # A token that is not finite in one process either is the model's own fault, not the sharding's.
    errors = errors.masked_fill(~_rms_by_token(expected).isfinite(), 0)
    return errors[tokens.local_real]


def _parameter_errors(whole: RecordedRun, sharded: RecordedRun) -> Errors:
    """Return one error per parameter, of its projected gradient.

    The error is relative to the unsharded gradient, or to the sum of the ranks' sizes if that is larger, as it is when
    the ranks' gradients nearly cancel each other.

    Args:
        sharded: with projections and sizes that were summed over all ranks.
    """
    # A gradient that is not finite in one process either is the model's own fault.
    finite_sizes = {name: size for name, size in whole.sizes.items() if isfinite(size)}
    # About one unit of fp32 relative to the largest gradient; smaller gradients are rounding alone.
    smallest_size = 1e-7 * max(finite_sizes.values(), default=0.0)
    errors: Errors = {}
    for name, size in finite_sizes.items():
        reference = whole.projections[name]
        seen = sharded.projections.get(name, torch.zeros_like(reference))
        scale = max(size, sharded.sizes.get(name, 0.0), smallest_size, 1e-30)
        error = (seen - reference).square().mean().sqrt() / scale
        errors[_Key(PARAMETER, ModuleOutput(name, 0, 0))] = error[None]
    return errors


def _loss_error(whole: RecordedRun, sharded: RecordedRun) -> Errors:
    if whole.loss is None or sharded.loss is None or not isfinite(whole.loss):
        return {}
    error = abs(sharded.loss - whole.loss) / max(abs(whole.loss), 1e-30)
    return {_Key(LOSS, ModuleOutput("the loss", 0, 0)): torch.tensor([error])}


def _rms_by_token(tensor: Tensor) -> Tensor:
    """Reduce all dimensions but the first two: [B, n, ...] -> [B, n]."""
    return tensor.reshape(*tensor.shape[:2], -1).square().mean(2).sqrt()


def _largest(errors: Tensor) -> float:
    """Return the largest error; infinity if one is NaN."""
    if not errors.numel():
        return 0.0
    return float(errors.nan_to_num(torch.inf).max())
