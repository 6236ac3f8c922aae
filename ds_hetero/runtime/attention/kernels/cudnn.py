"""The "cudnn" kernel: torch's cuDNN operator for blocks without windows, torch's flash operator for the others.

A block of a ring without windows and packed documents is a full rectangle or a causal square (`ds_hetero.batch.tiles`),
which is what the operator computes: its causal mask is aligned to the top left. It reads [B, H, S, D] with any strides
but the last, and returns log-sum-exp as [B, H, S, 1], or [B, H, S] in older releases of torch. Direct calls skip the
checks of ``scaled_dot_product_attention``; `cudnn_refusal` and `block_refusal` repeat them.

On one H200 the operator was 1.6 times as fast as torch's flash operator (docs/measured.md), but its gradients have not
been compared there block by block (`benchmarks.first_gpu`). Until they are, it runs only where a job names it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_hetero.batch.tiles import CAUSAL, FULL
from ds_hetero.runtime.attention.kernels.interface import Blocks, SavedForward, Scores
from ds_hetero.runtime.attention.kernels.torch_cuda import flash_backward, flash_forward, flash_refusal

_aten = torch.ops.aten
LEAST_CUDNN = 91501  # 9.15.1: earlier ones compute wrongly where lengths are not multiples of 128 (pytorch#169849)
_LARGEST_HEAD = 128
_GENERATIONS = (9, 10)  # Hopper and Blackwell of data centres: where torch itself prefers cuDNN (sdp_utils.cpp)


class Operators(NamedTuple):
    """Forward and backward with the arguments of torch's cuDNN operators."""

    forward: Any
    backward: Any


def of_torch() -> Operators:
    """Return torch's operators."""
    return Operators(
        _aten._scaled_dot_product_cudnn_attention.default, _aten._scaled_dot_product_cudnn_attention_backward.default
    )


def cudnn_refusal(device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float | None) -> str | None:
    """Return why the kernel cannot run on such tensors; None if it can.

    Sources: torch's sdp_utils.cpp, check_cudnn_tensor_shapes and check_cudnn_hardware_support.
    """
    if device.type != "cuda":
        return f"cuDNN runs on CUDA devices, not on {device.type}"
    if torch.version.hip:
        return "cuDNN runs on NVIDIA's GPUs, and this torch is built for ROCm"
    if torch.cuda.get_device_capability(device)[0] not in _GENERATIONS:
        return "cuDNN's attention is used on Hopper (sm90) and data-centre Blackwell (sm100, sm103)"
    version = torch.backends.cudnn.version() or 0  # type: ignore[no-untyped-call]
    if version < LEAST_CUDNN:
        return f"cuDNN {_spelled(LEAST_CUDNN)} or newer is needed, found {_spelled(version) if version else 'none'}"
    if softcap is not None:
        return "cuDNN's operator does not cap scores"
    if head_dim % 8 or head_dim > _LARGEST_HEAD:
        return f"cuDNN's operator is used with head sizes that are multiples of 8 up to {_LARGEST_HEAD}, not {head_dim}"
    return flash_refusal(device, dtype, head_dim)  # of the other blocks


def block_refusal(q: Tensor, k: Tensor, scores: Scores, blocks: object) -> str | None:
    """Return why the operator does not take such blocks; None if it does.

    Sources: torch's sdp_utils.cpp; cudnn-frontend#1072 on single queries.
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
    """cuDNN for fp16 and bf16 on Hopper and Blackwell.

    Args:
        operators: the two operators, or replacements for machines without cuDNN; left out, those of torch.
        lays_out: make out and its gradient contiguous in one layout first: older releases of torch cache a graph by the
            shapes and strides of q, k and v alone, and would read the others by the strides of an earlier call.
    """

    name = "cudnn"

    def __init__(self, operators: Operators | None = None, lays_out: bool = True) -> None:
        self._operators = operators or of_torch()
        self._lays_out = lays_out

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, blocks: Blocks) -> tuple[Tensor, Tensor]:
        """Return (out, lse) of the blocks, see `AttentionKernel`."""
        if block_refusal(q, k, scores, blocks) is not None:
            return flash_forward(q, k, v, scores, blocks)
        q, k, v = (_unit_last(x) for x in (q, k, v))
        result = self._operators.forward(q, k, v, None, True, 0.0, blocks == CAUSAL, False, scale=scores.scale)
        return result[0], result[1].squeeze(-1) if result[1].dim() == 4 else result[1]

    def backward(
        self, dout: Tensor, saved: SavedForward, scores: Scores, blocks: Blocks
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients (dq, dk, dv) of the blocks, see `AttentionKernel`."""
        if block_refusal(saved.q, saved.k, scores, blocks) is not None:
            return flash_backward(dout, saved, scores, blocks)
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
        """Whether one call for many blocks launches fewer kernels than one call per block; flash takes them."""
        return True


def _spelled(version: int) -> str:
    """Return cuDNN's version as its makers write it: 91501 is 9.15.1."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def _unit_last(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
