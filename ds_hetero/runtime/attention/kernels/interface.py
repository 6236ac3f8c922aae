"""What a block-attention kernel is, and which keys of a block its queries see.

Dimension key: B batch, H query heads, G KV heads (H a multiple of G), Q queries, K keys, D head size.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ds_hetero.runtime.attention.kernels.tiles import Band

__all__ = ["AttentionKernel", "Band"]


class AttentionKernel(Protocol):
    """Attention of a block of queries to a block of keys, together with its log-sum-exp.

    A kernel knows nothing of rings. The parts that a query's attention is cut into are combined by `merge_`, and the
    backward of each part is exact by itself, because it is given the out and lse of the *whole* row: with S the scores,
    P = exp(S - lse) and dS = P * (dP - rowsum(dout * out)), whatever other blocks or an attention sink put into lse
    (FlashAttention-2, arXiv:2307.08691, section 3.1).

        q              [B, H, Q, D]    any strides, here as below
        k, v           [B, G, K, D]    query head h reads KV head h // (H // G)
        out, dout      [B, H, Q, D]    in the dtype of q
        lse            [B, H, Q]       natural logarithm of sum(exp(scores)); float32, for float64 inputs float64
        dq, dk, dv     like q, k, v    of this block alone; in the input dtype or in float32

    ``band`` tells what is visible; the caller promises at least one query and one key, and that no query and no key of
    the block goes unseen. Scores are ``scale * q @ k.T``, with ``softcap`` then ``softcap * tanh(scores / softcap)``.
    """

    name: str

    def refusal(self, device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float | None) -> str | None:
        """Why this kernel cannot run such a block here, or None if it can."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """Return (out, lse)."""

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        band: Band,
        scale: float,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv)."""
