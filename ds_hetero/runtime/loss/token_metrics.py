"""Compute metrics of tokens that are logged beside the loss: entropy and accuracy.

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
    """Return three sums over this rank's tokens, [3]: labels that count, entropies, and correct predictions.

    Args:
        logits: [B, s, V].
        labels: [B, s], of the logits at the same position; `IGNORE_INDEX` for tokens that do not count.
        part: this rank's part of the vocabulary, which the logits have; None for the whole. With it the ranks of its
            group call this together, and get the same result.

    Collectives: with ``part``, two MAX all_reduces and two SUM all_reduces.
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
    num_correct = (_predicted_words(logits_CV, part) == labels[counts]).sum()
    return torch.stack([counts.sum(), entropy, num_correct]).to(logits.device, torch.float32)


def _predicted_words(logits_CV: Tensor, part: VocabularyPart | None) -> Tensor:
    """Return the vocabulary index of each token's largest logit, [C]; of several equal ones, the smallest index."""
    best_C, word_C = logits_CV.max(-1)
    if part is None:
        return word_C
    best_of_all_C = part.largest(best_C.clone())
    no_word = torch.iinfo(word_C.dtype).max
    candidate_C = (word_C + part.start).masked_fill(best_C < best_of_all_C, no_word)
    return -part.largest(-candidate_C)  # the smallest of the ranks' candidates
