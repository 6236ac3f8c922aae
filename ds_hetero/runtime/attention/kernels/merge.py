"""Merging of partial attention results."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["merge_"]


def merge_(out: Tensor, lse: Tensor, out_block: Tensor, lse_block: Tensor) -> None:
    """Merge the attention over one more block of keys into the attention over the earlier ones, in place.

    With L = log(exp(lse) + exp(lse_block)), the merged output is exp(lse - L) * out + exp(lse_block - L) * out_block.

        out, out_block   [..., Q, D]   out in float32 or float64
        lse, lse_block   [..., Q]      in the dtype of out

    An lse of -inf is a part in which the query saw nothing; its output must be finite and does not count. Where both
    are -inf, nothing changes.

    Source: the online softmax (arXiv:1805.02867), as in Ring Attention (arXiv:2310.01889).
    """
    share = torch.sigmoid(lse_block - lse.clamp(min=torch.finfo(lse.dtype).min))
    out.lerp_(out_block.to(out.dtype), share.unsqueeze(-1))
    torch.logaddexp(lse, lse_block, out=lse)
