"""Loss functions that a script gives a model: ``model.loss_function = f``, transformers' public way.

One process calls f with the logits of all tokens and all labels, and f may do anything with them: weigh classes, divide
by something else than the number of labels, mix tokens. A mean of its results on parts would be another loss. So the
logits of a batch are put together on every rank, f is called as in one process, and its result is of the convention
``"replica_mean"`` of `ds_hetero.runtime.loss`. That costs the memory of whole logits on every rank.

Dimension key: B batch, L tokens of the sequence, s tokens of this rank, V vocabulary.
"""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ds_hetero.errors import ModelError
from ds_hetero.runtime.data.shard_exchange import gather_tokens
from ds_hetero.runtime.data.shards import IGNORE_INDEX
from ds_hetero.runtime.replica import Replica
from ds_hetero.values.placement import Placement

logger = logging.getLogger(__name__)

# transformers.loss.loss_utils: token cross entropy of labels that are moved, and of labels in place
_TOKEN_LOSSES = ("ForCausalLMLoss", "ForMaskedLMLoss", "ForTokenClassification")
_STOCK_MODULE = "transformers.loss.loss_utils"
LARGE_BYTES = 1 << 30  # of whole logits, which rank 0 warns of


def own_loss_function(pretrained: Any) -> str:
    """Name of a model's loss function if it is not transformers' cross entropy of tokens; else empty."""
    function = getattr(pretrained, "loss_function", None)
    if function is None:
        return ""
    name = getattr(function, "__name__", type(function).__name__)
    is_stock = getattr(function, "__module__", None) == _STOCK_MODULE and name in _TOKEN_LOSSES
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
    """Loss of the whole batch by the model's own function, equal on all ranks; of the convention ``"replica_mean"``.

        logits         [B, s, V]
        shift_labels   [B, s], of the token at the same place

    Args:
        moves_labels: whether the function moves labels, which are then moved back before.
        num_items: what the caller gave the model as ``num_items_in_batch``; None without.

    Caller: every rank of the replica.
    Collectives: two all_gathers of results of tokens.

    Raises:
        ModelError: the function returned something else than one number; on every rank.
    """
    rows, _, vocabulary = logits.shape
    num_bytes = rows * placement.length * vocabulary * logits.element_size()
    name = own_loss_function(pretrained)
    if num_bytes >= LARGE_BYTES and dist.get_rank() == 0:
        logger.warning(
            "%s of %s needs the logits of whole sequences, which every rank holds: %.1f GB for [%d, %d, %d].",
            name,
            type(pretrained).__name__,
            num_bytes / 1e9,
            rows,
            placement.length,
            vocabulary,
        )
    whole = gather_tokens(logits, placement, replica)
    labels = gather_tokens(shift_labels, placement, replica)
    if moves_labels:
        labels = nn.functional.pad(labels[:, :-1], (1, 0), value=IGNORE_INDEX)
    given = {} if num_items is None else {"num_items_in_batch": num_items}
    loss = pretrained.loss_function(logits=whole, labels=labels, vocab_size=_vocabulary(pretrained), **given)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ModelError(
            f"{name}, the loss_function of {type(pretrained).__name__}, returned {type(loss).__name__} and not one "
            "number, which is what an engine runs backward on."
        )
    return loss.reshape(())


def _vocabulary(pretrained: Any) -> int:
    text = pretrained.config.get_text_config()
    size: int = text.vocab_size
    return size
