"""The engine checks itself: models that the ranks compute differently are refused by the module that differs.

Budget: 60 s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.integration.tiny import ONE_GROUP_2, UNEVEN_2, VOCAB, adam, batches, ds_config
from tests.support import run_deepspeed, run_ranks

# Both in CI; one in a quick run.
DTYPES = pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "attention_dropout": 0.0,
}
_KV = {"num_key_value_heads": 2}
_ESM = {"pad_token_id": 1, "mask_token_id": 5, "position_embedding_type": "absolute"}

# Config class, model class, changes.
EXACT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", _KV),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**_KV, "head_dim": 16}),
    "mistral window": ("MistralConfig", "MistralForCausalLM", {**_KV, "sliding_window": 16}),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {**_KV, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"attn_pdrop": 0.0, "n_embd": 32, "n_head": 4, "n_layer": 2}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**_KV, "head_dim": 8, "attn_implementation": "eager"}),
    "bert": ("BertConfig", "BertForMaskedLM", {}),
    "token classes": ("BertConfig", "BertForTokenClassification", {}),
}

# The same, and what the message names.
SILENTLY_WRONG: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "init_std": 0.3, "pad_token_id": 0},
        "output of model.decoder.layers.0.self_attn",
    ),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", {}, "output of roberta.embeddings.position_embeddings"),
    "camembert": ("CamembertConfig", "CamembertForMaskedLM", {}, "output of roberta.embeddings.position_embeddings"),
    "esm": ("EsmConfig", "EsmForMaskedLM", {**_ESM, "token_dropout": False}, "esm.embeddings"),
    "esm token dropout": (
        "EsmConfig",
        "EsmForMaskedLM",
        {**_ESM, "position_embedding_type": "rotary", "token_dropout": True},
        "output of esm.embeddings",
    ),
    "electra": ("ElectraConfig", "ElectraForPreTraining", {"embedding_size": 32}, "gradient at"),
    "gpt2 double heads": (
        "GPT2Config",
        "GPT2DoubleHeadsModel",
        {"attn_pdrop": 0.0, "n_embd": 32, "n_head": 4, "n_layer": 2},
        "gradient at",
    ),
    "mobilebert": (
        "MobileBertConfig",
        "MobileBertForMaskedLM",
        {"embedding_size": 16, "intra_bottleneck_size": 32, "true_hidden_size": 32, "num_feedforward_networks": 1},
        "output of mobilebert.embeddings.embedding_transformation",
    ),
}


def _make(entry: tuple[Any, ...], dtype: torch.dtype = torch.float32) -> Any:
    import transformers

    config, model, changes = entry[:3]
    torch.manual_seed(0)
    settings = getattr(transformers, config)(**{"attn_implementation": "sdpa", **_SIZES, **changes})
    return getattr(transformers, model)(settings).to(dtype).train()


def _batch(kind: str = "plain", labels: int = VOCAB) -> dict[str, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(6, VOCAB, (3, 151))
    ids[:, ::7] = 5  # the mask token of masked-language models
    batch = {"input_ids": ids, "labels": ids.clone() if labels == VOCAB else ids.remainder(labels)}
    if kind in ("left", "right"):
        mask = torch.ones_like(ids)
        mask[1, :120] = mask[2, :7] = 0
        batch["attention_mask"] = mask if kind == "left" else mask.flip(1)
        batch["labels"] = ids.masked_fill(batch["attention_mask"] == 0, -100)
    if kind == "packed":
        batch["position_ids"] = torch.cat([torch.arange(length) for length in (70, 41, 40)])[None].repeat(3, 1)
    if kind == "prompt":
        batch["labels"][:, :140] = -100
    return batch


def _verdict(model: Any, batch: Any, schedule: dict[str, Any], spoil: Callable[[Any], None] | None = None) -> str:
    """Return what the self-check says of a model, empty if nothing; the model must be as it was afterwards."""
    import ds_hetero
    from ds_hetero.errors import ModelError
    from ds_hetero.integrations.transformers.self_check import check_first_batch
    from ds_hetero.integrations.transformers.sharded_model import ShardedModel
    from ds_hetero.plans import Plan
    from ds_hetero.runtime.replica import make_replica
    from ds_hetero.schedule import Schedule

    ds_hetero.register()
    heads = model.config.num_attention_heads
    fitting = {**schedule, "num_kv_heads": getattr(model.config, "num_key_value_heads", None) or heads}
    if spoil is not None:
        spoil(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    sharded = ShardedModel(model, make_replica(Plan.of_replicas([Schedule.from_dict(fitting)])), None)
    try:
        check_first_batch(sharded, batch)
        return ""
    except ModelError as error:
        return str(error)
    finally:
        sharded.restore()
        assert model.training and all(parameter.grad is None for parameter in model.parameters())
        assert all(parameter.requires_grad for parameter in model.parameters())
        assert torch.equal(state, torch.get_rng_state()) and sharded.latest_positions is None
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def _check(rank: int, entry: tuple[Any, ...], kind: str, schedule: dict[str, Any], dtype: str) -> str:
    labels = 2 if entry[1].endswith(("PreTraining", "TokenClassification")) else VOCAB
    return _verdict(_make(entry, getattr(torch, dtype)), _batch(kind, labels), schedule)


@DTYPES
@pytest.mark.parametrize("name", EXACT)
def test_a_model_that_is_exact_passes(name: str, dtype: str) -> None:
    assert run_ranks(_check, 2, EXACT[name], "plain", UNEVEN_2, dtype) == ["", ""]


@pytest.mark.parametrize(("kind", "schedule"), [("left", 0), ("right", 0), ("packed", 0), ("prompt", 0), ("packed", 1)])
def test_padding_packing_and_prompts_raise_no_alarm(kind: str, schedule: int) -> None:
    assert run_ranks(_check, 2, EXACT["llama"], kind, (UNEVEN_2, ONE_GROUP_2)[schedule], "float32") == ["", ""]


@DTYPES
@pytest.mark.parametrize("name", SILENTLY_WRONG)
def test_a_model_that_would_train_on_something_else_is_refused(name: str, dtype: str) -> None:
    texts = run_ranks(_check, 2, SILENTLY_WRONG[name], "plain", UNEVEN_2, dtype)
    assert texts[0] == texts[1]
    assert SILENTLY_WRONG[name][3] in texts[0] and "computes something else when it is split" in texts[0]


class _Shifted(nn.Module):
    """Looks at the neighbour, as a convolution does."""

    def __init__(self, inner: nn.Module, by: int) -> None:
        super().__init__()
        self.inner, self.by = inner, by

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.inner(x + 0.1 * x.roll(self.by, dims=1), *args, **kwargs)


class _Pooled(nn.Module):
    """Mixes in a statistic of the whole sequence."""

    def __init__(self, inner: nn.Module, statistic: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.statistic = inner, statistic

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + 0.1 * self.statistic(x))


class _Spoiled(nn.Module):
    def __init__(self, inner: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.change = inner, change

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.change(self.inner(*args, **kwargs))


def _plant(kind: str) -> Callable[[Any], None]:
    def plant(model: Any) -> None:
        layer = model.model.layers[1]
        if kind == "neighbour to the left":
            layer.mlp = _Shifted(layer.mlp, 1)
        elif kind == "neighbour to the right":
            layer.mlp = _Shifted(layer.mlp, -1)
        elif kind == "mean over the sequence":
            layer.mlp = _Pooled(layer.mlp, lambda x: x.mean(1, keepdim=True))
        elif kind == "largest of the sequence":
            layer.mlp = _Pooled(layer.mlp, lambda x: x.amax(1, keepdim=True))
        elif kind == "norm over the sequence":
            layer.input_layernorm = _Spoiled(layer.input_layernorm, lambda x: x / x.norm(dim=1, keepdim=True))
        elif kind == "sum of what came before":
            layer.mlp = _Pooled(layer.mlp, lambda x: x.cumsum(1))
        elif kind == "first token":
            layer.mlp = _Pooled(layer.mlp, lambda x: x[:, :1])
        elif kind == "own numbering":
            layer.mlp = _Pooled(layer.mlp, lambda x: torch.arange(x.shape[1], dtype=x.dtype)[None, :, None] / 10)
        elif kind == "halves swapped":
            layer.mlp = _Pooled(layer.mlp, lambda x: x.roll(x.shape[1] // 2, dims=1))
        elif kind == "length":
            layer.mlp = _Pooled(layer.mlp, lambda x: x * (x.shape[1] ** 0.5))

    return plant


PLANTED = (
    "neighbour to the left",
    "neighbour to the right",
    "mean over the sequence",
    "largest of the sequence",
    "norm over the sequence",
    "sum of what came before",
    "first token",
    "own numbering",
    "halves swapped",
    "length",
)


@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_fault_is_found_by_its_module(kind: str) -> None:
    texts = run_ranks(_check_planted, 2, kind)
    assert texts[0] == texts[1]
    module = "model.layers.1.input_layernorm" if kind == "norm over the sequence" else "model.layers.1.mlp"
    assert f"output of {module}" in texts[0]


def _check_planted(rank: int, kind: str) -> str:
    return _verdict(_make(EXACT["llama"]), _batch(), UNEVEN_2, _plant(kind))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_steps_after_the_check_are_those_without_it_to_the_bit(stage: int) -> None:
    first, second = run_deepspeed(_train_twice, 2, stage)
    assert first[0] == first[1] and second[0] == second[1]
    assert len(first[0]) == 3


def _train_twice(rank: int, stage: int) -> list[list[tuple[float, Any]]]:
    """Return losses and gradient norms of a mixture of experts, with the check and without it."""
    import deepspeed

    import ds_hetero

    handle = ds_hetero.register()
    results = []
    for verify in ("first_batch", "off"):
        model = _make(EXACT["mixtral"])
        config = ds_config(stage, UNEVEN_2)
        config["heterogeneity"]["verify"] = verify
        engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=config)
        steps = []
        for batch in handle.dataloader(batches(3), batches="same"):
            loss = handle.loss(engine(**batch), batch)
            engine.backward(loss)
            engine.step()
            steps.append((float(loss.detach()), engine.get_global_grad_norm()))
        results.append(steps)
    return results


def test_a_refusal_reaches_the_loop_of_every_rank() -> None:
    texts = run_deepspeed(_train_opt, 2)
    assert texts[0] == texts[1]
    assert "OPTForCausalLM computes something else" in texts[0] and '"verify": "off"' in texts[0]


def _train_opt(rank: int) -> str:
    import deepspeed

    import ds_hetero
    from ds_hetero.errors import ModelError

    handle = ds_hetero.register()
    model = _make(SILENTLY_WRONG["opt"])
    config = ds_config(1, {**UNEVEN_2, "num_kv_heads": 4})
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=config)
    try:
        for batch in handle.dataloader(batches(1), batches="same"):
            engine(**batch)
    except ModelError as error:
        return str(error)
    return "trained"
