"""Log-probabilities and losses of tokens from logits, keeping nothing of the size of the logits but the logits.

``torch.nn.functional.cross_entropy(logits.float(), ...)`` keeps two fp32 copies of them: 32 GB for 32K tokens and a
vocabulary of 128K. Here log-sum-exps are kept, and the softmax is computed again, chunk by chunk, for the gradient.

Dimension key: B batch, s tokens of this rank, T tokens B * s, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ds_hetero.runtime.data.shards import IGNORE_INDEX


def token_log_probs(logits: Tensor, labels: Tensor, chunk_tokens: int = 1024) -> Tensor:
    """The log-probability of the label of each token.

    logits   [B, s, V] or [T, V]
    labels   [B, s] or [T], of the token at the same place
    result   as labels, fp32 (fp64 for fp64 logits); 0 where the label is `IGNORE_INDEX`
    """
    logits_TV, labels_T = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    log_probs_T: Tensor = _TokenLogProbs.apply(logits_TV, labels_T, chunk_tokens)  # type: ignore[no-untyped-call]
    return log_probs_T.view(labels.shape)


def cross_entropy_sum(logits: Tensor, shift_labels: Tensor, chunk_tokens: int = 1024) -> Tensor:
    """Token losses added up in fp32; see `token_log_probs`.

    logits        [B, s, V] or [T, V]
    shift_labels  [B, s] or [T]; -100 is not counted
    result        scalar, fp32 (fp64 for fp64 logits)
    """
    return -token_log_probs(logits, shift_labels, chunk_tokens).sum()


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, labels_T: Tensor, chunk_tokens: int) -> Tensor:
        accumulate = torch.promote_types(logits_TV.dtype, torch.float32)
        lse_T = logits_TV.new_empty(len(labels_T), dtype=accumulate)
        log_probs_T = torch.empty_like(lse_T)
        for logits, labels, lse, out in _chunks(chunk_tokens, logits_TV, labels_T, lse_T, log_probs_T):
            logits = logits.to(accumulate)
            lse.copy_(logits.logsumexp(-1))
            counted = labels != IGNORE_INDEX
            of_label = logits.gather(-1, labels.masked_fill(~counted, 0)[:, None])[:, 0]
            out.copy_((of_label - lse).masked_fill(~counted, 0.0))
        ctx.save_for_backward(logits_TV, labels_T, lse_T)
        ctx.chunk_tokens = chunk_tokens
        return log_probs_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, None, None]:
        logits_TV, labels_T, lse_T = ctx.saved_tensors
        grad_TV = torch.empty_like(logits_TV)
        for logits, labels, lse, grad, out in _chunks(ctx.chunk_tokens, logits_TV, labels_T, lse_T, grad_T, grad_TV):
            softmax = (logits.to(lse.dtype) - lse[:, None]).exp_()
            counted = labels != IGNORE_INDEX
            softmax.scatter_add_(-1, labels.masked_fill(~counted, 0)[:, None], -softmax.new_ones(len(labels), 1))
            out.copy_(softmax.mul_((-grad * counted)[:, None]))
        return grad_TV, None, None


def _chunks(size: int, *tensors: Tensor) -> zip[tuple[Tensor, ...]]:
    return zip(*(torch.split(tensor, size) for tensor in tensors), strict=True)
