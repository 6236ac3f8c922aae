"""Compute log-probabilities and losses of tokens, saving no tensor as large as the logits except the logits.

``torch.nn.functional.cross_entropy(logits.float(), ...)`` saves two fp32 copies of them: 32 GB for 32K tokens and a
vocabulary of 128K. Here log-sum-exps are saved, and the backward computes the softmax again, chunk by chunk.

If the vocabulary is sharded over ranks, they exchange three numbers per token: the largest log-sum-exp, and in one
message the sum of exponentials and the logit of the label (Megatron-LM, arXiv:1909.08053, section 3).

Dimension key: B batch, s tokens of this rank, T tokens B * s, V vocabulary, or this rank's part of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ds_hetero.runtime.data.shards import IGNORE_INDEX
from ds_hetero.runtime.vocabulary import VocabularyPart


def lse_of_parts(lse_T: Tensor, part: VocabularyPart, label_logits_T: Tensor | None = None) -> Tensor:
    """Return log-sum-exps [T] over the full vocabulary from the ranks' log-sum-exps over their parts.

    Args:
        label_logits_T: [T], summed over the ranks in place: the logit of the label on the rank that has it, else 0.

    Collectives: two all_reduces, as `token_log_probs` says.
    """
    largest_T = part.largest(lse_T.clone())
    sums = [(lse_T - largest_T).exp(), *(() if label_logits_T is None else (label_logits_T,))]
    sums_over_ranks = part.summed(torch.stack(sums))
    if label_logits_T is not None:
        label_logits_T.copy_(sums_over_ranks[1])
    return largest_T + sums_over_ranks[0].log()


def token_log_probs(
    logits: Tensor, labels: Tensor, chunk_tokens: int = 1024, part: VocabularyPart | None = None
) -> Tensor:
    """Return the log-probability of the label of each token.

    logits   [B, s, V] or [T, V]
    labels   [B, s] or [T], of the logits at the same position
    result   like labels, fp32 (fp64 for fp64 logits); 0 for labels of `IGNORE_INDEX`

    Args:
        chunk_tokens: tokens whose softmax is in memory at the same time.
        part: this rank's part of the vocabulary, which the logits have; None for the whole. With it the ranks of its
            group call this together, get the same result, and must begin the backward with the same gradient.

    Collectives: with ``part``, an all_reduce of one number and one of two numbers per token forward, none backward.
    """
    logits_TV, labels_T = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    log_probs_T: Tensor = _TokenLogProbs.apply(logits_TV, labels_T, chunk_tokens, part)  # type: ignore[no-untyped-call]
    return log_probs_T.view(labels.shape)


def cross_entropy_sum(
    logits: Tensor, shift_labels: Tensor, chunk_tokens: int = 1024, part: VocabularyPart | None = None
) -> Tensor:
    """Return the sum of the cross entropies of tokens; see `token_log_probs` for arguments and collectives.

    logits        [B, s, V] or [T, V]
    shift_labels  [B, s] or [T]; labels of -100 do not count
    result        scalar, fp32 (fp64 for fp64 logits)
    """
    return -token_log_probs(logits, shift_labels, chunk_tokens, part).sum()


class _TokenLogProbs(torch.autograd.Function):
    """`token_log_probs` of flat tokens; the backward computes the softmax again."""

    @staticmethod
    def forward(
        ctx: Any, logits_TV: Tensor, labels_T: Tensor, chunk_tokens: int, part: VocabularyPart | None
    ) -> Tensor:
        accumulate = torch.promote_types(logits_TV.dtype, torch.float32)
        lse_T = logits_TV.new_empty(len(labels_T), dtype=accumulate)
        label_logits_T = torch.empty_like(lse_T)
        for logits, labels, lse, out in _chunks(chunk_tokens, logits_TV, labels_T, lse_T, label_logits_T):
            logits = logits.to(accumulate)
            lse.copy_(logits.logsumexp(-1))
            columns, are_here = _label_columns(labels, part)
            out.copy_(logits.gather(-1, columns[:, None])[:, 0].masked_fill(~are_here, 0.0))
        if part is not None:
            lse_T = lse_of_parts(lse_T, part, label_logits_T)
        ctx.save_for_backward(logits_TV, labels_T, lse_T)
        ctx.chunk_tokens, ctx.part = chunk_tokens, part
        return (label_logits_T - lse_T).masked_fill_(labels_T == IGNORE_INDEX, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, None, None, None]:
        logits_TV, labels_T, lse_T = ctx.saved_tensors
        grad_TV = torch.empty_like(logits_TV)
        for logits, labels, lse, grad, out in _chunks(ctx.chunk_tokens, logits_TV, labels_T, lse_T, grad_T, grad_TV):
            softmax = logits.to(lse.dtype, copy=True).sub_(lse[:, None]).exp_()
            columns, are_here = _label_columns(labels, ctx.part)
            softmax.scatter_add_(-1, columns[:, None], -are_here[:, None].to(softmax.dtype))
            out.copy_(softmax.mul_((-grad * (labels != IGNORE_INDEX))[:, None]))
            del softmax  # so that the next chunk can use its memory
        return grad_TV, None, None, None


def _label_columns(labels: Tensor, part: VocabularyPart | None) -> tuple[Tensor, Tensor]:
    """Return the indices of labels in this rank's logits, 0 for labels that are not there, and whether they are."""
    is_counted = labels != IGNORE_INDEX
    if part is not None:
        return part.local(labels, is_counted)
    return labels.masked_fill(~is_counted, 0), is_counted


def _chunks(size: int, *tensors: Tensor) -> zip[tuple[Tensor, ...]]:
    """Yield the chunks of ``size`` tokens of all tensors together."""
    return zip(*(torch.split(tensor, size) for tensor in tensors), strict=True)
