"""Decoders of transformers on the meta device, of their usual widths and few layers, beside what the planner counts.

Every type is built from its class's defaults, which are the sizes of a model that was released; `_CHANGES` has what a
class cannot be built without. A configuration goes through the text that transformers writes into a config.json.

    PYTHONPATH=. python -m tests.families    # prints the table of all types
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import torch
import transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import masking_utils
from transformers.initialization import no_init_weights

from ds_hetero.errors import ModelError
from ds_hetero.models.configs import model_from_config
from ds_hetero.models.families import BERT_TYPES
from ds_hetero.models.shapes import ModelSpec
from tests.sweep_table import recorded

NUM_LAYERS = 4

_THREE_LINEAR = ["linear_attention"] * (NUM_LAYERS - 1) + ["full_attention"]
# Beside or against a class's defaults: values of released models where the class has none.
_CHANGES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_types": _THREE_LINEAR},
    "bamba": {"attn_layer_indices": [3]},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}},
        "layer_types": ["full_attention"] * NUM_LAYERS,
    },
    "deepseek_v2": {"num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "glm4_moe": {"head_dim": 128},
    "granitemoehybrid": {"layer_types": _THREE_LINEAR},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 16, "moe_topk": 2, "num_key_value_heads": 8},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * (NUM_LAYERS // 4)},
    "kimi_linear": {"layer_types": _THREE_LINEAR},
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    "zamba2": {
        "layers_block_type": ["linear_attention"] * (NUM_LAYERS - 1) + ["hybrid"],
    },
    "nemotron_h": {"layers_block_type": ["mamba", "mlp", "attention", "moe", "mlp", "mlp"], "num_hidden_layers": None},
}

# Settings that many released models have, and the defaults have not.
_VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("deepseek_v2", {**_CHANGES["deepseek_v2"], "q_lora_rank": None}),
    ("ernie4_5_moe", {"moe_layer_interval": 2}),
    ("gemma3_text", {"tie_word_embeddings": False}),
    ("gpt2", {"n_inner": 1024}),
    ("gpt_bigcode", {"multi_query": False}),
    ("granitemoe_swa", {"shared_intermediate_size": 1024}),
    ("granitemoehybrid", {**_CHANGES["granitemoehybrid"], "num_local_experts": 0}),
    ("granitemoeshared", {"shared_intermediate_size": 1024}),
    ("lfm2", {"layer_types": ["conv", "conv", "full_attention", "conv"] * (NUM_LAYERS // 4)}),
    ("minimax_m3_vl_text", {"mlp_layer_types": ["dense"] * 3 + ["sparse"] * (NUM_LAYERS - 3)}),
    ("mistral", {"sliding_window": None}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 2}),
    ("qwen2_moe", {"mlp_only_layers": [0, 1]}),
    ("qwen3_moe", {"decoder_sparse_step": 2}),
    ("qwen3_next", {"mlp_only_layers": [0]}),
    ("qwen3_next", {"mlp_only_layers": list(range(NUM_LAYERS))}),
)


class Family(NamedTuple):
    """A type of decoder with changes against its class's defaults."""

    model_type: str
    changes: str = "{}"  # JSON

    def config(self) -> Any:
        """Return the configuration of transformers."""
        changes = {**_CHANGES.get(self.model_type, {}), **json.loads(self.changes)}
        if changes.get("num_hidden_layers", 0) is None:
            changes.pop("num_hidden_layers")
        elif self.model_type not in BERT_TYPES:  # small, so that all layers make up for what stands before the head
            changes.setdefault("num_hidden_layers", NUM_LAYERS)
        return transformers.AutoConfig.for_model(self.model_type, **changes)

    def written(self) -> dict[str, Any]:
        """Return the content of the config.json that transformers writes."""
        return json.loads(self.config().to_json_string())

    @property
    def text_type(self) -> str:
        """Type of the text's part of the configuration, or of the whole one."""
        return str(self.config().get_text_config().model_type)

    def planned(self) -> ModelSpec | str:
        """Return the model as the planner knows it, or the reason why it does not."""
        try:
            return model_from_config(self.written(), self.model_type)
        except ModelError as error:
            return str(error)


FAMILIES = tuple(
    Family(name.removeprefix("causal "))
    for name, (kind, _) in recorded().items()
    if kind == "exact" and name.startswith("causal ")
)
"""Types of decoders that train exactly."""

VARIANTS = tuple(Family(model_type, json.dumps(changes)) for model_type, changes in _VARIANTS)


@cache
def built(family: Family) -> Any:
    """Return the model of transformers on the meta device."""
    config = family.config()
    kernels = {"attn_implementation": "eager"}  # whose matmuls torch counts
    if not isinstance(spec := family.planned(), str) and spec.num_experts:
        kernels["experts_implementation"] = "batched_mm"  # which needs no numbers
    with torch.device("meta"), no_init_weights():
        model = transformers.AutoModelForCausalLM.from_config(config, **kernels)
    model.tie_weights()
    return model.eval()


def text_part(model_type: str) -> tuple[dict[str, Any], int]:
    """Return the text's part of a config.json, and the parameters of a model of it that has no head.

    Args:
        model_type: of a model with towers before a decoder of text, or of an encoder of text.
    """
    config = transformers.AutoConfig.for_model(model_type)
    text_config = config.get_text_config()
    for name, value in _CHANGES_OF_TEXT.get(model_type, {}).items():
        setattr(text_config, name, value)
    text_config.num_hidden_layers = NUM_LAYERS
    with torch.device("meta"), no_init_weights():
        if text_config is config:
            part = transformers.AutoModel.from_config(config)
        else:
            part = transformers.AutoModelForMultimodalLM.from_config(config).get_decoder()
    return json.loads(text_config.to_json_string()), _num_parameters(part)


_CHANGES_OF_TEXT: dict[str, dict[str, Any]] = {
    "glm4v_moe": {"head_dim": 128},
    "hunyuan_vl": {"head_dim": 128, "num_key_value_heads": 8},
    "qwen3_omni_moe_thinker": {"head_dim": 128},
}


class Sizes(NamedTuple):
    """Parameters of a model, or as many as the planner counts."""

    total: int
    of_layer: float  # the mean of all layers
    of_ends: int  # of embedding and head, once if they are tied
    is_tied: bool


def sizes_of_model(family: Family) -> Sizes:
    """Count the parameters of the model of transformers."""
    model = built(family)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    is_tied = head is embedding
    layers = max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=_num_parameters)
    return Sizes(
        total=_num_parameters(model),
        of_layer=_num_parameters(layers) / len(layers),
        of_ends=embedding.numel() + (0 if is_tied else head.numel()),
        is_tied=is_tied,
    )


def sizes_of_spec(spec: ModelSpec) -> Sizes:
    """Return what the planner counts."""
    return Sizes(spec.num_parameters, spec.layer_parameters, spec.embedding_parameters, spec.tied_embeddings)


def forward_flops(family: Family, num_tokens: int) -> float:
    """Count the FLOPs of a forward of one sequence by torch's own counter, without the scans of recurrent layers."""
    model = built(family)
    token_ids = torch.zeros(1, num_tokens, dtype=torch.long, device="meta")
    # It looks for restarts of positions, which are numbers that a tensor without data has not.
    no_packing = mock.patch.object(masking_utils, "find_packed_sequence_indices", lambda positions: None)
    with no_packing, FlopCounterMode(display=False) as counter, torch.no_grad(), torch.device("meta"):
        model(input_ids=token_ids, use_cache=False)
    scans = 0
    for path, flops_by_operator in counter.get_flop_counts().items():
        module = None if path == "Global" else model.get_submodule(path.partition(".")[2])
        if hasattr(module, "A_log") or hasattr(module, "forget_gate"):  # the decay of a state
            scans += sum(n for operator, n in flops_by_operator.items() if str(operator) not in _LINEAR)
    return float(counter.get_total_flops() - scans)


_LINEAR = ("aten.mm", "aten.addmm")  # operators of linear layers


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def relative_error(counted: float, true: float) -> float:
    """Error as a share of the true value."""
    return counted / true - 1


def _print_table() -> None:
    for family in (*FAMILIES, *VARIANTS):
        spec = family.planned()
        if isinstance(spec, str):
            print(f"{family.model_type:24} refused  {spec}")
            continue
        true, counted = sizes_of_model(family), sizes_of_spec(spec)
        errors = [relative_error(*pair) for pair in zip(counted[:3], true[:3], strict=True)]
        text = " ".join(f"{error:+9.5%}" for error in errors)
        print(f"{family.model_type:24} planned {text} {counted.is_tied == true.is_tied} {family.changes[:60]}")


if __name__ == "__main__":
    _print_table()
