"""Describe one call of a scan by a layer: the kernel, its tensors, and how its state can be passed between ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

Tensors = Mapping[str, Tensor]
"""Inputs or parameters by name."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PassedState:
    """How to continue a scan on the next shard, for scans whose state decays by a factor per head and token.

    The output of such a scan is linear in the state before the shard: ``out_t`` increases by ``state x reader_t`` times
    the product of the decay factors up to token t.

    Attributes:
        reader: name of the input [B, s, G, N] that reads the state [B, H, P, N], with P the width of the output.
        log_decay: (inputs, parameters) -> logarithm of the decay factor of each token, [B, s, H].
        compute: (inputs, parameters) -> the output of `Scan.compute` that starts with a state of zeros, and the state
            after the last token, [B, H, P, N].
    """

    reader: str
    log_decay: Callable[[Tensors, Tensors], Tensor]
    compute: Callable[[Tensors, Tensors], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Scan:
    """A call of a scan by one layer.

    Attributes:
        inputs: of this rank's tokens, [B, s, N, ...] with N = H or a divisor of it.
        output_like: name of the input that has H heads and the shape of the output.
        parameters: [H] each, a number per head.
        compute: (inputs, parameters) -> the output [B, L, h, D], for whole sequences of some heads.
        passed_state: how to pass its state between ranks; None if that is not possible.
    """

    inputs: Tensors
    output_like: str
    parameters: Tensors
    compute: Callable[[Tensors, Tensors], Tensor]
    passed_state: PassedState | None = None
