"""Models by their configuration: from a config.json to a `ModelSpec`, and the shapes that time and memory depend on."""

from ds_hetero.models.configs import model_from_config
from ds_hetero.models.presets import load_model, model_names
from ds_hetero.models.shapes import ModelSpec

__all__ = ["ModelSpec", "load_model", "model_from_config", "model_names"]
