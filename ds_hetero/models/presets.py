"""Models by name: presets, the Hub's names of them, and folders or files of a config.json.

Presets are Hugging Face configurations in ds_configs/models.
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
from ds_hetero.models.shapes import ModelSpec

_TUNED = re.compile(r"(-(instruct|chat|hf|it|base|thinking|2507|bnb-4bit|unsloth))+$")
_SAME_SHAPES = {"llama-3-8b": "llama-3.1-8b", "llama-3-70b": "llama-3.1-70b", "llama-3.3-70b": "llama-3.1-70b"}


def load_model(source: str | Path | JsonObject) -> ModelSpec:
    """Return a model by its config.json, a folder with one, a preset's name, or the configuration itself.

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
    """Read a config.json by its path, its folder, or a preset's name, ours or the Hub's.

    Raises:
        ModelError: it cannot be read; the message names the nearest preset and lists all.
    """
    path, _ = _config_file(source)
    try:
        return read_file(path, "model", ModelError)
    except ModelError as error:
        if path.name == "config.json" or _preset_named(str(source)) or is_file(path):
            raise
        close = nearest(str(source), model_names(), cutoff=0.4)
        question = f"; did you mean {close!r}?" if close else "."
        raise ModelError(
            f"cannot read model {shortened(str(source))}: it is neither a Hugging Face config.json, a folder with one, "
            f"nor a preset{question} Presets: {', '.join(model_names())}."
        ) from error


def _config_file(source: str | Path) -> tuple[Path, str]:
    """Return the file that a source stands for, and the model's name."""
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
    """Return the preset of a name, None if there is none.

    Names of the Hub lose their owner and the suffixes of tuned models, which have the shapes of their base:
    ``meta-llama/Llama-3.1-8B-Instruct`` is the preset ``llama-3.1-8b``.
    """
    names = model_names()
    if source in names:
        return source
    bare = _TUNED.sub("", source.lower().rpartition("/")[2]).removeprefix("meta-")
    bare = _SAME_SHAPES.get(bare, bare)
    return bare if bare in names else None


def model_names() -> tuple[str, ...]:
    """Return names of the presets."""
    return tuple(sorted(path.stem for path in (config_dir() / "models").glob("*.json")))
