"""Features of a batch that can make a model run other code: the self-check checks every batch with a new feature.

A model may have code for padding, for packed documents or for an argument that its first batch does not have. Features
are few, and cheap to compute. Token ids are not among them. Modules that look for certain tokens are refused by name
instead, see `ds_hetero.frameworks.transformers.model.model_checks`.
"""

from __future__ import annotations

from torch import Tensor

from ds_hetero.frameworks.transformers.model.sharded_model import ShardedModel
from ds_hetero.frameworks.transformers.self_check.piece import ROWS, first_restart, has_left_padding, real_tokens
from ds_hetero.runtime.data.shards import Batch

_TOKEN_ENTRIES = ("input_ids", "inputs_embeds", "attention_mask")


def features_of(model: ShardedModel, batch: Batch) -> frozenset[str]:
    """Return the features of the rows that a self-check of this batch would run, with the model's active adapters.

    Example, a padded batch: {"entries attention_mask[2], input_ids[2], labels[2]", "adapters ()", "several rows",
    "padding"}.
    """
    entries = {name: entry for name, entry in batch.items() if entry is not None}
    tensors = {name: entry for name, entry in entries.items() if isinstance(entry, Tensor)}
    names_with_dims = [f"{name}[{tensors[name].dim()}]" if name in tensors else name for name in entries]
    tokens = tensors["input_ids"] if "input_ids" in tensors else tensors["inputs_embeds"]
    checked_rows = {name: entry[:ROWS] for name, entry in tensors.items() if name in _TOKEN_ENTRIES}

    boundaries = tensors.get("cu_seq_lens_q")
    has_several_sequences = boundaries is not None and len(boundaries) > 2
    has_restart = first_restart(tensors, tokens.shape[1]) is not None
    images = tensors.get("mm_token_type_ids")

    features = {f"entries {', '.join(sorted(names_with_dims))}", f"adapters {model.active_adapters}"}
    if len(tokens) > 1:
        features.add("several rows")
    if not bool(real_tokens(checked_rows).all()):
        features.add("padding")
    if has_left_padding(checked_rows):
        features.add("padding on the left")
    if has_restart or has_several_sequences:
        features.add("documents")
    if images is not None and bool(images.any()):
        features.add("images")
    return frozenset(features)
