"""The "flash_attn" kernel: calls the flash-attn package, version 3 on Hopper if it is installed, else version 2.

Both align windows to the lower right corner of a block, which can express every band (`Band.window`), and accept soft
caps and grouped heads. The package is imported at its first use.

Source: Dao-AILab/flash-attention, flash_attn/flash_attn_interface.py (2.7 to 2.8), hopper/flash_attn_interface.py.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ds_hetero.runtime.attention.kernels.each_block import boundaries
from ds_hetero.runtime.attention.kernels.interface import (
    Blocks,
    PackedBlocks,
    SavedForward,
    Scores,
    head_first,
    window_of_blocks,
)


def flash_attn_refusal(device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float | None) -> str | None:
    """Return why flash-attn cannot run such a block; None if it can."""
    if device.type != "cuda":
        return f"flash-attn runs on CUDA devices, not on {device.type}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "flash-attn needs an Ampere GPU (sm80) or newer"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"flash-attn takes float16 and bfloat16, not {dtype}"
    if head_dim % 8 or head_dim > 256:
        return f"flash-attn takes head sizes that are multiples of 8 up to 256, not {head_dim}"
    if _version_3(device) is not None:
        return None
    version_2_or_reason = _version_2()
    return version_2_or_reason if isinstance(version_2_or_reason, str) else None


@dataclass(frozen=True)
class FlashAttnKernel:
    """flash-attn for fp16 and bf16 on Ampere GPUs and newer.

    Args:
        sm_margin: SMs that version 3 leaves to other kernels, such as those of messages. Its blocks stay on their SMs
            until all work is done, so that another kernel would have to wait for all of it. Version 2 ignores it: its
            blocks end one by one.
    """

    sm_margin: int = 0
    name = "flash_attn"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, blocks: Blocks) -> tuple[Tensor, Tensor]:
        """Return (out, lse) of the blocks, see `AttentionKernel`."""
        is_packed, lengths = isinstance(blocks, PackedBlocks), _lengths(blocks, q.device)
        mask, softcap = _mask(window_of_blocks(blocks, q, k)), scores.softcap or 0.0
        tensors = [_token_first(x, is_packed) for x in (q, k, v)]
        if flash := _version_3(q.device):
            out, lse, *_ = flash._flash_attn_forward(
                *tensors, **lengths, softmax_scale=scores.scale, softcap=softcap, **mask, **self._margin(flash)
            )
        elif is_packed:
            out, lse, *_ = _version_2()._flash_attn_varlen_forward(
                *tensors, *lengths.values(), 0.0, scores.scale, softcap=softcap, **mask
            )
        else:
            out, lse, *_ = _version_2()._flash_attn_forward(
                *tensors, 0.0, scores.scale, softcap=softcap, alibi_slopes=None, return_softmax=False, **mask
            )
        return head_first(out, is_packed), lse[None] if is_packed else lse

    def backward(
        self, dout: Tensor, saved: SavedForward, scores: Scores, blocks: Blocks
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients (dq, dk, dv) of the blocks, see `AttentionKernel`."""
        is_packed, lengths = isinstance(blocks, PackedBlocks), list(_lengths(blocks, dout.device).values())
        mask = (*_mask(window_of_blocks(blocks, saved.q, saved.k)).values(), scores.softcap or 0.0)
        tensors = [_token_first(x, is_packed) for x in (dout, saved.q, saved.k, saved.v, saved.out)]
        # flash-attn reads lse as [B, H, Q] and ignores its strides.
        tensors.append((saved.lse[0] if is_packed else saved.lse).contiguous())
        grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors[1:4]]
        deterministic = torch.are_deterministic_algorithms_enabled()
        if flash := _version_3(dout.device):
            cu_seqlens, max_lengths = lengths[:2] or [None] * 2, lengths[2:] or [None] * 2
            no_used_lengths = [None] * 2
            arguments = (*tensors, *cu_seqlens, *no_used_lengths, *max_lengths, *grads, scores.scale, *mask)
            flash._flash_attn_backward(*arguments, deterministic, **self._margin(flash))
        else:
            version_2 = _version_2()
            backward = version_2._flash_attn_varlen_backward if is_packed else version_2._flash_attn_backward
            backward(*tensors, *grads, *lengths, 0.0, scores.scale, *mask, None, deterministic)
        dq, dk, dv = (head_first(x, is_packed) for x in grads)
        return dq, dk, dv

    def packs(self, q: Tensor, scores: Scores) -> bool:
        """Whether one call for many blocks launches fewer kernels than one call per block."""
        return True

    def _margin(self, flash: Any) -> dict[str, int]:
        """Return version 3's argument for SMs that it leaves to others; {} for none, or if a release lacks it."""
        return {"sm_margin": self.sm_margin} if self.sm_margin and _takes_margin(flash) else {}


def _token_first(x: Tensor, is_packed: bool) -> Tensor:
    """Transpose [B, heads, tokens, D] to [B, tokens, heads, D]; packed blocks, which have B = 1, come without B."""
    x = x.transpose(1, 2)
    return x[0] if is_packed else x


def _lengths(blocks: Blocks, device: torch.device) -> dict[str, Any]:
    """Return flash-attn's cu_seqlens and max_seqlen arguments for packed blocks; {} for one block."""
    if not isinstance(blocks, PackedBlocks):
        return {}
    return {
        "cu_seqlens_q": boundaries(blocks.queries, device),
        "cu_seqlens_k": boundaries(blocks.keys, device),
        "max_seqlen_q": blocks.max_queries,
        "max_seqlen_k": blocks.max_keys,
    }


def _mask(window: tuple[int, int]) -> dict[str, Any]:
    """Return flash-attn's arguments for a window, as `Band.window` returns it."""
    left, right = window
    return {"causal": window == (-1, 0), "window_size_left": left, "window_size_right": right}


@cache
def _version_3(device: torch.device) -> Any | None:
    """Return the module of flash-attn 3; None without a Hopper GPU, or if it is not installed.

    A release from before July 2025, whose functions are not torch operators yet, counts as not installed.
    """
    if torch.cuda.get_device_capability(device) != (9, 0):
        return None
    try:
        flash = importlib.import_module("flash_attn_interface")
    except ImportError:
        return None
    return flash if hasattr(torch.ops.flash_attn_3, "_flash_attn_forward") else None


@cache
def _takes_margin(flash: Any) -> bool:
    """Whether flash-attn 3 has the argument ``sm_margin``: its documented function passes it to both operators."""
    return "sm_margin" in inspect.signature(flash.flash_attn_func).parameters


@cache
def _version_2() -> Any:
    """Return the module of flash-attn 2, or a text that says why it cannot be used."""
    remedy = "pip install 'flash-attn>=2.7' --no-build-isolation"
    try:
        version = importlib.metadata.version("flash-attn")
        if tuple(int(x) for x in version.split(".")[:2]) < (2, 7):
            return f"flash-attn 2.7 or newer is needed, found {version}: {remedy}"
        return importlib.import_module("flash_attn.flash_attn_interface")
    except importlib.metadata.PackageNotFoundError:
        return f"flash-attn is not installed: {remedy}{_remedy_of_version_4()}"
    except ImportError as error:  # it was built for another torch
        return f"flash-attn {version} cannot be imported ({error}): {remedy}"


def _remedy_of_version_4() -> str:
    """Return how to use flash-attn 4, if it is installed: the kernel does not call it, but torch can."""
    try:
        importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        return ""
    return (
        '. flash-attn-4 is another package: call torch.nn.attention.activate_flash_attention_impl("FA4") before '
        'training, and set "attention": "torch"'
    )


def flash_attn_rates(device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float | None) -> str:
    """Return the catalogue's name of the version that runs such a block."""
    return "flash_attn_2" if _version_3(device) is None else "flash_attn_3"
