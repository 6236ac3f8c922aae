"""Blocks of attention to measure: their tensors, their FLOPs, and the error of a kernel against plain operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_hetero.batch.tiles import CAUSAL, FULL, Band
from ds_hetero.runtime.attention.kernels import AttentionKernel, SavedForward, Scores, merge_
from ds_hetero.runtime.attention.kernels.plain import plain_backward, plain_forward

RIGHT = 0.02  # largest error over the largest value, in 16 bits; that of `benchmarks.gpu`


@dataclass(frozen=True)
class Block:
    """One block.

    Args:
        queries: tokens of q. keys: tokens of k and v.
        heads: query heads. kv_heads: KV heads.
        lse_shift: approximate shift of every score, and so of lse.
    """

    queries: int
    keys: int
    is_causal: bool
    head_dim: int = 128
    heads: int = 16
    kv_heads: int = 16
    lse_shift: float = 0.0

    @property
    def band(self) -> Band:
        """Mask of the visible pairs."""
        return CAUSAL if self.is_causal else FULL

    @property
    def text(self) -> str:
        """Description for people."""
        kind = "causal" if self.is_causal else "full"
        shift = f", lse {self.lse_shift:+g}" if self.lse_shift else ""
        return f"{kind} {self.queries:,} x {self.keys:,}, {self.heads}:{self.kv_heads} heads of {self.head_dim}{shift}"

    @property
    def scores(self) -> Scores:
        """Scale and soft cap of the scores, as in models."""
        return Scores(self.head_dim**-0.5)

    def flops(self, backward: bool) -> float:
        """Return the FLOPs of the visible half.

        2 matmuls forward, 5 backward (FlashAttention-2, arXiv:2307.08691, section 3.1.2).
        """
        pairs = self.queries * self.keys * (0.5 if self.is_causal else 1.0)
        return (10.0 if backward else 4.0) * pairs * self.heads * self.head_dim

    def tensors(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q, k, v, dout in a model's layout: [B, H, S, D] views of [B, S, H, D]."""
        generator = torch.Generator(device).manual_seed(0)
        shapes = ((self.queries, self.heads), *((self.keys, self.kv_heads),) * 2, (self.queries, self.heads))
        tensors = [
            torch.randn(1, tokens, heads, self.head_dim, device=device, generator=generator) for tokens, heads in shapes
        ]
        if self.lse_shift:
            # One common direction: q has a length along it, k the opposite, so that every score moves by the shift.
            along = (abs(self.lse_shift) * self.head_dim**0.5) ** 0.5
            tensors[0][..., 0] = along
            tensors[1][..., 0] = along if self.lse_shift > 0 else -along
        q, k, v, dout = (x.to(dtype).transpose(1, 2) for x in tensors)
        return q, k, v, dout


def expected(block: Block, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Compute out, dq, dk, dv by plain operations in float32."""
    q, k, v, dout = (x.float() for x in tensors)
    out, lse = plain_forward(q, k, v, block.scores, block.band)
    return out, *plain_backward(dout, SavedForward(q, k, v, out, lse), block.scores, block.band)


def computed(kernel: AttentionKernel, block: Block, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Compute out, dq, dk, dv by a kernel."""
    q, k, v, dout = tensors
    out, lse = kernel.forward(q, k, v, block.scores, block.band)
    return out, *kernel.backward(dout, SavedForward(q, k, v, out, lse), block.scores, block.band)


def computed_of_rows(kernel: AttentionKernel, block: Block, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Compute them by a kernel in two blocks of keys and merge; each backward gets out and lse of whole rows."""
    assert not block.is_causal
    q, k, v, dout = tensors
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.full(q.shape[:3], -torch.inf, device=q.device)
    halves = (slice(0, block.keys // 2), slice(block.keys // 2, block.keys))
    for columns in halves:
        merge_(out, lse, *kernel.forward(q, k[:, :, columns], v[:, :, columns], block.scores, FULL))
    out = out.to(q.dtype)
    dq, dk, dv = torch.zeros_like(out, dtype=torch.float32), [], []
    for columns in halves:
        saved = SavedForward(q, k[:, :, columns], v[:, :, columns], out, lse)
        dq_part, dk_part, dv_part = kernel.backward(dout, saved, block.scores, FULL)
        dq += dq_part
        dk.append(dk_part)
        dv.append(dv_part)
    return out, dq, torch.cat(dk, 2), torch.cat(dv, 2)


def errors(computed: Sequence[Tensor], expected: Sequence[Tensor]) -> dict[str, float]:
    """Return the largest error of each tensor over its largest value.

    Gradients share one scale, since some are rounding only.
    """
    scales = [expected[0].abs().max(), *[max(x.abs().max() for x in expected[1:])] * 3]
    return {
        name: float((have.float() - want).abs().max() / scale)
        for name, have, want, scale in zip(("out", "dq", "dk", "dv"), computed, expected, scales, strict=True)
    }
