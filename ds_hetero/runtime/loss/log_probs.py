"""Log-probabilities and losses of tokens from logits, keeping nothing of the size of the logits but the logits.

``torch.nn.functional.cross_entropy(logits.float(), ...)`` keeps two fp32 copies of them: 32 GB for 32K tokens and a
vocabulary of 128K. Here log-sum-exps are kept, and the softmax is computed again, chunk by chunk, for the gradient.

Where ranks have the logits of a part of the words each, they exchange three numbers a token: the largest log-sum-exp,
and in one message the sum of exponentials and the logit of the label (Megatron-LM, arXiv:1909.08053, section 3).

Dimension key: B batch, s tokens of this rank, T tokens B * s, V vocabulary, or this rank's part of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ds_hetero.runtime.data.shards import IGNORE_INDEX
from ds_hetero.runtime.vocabulary import VocabularyPart


def lse_of_parts(lse_T: Tensor, part: VocabularyPart, of_label_T: Tensor | None = None) -> Tensor:
    """Log-sum-exps of all words from those of this rank's; ``of_label_T`` is added up over the ranks in place."""
    largest_T = part.largest(lse_T.clone())
    sums = [(lse_T - largest_T).exp(), *(() if of_label_T is None else (of_label_T,))]
    summed = part.summed(torch.stack(sums))
    if of_label_T is not None:
        of_label_T.copy_(summed[1])
    return largest_T + summed[0].log()


def token_log_probs(
    logits: Tensor, labels: Tensor, chunk_tokens: int = 1024, part: VocabularyPart | None = None
) -> Tensor:
    """Return the log-probability of the label of each token.

    logits   [B, s, V] or [T, V]
    labels   [B, s] or [T], of the token at the same place
    result   as labels, fp32 (fp64 for fp64 logits); 0 where the label is `IGNORE_INDEX`

    Args:
        chunk_tokens: tokens whose softmax exists at once.
        part: words of the logits; None for all. With it the ranks of its group call this together, get the same, and
            begin the backward with the same gradient.

    Collectives: with ``part``, two all_reduces of a number and of two by token forward, none backward.
    """
    logits_TV, labels_T = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    log_probs_T: Tensor = _TokenLogProbs.apply(logits_TV, labels_T, chunk_tokens, part)  # type: ignore[no-untyped-call]
    return log_probs_T.view(labels.shape)


def cross_entropy_sum(
    logits: Tensor, shift_labels: Tensor, chunk_tokens: int = 1024, part: VocabularyPart | None = None
) -> Tensor:
    """Token losses added up in fp32; see `token_log_probs`.

    logits        [B, s, V] or [T, V]
    shift_labels  [B, s] or [T]; -100 is not counted
    result        scalar, fp32 (fp64 for fp64 logits)
    """
    return -token_log_probs(logits, shift_labels, chunk_tokens, part).sum()


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TV: Tensor, labels_T: Tensor, chunk_tokens: int, part: VocabularyPart | None
    ) -> Tensor:
        accumulate = torch.promote_types(logits_TV.dtype, torch.float32)
        lse_T = logits_TV.new_empty(len(labels_T), dtype=accumulate)
        of_label_T = torch.empty_like(lse_T)
        for logits, labels, lse, out in _chunks(chunk_tokens, logits_TV, labels_T, lse_T, of_label_T):
            logits = logits.to(accumulate)
            lse.copy_(logits.logsumexp(-1))
            rows, own = _rows_of(labels, part)
            out.copy_(logits.gather(-1, rows[:, None])[:, 0].masked_fill(~own, 0.0))
        if part is not None:
            lse_T = lse_of_parts(lse_T, part, of_label_T)
        ctx.save_for_backward(logits_TV, labels_T, lse_T)
        ctx.chunk_tokens, ctx.part = chunk_tokens, part
        return (of_label_T - lse_T).masked_fill_(labels_T == IGNORE_INDEX, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, None, None, None]:
        logits_TV, labels_T, lse_T = ctx.saved_tensors
        grad_TV = torch.empty_like(logits_TV)
        for logits, labels, lse, grad, out in _chunks(ctx.chunk_tokens, logits_TV, labels_T, lse_T, grad_T, grad_TV):
            softmax = logits.to(lse.dtype, copy=True).sub_(lse[:, None]).exp_()
            rows, own = _rows_of(labels, ctx.part)
            softmax.scatter_add_(-1, rows[:, None], -own[:, None].to(softmax.dtype))
            out.copy_(softmax.mul_((-grad * (labels != IGNORE_INDEX))[:, None]))
            del softmax  # before the next chunk makes its own
        return grad_TV, None, None, None


def _rows_of(labels: Tensor, part: VocabularyPart | None) -> tuple[Tensor, Tensor]:
    """Places of labels among the logits of this rank, 0 for those that are not there; and whether they are."""
    counted = labels != IGNORE_INDEX
    if part is not None:
        return part.local(labels, counted)
    return labels.masked_fill(~counted, 0), counted


def _chunks(size: int, *tensors: Tensor) -> zip[tuple[Tensor, ...]]:
    return zip(*(torch.split(tensor, size) for tensor in tensors), strict=True)
