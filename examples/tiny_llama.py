"""The model of the examples: a Llama small enough for a CPU, with head counts that divide by nothing much."""

from __future__ import annotations

import os

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from corpus import VOCAB_SIZE


def tiny_llama(max_tokens: int = 16384) -> LlamaForCausalLM:
    """10 query heads over 5 KV heads, 2 layers, 0.9 million weights; the same weights in every process."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=160,
            intermediate_size=320,
            num_hidden_layers=2,
            num_attention_heads=10,
            num_key_value_heads=5,
            max_position_embeddings=max_tokens,
        )
    )


def without_compiling() -> None:
    """On a CPU, keep DeepSpeed from compiling an extension as it starts, which takes a minute and needs a compiler.

    The extension speeds up all-reduces between processes of one machine; gloo does them without it.
    """
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
