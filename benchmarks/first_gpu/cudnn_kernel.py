"""The package's cuDNN kernel as the first GPU run times it: alone, without the flash operator for other blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_hetero.batch.tiles import CAUSAL, FULL
from ds_hetero.runtime.attention.kernels import SavedForward, Scores
from ds_hetero.runtime.attention.kernels import cudnn as package
from ds_hetero.runtime.attention.kernels.cudnn import Operators, of_torch
from ds_hetero.runtime.attention.kernels.cudnn import block_refusal as cudnn_refusal
from ds_hetero.runtime.attention.kernels.plain import plain_backward, plain_forward


class CudnnKernel(package.CudnnKernel):
    """The package's kernel; it raises ValueError for blocks that the operator does not take."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, blocks: Any) -> tuple[Tensor, Tensor]:
        """See `ds_hetero.runtime.attention.kernels.AttentionKernel`."""
        _expect_taken(q, k, scores, blocks)
        return super().forward(q, k, v, scores, blocks)

    def backward(self, dout: Tensor, saved: SavedForward, scores: Scores, blocks: Any) -> tuple[Tensor, Tensor, Tensor]:
        """See `ds_hetero.runtime.attention.kernels.AttentionKernel`."""
        _expect_taken(saved.q, saved.k, scores, blocks)
        return super().backward(dout, saved, scores, blocks)

    def packs(self, q: Tensor, scores: Scores) -> bool:
        """Return False: the operator takes one block at a time."""
        return False


def without_cudnn() -> Operators:
    """Return replacements with the same arguments for a machine without cuDNN.

    torch's operators are called on tensors without numbers, and their results must have the shapes of plain operations;
    the numbers are those of plain operations.
    """
    stock = of_torch()

    def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any, scale: float) -> tuple[Any, ...]:
        result = stock.forward(*_meta(q, k, v), *rest, scale=scale)
        out, lse = plain_forward(q, k, v, Scores(scale), CAUSAL if rest[3] else FULL)
        lse = lse.unsqueeze(-1)
        _expect_shapes(result[:2], (out, lse))
        return out, lse, *result[2:]

    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, scale: float):  # type: ignore[no-untyped-def]
        result = stock.backward(*_meta(dout, q, k, v, out, lse), *rest, scale=scale)
        saved = SavedForward(q, k, v, out, lse.squeeze(-1))
        grads = plain_backward(dout, saved, Scores(scale), CAUSAL if rest[-1] else FULL)
        _expect_shapes(result, grads)
        return tuple(grad.to(q.dtype) for grad in grads)

    return Operators(forward, backward)


def _meta(*tensors: Tensor) -> list[Tensor]:
    return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in tensors]


def _expect_shapes(returned: Any, expected: Any) -> None:
    for have, want in zip(returned, expected, strict=True):
        if have.shape != want.shape:
            raise ValueError(f"torch's operator returns {tuple(have.shape)}, expected {tuple(want.shape)}")


def _expect_taken(q: Tensor, k: Tensor, scores: Scores, blocks: object) -> None:
    if (reason := cudnn_refusal(q, k, scores, blocks)) is not None:
        raise ValueError(f"cuDNN's operator: {reason}")
