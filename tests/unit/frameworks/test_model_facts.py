"""Facts of transformers models at the start of a job."""

from __future__ import annotations

import pytest
import torch
import transformers

from ds_hetero.frameworks.transformers.model.facts import describe_model

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 50,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "first_k_dense_replace": 1,
}


@pytest.mark.parametrize(
    ("model_type", "own_sizes", "head_dim"),
    [
        ("llama", {}, 128 // 4),
        ("qwen3", {"head_dim": 48}, 48),
        ("deepseek_v3", LATENT, 32 + 16),  # its head_dim is qk_rope_head_dim, 16
    ],
)
def test_head_dim_is_the_width_of_a_query(model_type, own_sizes, head_dim):
    config = transformers.AutoConfig.for_model(model_type, **SIZES, **own_sizes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    facts = describe_model(model)
    assert facts.head_dim == head_dim
    assert facts.spec is not None
    assert facts.spec.head_dim == head_dim
