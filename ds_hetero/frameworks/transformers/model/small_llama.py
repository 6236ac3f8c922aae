"""Llama models that are small enough to train in a second, for checks of an installation."""

from __future__ import annotations

import torch
from torch import nn

from ds_hetero.common.reading import JsonObject

VOCAB_SIZE = 97


def small_llama(num_heads: int, num_kv_heads: int, max_tokens: int) -> nn.Module:
    """Return a Llama with two layers and heads of size 16; its weights are the same in every process."""
    return llama_of(num_heads, num_kv_heads, max_tokens, num_layers=2)


def llama_of(
    num_heads: int, num_kv_heads: int, max_tokens: int, *, num_layers: int, is_tied: bool = False
) -> nn.Module:
    """Return a Llama with heads of size 16; its weights are the same in every process.

    Args:
        is_tied: True if the head shares the weight of the embedding.
    """
    return llama(
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 16 * num_heads,
            "intermediate_size": 32 * num_heads,
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "max_position_embeddings": max_tokens,
            "tie_word_embeddings": is_tied,
        }
    )


def llama(content: JsonObject) -> nn.Module:
    """Return a Llama by the content of a config.json; its weights are the same in every process."""
    from transformers.models.llama import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**content)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = LlamaForCausalLM(config)
    return model
