"""Count weights that are neither matmul weights nor scales of norms: biases, learned positions, the head's transform.

They are counted for the model types whose usual sizes they change by more than a thousandth.
"""

from __future__ import annotations

from ds_hetero.common.reading import JsonObject
from ds_hetero.models.config_values import read_int
from ds_hetero.models.families import BERT_TYPES, GPT2_TYPES
from ds_hetero.models.shapes import ModelSpec


def count_other_layer_weights(config: JsonObject, model_type: str, spec: ModelSpec) -> int:
    """Return the biases of one layer: of attention, of the MLP, and of two norms.

    Args:
        spec: shape of the model, with ``other_layer_parameters`` still 0.
    """
    if model_type in GPT2_TYPES and "n_positions" not in config:
        return 0  # a preset gpt-7b and its like: papers count their matmuls alone
    if model_type not in {*GPT2_TYPES, *BERT_TYPES, "ctrl", "opt"}:
        return 0
    hidden = spec.hidden_size
    attention_biases = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim + hidden
    mlp_biases = spec.mlp_size + hidden
    norm_biases = 2 * hidden
    return attention_biases + mlp_biases + norm_biases


def count_other_weights(decoder: JsonObject, config: JsonObject, name: str, spec: ModelSpec) -> int:
    """Return the weights outside of layers, without embedding, head and final norm.

    Args:
        decoder: the decoder's configuration.
        config: the whole configuration, the same object except in multimodal models.
        name: name of the model, for messages.
        spec: shape of the model, with ``other_parameters`` still 0.
    """
    model_type, hidden, vocab = decoder.get("model_type"), spec.hidden_size, spec.vocab_size
    if config.get("model_type") == "fuyu":  # a linear layer projects the pixels of a patch to one token
        patch_size = read_int(config, "patch_size", name, default=30)
        patch_values = patch_size**2 * read_int(config, "num_channels", name, default=3)
        return (patch_values + 1) * hidden
    if model_type in GPT2_TYPES and "n_positions" in decoder:
        return read_int(decoder, "n_positions", name) * hidden
    if model_type == "opt":  # its table of positions begins with 2 unused rows
        return (read_int(decoder, "max_position_embeddings", name, default=2048) + 2) * hidden
    if model_type == "ctrl":
        return vocab  # bias of the head
    head_transform = hidden * hidden + vocab  # a linear layer before the head, and the head's bias
    if model_type == "modernbert-decoder":
        return head_transform
    if model_type not in BERT_TYPES:
        return 0
    positions = read_int(decoder, "max_position_embeddings", name, default=512) * hidden
    if model_type == "bert-generation":
        return positions + vocab
    token_types = read_int(decoder, "type_vocab_size", name, default=2) * hidden
    return positions + token_types + head_transform
