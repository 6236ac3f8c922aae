"""The names of transformers' objects that ds_hetero uses, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import nn

from ds_hetero.runtime.data.shards import Entries


class ModelConfig(Protocol):
    """A `transformers.PretrainedConfig`; numbers that only some models have are read with ``getattr``."""

    _attn_implementation: str | None
    _attn_implementation_internal: str | None

    def get_text_config(self) -> ModelConfig:
        """The part of a multimodal configuration that describes the decoder of text; else the configuration itself."""

    def to_dict(self) -> Entries:
        """The content of config.json."""

    def to_json_string(self, use_diff: bool = True) -> str:
        """The content of config.json as text, with all keys or with those that are not the model's defaults."""

    def save_pretrained(self, save_directory: str) -> None:
        """Write config.json."""


class PretrainedModel(Protocol):
    """A `transformers.PreTrainedModel`."""

    config: ModelConfig

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters."""

    @property
    def base_model(self) -> nn.Module:
        """The decoder, without the head."""

    def modules(self) -> Iterator[nn.Module]:
        """The model and all modules inside."""

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The same with their names."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """All parameters."""

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Run by a call of the model; its parameters say which arguments it takes."""

    def get_decoder(self) -> nn.Module:
        """The part of it that turns embeddings of tokens into hidden states."""

    def get_output_embeddings(self) -> nn.Module:
        """The head that turns hidden states into logits."""

    def get_input_embeddings(self) -> nn.Module | None:
        """Module that turns tokens into embeddings."""

    def register_forward_pre_hook(self, hook: Any) -> Any:
        """Run ``hook`` before every forward; the handle removes it."""

    def _init_weights(self, module: nn.Module) -> None:
        """Give a module of the model its first values, but for parameters that are marked as filled."""

    def is_backend_compatible(self) -> bool:
        """Whether every layer takes its attention function from transformers' registry."""

    def set_attn_implementation(self, attn_implementation: str) -> None:
        """Let all layers use the attention function of that name."""


class AttentionLayer(Protocol):
    """A module that calls an attention function of transformers' registry."""

    config: ModelConfig
