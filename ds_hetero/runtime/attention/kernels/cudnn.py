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
        installed = _spelled(version) if version else "none"
        return f"cuDNN {_spelled(LEAST_CUDNN)} or newer is needed, found {installed}"
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
    num_queries, num_keys = q.shape[2], k.shape[2]
    # The operator is compared with the definition on squares alone: a ring has no other causal blocks.
    is_causal_square = blocks == CAUSAL and num_queries == num_keys
    if blocks != FULL and not is_causal_square:
        return f"it takes full blocks and causal squares, not {blocks} of {num_queries} x {num_keys}"
    if scores.softcap is not None:
        return "it does not cap scores"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, not {q.dtype}"
    if head_dim % 8 or head_dim > _LARGEST_HEAD:
        return f"it takes head sizes that are multiples of 8 up to {_LARGEST_HEAD}, not {head_dim}"
    if min(num_queries, num_keys) < 2:
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
        results = self._operators.forward(
            *map(_unit_last, (q, k, v)),
            None,  # no bias
            True,  # return the log-sum-exp
            0.0,  # no dropout
            blocks == CAUSAL,
            False,  # return no mask for debugging
            scale=scores.scale,
        )
        # The others are bounds of packed sequences, states of dropout and the mask for debugging: none is used here.
        out, lse = results[0], results[1]
        return out, _without_unit(lse)

    def backward(
        self, dout: Tensor, saved: SavedForward, scores: Scores, blocks: Blocks
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients (dq, dk, dv) of the blocks, see `AttentionKernel`."""
        if block_refusal(saved.q, saved.k, scores, blocks) is not None:
            return flash_backward(dout, saved, scores, blocks)
        lay_out = _token_major if self._lays_out else _unit_last
        # The engine keeps lse as [B, H, Q], a slice of longer rows; the operator reads [B, H, Q, 1].
        lse = saved.lse.contiguous().unsqueeze(-1)
        dq, dk, dv = self._operators.backward(
            lay_out(dout),
            *map(_unit_last, (saved.q, saved.k, saved.v)),
            lay_out(saved.out),
            lse,
            *(None, None),  # random state of dropout: seed, offset
            None,  # no bias
            *(None, None),  # bounds of packed queries and keys
            saved.q.shape[2],
            saved.k.shape[2],
            0.0,  # no dropout
            blocks == CAUSAL,
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
    """Return ``x`` with the numbers of a row side by side; the operator takes any other strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _token_major(x: Tensor) -> Tensor:
    """Return ``x`` [B, H, S, D] contiguous as [B, S, H, D] in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _without_unit(lse: Tensor) -> Tensor:
    """Return [B, H, Q]: torch gives log-sum-exp as [B, H, Q, 1], in older releases without the last dimension."""
    return lse.squeeze(-1) if lse.dim() == 4 else lse
