"""Custom loss functions of a model, which a script sets by ``model.loss_function = f``.

One process calls f with the logits of all tokens and with all labels. f may weigh classes, divide by another number
than that of the labels, or mix tokens. So the mean of its results on shards would be another loss. Therefore every rank
gathers the logits of the whole batch and calls f as one process does. The loss has the convention ``"replica_mean"`` of
`ds_hetero.runtime.loss`. This costs the memory of the whole batch's logits on every rank.

Dimension key: B batch, L tokens of the sequence, s tokens of this rank, V vocabulary.
"""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ds_hetero.errors import ModelError
from ds_hetero.runtime.data.gather_tokens import gather_tokens
from ds_hetero.runtime.data.shards import IGNORE_INDEX
from ds_hetero.runtime.replica import Replica
from ds_hetero.values.placement import Placement

logger = logging.getLogger(__name__)

# Functions of transformers.loss.loss_utils that compute the cross entropy of tokens, with or without shifted labels.
_CROSS_ENTROPIES = ("ForCausalLMLoss", "ForMaskedLMLoss", "ForTokenClassification")
_STOCK_MODULE = "transformers.loss.loss_utils"
LARGE_LOGITS_BYTES = 1 << 30  # rank 0 warns of gathered logits that are larger; chosen


def own_loss_function(pretrained: Any) -> str:
    """Return the name of a model's loss function; empty if it is transformers' cross entropy of tokens."""
    function = getattr(pretrained, "loss_function", None)
    if function is None:
        return ""
    name = getattr(function, "__name__", type(function).__name__)
    is_stock = getattr(function, "__module__", None) == _STOCK_MODULE and name in _CROSS_ENTROPIES
    return "" if is_stock else str(name)


def loss_by_own_function(
    pretrained: Any,
    logits: Tensor,
    shift_labels: Tensor,
    placement: Placement,
    replica: Replica,
    moves_labels: bool,
    num_items: Any = None,
) -> Tensor:
    """Return the loss of the whole batch by the model's custom function, in the convention ``"replica_mean"``.

        logits         [B, s, V]
        shift_labels   [B, s], the label that the token at the same position predicts
        result         [], equal on all ranks

    Args:
        moves_labels: True if the function shifts labels itself. They are then shifted back before the call.
        num_items: ``num_items_in_batch`` of the caller; None if there is none.

    Caller: every rank of the replica.
    Collectives: two all_gathers, of logits and of labels.

    Raises:
        ModelError: on every rank; the function did not return one number.
    """
    rows, _, vocabulary = logits.shape
    num_bytes = rows * placement.length * vocabulary * logits.element_size()
    name = own_loss_function(pretrained)
    if num_bytes >= LARGE_LOGITS_BYTES and dist.get_rank() == 0:
        logger.warning(
            "%s of %s needs the logits of whole sequences, which every rank gathers: %.1f GB for [%d, %d, %d].",
            name,
            type(pretrained).__name__,
            num_bytes / 1e9,
            rows,
            placement.length,
            vocabulary,
        )
    all_logits = gather_tokens(logits, placement, replica)
    labels = gather_tokens(shift_labels, placement, replica)
    if moves_labels:
        labels = nn.functional.pad(labels[:, :-1], (1, 0), value=IGNORE_INDEX)
    options = {} if num_items is None else {"num_items_in_batch": num_items}
    loss = pretrained.loss_function(
        logits=all_logits, labels=labels, vocab_size=_vocabulary_size(pretrained), **options
    )
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ModelError(
            f"{name}, the loss_function of {type(pretrained).__name__}, returned {type(loss).__name__}, but backward "
            "needs one number. Let the function return a tensor with one element."
        )
    return loss.reshape(())


def _vocabulary_size(pretrained: Any) -> int:
    size: int = pretrained.config.get_text_config().vocab_size
    return size
