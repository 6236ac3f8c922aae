"""Tiny random models that put images or sounds before a text decoder, and batches for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LENGTH = 96
KINDS = ("plain", "left", "right")
_ROWS, _PLACEHOLDER, _FIRST, _LAST = 2, 60, 20, 59  # the first place of an image; tokens are below `_LAST`

_TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 3,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_value_heads": 6,
    "linear_num_key_heads": 3,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 4,
}
_AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "out_hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": 4,
}
_VIT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
_SOUND: dict[str, Any] = {
    "num_mel_bins": 8,
    "hidden_size": 16,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_source_positions": 16,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
_QWEN = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}

# By the first part of the class's name: what its configuration is made of, and the features of one image or sound.
TOWERS: dict[str, tuple[dict[str, Any], int]] = {
    "Qwen2_5_VL": (
        {
            "text_config": _TEXT | _AXES,
            "vision_config": _VISION | {"window_size": 16, "fullatt_block_indexes": [1]},
            **_QWEN,
        },
        24,
    ),
    "Qwen3VL": (
        {
            "text_config": _TEXT | _AXES,
            "vision_config": _VISION | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
            **_QWEN,
        },
        24,
    ),
    "Qwen3_5": (
        {"text_config": _TEXT | _DELTA, "vision_config": _VISION | {"num_position_embeddings": 64}, **_QWEN},
        24,
    ),
    "Llava": (
        {
            "text_config": {"model_type": "llama", **_TEXT},
            "vision_config": {"model_type": "clip_vision_model", **_VIT},
            "image_token_id": _PLACEHOLDER,
        },
        16,
    ),
    "SmolVLM": (
        {
            "text_config": {"model_type": "llama", **_TEXT},
            "vision_config": _VIT,
            "image_token_id": _PLACEHOLDER,
            "scale_factor": 2,
        },
        4,
    ),
    "Qwen2Audio": (
        {
            "text_config": {"model_type": "qwen2", **_TEXT},
            "audio_config": {
                "num_mel_bins": 8,
                "d_model": 16,
                "encoder_layers": 2,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 64,
                "max_source_positions": 32,
                "dropout": 0.0,
                "attention_dropout": 0.0,
            },
            "audio_token_index": _PLACEHOLDER,
        },
        16,
    ),
    "Voxtral": (
        {
            "text_config": {"model_type": "llama", **_TEXT},
            "audio_config": _SOUND,
            "audio_token_id": _PLACEHOLDER,
        },
        4,
    ),
}


def make(name: str, dtype: torch.dtype = torch.float64) -> Any:
    """Build one of `TOWERS`, the same on every rank, in training."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**TOWERS[name][0])
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).to(dtype)
    with torch.no_grad():  # parameters that start at zero or one, and so would hide a fault
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape).to(dtype))
    return model.train()


def batch_of(name: str, kind: str = "plain", dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Two rows, each with one image or sound at places that differ; padded on one side, or not."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, _LAST, (_ROWS, LENGTH), generator=generator)
    places = TOWERS[name][1]
    for row in range(_ROWS):
        ids[row, _FIRST + 7 * row : _FIRST + 7 * row + places] = _PLACEHOLDER
    labels = ids.masked_fill(ids == _PLACEHOLDER, -100)
    batch = {"input_ids": ids, "labels": labels, **_features(name, ids, generator, dtype)}
    if kind != "plain":
        mask = torch.ones_like(ids)
        mask[1, :9] = 0
        batch["attention_mask"] = mask if kind == "left" else mask.flip(1)
        labels[batch["attention_mask"] == 0] = -100
        labels[1, 9] = -100  # the last padding token of one process predicts it
    return batch


def _features(name: str, ids: Tensor, generator: torch.Generator, dtype: torch.dtype) -> dict[str, Tensor]:
    if name.startswith("Qwen") and name != "Qwen2Audio":
        return {
            "pixel_values": torch.randn(192, 96, generator=generator).to(dtype),
            "image_grid_thw": torch.tensor([[1, 8, 12], [1, 12, 8]]),
            "mm_token_type_ids": (ids == _PLACEHOLDER).int(),
        }
    if name in ("Llava", "SmolVLM"):
        shape = (_ROWS, *[1] * (name == "SmolVLM"), 3, 16, 16)
        return {"pixel_values": torch.randn(shape, generator=generator).to(dtype)}
    if name == "Voxtral":
        return {"input_features": torch.randn(_ROWS, 8, 32, generator=generator).to(dtype)}
    return {
        "input_features": torch.randn(_ROWS, 8, 64, generator=generator).to(dtype),
        "feature_attention_mask": torch.ones(_ROWS, 64, dtype=torch.int64),
    }
