"""The model that benchmarks of training steps train."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from benchmarks.measure.contenders import Shape

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

__all__ = ["VOCABULARY", "llama_of"]

VOCABULARY = 512


def llama_of(shape: Shape, max_length: int, attention: str) -> LlamaForCausalLM:
    """A Llama of this shape, with the same weights on every rank.

    Args:
        shape: of its layers.
        max_length: tokens of the longest sequence.
        attention: name of its attention function.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=shape.hidden_size,
            intermediate_size=shape.hidden_size * 11 // 4,
            head_dim=shape.head_dim,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            vocab_size=VOCABULARY,
            max_position_embeddings=max_length,
            use_cache=False,
            attn_implementation=attention,
        )
    )
