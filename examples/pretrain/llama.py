"""Llamas to pretrain on a CPU, by size, and the optimizer that trains them.

size     weights       for
"small"  11 million    the example: ten minutes on two cores
"tiny"   0.2 million   tests and long runs: a step of 1,024 tokens takes about 0.1 s on one core
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from definitions import BEGIN, END

VOCAB_SIZE = {"small": 4096, "tiny": 1024}
QUERY_HEADS, KV_HEADS = 10, 5
PEAK_LEARNING_RATE = {"small": 2e-3, "tiny": 4e-3}
_SHAPE = {
    "small": {"hidden_size": 320, "intermediate_size": 896, "num_hidden_layers": 8},
    "tiny": {"hidden_size": 80, "intermediate_size": 160, "num_hidden_layers": 2},
}


def llama(size: str, seed: int = 0) -> LlamaForCausalLM:
    """10 query heads over 5 KV heads, tied embeddings, equal weights in every process."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE[size],
            num_attention_heads=QUERY_HEADS,
            num_key_value_heads=KV_HEADS,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
            bos_token_id=BEGIN,
            eos_token_id=END,
            pad_token_id=END,
            **_SHAPE[size],
        )
    )


def adamw(model: torch.nn.Module, learning_rate: float) -> torch.optim.AdamW:
    """AdamW as small language models are pretrained with: beta2 0.95, weight decay 0.1 on matrices but not on norms."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    norms = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), eps=1e-8)
