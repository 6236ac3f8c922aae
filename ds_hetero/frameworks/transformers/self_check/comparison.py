"""Two runs compared, token by token and module by module, against what rounding does to the model.

The error of a token is the root mean square of its difference over that of the whole tensor. A module may differ by
`FACTOR` times its own noise, which a second whole run with embeddings shaken by one unit of rounding shows, plus
`FLOOR` units of rounding, plus `FLOOR_OF_ORDER` units of fp32.
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

FACTOR = 8.0
FLOOR = 2.0
# Of gradients of parameters. Terms of a sum over tokens that nearly cancel are each rounded in the model's dtype: 12
# units were seen in bf16, of the bias of a norm of RoBERTa-PreLayerNorm; embeddings shaken by one unit show a tenth.
FLOOR_OF_TERMS = 16.0
FLOOR_OF_SUMS = 64.0  # units of fp32: sums over a hundred tokens, in which they are added in another order
# Units of fp32, of all else. A matmul over other numbers of rows, and attention over parts, add their terms up in
# another order, which embeddings shaken by a unit need not show. Cohere with LoRA was refused for 6 units.
FLOOR_OF_ORDER = 8.0

OUTPUT, GRADIENT, INPUT, PARAMETER, LOSS = "output", "gradient", "input", "parameter", "loss"


class _Key(NamedTuple):
    kind: str
    place: ModuleOutput


Errors = dict[_Key, Tensor]
"""By output, gradient or loss: the error of every token of this rank, in the order in which faults are named."""


@dataclass(frozen=True)
class Held:
    """Which tokens of the piece this rank holds."""

    intervals: tuple[tuple[int, int], ...]  # of positions; empty for a rank without tokens
    real: Tensor  # [B, n], true where a token of the whole piece is no padding

    @property
    def own_real(self) -> Tensor:
        """[B, s], true where a token of this rank is no padding."""
        return cut(self.real, self.intervals)


@dataclass(frozen=True)
class Difference:
    """How far one module is from the whole run on this rank, at its worst token."""

    kind: str  # ``"output"``, ``"gradient"``, ``"input"``, ``"parameter"`` or ``"loss"``
    module: str  # or parameter
    error: float  # relative, of the worst token
    allowed: float  # what rounding accounts for
    ratio: float  # error over what is allowed; a fault above 1


def compare_runs(whole: RecordedRun, sharded: RecordedRun, held: Held) -> Errors:
    """Return the errors of a sharded run: outputs in forward order, gradients in backward order, the rest."""
    errors: Errors = {}
    for kind, expected, seen in (
        (OUTPUT, whole.outputs, sharded.outputs),
        (GRADIENT, dict(reversed(whole.gradients.items())), sharded.gradients),
        (INPUT, whole.inputs, sharded.inputs),
    ):
        for place, reference in expected.items():
            if place in seen:
                errors[_Key(kind, place)] = _errors(reference, seen[place], held)
    return {**errors, **_parameter_errors(whole, sharded), **_loss_error(whole, sharded)}


def noise_of(whole: RecordedRun, shaken: RecordedRun, held: Held) -> dict[_Key, float]:
    """Return the largest error that rounding alone makes, from a whole run with slightly shaken embeddings."""
    everything = Held(((0, held.real.shape[1]),), held.real)
    return {key: _largest(errors) for key, errors in compare_runs(whole, shaken, everything).items()}


def least(first: Errors, again: Errors) -> Errors:
    """Return each token's smaller error of two pairs: a tie in a router moves to other tokens, a fault stays."""
    return {
        key: torch.minimum(errors, again[key]) if key in again and again[key].shape == errors.shape else errors
        for key, errors in first.items()
    }


def worst(errors: Errors, noise: Mapping[_Key, float], eps: float) -> list[Difference]:
    """The worst token of every module, in the order in which faults are named; ``eps`` of the model's dtype."""
    differences = []
    for key, values in errors.items():
        error, rounding = _largest(values), noise.get(key, 0.0)
        eps_of_fp32 = torch.finfo(torch.float32).eps
        floor = FLOOR * eps + FLOOR_OF_ORDER * eps_of_fp32
        if key.kind == PARAMETER:
            floor = FLOOR_OF_TERMS * eps + FLOOR_OF_SUMS * eps_of_fp32
        allowed = FACTOR * rounding + floor
        differences.append(Difference(key.kind, key.place.module, error, allowed, error / allowed))
    return differences


def faults(differences_of_ranks: Sequence[Sequence[Difference]]) -> list[tuple[int, Difference]]:
    """Return (rank, difference) of what exceeds rounding, one rank per module, in the order of naming."""
    longest = max(differences_of_ranks, key=len)
    out = []
    for i in range(len(longest)):
        of_ranks = [(d[i], rank) for rank, d in enumerate(differences_of_ranks) if i < len(d)]
        difference, rank = max(of_ranks, key=lambda entry: (entry[0].ratio, -entry[1]))
        if not difference.ratio <= 1:
            out.append((rank, difference))
    return out


def _errors(reference: Tensor, seen: Tensor, held: Held) -> Tensor:
    if not held.intervals:
        return torch.zeros(1)
    expected = cut(reference.double(), held.intervals)
    if expected.shape != seen.shape:
        return torch.full((1,), torch.inf)
    size = _by_token(reference.double().cpu())[held.real].square().mean().sqrt().clamp(min=1e-30)
    errors = _by_token(seen.double().cpu() - expected) / size
    return errors.masked_fill(~_by_token(expected).isfinite(), 0)[held.own_real]  # what one process breaks is no fault


def _parameter_errors(whole: RecordedRun, sharded: RecordedRun) -> Errors:
    """Errors of projected gradients, one of each parameter; ``sharded`` holds sums over all ranks.

    An error is relative to the whole gradient, or to those of the ranks where they nearly cancel each other.
    """
    finite = {name: size for name, size in whole.sizes.items() if isfinite(size)}  # what one process breaks is no fault
    least_size = 1e-7 * max(finite.values(), default=0.0)  # a unit of rounding; smaller sums are of rounding alone
    errors: Errors = {}
    for name, size in finite.items():
        reference = whole.projections[name]
        seen = sharded.projections.get(name, torch.zeros_like(reference))
        error = (seen - reference).square().mean().sqrt() / max(size, sharded.sizes.get(name, 0.0), least_size, 1e-30)
        errors[_Key(PARAMETER, ModuleOutput(name, 0, 0))] = error[None]
    return errors


def _loss_error(whole: RecordedRun, sharded: RecordedRun) -> Errors:
    if whole.loss is None or sharded.loss is None or not isfinite(whole.loss):
        return {}
    error = abs(sharded.loss - whole.loss) / max(abs(whole.loss), 1e-30)
    return {_Key(LOSS, ModuleOutput("the loss", 0, 0)): torch.tensor([error])}


def _by_token(tensor: Tensor) -> Tensor:
    return tensor.reshape(*tensor.shape[:2], -1).square().mean(2).sqrt()


def _largest(errors: Tensor) -> float:
    """Return the largest error; infinity if one is no number."""
    if not errors.numel():
        return 0.0
    return float(errors.nan_to_num(torch.inf).max())
