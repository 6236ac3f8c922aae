"""Load a model by the name of a preset, by the Hub's name of it, or by a config.json or its folder.

Presets are Hugging Face configurations in ds_configs/models; ``llama-3.1-8b`` is one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_hetero.common.reading import JsonObject, config_dir, is_file, is_folder, read_file, shortened
from ds_hetero.common.spelling import nearest
from ds_hetero.errors import ModelError
from ds_hetero.models.configs import model_from_config
from ds_hetero.models.families import PLANNED_TYPES, UNPLANNED_TYPES
from ds_hetero.models.shapes import ModelSpec

_TUNED_SUFFIXES = re.compile(r"(-(instruct|chat|hf|it|base|thinking|2507|bnb-4bit|unsloth))+$")
# Names of the Hub, each with the preset that has the same shapes.
_PRESET_OF_SAME_SHAPES = {
    "llama-3-8b": "llama-3.1-8b",
    "llama-3-70b": "llama-3.1-70b",
    "llama-3.3-70b": "llama-3.1-70b",
}


def load_model(source: str | Path | JsonObject) -> ModelSpec:
    """Return the shape of a model.

    Args:
        source: path of a config.json, folder with one, name of a preset, or the content of a config.json.

    Raises:
        ModelError: the model is unknown, or its configuration is wrong or cannot be planned.
    """
    if isinstance(source, Mapping):
        model_type = source.get("model_type")
        name = model_type if isinstance(model_type, str) and model_type else "model"
        return model_from_config(source, name)
    _, name = _config_file(source)
    return model_from_config(read_model_config(source), name)


def read_model_config(source: str | Path) -> Any:
    """Return the content of a config.json.

    Args:
        source: path of the file, folder with it, or name of a preset, such as ``llama-3.1-8b`` or, on the Hub,
            ``meta-llama/Llama-3.1-8B``.

    Raises:
        ModelError: the file cannot be read; the message names the nearest preset of the same family and lists all.
    """
    path, _ = _config_file(source)
    try:
        return _with_floats(read_file(path, "model", ModelError, finite=False))
    except ModelError as error:
        if path.name == "config.json" or _preset_named(str(source)) or is_file(path):
            raise
        close = _nearest_preset(str(source))
        question = f"; did you mean {close!r}?" if close else "."
        raise ModelError(
            f"cannot read model {shortened(str(source))}: it is neither a Hugging Face config.json, a folder with one, "
            f"nor a preset{question} Presets: {', '.join(model_names())}."
        ) from error


def _with_floats(content: Any) -> Any:
    """Replace ``{"__float__": "Infinity"}``, which transformers writes for numbers that JSON lacks, by the number."""
    if isinstance(content, list):
        return [_with_floats(value) for value in content]
    if not isinstance(content, Mapping):
        return content
    if set(content) == {"__float__"} and content["__float__"] in ("Infinity", "-Infinity", "NaN"):
        return float(content["__float__"])
    return {key: _with_floats(value) for key, value in content.items()}


def _nearest_preset(source: str) -> str | None:
    """Return the preset of the same family with the most similar name; None if the family has none.

    ``gemma-3-27b`` has none, since there are no presets of Gemma. ``gtp-13b`` is ``gpt-13b``: no family is called
    ``gtp``, so it is taken for a misspelled one.
    """
    bare_name = source.lower().rpartition("/")[2]
    presets_by_family: dict[str, list[str]] = {}
    for name in model_names():
        presets_by_family.setdefault(_family(name), []).append(name)
    family = _family(bare_name)
    known_families = {_family(model_type) for model_type in (*PLANNED_TYPES, *UNPLANNED_TYPES)}
    if family not in known_families:  # misspelled
        family = nearest(family, presets_by_family) or ""
    return nearest(bare_name, presets_by_family.get(family, ()), cutoff=0.4)


def _family(name: str) -> str:
    """Return the letters at the beginning of a model's name: ``qwen`` of ``qwen2.5-7b``."""
    letters = re.match(r"[a-z]*", name)
    return letters[0] if letters else ""


def _config_file(source: str | Path) -> tuple[Path, str]:
    """Return the config.json that a source stands for, and the model's name; the file need not exist."""
    path = Path(source)
    if is_folder(path):
        return path / "config.json", path.resolve().name
    if is_file(path):
        folder = path.resolve().parent
        return path, folder.name if path.name == "config.json" else path.stem
    preset = _preset_named(str(source))
    if preset is None:
        return path, str(source)
    return config_dir() / "models" / f"{preset}.json", preset


def _preset_named(source: str) -> str | None:
    """Return the preset of this name; None if there is none.

    A name of the Hub is read without its owner and without suffixes of tuned models, which have the shapes of their
    base model: ``meta-llama/Llama-3.1-8B-Instruct`` is the preset ``llama-3.1-8b``.
    """
    names = model_names()
    if source in names:
        return source
    bare_name = _TUNED_SUFFIXES.sub("", source.lower().rpartition("/")[2]).removeprefix("meta-")
    bare_name = _PRESET_OF_SAME_SHAPES.get(bare_name, bare_name)
    return bare_name if bare_name in names else None


def model_names() -> tuple[str, ...]:
    """Return the names of all presets in alphabetical order."""
    return tuple(sorted(path.stem for path in (config_dir() / "models").glob("*.json")))
