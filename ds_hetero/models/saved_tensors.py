"""Tensors that autograd saves in a layer beyond the usual ones, by how transformers writes a model type's modules.

The usual layer is Llama's: two norms, each of which reads tokens and whose output a matmul reads. A norm of tokens x
has three steps, of which autograd saves what the gradients of the next ones need:

    x in fp32                 saved for the gradient of the tokens
    x / its length            saved for the gradient of the weight: in 16 bits, or in fp32 if the norm is wide
    times the weight          saved by the matmul that reads it; not saved if the result is added to the residual stream

tests/unit/cost/test_saved_by_families.py compares the bytes with those that autograd saves of transformers' layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_hetero.common.reading import JsonObject
from ds_hetero.models.families import GPT2_TYPES

_WIDE_NORM_PREFIXES = ("afmoe", "beam", "flex_olmo", "gemma", "gpt_oss", "helium", "olmo2", "olmo3", "vaultgemma")
_NATIVE_NORM_TYPES = {
    "gpt_neox",
    "jais2",
    "modernbert-decoder",
    "nemotron",
    "opt",
    "phi",
    "phimoe",
    "stablelm",
    "starcoder2",
    *GPT2_TYPES,
}
_POST_NORM_TYPES = {"afmoe", "beam", "gemma2", "gemma3_text", "glm4", "hyperclovax"}
_ROUTER_IN_FP32_TYPES = {
    "axk1",
    "beam",
    "deepseek_v3",
    "dots1",
    "exaone_moe",
    "glm4_moe",
    "glm4_moe_lite",
    "hy_v3",
    "solar_open",
}
_FUSED_PROJECTION_TYPES = {"phi3"}

_MLP_WIDTHS = {
    "relu": 1.0,  # its output, which is the input of the down projection, too
    "gelu_new": 5.0,  # four steps of the formula, and the output
    "xielu": 5.5,  # four steps of the formula, a mask of one byte, and the output
}
"""`SavedTensors.mlp_widths` of plain MLPs, by activation."""

_GPT_OSS_WIDTHS = 7.0  # gate and up in one tensor, both clamped, the sigmoid, the activated gate, and the product


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedTensors:
    """How a model's layers differ from Llama's in what autograd saves."""

    wide_norms: bool = False  # norms multiply by their weight in fp32 and keep the normalized tokens in fp32
    native_norms: bool = False  # torch's own layer norm, one kernel: saves its input as it comes, and nothing in fp32
    post_norms: bool = False  # norms of the outputs of mixer and MLP, beside those of their inputs
    # Saved elements per token and column of the MLP. None: 4 of a gated MLP (gate, activated gate, up, and the product
    # of the latter two), 2 of a plain one (input and output of the activation).
    mlp_widths: float | None = None
    fused_projection: bool = False  # values are a view of one projection of queries, keys and values
    router_in_fp32: bool = False  # the router of experts keeps its input in fp32
    capped_logits: bool = False  # a tanh limits the logits, and keeps its output


USUAL_TENSORS = SavedTensors()


def read_saved_tensors(decoder: JsonObject, model_type: str) -> SavedTensors:
    """Return what the layers of a model type save; ``decoder`` is the decoder's configuration."""
    activation = decoder.get("hidden_act", decoder.get("activation_function"))
    widths = _GPT_OSS_WIDTHS if model_type == "gpt_oss" else _MLP_WIDTHS.get(str(activation))
    return SavedTensors(
        wide_norms=model_type.startswith(_WIDE_NORM_PREFIXES),
        native_norms=model_type in _NATIVE_NORM_TYPES,
        post_norms=model_type in _POST_NORM_TYPES,
        mlp_widths=widths,
        fused_projection=model_type in _FUSED_PROJECTION_TYPES,
        router_in_fp32=model_type in _ROUTER_IN_FP32_TYPES,
        capped_logits=bool(decoder.get("final_logit_softcapping")),
    )
