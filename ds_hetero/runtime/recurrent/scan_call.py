"""One call of a scan: the kernel, its tensors, and how its state is passed on where it can be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

Tensors = Mapping[str, Tensor]
"""Inputs or parameters by name."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PassedState:
    """How a state goes on behind the end of a shard, for scans whose state only decays from token to token.

    Such a scan's output is linear in the state before it: ``out_t`` gains ``state x reader_t``, times what is left of
    the state after token t.

    Args:
        compute: as `Scan.compute` from a state of zeros, and the state after the last token, [B, H, P, N].
    """

    reader: str  # the input that reads the state, [B, s, G, N] of a state [B, H, P, N] with P the output's width
    log_decay: Callable[[Tensors, Tensors], Tensor]  # -> log of what tokens leave of the state before, [B, s, H]
    compute: Callable[[Tensors, Tensors], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Scan:
    """Call of a scan by one layer, on whole sequences of some heads, inputs and parameters: [B, L, h, D]."""

    inputs: Tensors  # per token, [B, s, N, ...] with N = H or a divisor of it
    output_like: str  # the input of H heads and of the output's shape
    parameters: Tensors  # per head, [H]
    compute: Callable[[Tensors, Tensors], Tensor]
    passed_state: PassedState | None = None  # None where a state cannot be passed on
