"""A model small enough to be trained in a second, for checks of an installation."""

from __future__ import annotations

import torch
from torch import nn

VOCAB_SIZE = 97


def small_llama(num_heads: int, num_kv_heads: int, max_tokens: int) -> nn.Module:
    """A Llama of two layers with heads of 16, the same weights in every process.

    Args:
        num_heads: query heads.
        num_kv_heads: key/value heads.
        max_tokens: of the longest sequence.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16 * num_heads,
        intermediate_size=32 * num_heads,
        num_hidden_layers=2,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=max_tokens,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = LlamaForCausalLM(config)
    return model
