"""Features of a batch that show more of a model than those before it: the self-check runs once for every such feature.

A model may have code for padding, for packed documents or for an argument that its first batch does not have. Features
are few, and cheap to see. A value of one token is none of them: a module that looks for certain tokens is known by its
name alone, see `ds_hetero.frameworks.transformers.model.model_checks`.
"""

from __future__ import annotations

from torch import Tensor

from ds_hetero.frameworks.transformers.model.sharded_model import ShardedModel
from ds_hetero.frameworks.transformers.self_check.piece import ROWS, first_restart, has_left_padding, real_tokens
from ds_hetero.runtime.data.shards import Batch

_ROWS_OF_TOKENS = ("input_ids", "inputs_embeds", "attention_mask")


def features_of(model: ShardedModel, batch: Batch) -> frozenset[str]:
    """Name what the self-check could see in the rows it would look at, of a batch and of the model's adapters."""
    given = {name: entry for name, entry in batch.items() if entry is not None}
    shapes = sorted(f"{name}[{entry.dim()}]" if isinstance(entry, Tensor) else name for name, entry in given.items())
    tensors = {name: entry for name, entry in given.items() if isinstance(entry, Tensor)}
    tokens = tensors["input_ids"] if "input_ids" in tensors else tensors["inputs_embeds"]
    rows = {name: entry[:ROWS] for name, entry in tensors.items() if name in _ROWS_OF_TOKENS}
    packing, images = tensors.get("cu_seq_lens_q"), tensors.get("mm_token_type_ids")
    is_there = {
        "several rows": len(tokens) > 1,
        "padding": not bool(real_tokens(rows).all()),
        "padding on the left": has_left_padding(rows),
        "documents": first_restart(tensors, tokens.shape[1]) is not None or (packing is not None and len(packing) > 2),
        "images": images is not None and bool(images.any()),
    }
    names = (name for name, there in is_there.items() if there)
    return frozenset({f"entries {', '.join(shapes)}", f"adapters {model.active_adapters}", *names})
