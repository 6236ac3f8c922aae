"""torch's cuDNN operator as an attention kernel, for blocks without windows.

A block of a ring without windows and packed documents is a full rectangle or a causal square (`ds_hetero.batch.tiles`).
The operator computes these: its causal mask is aligned to the top left. It reads [B, H, S, D] with any strides but the
last, and returns log-sum-exp as [B, H, S, 1]. Direct calls skip the checks of ``scaled_dot_product_attention``, which
are in `cudnn_refusal`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_hetero.batch.tiles import CAUSAL, FULL
from ds_hetero.runtime.attention.kernels import SavedForward, Scores
from ds_hetero.runtime.attention.kernels.plain import plain_backward, plain_forward

_aten = torch.ops.aten
_LARGEST_HEAD = 128


def cudnn_refusal(q: Tensor, k: Tensor, scores: Scores, blocks: object) -> str | None:
    """Return why the operator does not take such a block; None if it does.

    Sources: torch's sdp_utils.cpp, check_cudnn_tensor_shapes and check_cudnn_hardware_support; pytorch#169849 on
    lengths, cudnn-frontend#1072 on single queries.
    """
    head_dim = q.shape[-1]
    if blocks != FULL and not (blocks == CAUSAL and q.shape[2] == k.shape[2]):
        return f"it takes full blocks and causal squares, not {blocks} of {q.shape[2]} x {k.shape[2]}"
    if scores.softcap is not None:
        return "it does not cap scores"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, not {q.dtype}"
    if head_dim % 8 or head_dim > _LARGEST_HEAD:
        return f"it takes head sizes that are multiples of 8 up to {_LARGEST_HEAD}, not {head_dim}"
    if min(q.shape[2], k.shape[2]) < 2:
        return "gradients of a single query or key are wrong (cudnn-frontend#1072)"
    return None


class CudnnKernel:
    """An `AttentionKernel`; it raises ValueError for blocks that `cudnn_refusal` refuses.

    Args:
        operators: the two operators, or replacements for machines without cuDNN. lays_out: make out, its gradient and
        lse contiguous in one layout first: older releases of torch cache a graph by
            the shapes and strides of q, k and v alone.
    """

    name = "cudnn"

    def __init__(self, operators: Operators | None = None, lays_out: bool = True) -> None:
        self._operators = operators or of_torch()
        self._lays_out = lays_out

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, blocks: Any) -> tuple[Tensor, Tensor]:
        """See `AttentionKernel`."""
        _expect_taken(q, k, scores, blocks)
        q, k, v = (_unit_last(x) for x in (q, k, v))
        result = self._operators.forward(q, k, v, None, True, 0.0, blocks == CAUSAL, False, scale=scores.scale)
        return result[0], result[1].squeeze(-1) if result[1].dim() == 4 else result[1]

    def backward(self, dout: Tensor, saved: SavedForward, scores: Scores, blocks: Any) -> tuple[Tensor, Tensor, Tensor]:
        """See `AttentionKernel`."""
        _expect_taken(saved.q, saved.k, scores, blocks)
        q, k, v, out, dout = (_unit_last(x) for x in (saved.q, saved.k, saved.v, saved.out, dout))
        if self._lays_out:
            out, dout = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (out, dout))
        lse = saved.lse.contiguous().unsqueeze(-1)
        dq, dk, dv = self._operators.backward(
            *(dout, q, k, v, out, lse),
            *(None, None, None, None, None),  # random state, bias, bounds of packed sequences
            *(q.shape[2], k.shape[2], 0.0, blocks == CAUSAL),
            scale=scores.scale,
        )
        return dq, dk, dv

    def packs(self, q: Tensor, scores: Scores) -> bool:
        """See `AttentionKernel`."""
        return False


class Operators(NamedTuple):
    """Forward and backward with the arguments of torch's cuDNN operators."""

    forward: Any
    backward: Any


def of_torch() -> Operators:
    """Return torch's operators."""
    return Operators(
        _aten._scaled_dot_product_cudnn_attention.default, _aten._scaled_dot_product_cudnn_attention_backward.default
    )


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


def _unit_last(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
