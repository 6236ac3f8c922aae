"""Sizes of decoders: what the planner counts, beside the models that transformers builds on the meta device."""

from __future__ import annotations

import json

import pytest
from transformers import AutoConfig

from ds_hetero.errors import ModelError
from ds_hetero.models.configs import model_from_config
from ds_hetero.models.families import PLANNED_TYPES, TEXT_CONFIG_DEFAULTS, UNPLANNED_TOWERS, UNPLANNED_TYPES
from ds_hetero.models.shapes import ModelSpec
from tests.families import FAMILIES, VARIANTS, Family, relative_error, sizes_of_model, sizes_of_spec, text_part

MAX_SIZE_ERROR = 1e-3  # the promise of docs/architectures.md
REFUSED = {**UNPLANNED_TYPES, **UNPLANNED_TOWERS}


@pytest.mark.parametrize("family", FAMILIES, ids=[family.model_type for family in FAMILIES])
def test_a_decoder_that_trains_is_planned_with_its_size_or_refused_by_name(family: Family) -> None:
    planned = family.planned()
    if family.model_type in REFUSED:
        assert isinstance(planned, str) and REFUSED[family.model_type] in planned
    else:
        _expect_size(family, planned)


@pytest.mark.parametrize("family", VARIANTS, ids=[f"{family.model_type} {family.changes}" for family in VARIANTS])
def test_settings_of_released_models_change_the_size_as_in_transformers(family: Family) -> None:
    _expect_size(family, family.planned())


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("cohere2", {}),
        ("gemma2", {}),
        ("gemma3_text", {}),
        ("ministral", {}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 5}),
        ("qwen3", {"use_sliding_window": False}),
    ],
)
def test_files_that_do_not_list_layers_have_the_windows_that_transformers_gives_them(model_type, changes) -> None:
    config = Family(model_type, json.dumps({"num_hidden_layers": 12, "head_dim": 128, **changes})).written()
    assert len(config["layer_types"]) == 12
    assert model_from_config({**config, "layer_types": None}, "m") == model_from_config(config, "m")


TEXT_PARTS = (
    *("cosmos3_omni", "glm46v", "glm4v_moe", "glm_ocr", "granite_docling", "hunyuan_vl", "paddleocr_vl"),
    *("qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_vl", "qwen3_omni_moe_thinker", "qwen3_vl", "qwen3_vl_moe"),
    *("esmc", "eurobert", "gte", "nomic_bert"),
)


@pytest.mark.parametrize("model_type", TEXT_PARTS)
def test_the_text_beside_towers_and_encoders_of_text_are_planned_with_their_size(model_type: str) -> None:
    config, true = text_part(model_type)
    spec = model_from_config(config, model_type)
    head = 0 if spec.tied_embeddings else spec.vocab_size * spec.hidden_size
    assert abs(relative_error(spec.num_parameters - head, true)) < MAX_SIZE_ERROR


@pytest.mark.parametrize("model_type", TEXT_CONFIG_DEFAULTS)
def test_a_text_part_without_sizes_has_those_of_its_class(model_type: str) -> None:
    written = json.loads(AutoConfig.for_model(model_type).to_json_string())
    part = {"model_type": "llava", "text_config": {"model_type": model_type}}
    assert model_from_config(part, "m") == model_from_config(written, "m")
    with pytest.raises(ModelError, match="the model config lacks num_hidden_layers, hidden_size"):
        model_from_config({"model_type": model_type}, "m")


def test_every_type_that_is_planned_was_compared() -> None:
    compared = {family.text_type for family in FAMILIES if family.model_type not in REFUSED}
    compared |= {text_part(model_type)[0]["model_type"] for model_type in TEXT_PARTS}
    flat = {f"{family}_vl" for family in ("qwen2", "qwen2_5") if f"{family}_vl_text" in compared}
    assert compared | flat == PLANNED_TYPES


def test_a_type_whose_size_is_not_known_is_refused() -> None:
    config = Family("llama").written()
    assert isinstance(model_from_config({**config, "model_type": None}, "m"), ModelSpec)
    with pytest.raises(ModelError, match="the size of model type 'lama' is not known"):
        model_from_config({**config, "model_type": "lama"}, "m")


def _expect_size(family: Family, planned: ModelSpec | str) -> None:
    assert isinstance(planned, ModelSpec), planned
    counted, true = sizes_of_spec(planned), sizes_of_model(family)
    assert abs(relative_error(counted.total, true.total)) < MAX_SIZE_ERROR
    assert abs(relative_error(counted.of_layer, true.of_layer)) < MAX_SIZE_ERROR
    assert abs(relative_error(counted.of_ends, true.of_ends)) < MAX_SIZE_ERROR
    assert counted.is_tied == true.is_tied
