"""Models by name, and what a config.json may hold."""

from __future__ import annotations

import json

import pytest

from ds_hetero.errors import ModelError
from ds_hetero.models.presets import load_model, read_model_config

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 96,
}


@pytest.mark.parametrize(
    ("name", "suggested"),
    [
        ("gtp-13b", "; did you mean 'gpt-13b'?"),
        ("Qwen/Qwen3-9B", "; did you mean 'qwen3-8b'?"),
        ("meta-lama/lama-3.1-8b", "; did you mean 'llama-3.1-8b'?"),
        ("gemma-3-27b", ". Presets"),
        ("mistralai/Mistral-7B-v0.3", ". Presets"),
        ("3b", ". Presets"),
    ],
)
def test_a_name_is_suggested_from_the_same_family_or_none(name, suggested):
    with pytest.raises(ModelError) as caught:
        load_model(name)
    assert f"nor a preset{suggested}" in str(caught.value)


@pytest.mark.parametrize(
    "limit", ["Infinity", "-Infinity", "NaN", '{"__float__": "Infinity"}', '[0.0, {"__float__": "NaN"}]', "null"]
)
def test_a_configuration_may_hold_infinity_as_transformers_writes_it(tmp_path, limit):
    text = json.dumps(LLAMA)[:-1] + f', "time_step_limit": {limit}, "text_config": null}}'
    (tmp_path / "config.json").write_text(text)
    assert load_model(tmp_path).num_parameters == load_model(LLAMA).num_parameters
    assert "__float__" not in str(read_model_config(tmp_path))
