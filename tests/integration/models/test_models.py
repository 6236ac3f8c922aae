"""Real architectures, split unevenly, give the gradients that they give whole; what cannot be split is refused by name.

Budget: 40 s.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_hetero.errors import ModelError
from ds_hetero.frameworks.transformers.model.facts import describe_model
from ds_hetero.frameworks.transformers.model.model_checks import check_model, decoder_of
from tests.integration.architectures import build
from tests.integration.tiny import ONE_GROUP_2, UNEVEN_2, VOCAB
from tests.support import run_ranks

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
}
_VISION: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

_ROBERTA = {
    "num_key_value_heads": 4,
    "attention_probs_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
    "pad_token_id": 1,  # which is among the tokens of `whole_batch`, so that a mask has to say what is padding
}
_NEED_MASK = ("roberta", "roberta decoder", "esm")

_ROUTER = {"output_router_logits": True, "router_aux_loss_coef": 0.7}
_ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}

# Config class, model class, changes; where eager is named, sdpa cannot do what the model asks for.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen2 window": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16}),
    "mistral window": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 7}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", _EXPERTS),
    "mixtral router loss": ("MixtralConfig", "MixtralForCausalLM", {**_EXPERTS, **_ROUTER}),
    "qwen3 moe router loss": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**_ROUTED, **_ROUTER}),
    "gemma2 softcap": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {"head_dim": 8, "sliding_window": 9, "attn_implementation": "eager"},
    ),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {"head_dim": 8, "sliding_window": 9}),
    "gpt-oss sinks": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {"head_dim": 8, "sliding_window": 9, "attn_implementation": "eager", **_EXPERTS},
    ),
    "deepseek mla": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
        },
    ),
    "dynamic rope": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {"max_position_embeddings": 16, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "longrope": (
        "Phi3Config",
        "Phi3ForCausalLM",
        {
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "original_max_position_embeddings": 16,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0, 3.0, 4.0, 5.0],
            },
            "pad_token_id": 0,
        },
    ),
    "bert": (
        "BertConfig",
        "BertForMaskedLM",
        {"num_key_value_heads": 4, "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0},
    ),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {
            "num_key_value_heads": 4,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "attn_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
        },
    ),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {"num_key_value_heads": 4, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "pad_token_id": 0},
    ),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", _ROBERTA),
    "roberta decoder": ("RobertaConfig", "RobertaForCausalLM", {**_ROBERTA, "is_decoder": True}),
    "esm": (
        "EsmConfig",
        "EsmForMaskedLM",
        {**_ROBERTA, "mask_token_id": 5, "position_embedding_type": "absolute", "token_dropout": False},
    ),
}


def make(name: str) -> Any:
    import transformers

    config, model, changes = MODELS[name]
    torch.manual_seed(0)
    return getattr(transformers, model)(
        getattr(transformers, config)(**{**_SIZES, "attn_implementation": "sdpa", **changes})
    )


def whole_batch(kind: str) -> dict[str, Tensor]:
    """Two rows of 31 tokens: plain, padded on one side, or packed documents.

    "left, first unlabelled" is padded on the left, and padding predicts no label.
    """
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, VOCAB, (2, 31), generator=generator)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if kind == "packed":
        batch["position_ids"] = torch.cat([torch.arange(11), torch.arange(20)]).expand(2, -1)
    if kind.startswith(("left", "right")):
        mask = torch.ones_like(ids)
        mask[1, :9] = 0
        batch["attention_mask"] = mask if kind.startswith("left") else mask.flip(1)
        batch["labels"] = ids.masked_fill(batch["attention_mask"] == 0, -100)
    if kind == "left, first unlabelled":
        batch["labels"][1, 9] = -100
    return batch


NO_TOKENS_2 = {**ONE_GROUP_2, "groups": [{"ranks": [0, 1], "tokens": [1, 0], "heads": [3, 1]}]}
GRADIENT_CASES = [(name, "plain", UNEVEN_2) for name in MODELS if name not in _NEED_MASK]
GRADIENT_CASES += [
    (name, kind, UNEVEN_2) for name in ("llama", "gpt-oss sinks") for kind in ("left", "right", "packed")
]
GRADIENT_CASES += [
    ("llama", "packed", ONE_GROUP_2),
    ("gemma3", "packed", ONE_GROUP_2),
    ("bert", "right", ONE_GROUP_2),
    ("opt", "right", ONE_GROUP_2),
    ("opt", "left, first unlabelled", UNEVEN_2),
    ("roberta", "left", UNEVEN_2),
    ("roberta decoder", "right", UNEVEN_2),
    ("esm", "right", NO_TOKENS_2),
    ("mixtral router loss", "right", ONE_GROUP_2),
    ("mixtral router loss", "left", NO_TOKENS_2),
]


@pytest.mark.parametrize(
    ("name", "kind", "schedule"),
    GRADIENT_CASES,
    ids=[f"{name}, {kind}{', one group' * (schedule is not UNEVEN_2)}" for name, kind, schedule in GRADIENT_CASES],
)
def test_gradients_equal_those_of_the_undivided_model(name: str, kind: str, schedule: Any) -> None:
    run_ranks(_check_gradients, 2, name, kind, schedule)


def _check_gradients(rank: int, name: str, kind: str, schedule: Any) -> None:
    import ds_hetero
    from ds_hetero.values.schedule import Schedule

    handle = ds_hetero.register()
    whole, batch = make(name).train(), whole_batch(kind)
    loss = _loss_of(whole, batch)
    loss.backward()
    model = make(name).train()
    heads = model.config.num_attention_heads
    fitting = {**schedule, "num_kv_heads": getattr(model.config, "num_key_value_heads", None) or heads}
    assert Schedule.from_dict(fitting).num_heads == heads
    handle.registry.prepare(model, {"heterogeneity": {"schedule": fitting}}, {})
    (shard,) = handle.dataloader([batch])
    ours = handle.loss(model(**{**shard, "labels": shard["shift_labels"]}), shard)
    ours.backward()
    torch.testing.assert_close(ours, loss, rtol=1e-5, atol=0)
    for (parameter, expected), own in zip(whole.named_parameters(), model.parameters(), strict=True):
        if expected.grad is None:
            assert own.grad is None, parameter
            continue
        grad = torch.zeros_like(own) if own.grad is None else own.grad
        dist.all_reduce(grad)
        error = (grad / dist.get_world_size() - expected.grad).norm() / (expected.grad.norm() + 1e-4)
        assert error < 1e-5, f"{parameter} is off by {float(error):.1e}"


def _loss_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The model's own of the whole batch; of packed documents, each on its own."""
    if "position_ids" not in batch:
        return model(**batch).loss
    logits = torch.cat([model(part).logits for part in batch["input_ids"].split([11, 20], dim=1)], dim=1)
    moved = torch.cat([batch["labels"][:, 1:], torch.full_like(batch["labels"][:, :1], -100)], dim=1)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), moved.flatten())


REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "dropout": ("LlamaConfig", "LlamaForCausalLM", {"attention_dropout": 0.1}, "attention_dropout=0.1: dropout inside"),
    "router loss with images": (
        "Qwen3VLMoeConfig",
        "Qwen3VLMoeForConditionalGeneration",
        {"text_config": {**_SIZES, **_ROUTED, "output_router_logits": True, "router_aux_loss_coef": 0.7}},
        "its router loss",
    ),
    "pooling": ("LlamaConfig", "LlamaForQuestionAnswering", {}, "its head pools over the whole sequence"),
    "pooler": ("BertConfig", "BertForSequenceClassification", {}, "BertModel itself pools over the sequence"),
    "encoder-decoder": (
        "T5Config",
        "T5ForConditionalGeneration",
        {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4, "attn_implementation": "eager"},
        "it is an encoder-decoder",
    ),
    "recurrent": (
        "MambaConfig",
        "MambaForCausalLM",
        {"attn_implementation": "eager"},
        "does not declare that its attention may be replaced",
    ),
    "state space of the first kind": (
        "JambaConfig",
        "JambaForCausalLM",
        {"num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 2, "attn_layer_offset": 1},
        "its state-space layers are of the first Mamba",
    ),
    "chunks": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {"head_dim": 8, "intermediate_size_mlp": 32, "num_local_experts": 2},
        "layers of type chunked_attention",
    ),
    "masks by content": ("DogeConfig", "DogeForCausalLM", {}, "its attention chooses keys by their content"),
    "keys repeated by experts": (
        "JetMoeConfig",
        "JetMoeForCausalLM",
        {"num_key_value_heads": 2, "kv_channels": 8, "num_local_experts": 4},
        "its attention has num_key_value_heads of keys per expert",
    ),
    "masks by blocks of images": (
        "Gemma3Config",
        "Gemma3ForConditionalGeneration",
        {"text_config": {**_SIZES, "head_dim": 8}, "vision_config": _VISION},
        "it makes the masks of its text decoder before it, by blocks of images",
    ),
    "images before a prefix": (
        "PaliGemmaConfig",
        "PaliGemmaForConditionalGeneration",
        {"text_config": {**_SIZES, "model_type": "gemma", "head_dim": 8}, "vision_config": _VISION},
        "it makes the masks of its text decoder before it, by blocks of images",
    ),
    "cross attention to images": (
        "MllamaConfig",
        "MllamaForConditionalGeneration",
        {
            "text_config": {**_SIZES, "pad_token_id": 0, "cross_attention_layers": [1]},
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_global_layers": 1,
            },
        },
        "its text attends to its images by cross attention",
    ),
    "windows in both directions": (
        "ModernBertConfig",
        "ModernBertForMaskedLM",
        {"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2},
        "its sliding windows look in both directions",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_split_is_refused_by_name(name: str) -> None:
    import transformers

    from ds_hetero.errors import ModelError
    from ds_hetero.frameworks.transformers.model.model_checks import check_model

    config, model, changes, says = REFUSED[name]
    settings = getattr(transformers, config)(**{**_SIZES, "attn_implementation": "sdpa", **changes})
    with pytest.raises(ModelError, match=f"{model} cannot be split over the sequence:(.|\n)*{re.escape(says)}"):
        check_model(getattr(transformers, model)(settings))


def test_heads_of_unlike_width_are_described_by_the_widest_and_unlike_numbers_of_heads_are_refused() -> None:
    model = build("gemma4_text", torch.float32)
    facts = describe_model(model)
    assert (facts.head_dim, facts.num_kv_heads, facts.spec) == (256, 2, None)  # 16 in one layer
    assert "gemma4_text cannot be planned: its layers differ in heads" in facts.no_spec_reason
    model.config.per_layer_config = {1: {"num_key_value_heads": 1}}
    with pytest.raises(ModelError, match=r"num_key_value_heads=\(2, 1\)"):
        describe_model(model)
    model.config.per_layer_config = {0: {"rope_parameters": None}}
    with pytest.raises(ModelError, match="rope_parameters must be the same in every layer"):
        check_model(model)


def test_a_model_that_does_not_call_its_decoder_its_base_model_is_split_at_its_decoder() -> None:
    model = build("mllama_text_model", torch.float32)
    assert model.base_model is model and decoder_of(model) is model.model


def test_padding_that_no_mask_tells_of_is_refused_where_positions_are_counted_by_it() -> None:
    from ds_hetero.errors import BatchError
    from ds_hetero.frameworks.transformers.model.embeddings import position_counter, with_positions

    count = position_counter(make("roberta").base_model)
    batch = {"input_ids": torch.tensor([[5, 6, 7, 1, 1]])}
    with pytest.raises(BatchError, match="contain padding tokens, which the model leaves out when it counts positions"):
        with_positions(count, batch)
    masked = {**batch, "attention_mask": torch.tensor([[1, 1, 1, 0, 0]])}
    assert with_positions(count, masked)["position_ids"].tolist() == [[2, 3, 4, 1, 1]]
    given = {**batch, "position_ids": torch.arange(5)[None]}
    assert with_positions(count, given) is given
    assert position_counter(make("llama").base_model) is None


def test_a_mask_of_a_shard_says_that_it_holds_no_numbers() -> None:
    from ds_hetero.errors import ModelError
    from ds_hetero.frameworks.transformers.attention import ShardedMask
    from ds_hetero.frameworks.transformers.mask_kind import MaskKind

    mask: Any = ShardedMask(None, MaskKind(True, None))  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"reads its attention mask \(its 'shape'\)"):
        mask.shape  # noqa: B018
    with pytest.raises(ModelError, match=r"reads its attention mask \(a part of it\)"):
        mask[:, :, :, :5]
    assert not hasattr(mask, "dtype") and mask.kind.causal


def test_a_mask_is_read_from_the_parts_that_made_it() -> None:
    from transformers import masking_utils

    from ds_hetero.errors import ModelError
    from ds_hetero.frameworks.transformers.mask_kind import mask_kind

    causal, full = masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function
    assert mask_kind(causal) == (True, None)
    assert mask_kind(full) == (False, None)
    window = masking_utils.sliding_window_causal_mask_function(9)
    assert mask_kind(window) == (True, 9)
    positions = torch.arange(4)[None]
    packed = masking_utils.packed_sequence_compatibility_function(window, positions, positions)
    assert mask_kind(packed) == (True, 9)
    for unknown, name in (
        (masking_utils.chunked_causal_mask_function(4, positions), "chunked_overlay"),
        (masking_utils.or_masks(causal, masking_utils.blockwise_overlay(positions)), "blockwise_overlay, or_masks"),
        (masking_utils.and_masks(causal, lambda b, h, q, k: q > k), "<lambda>"),
    ):
        with pytest.raises(ModelError, match=name):
            mask_kind(unknown)
