"""Model shapes from Hugging Face config.json files and presets."""

from __future__ import annotations

import json

import pytest

from ds_hetero.errors import ModelError
from ds_hetero.models.configs import model_from_config
from ds_hetero.models.presets import load_model, model_names

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "hidden_act": "silu",
}


@pytest.mark.parametrize(
    ("name", "layers", "hidden", "heads", "billions"),
    [
        ("gpt-3b", 32, 2560, 32, 2.65),
        ("gpt-7b", 32, 4096, 32, 6.65),
        ("gpt-13b", 40, 5120, 40, 12.84),
        ("gpt-30b", 48, 7168, 56, 29.96),
        ("gpt-70b", 80, 8192, 64, 64.84),
        ("llama-3.1-8b", 32, 4096, 32, 8.03),
        ("llama-3.1-70b", 80, 8192, 64, 70.55),
        ("qwen3-8b", 36, 4096, 32, 8.19),
        ("qwen3-30b-a3b", 48, 2048, 32, 30.53),
        ("qwen3-next-80b-a3b", 48, 2048, 16, 79.67),
        ("bamba-9b", 32, 4096, 32, 9.78),
    ],
)
def test_a_preset_has_the_shape_and_parameters_of_its_paper(name, layers, hidden, heads, billions):
    model = load_model(name)
    assert (model.num_layers, model.hidden_size, model.num_heads) == (layers, hidden, heads)
    assert model.num_parameters / 1e9 == pytest.approx(billions, abs=0.01)


def test_every_preset_loads():
    assert all(load_model(name).name == name for name in model_names())


def test_gpt_layer_has_twelve_hidden_squared_weights():
    model = load_model("gpt-13b")
    assert not model.gated_mlp and model.mlp_size == 4 * model.hidden_size
    assert model.attention_parameters + model.mlp_parameters == 12 * model.hidden_size**2


def test_llama_counts_kv_heads_and_three_matrices(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    model = load_model(tmp_path)
    assert model == load_model(tmp_path / "config.json")
    assert model.head_dim == 128 and model.queries_per_kv_head == 4 and model.gated_mlp
    assert model.attention_parameters == 2 * 4096 * 4096 + 2 * 4096 * 1024
    assert model.mlp_parameters == 3 * 4096 * 14336
    assert not model.tied_embeddings and model.embedding_parameters == 2 * 128256 * 4096


def test_experts_are_counted():
    model = model_from_config(LLAMA | {"num_local_experts": 8, "num_experts_per_tok": 2}, "mixtral")
    assert model.layer_parameters - model.active_layer_parameters == 6 * model.mlp_parameters + 2 * 4096


def test_head_dim_may_differ_from_hidden_size_over_heads():
    model = model_from_config(LLAMA | {"head_dim": 64}, "m")
    assert model.head_dim == 64 and model.attention_parameters == 4096 * 64 * (2 * 32 + 2 * 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "hidden_size must be a whole number >= 1, got None"),
        ({"num_key_value_heads": 5}, "num_attention_heads=32 is not a multiple of num_key_value_heads=5"),
        ({"sliding_window": 4096}, "sliding_window is 4096, but the configuration does not say which layers use it"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}, "layer_types names 2 layers of 32"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types has linear_attention"),
        ({"kv_lora_rank": 512}, "kv_lora_rank means latent attention"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "qk_rope_head_dim must be a whole number >= 1, got None"),
        ({"model_type": "kimi_linear"}, "linear_num_heads must be a whole number >= 1, got None"),
        ({"model_type": "zamba2"}, "model type zamba2 cannot be planned: its attention layers share one set"),
        ({"num_experts": 4, "moe_topk": [2, 1]}, r"moe_topk must be the same in every layer, got \[2, 1\]"),
        ({"num_experts": 4, "moe_k": 2, "mlp_layer_types": ["moe"]}, 'mlp_layer_types must be "dense" or "sparse"'),
        ({"num_experts": 4, "moe_k": 2, "mlp_layer_types": [[]] * 32}, 'mlp_layer_types must be "dense" or "sparse"'),
        ({"layer_types": 3}, "layer_types must be a list of names, got 3"),
        ({"model_type": "nemotron_h", "layers_block_type": None}, "layers_block_type must list kinds of layers"),
        ({"model_type": "nemotron_h", "moe_latent_size": 64}, "experts on narrower tokens have no cost model"),
        ({"word_embed_proj_dim": 512}, "word_embed_proj_dim=512 beside hidden_size=4096: an embedding narrower than"),
        ({"model_type": "lfm2", "full_attn_idxs": 3}, "full_attn_idxs must be a list of layers, got 3"),
        ({"num_experts": 4, "moe_k": 2, "mlp_only_layers": 3}, "mlp_only_layers must be a list of layers, got 3"),
        ({"num_experts": 64}, "lacks num_experts_per_tok"),
        ({"head_dim": 64, "per_layer_config": {"5": {"head_dim": 128}}}, "per_layer_config gives layer 5 head_dim=128"),
        ({"num_attention_heads_per_layer": [32] * 31 + [16]}, "num_attention_heads_per_layer has 32 and 16"),
        ({"head_dim": 64, "global_head_dim": 128}, "global_head_dim=128 beside head_dim=64"),
    ],
)
def test_what_cannot_be_planned_is_refused(changes, message):
    with pytest.raises(ModelError, match=message):
        model_from_config(LLAMA | changes, "m")


def test_sizes_by_layer_that_are_all_alike_are_those_of_the_model():
    alike = {"per_layer_config": {"5": {"num_key_value_heads": 8}}, "num_attention_heads_per_layer": [32] * 32}
    assert model_from_config(LLAMA | alike, "m") == model_from_config(LLAMA, "m")


def test_missing_keys_are_named(tmp_path):
    with pytest.raises(ModelError, match="lacks num_hidden_layers, vocab_size, intermediate_size; it has"):
        model_from_config({"hidden_size": 8, "num_attention_heads": 2}, "m")
    (tmp_path / "m.json").write_text("{")
    with pytest.raises(ModelError, match="is not JSON"):
        load_model(tmp_path / "m.json")


@pytest.mark.parametrize(
    ("model_type", "keys", "window_layers"),
    [
        ("mistral", {"sliding_window": 4096}, 32),
        ("mistral", {"sliding_window": None}, 0),
        ("gemma2", {"sliding_window": 4096}, 16),
        ("gemma3_text", {"sliding_window": 1024}, 27),
        ("cohere2", {"sliding_window": 4096, "sliding_window_pattern": 4}, 24),
        ("qwen2", {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 20}, 0),
        ("qwen2", {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 20}, 12),
        ("qwen2", {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 40}, 0),
        ("qwen2", {"sliding_window": 4096, "max_window_layers": 20}, 0),
        ("qwen3_moe", {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 20}, 32),
        ("ministral3", {"sliding_window": 4096}, 32),
        ("llama", {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 16}, 16),
    ],
)
def test_windows_of_layers_are_listed_or_follow_from_the_type(model_type, keys, window_layers):
    model = model_from_config(LLAMA | {"model_type": model_type} | keys, "m")
    assert model.window_layers == window_layers
    assert model.window == (keys["sliding_window"] if window_layers else 0)


def test_older_files_of_tied_types_leave_the_tie_out():
    assert model_from_config(LLAMA | {"model_type": "gemma2"}, "m").tied_embeddings
    assert not model_from_config(LLAMA | {"model_type": "gemma2", "tie_word_embeddings": False}, "m").tied_embeddings


def test_the_tie_of_a_model_with_towers_is_that_of_its_decoder_or_else_of_the_whole():
    text = LLAMA | {"model_type": "qwen2_5_vl_text"}
    whole = {"model_type": "qwen2_5_vl", "text_config": text, "tie_word_embeddings": True}
    assert model_from_config(whole, "m").tied_embeddings
    assert not model_from_config(whole | {"text_config": text | {"tie_word_embeddings": False}}, "m").tied_embeddings
    assert model_from_config(LLAMA | {"model_type": "qwen2_5_vl", "vision_config": {}}, "m").num_layers == 32


def test_nemotron_h_lists_its_layers_by_kinds_or_by_letters():
    keys = {"mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
    config = LLAMA | keys | experts | {"model_type": "nemotron_h", "chunk_size": 128, "num_hidden_layers": None}
    by_letters = model_from_config(config | {"hybrid_override_pattern": "M-M*EM-"}, "m")
    kinds = ["mamba", "mlp", "mamba", "attention", "moe", "mamba", "mlp"]
    assert model_from_config(config | {"layers_block_type": kinds}, "m") == by_letters
    assert (by_letters.num_layers, by_letters.num_mlps, by_letters.dense_layers) == (7, 3, 2)
    assert by_letters.recurrent.num_layers == 3 and by_letters.attention_layers == 1


def test_first_files_of_lfm2_say_the_same_in_other_keys():
    places = [layer for layer in range(32) if layer % 4 == 2]
    kinds = ["full_attention" if layer in places else "conv" for layer in range(32)]
    first = LLAMA | {"model_type": "lfm2", "intermediate_size": 1, "block_ff_dim": 14336, "full_attn_idxs": places}
    usual = LLAMA | {"model_type": "lfm2", "layer_types": kinds}
    assert model_from_config(first, "m") == model_from_config(usual, "m")
    assert model_from_config(usual, "m").recurrent.num_layers == 24


def test_shared_experts_and_first_dense_layers_are_counted():
    """32 layers of 4,096: one MLP of 14,336 in the first two, 64 experts of 512 and two shared ones in the others."""
    keys = {"num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 512, "n_shared_experts": 2}
    model = model_from_config(LLAMA | keys | {"first_k_dense_replace": 2}, "m")
    expert, dense, router = 3 * 4096 * 512, 3 * 4096 * 14336, 64 * 4096
    mlps = 30 * (66 * expert + router) + 2 * dense
    others = 32 * (model.attention_parameters + 2 * 4096)
    assert 32 * model.layer_parameters == pytest.approx(mlps + others, rel=1e-4)
    active = 30 * (6 * expert + router) + 2 * dense
    assert 32 * model.active_mlp_parameters == pytest.approx(active, rel=1e-3)
    assert model.unlike_layers == "layers with one MLP beside those with experts"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": [1, 2]}, r"layer_types must be a list of names, got \[1, 2\]"),
        ({"layer_types": "full_attention"}, "layer_types must be a list"),
        ({"model_type": []}, r"model_type must be text, got \[\]"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false, got 'no'"),
        ({"hidden_size": 10**400}, "hidden_size must be a whole number <= 16,777,216"),
        ({"hidden_size": 2**60}, "hidden_size must be a whole number <= 16,777,216"),
        ({"num_attention_heads": 100_003}, "num_attention_heads must be a whole number <= 4,096"),
        ({"text_config": 3}, "text_config must be an object, got 3"),
        ({"hidden_act": 3}, "hidden_act must be text, got 3"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_its_key(changes, message):
    with pytest.raises(ModelError, match=message):
        model_from_config(LLAMA | changes, "m")


def test_a_configuration_may_hold_what_no_file_can():
    assert model_from_config(LLAMA | {"id2label": {0: "no"}, "dtype": object()}, "m").num_layers == 32


def test_older_files_of_gpt_bigcode_say_by_a_flag_that_all_heads_share_a_key():
    keys = {"model_type": "gpt_bigcode", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 96}
    assert model_from_config(keys, "m").num_kv_heads == 1
    assert model_from_config(keys | {"multi_query": False}, "m").num_kv_heads == 4


def test_null_stands_for_a_key_that_is_left_out(tmp_path):
    empty = {"text_config": None, "layer_types": None, "model_type": None, "tie_word_embeddings": None}
    assert model_from_config(LLAMA | empty, "m") == model_from_config(LLAMA, "m")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested"),
        ('{"n_head": 1, "n_head": 2}', "twice"),
        ("9" * 5000, "64 bits"),
    ],
    ids=["nested", "twice", "long"],
)
def test_nested_and_doubled_keys_of_a_model_file_are_refused(tmp_path, text, message):
    path = tmp_path / "model.json"
    path.write_text(text)
    with pytest.raises(ModelError, match=message):
        load_model(path)
