"""Call of a scan by one layer that carries a state.

Dimension key: B batch, s this rank's tokens, L tokens of a sequence, H heads, G heads of an input that several share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

Tensors = Mapping[str, Tensor]
"""Inputs or parameters by name."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PassedState:
    """How a state runs on past the end of a shard; of scans whose state only decays from token to token.

    Such a scan's output is linear in the state before it: ``out_t`` gains ``state x reader_t``, times what is left of
    the state after token t.

    Args:
        reader: the input that reads the state, [B, s, G, N] of a state [B, H, P, N] with P the output's width.
        log_decay: inputs and parameters -> logarithm of what each token leaves of the state before it, [B, s, H].
        compute: as `Scan.compute` from a state of zeros, and the state after the last token, [B, H, P, N].
    """

    reader: str
    log_decay: Callable[[Tensors, Tensors], Tensor]
    compute: Callable[[Tensors, Tensors], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Scan:
    """Call of a scan by one layer.

    Args:
        inputs: per token, [B, s, N, ...] with N = H or a divisor of it.
        output_like: the input of H heads and of the output's shape.
        parameters: per head, [H].
        compute: of whole sequences of some heads, inputs and parameters by name: [B, L, h, D].
        passed_state: None where a state cannot be passed on.
    """

    inputs: Tensors
    output_like: str
    parameters: Tensors
    compute: Callable[[Tensors, Tensors], Tensor]
    passed_state: PassedState | None = None
