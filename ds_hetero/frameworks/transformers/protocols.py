"""Protocols of transformers' objects, with only those names that ds_hetero uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from ds_hetero.runtime.data.shards import Entries


class ModelConfig(Protocol):
    """A `transformers.PretrainedConfig`. Fields that only some models have are read with ``getattr``."""

    _attn_implementation: str | None
    _attn_implementation_internal: str | None

    get_text_config: Callable[[], ModelConfig]  # the part that describes the text decoder; itself if there is none
    to_dict: Callable[[], Entries]  # the content of config.json
    to_json_string: Callable[..., str]  # the same as text; ``use_diff``: without default values
    save_pretrained: Callable[[str], None]  # write config.json into a folder


class PretrainedModel(Protocol):
    """A `transformers.PreTrainedModel`."""

    config: ModelConfig
    dtype: torch.dtype  # of the parameters
    base_model: nn.Module  # the decoder, without the head
    modules: Callable[[], Iterator[nn.Module]]
    named_modules: Callable[[], Iterator[tuple[str, nn.Module]]]
    parameters: Callable[[], Iterator[nn.Parameter]]
    forward: Callable[..., Any]  # run by a call of the model; its parameters say which arguments it takes
    get_decoder: Callable[[], nn.Module]  # the module that turns embeddings of tokens into hidden states
    get_output_embeddings: Callable[[], nn.Module]  # the head that turns hidden states into logits
    get_input_embeddings: Callable[[], nn.Module | None]  # the module that turns tokens into embeddings
    register_forward_pre_hook: Callable[[Any], Any]  # add a hook before every forward; returns its handle
    _init_weights: Callable[[nn.Module], None]  # set a module's first values, except those of marked parameters
    is_backend_compatible: Callable[[], bool]  # whether every layer takes its attention from transformers' registry
    set_attn_implementation: Callable[[str], None]  # let all layers use the attention function of that name


class AttentionLayer(Protocol):
    """A module that calls an attention function of transformers' registry."""

    config: ModelConfig
