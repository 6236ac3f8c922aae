"""The models of benchmarks of training steps: a small one of every family, in the shape of a layer."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.measure.contenders import Shape

VOCABULARY = 512
FAMILIES = ("llama", "qwen3-next", "bamba")
"""Full attention; three layers of the gated delta rule to one of attention; Mamba-2 with one layer of attention."""

_CLASSES = {"llama": "Llama", "qwen3-next": "Qwen3Next", "bamba": "Bamba"}
_SCAN_HEADS = 32  # as in the models of these families; their widths are in proportion to the hidden size


def shape_of(family: str) -> Shape:
    """Return the shape for whole steps; hybrids have four layers, one of them with attention."""
    return Shape() if family == "llama" else Shape(head_dim=32, num_layers=4, family=family)


def config_of(shape: Shape, max_length: int = 1 << 20) -> dict[str, Any]:
    """Return a config.json of this shape.

    Args:
        shape: of its layers, and the family.
        max_length: tokens of the longest sequence.
    """
    config: dict[str, Any] = {
        "model_type": shape.family.replace("-", "_"),
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.hidden_size * 11 // 4,
        "head_dim": shape.head_dim,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": max_length,
        "hidden_act": "silu",
        "use_cache": False,
    }
    if shape.family == "qwen3-next":
        kinds = ["full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(shape.num_layers)]
        width = 2 * shape.hidden_size // _SCAN_HEADS
        config |= {
            "layer_types": kinds,
            "linear_num_value_heads": _SCAN_HEADS,
            "linear_num_key_heads": _SCAN_HEADS // 2,
            "linear_key_head_dim": width,
            "linear_value_head_dim": width,
            "linear_conv_kernel_dim": 4,
            "mlp_only_layers": list(range(shape.num_layers)),
        }
    if shape.family == "bamba":
        if shape.head_dim * shape.num_heads != shape.hidden_size:
            raise ValueError(f"heads of Bamba have the width hidden_size / num_heads, {shape} asks for another one.")
        config |= {
            "attn_layer_indices": [i for i in range(shape.num_layers) if (i + 1) % 4 == 0],
            "mamba_n_heads": _SCAN_HEADS,
            "mamba_d_head": 2 * shape.hidden_size // _SCAN_HEADS,
            "mamba_d_state": 64,
            "mamba_n_groups": 1,
            "mamba_d_conv": 4,
            "mamba_chunk_size": 64,
            "pad_token_id": None,
        }
    return config


def trained_model(shape: Shape, max_length: int, attention: str) -> Any:
    """Return a model of this shape, with the same weights on every rank.

    Args:
        shape: of its layers, and the family.
        max_length: tokens of the longest sequence.
        attention: name of its attention function.
    """
    import transformers

    torch.manual_seed(0)
    name = _CLASSES[shape.family]
    config = getattr(transformers, f"{name}Config")(**config_of(shape, max_length), attn_implementation=attention)
    return getattr(transformers, f"{name}ForCausalLM")(config)
