"""Plain single-process twins of this folder's fast operations, written to be read and to be tested against.

    fast                                           twin
    `attention`, and each kernel                   `dense_attention`, `dense_lse`
    `merge_`, by which the ring adds up blocks     `merged_attention`
    `gather_sequence`, `gather_output_heads`       `heads_of_ranks`
    `scatter_sequence`, `scatter_output`           `tokens_of_ranks`

Dimension key: B batch, H query heads, G KV heads (H a multiple of G), Q queries, K keys, D head size; in the exchange S
the group's tokens, s and h the tokens and heads of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
    """Softmax attention with the whole score matrix in memory; differentiable, in the dtype of its inputs.

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
    """Natural logarithm of sum(exp(scores)), [B, H, Q]; -inf for a query that sees nothing. No sinks."""
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


def merged_attention(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Attention over all keys, from the attention over each block of them.

    Block i has the share exp(lse_i) / sum(exp(lse)) of the softmax; where every lse is -inf, nothing is visible and the
    output is 0.

    Args:
        parts: (out [B, H, Q, D], lse [B, H, Q]) of every block.
    """
    lse_BHQ = torch.stack([lse for _, lse in parts]).logsumexp(0)
    shares = [torch.exp(lse - lse_BHQ).nan_to_num(0.0).unsqueeze(-1) for _, lse in parts]
    out_BHQD = torch.stack([share * out for share, (out, _) in zip(shares, parts, strict=True)]).sum(0)
    return out_BHQD, lse_BHQ


def heads_of_ranks(shards_BHsD: Sequence[Tensor], heads: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Each rank's tensor after an exchange from tokens to heads: [B, h, S, D], all tokens of its heads.

    Args:
        shards_BHsD: every rank's tokens, in the order of the ranks.
        heads: range of heads of every rank; ranges of KV heads may overlap.
    """
    whole_BHSD = torch.cat(list(shards_BHsD), dim=2)
    return [whole_BHSD[:, start:stop] for start, stop in heads]


def tokens_of_ranks(
    parts_BhSD: Sequence[Tensor], heads: Sequence[tuple[int, int]], tokens: Sequence[int]
) -> list[Tensor]:
    """Each rank's tensor after an exchange from heads to tokens: [B, H, s, D], all heads of its tokens.

    Where ranges of heads overlap, their parts add up, as the gradients of a shared KV head do.

    Args:
        parts_BhSD: every rank's heads, in the order of the ranks.
        heads: range of heads of every rank.
        tokens: of every rank.
    """
    batch_size, _, num_tokens, head_dim = parts_BhSD[0].shape
    whole_BHSD = parts_BhSD[0].new_zeros(batch_size, max(stop for _, stop in heads), num_tokens, head_dim)
    for part, (start, stop) in zip(parts_BhSD, heads, strict=True):
        whole_BHSD[:, start:stop] += part
    return list(torch.split(whole_BHSD, list(tokens), dim=2))
