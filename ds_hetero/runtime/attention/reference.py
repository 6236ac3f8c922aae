"""Attention with the whole score matrix in memory, in one process: the reference with which tests compare kernels.

Dimension key: B batch, H query heads, G KV heads (H a multiple of G), Q queries, K keys, D head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Visible = Tensor | Callable[[Tensor, Tensor], Tensor]


def dense_attention(
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    visible: Visible,
    scale: float | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Compute softmax attention, differentiably, in the dtype of its inputs.

    Query head h reads KV head h // (H // G). A query that sees nothing gets 0.

        q [B, H, Q, D], k and v [B, G, K, D] -> out [B, H, Q, D]

    Args:
        visible: booleans that broadcast to [B, H, Q, K], or a function of the query and key indices [Q, 1] and [1, K].
        scale: of q @ k.T; D ** -0.5 if left out.
        softcap: s becomes softcap * tanh(s / softcap) (Gemma 2, arXiv:2408.00118, section 2).
        sinks_H: one logit per head that takes part in the softmax and carries no value (GPT-OSS).
    """
    scores_BHQK = _scores(q_BHQD, k_BGKD, visible, scale, softcap)
    if sinks_H is not None:
        sinks_BHQ1 = sinks_H.to(scores_BHQK.dtype).view(1, -1, 1, 1).expand(*scores_BHQK.shape[:3], 1)
        probs_BHQK = torch.cat((scores_BHQK, sinks_BHQ1), dim=-1).softmax(-1)[..., :-1]
    else:
        sees_something = scores_BHQK.detach().amax(-1, keepdim=True) > -torch.inf
        probs_BHQK = scores_BHQK.masked_fill(~sees_something, 0).softmax(-1) * sees_something
    return probs_BHQK @ v_BGKD.repeat_interleave(q_BHQD.shape[1] // v_BGKD.shape[1], dim=1)


def dense_lse(
    q_BHQD: Tensor, k_BGKD: Tensor, visible: Visible, scale: float | None = None, softcap: float | None = None
) -> Tensor:
    """Return the natural logarithm of sum(exp(scores)) [B, H, Q], without sinks; -inf for a query that sees nothing."""
    return _scores(q_BHQD, k_BGKD, visible, scale, softcap).logsumexp(-1)


def _scores(q_BHQD: Tensor, k_BGKD: Tensor, visible: Visible, scale: float | None, softcap: float | None) -> Tensor:
    k_BHKD = k_BGKD.repeat_interleave(q_BHQD.shape[1] // k_BGKD.shape[1], dim=1)
    scores = q_BHQD @ k_BHKD.mT * (q_BHQD.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if not isinstance(visible, Tensor):
        queries, keys = (torch.arange(n, device=scores.device) for n in scores.shape[-2:])
        visible = visible(queries.unsqueeze(1), keys.unsqueeze(0))
    return scores.masked_fill(~visible, -torch.inf)
