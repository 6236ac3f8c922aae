"""MLPs and experts of a config.json: which keys hold their widths."""

from __future__ import annotations

from ds_hetero.common.reading import JsonObject
from ds_hetero.models.recurrent import RecurrentLayers


def mlp_keys(config: JsonObject, experts_key: str | None, recurrent: RecurrentLayers | None) -> tuple[str, str | None]:
    """Find the keys of an MLP's widths.

    Returns:
        The key of the MLP's width (of one expert where there are experts), and that of the MLP that every token passes
        beside the experts; None where there is none.
    """
    shared_key = None
    if recurrent:
        shared_key = next((key for key in SHARED_MLP_KEYS if config.get(key)), None)
    if experts_key is None:
        # A model of this kind without experts has its only MLP under the key of the shared one.
        is_only_mlp = shared_key == "shared_intermediate_size"
        return "shared_intermediate_size" if is_only_mlp else "intermediate_size", None
    has_expert_key = "moe_intermediate_size" in config
    return "moe_intermediate_size" if has_expert_key else "intermediate_size", shared_key


def is_dense(config: JsonObject, num_layers: int) -> bool:
    """Whether no layer has experts, although the configuration has keys of experts."""
    plain = config.get("mlp_only_layers")
    return isinstance(plain, (list, tuple)) and all(layer in plain for layer in range(num_layers))


SHARED_MLP_KEYS = ("shared_expert_intermediate_size", "shared_intermediate_size")
