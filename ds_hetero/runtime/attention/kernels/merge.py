"""Merge the attention over two sets of keys: in one kernel where a GPU has shown that it works, else by operators.

Dimension key: B batch, H query heads, Q queries, D head size.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_Merge = Callable[[Tensor, Tensor, Tensor, Tensor], None]
_LARGEST_ROUNDING = 1e-5  # of the trial, whose numbers are about 1 and are merged in float32


def merge_(out: Tensor, lse: Tensor, out_block: Tensor, lse_block: Tensor) -> None:
    """Merge the attention over one more block of keys into the attention over the blocks before, in place.

    With L = log(exp(lse) + exp(lse_block)), the merged output is exp(lse - L) * out + exp(lse_block - L) * out_block.

        out, out_block   [B, H, Q, D]  out in float32 or float64
        lse, lse_block   [B, H, Q]     in the dtype of out

    A query that sees nothing in a part has an lse of -inf there; its output must be finite, and does not count. If both
    are -inf, nothing changes.

    Source: the online softmax (arXiv:1805.02867), as in Ring Attention (arXiv:2310.01889).
    """
    chosen_merge(out.device, out.dtype)(out, lse, out_block, lse_block)


@lru_cache(maxsize=16)
def chosen_merge(device: torch.device, dtype: torch.dtype) -> _Merge:
    """Return the function that merges such outputs. The first call for a GPU compiles and tries the kernel there."""
    if device.type != "cuda" or dtype != torch.float32:
        return merge_by_operators_
    refusal = one_kernel_refusal(device)
    if refusal is None:
        return merge_in_one_kernel_
    logger.warning("parts of attention are merged by torch's operators and not by one kernel: %s", refusal)
    return merge_by_operators_


def merge_by_operators_(out: Tensor, lse: Tensor, out_block: Tensor, lse_block: Tensor) -> None:
    """`merge_` by torch's operators, on every device."""
    share = torch.sigmoid(lse_block - lse.clamp(min=torch.finfo(lse.dtype).min))
    out.lerp_(out_block.to(out.dtype), share.unsqueeze(-1))
    torch.logaddexp(lse, lse_block, out=lse)


def merge_in_one_kernel_(out: Tensor, lse: Tensor, out_block: Tensor, lse_block: Tensor) -> None:
    """`merge_` by a Triton kernel, which reads and writes ``out`` once; for float32 and D consecutive in memory."""
    # Triton reads TRITON_INTERPRET at its import, which is therefore left to the first launch.
    kernel = importlib.import_module("ds_hetero.runtime.attention.kernels.triton_merge")
    kernel.launch(out, lse, out_block, lse_block)


def one_kernel_refusal(device: torch.device) -> str | None:
    """Return why `merge_in_one_kernel_` cannot be used on a GPU; None if it works there.

    It is compiled and run, since a machine may lack what Triton compiles with, and compared with the operators.
    """
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install triton"
    try:
        difference = _largest_difference(device)
    except Exception as error:  # Triton raises many kinds: of its compiler, of the C compiler, of the driver
        return f"{type(error).__name__}: {str(error)[:300]}"
    if difference <= _LARGEST_ROUNDING:
        return None
    return f"its results differ from those of the operators by {difference:.2g}"


def _largest_difference(device: torch.device) -> float:
    """Merge a small example in both ways; return the largest difference. Draws no random numbers."""
    batch_size, heads, queries, head_dim = 2, 3, 70, 24
    ramp = torch.linspace(-3, 3, batch_size * heads * queries * head_dim, device=device)
    out = ramp.view(queries, batch_size, heads, head_dim).permute(1, 2, 0, 3)
    out_block = ramp.flip(0).view(batch_size, heads, queries, head_dim).to(torch.bfloat16)
    lse = ramp[: batch_size * heads * queries].view(batch_size, heads, queries).clone()
    lse_block = lse.flip(2)
    lse[:, :, :3] = -torch.inf  # queries that see nothing before
    lse_block[:, :, 2:5] = -torch.inf  # or nothing in the block; one of them sees nothing at all
    results = []
    for merge in (merge_by_operators_, merge_in_one_kernel_):
        merged, lse_merged = out.clone(), lse.clone()
        merge(merged, lse_merged, out_block, lse_block)
        results.append(torch.cat([merged.flatten(), lse_merged.exp().flatten()]))
    return float((results[0] - results[1]).abs().max())
