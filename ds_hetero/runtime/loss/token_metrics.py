"""Quantities that people watch beside the loss: entropy and accuracy of the tokens.

Dimension key: B batch, s tokens of this rank, C tokens that count, V vocabulary, or this rank's part of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_hetero.runtime.data.shards import IGNORE_INDEX
from ds_hetero.runtime.loss.log_probs import lse_of_parts
from ds_hetero.runtime.vocabulary import VocabularyPart


@torch.no_grad()
def measure_tokens(logits: Tensor, labels: Tensor, part: VocabularyPart | None = None) -> Tensor:
    """Return what people watch beside the loss, ``[3]``: labels that count, entropies and hits of the first guess.

    Args:
        logits: [B, s, V].
        labels: [B, s], of the token at the same place; those that do not count are `IGNORE_INDEX`.
        part: words of the logits; None for all. With it the ranks of its group call this together, and get the same.

    Collectives: with ``part``, two all_reduces of the largest of numbers by token, and two of sums.
    """
    counts = labels != IGNORE_INDEX
    logits_CV = logits[counts].float()
    lse_C = logits_CV.logsumexp(-1)
    if part is not None:
        lse_C = lse_of_parts(lse_C, part)
    log_p_CV = logits_CV - lse_C[:, None]
    entropy = -(log_p_CV.exp() * log_p_CV).sum()
    if part is not None:
        entropy = part.summed(entropy)
    hits = (_first_guess(logits_CV, part) == labels[counts]).sum()
    return torch.stack([counts.sum(), entropy, hits]).to(logits.device, torch.float32)


def _first_guess(logits_CV: Tensor, part: VocabularyPart | None) -> Tensor:
    """The word of the largest logit, ``[C]``; of words with equal logits the first one, with and without parts."""
    best_C, word_C = logits_CV.max(-1)
    if part is None:
        return word_C
    best_of_all_C = part.largest(best_C.clone())
    not_here = torch.iinfo(word_C.dtype).max
    word_of_all_C = (word_C + part.start).masked_fill(best_C < best_of_all_C, not_here)
    return -part.largest(-word_of_all_C)  # the smallest
