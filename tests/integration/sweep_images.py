"""Images or sounds for a tiny model of any kind, found by trying the shapes that processors make."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_FIRST = 20  # place of the first placeholder


class NotBuiltError(Exception):
    """No tiny model of this kind, or no batch for it."""


def images_for(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return entries with one image or sound for each row, and the tokens and labels with places for them.

    The first of the usual shapes that one process takes; none where the model takes none of them, so that it is run on
    text alone.
    """
    token = _placeholder(model.config)
    given = dict(batch)
    for entries in _entries(model):
        ids = batch["input_ids"].clone()
        if token is None:
            if _runs(model, {**given, **entries}):
                return entries
            continue
        count = _features(model, entries)
        if not count or count > ids.shape[1] // 2:
            continue
        ids[:, _FIRST : _FIRST + count] = token
        entries["mm_token_type_ids"] = (ids == token).int()
        for names in (entries, {name: entry for name, entry in entries.items() if name != "mm_token_type_ids"}):
            tokens = {"input_ids": ids, "labels": ids.masked_fill(ids == token, -100)}
            if _runs(model, {**given, **tokens, **names}):
                return {**tokens, **names}
    return {}


def _runs(model: Any, batch: dict[str, Any]) -> bool:
    try:
        with torch.no_grad():
            model(**batch)
    except Exception:  # another shape, then
        return False
    return True


def _placeholder(config: Any) -> int | None:
    names = ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index", "image_patch_id")
    found = (getattr(config, name, None) for name in names)
    return next((number for number in found if isinstance(number, int)), None)


def _entries(model: Any) -> Iterator[dict[str, Any]]:
    vision = getattr(model.config, "vision_config", None)
    size, patch = getattr(vision, "image_size", None) or 16, getattr(vision, "patch_size", None) or 4
    size = size if isinstance(size, int) else size[0]
    patch = patch if isinstance(patch, int) else patch[0]
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    yield {"pixel_values": random(2, 3, size, size)}
    yield {"pixel_values": random(2, 3, size, size), "image_sizes": torch.tensor([[size, size]] * 2)}
    yield {"pixel_values": random(2, 1, 3, size, size)}
    yield {"pixel_values": random(2, 5, 3, size, size), "image_sizes": torch.tensor([[size, size]] * 2)}
    for frames in (2, 1):
        grid = torch.tensor([[1, 4, 8], [1, 8, 4]])
        width = 3 * frames * patch * patch
        yield {"pixel_values": random(64, width), "image_grid_thw": grid}
    yield {"pixel_values": random(64, 3, patch, patch), "image_grid_thw": torch.tensor([[1, 4, 8], [1, 8, 4]])}
    audio = getattr(model.config, "audio_config", None)
    bins = getattr(audio, "num_mel_bins", 8)
    yield {"input_features": random(2, bins, 64)}
    yield {"input_features": random(2, bins, 64), "feature_attention_mask": torch.ones(2, 64, dtype=torch.int64)}


def _features(model: Any, entries: dict[str, Any]) -> int:
    """Features of one image or sound; 0 where the model does not take these entries."""
    inner = getattr(model, "model", model)
    name = "get_audio_features" if "input_features" in entries else "get_image_features"
    get = getattr(inner, name, None) or getattr(model, name, None)
    if get is None:
        return 0
    try:
        with torch.no_grad():
            features = get(**entries, return_dict=True)
    except Exception:  # another shape, then
        return 0
    made = getattr(features, "pooler_output", features)
    tensors = [made] if isinstance(made, Tensor) else list(made) if isinstance(made, tuple | list) else []
    tensors = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
    return sum(tensor.numel() // tensor.shape[-1] for tensor in tensors) // 2
