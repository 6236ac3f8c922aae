"""Compute losses of sequences and batches that are split over ranks.

scaling           factors with which DeepSpeed's plain average of gradients is the gradient of the loss
recognition       finds out whether a loss has such a factor already
counted_ratio     a term divided by a count, which its graph keeps
log_probs         log-probabilities and cross entropies of tokens from logits
token_metrics     entropy and accuracy of tokens
load_balancing    auxiliary loss of a mixture of experts
same_scalar       checks that a penalty is the same on all ranks of a replica
"""

from ds_hetero.runtime.loss.counted_ratio import ratio
from ds_hetero.runtime.loss.load_balancing import load_balancing_loss
from ds_hetero.runtime.loss.log_probs import cross_entropy_sum, token_log_probs
from ds_hetero.runtime.loss.recognition import has_loss_of_batch, has_unscaled_term, is_scaled, mark_loss_of_batch
from ds_hetero.runtime.loss.same_scalar import expect_same_scalar
from ds_hetero.runtime.loss.scaling import (
    CONVENTIONS,
    count_items,
    loss_of_replica,
    mean_over_replica,
    rescaled_loss,
    scaled_loss,
    sequence_parallel_loss,
    shown_loss,
)
from ds_hetero.runtime.loss.token_metrics import measure_tokens

__all__ = [
    "CONVENTIONS",
    "count_items",
    "cross_entropy_sum",
    "expect_same_scalar",
    "has_loss_of_batch",
    "has_unscaled_term",
    "is_scaled",
    "load_balancing_loss",
    "loss_of_replica",
    "mark_loss_of_batch",
    "mean_over_replica",
    "measure_tokens",
    "ratio",
    "rescaled_loss",
    "scaled_loss",
    "sequence_parallel_loss",
    "shown_loss",
    "token_log_probs",
]
