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
        ({"sliding_window": 4096}, "sliding_window=4096: attention over a window"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types has linear_attention"),
        ({"kv_lora_rank": 512}, "kv_lora_rank names a kind of layer"),
        ({"num_experts": 64, "num_experts_per_tok": 4, "n_shared_experts": 2}, "shared experts"),
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
    with pytest.raises(ModelError, match="did you mean 'gpt-13b'"):
        load_model("gtp-13b")
    (tmp_path / "m.json").write_text("{")
    with pytest.raises(ModelError, match="is not JSON"):
        load_model(tmp_path / "m.json")


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
