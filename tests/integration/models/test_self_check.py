"""The engine checks itself: models that the ranks compute differently are refused by the module that differs.

Budget: 40 s in a quick run, 240 s in CI.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.integration.self_checking import batch_of, verdict
from tests.integration.tiny import ONE_GROUP_2, UNEVEN_2, VOCAB, adam, batches, ds_config
from tests.support import ROOT, run_deepspeed, run_ranks

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

# They count positions from ``padding_idx + 1``.
_ROBERTAS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("roberta", "Roberta", {}),
    ("roberta-prelayernorm", "RobertaPreLayerNorm", {}),
    ("camembert", "Camembert", {}),
    ("xlm-roberta", "XLMRoberta", {}),
    ("xlm-roberta-xl", "XLMRobertaXL", {}),
    ("data2vec-text", "Data2VecText", {}),
    ("xmod", "Xmod", {"languages": ("en_XX",), "default_language": "en_XX"}),
)
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
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "init_std": 0.3, "pad_token_id": 0},
    ),
    "esm": ("EsmConfig", "EsmForMaskedLM", {**_ESM, "token_dropout": False}),
    **{
        f"{family} {head}": (f"{name}Config", f"{name}For{head}", {**changes, "is_decoder": head == "CausalLM"})
        for family, name, changes in _ROBERTAS
        for head in ("MaskedLM", "CausalLM", "TokenClassification")
    },
}

# The same, and what the message names.
SILENTLY_WRONG: dict[str, tuple[str, str, dict[str, Any], str]] = {
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


# Refused at the start by their type; a model like them, which no rule knows, is told in its first forward.
_UNUSUAL_ATTENTION: dict[str, tuple[str, str, dict[str, Any]]] = {
    "doge": ("DogeConfig", "DogeForCausalLM", _KV),
    "jetmoe": ("JetMoeConfig", "JetMoeForCausalLM", {**_KV, "kv_channels": 8, "num_local_experts": 4}),
}


def test_attention_that_is_not_what_the_config_says_is_told_by_its_layer() -> None:
    first, second = run_ranks(_verdicts, 2, _UNUSUAL_ATTENTION, "plain", UNEVEN_2, "float32")
    assert first == second
    assert "a layer of the model reads its attention mask (its 'dtype') to build another" in first["doge"]
    assert "JetMoeAttention computes attention with 4 heads over 4 key/value heads" in first["jetmoe"]


def test_padding_that_predicts_a_label_is_told_where_it_makes_a_difference() -> None:
    (eager, sdpa), (other, _) = run_ranks(_warnings, 2)
    assert "padding on the left predicts the first token of each row. In one process, Gemma2ForCausalLM" in eager
    assert "Set the labels of first tokens to -100" in eager
    assert sdpa == other == ""


def _warnings(rank: int) -> tuple[str, str]:
    """What is said of left padding, with eager attention and with sdpa."""
    from ds_hetero.frameworks.transformers.self_check.check import logger

    texts = []
    for name in ("gemma2", "llama"):
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record, said=said: said.append(record.getMessage())  # type: ignore[method-assign]
        logger.addHandler(handler)
        assert verdict(_make(EXACT[name]), batch_of("left"), UNEVEN_2) == ""
        logger.removeHandler(handler)
        texts.append("".join(said))
    return texts[0], texts[1]


def _verdicts(rank: int, entries: dict[str, tuple[Any, ...]], kind: str, schedule: Any, dtype: str) -> dict[str, str]:
    """What the self-check says of each model, in one world."""
    texts = {}
    for name, entry in entries.items():
        num_labels = 2 if entry[1] == "ElectraForPreTraining" or entry[1].endswith("TokenClassification") else VOCAB
        batch = batch_of(kind, num_labels)
        texts[name] = verdict(_make(entry, getattr(torch, dtype)), batch, schedule)
    return texts


# One family stands for those that are built alike; the rest are run in CI.
_OTHER_ROBERTAS = tuple(f"{family} " for family, *_ in _ROBERTAS[1:])


@DTYPES
@pytest.mark.parametrize("others", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_models_that_are_exact_pass(others: bool, dtype: str) -> None:
    models = {name: entry for name, entry in EXACT.items() if name.startswith(_OTHER_ROBERTAS) == others}
    assert run_ranks(_verdicts, 2, models, "plain", UNEVEN_2, dtype) == [dict.fromkeys(models, "")] * 2


def test_losses_in_single_precision_raise_no_alarm_in_a_model_of_double_precision() -> None:
    llama = {"llama": EXACT["llama"]}
    assert run_ranks(_verdicts, 2, llama, "plain", UNEVEN_2, "float64") == [{"llama": ""}] * 2


@pytest.mark.parametrize(("kind", "schedule"), [("left", 0), ("right", 0), ("packed", 0), ("prompt", 0), ("packed", 1)])
def test_padding_packing_and_prompts_raise_no_alarm(kind: str, schedule: int) -> None:
    llama = {"llama": EXACT["llama"]}
    texts = run_ranks(_verdicts, 2, llama, kind, (UNEVEN_2, ONE_GROUP_2)[schedule], "float32")
    assert texts == [{"llama": ""}] * 2


@DTYPES
def test_models_that_would_train_on_something_else_are_refused(dtype: str) -> None:
    first, second = run_ranks(_verdicts, 2, SILENTLY_WRONG, "plain", UNEVEN_2, dtype)
    assert first == second
    for name, text in first.items():
        assert "computes something else when it is split" in text, name
        assert SILENTLY_WRONG[name][3] in text, (name, text)


class _Changed(nn.Module):
    """A module whose input or output is changed."""

    def __init__(
        self, inner: nn.Module, before: Callable[[Tensor], Tensor] | None, after: Callable[[Tensor], Tensor] | None
    ) -> None:
        super().__init__()
        self.inner, self.before, self.after = inner, before, after

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        out = self.inner(x if self.before is None else self.before(x), *args, **kwargs)
        return out if self.after is None else self.after(out)


def _smeared(x: Tensor) -> Tensor:
    """Every token with a tenth of each neighbour, by a convolution that no module holds."""
    weight = x.new_tensor([0.1, 0.8, 0.1]).expand(x.shape[-1], 1, 3)
    return nn.functional.conv1d(x.transpose(1, 2), weight, padding=1, groups=x.shape[-1]).transpose(1, 2)


def _by_index(x: Tensor) -> Tensor:
    """Every token scaled by its place in the tensor, as a bias that grows with the local index would."""
    return x * (1 + 0.01 * torch.arange(x.shape[1], dtype=x.dtype))[None, :, None]


# What is done to the input of the second layer's MLP.
_MLP_FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum of what came before": lambda x: x + 0.1 * x.cumsum(1),
    "neighbour to the left": lambda x: x + 0.1 * x.roll(1, dims=1),
    "neighbour to the right": lambda x: x + 0.1 * x.roll(-1, dims=1),
    "halves swapped": lambda x: x + 0.1 * x.roll(x.shape[1] // 2, dims=1),
    "mean over the sequence": lambda x: x - x.mean(1, keepdim=True),
    "largest of the sequence": lambda x: x / x.abs().amax(1, keepdim=True),
    "length": lambda x: x * (1 + x.shape[1] ** -0.5),
    "own numbering": lambda x: x + torch.arange(x.shape[1], dtype=x.dtype)[None, :, None].sin() / 10,
    "convolution": _smeared,
    "first token": lambda x: x + 0.1 * x[:, :1],
}


def _spoil_mlp(kind: str, model: Any) -> None:
    layer = model.model.layers[1]
    layer.mlp = _Changed(layer.mlp, _MLP_FAULTS[kind], None)


def _norm_over_sequence(model: Any) -> None:
    layer = model.model.layers[1]
    layer.input_layernorm = _Changed(layer.input_layernorm, None, lambda x: x / x.norm(dim=1, keepdim=True))


def _bias_by_local_index(model: Any) -> None:
    attention = model.model.layers[0].self_attn
    attention.k_proj = _Changed(attention.k_proj, None, _by_index)


def _positions_of_its_own(model: Any) -> None:
    """Rotary embeddings by the number of a token in the tensor plus two, whatever ``position_ids`` say."""
    rotary = model.model.rotary_emb
    stock = rotary.forward
    rotary.forward = lambda x, position_ids: stock(x, torch.arange(x.shape[1])[None] + 2)


def _with_loss_in_forward(model: Any, loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """Let a subclass make another loss of logits, labels and its own loss; `loss_function` is called exactly."""
    plain = type(model).forward

    def forward(self: Any, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
        outputs = plain(self, *args, labels=labels, **kwargs)
        if labels is not None:
            outputs.loss = loss(outputs.logits, labels, outputs.loss)
        return outputs

    model.__class__ = type(type(model).__name__, (type(model),), {"forward": forward})


def _labels_moved_by_the_model(model: Any) -> None:
    def loss(logits: Tensor, labels: Tensor, plain: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    _with_loss_in_forward(model, loss)


def _term_in_the_loss(model: Any) -> None:
    """A spread over the sequence, as decorrelating losses are; bf16 shows what is above some per cent of a gradient."""
    weight = 0.1 if model.dtype == torch.float32 else 2.0
    _with_loss_in_forward(model, lambda logits, labels, plain: plain + weight * logits.std(dim=1).mean())


# What else is done to a Llama, and what the message names.
_FAULTS: dict[str, tuple[Callable[[Any], None], str]] = {
    **{kind: (functools.partial(_spoil_mlp, kind), "output of model.layers.1.mlp") for kind in _MLP_FAULTS},
    "norm over the sequence": (_norm_over_sequence, "output of model.layers.1.input_layernorm"),
    "bias by the local index": (_bias_by_local_index, "output of model.layers.0.self_attn.k_proj"),
    "positions of its own": (_positions_of_its_own, "output of model.rotary_emb"),
    "labels moved by the model": (_labels_moved_by_the_model, "gradient at"),
    "a term in the loss": (_term_in_the_loss, "gradient at"),
}


@DTYPES
def test_planted_faults_are_found_by_their_modules(dtype: str) -> None:
    first, second = run_ranks(_check_planted, 2, dtype)
    assert first == second
    assert {kind: _FAULTS[kind][1] in text for kind, text in first.items()} == dict.fromkeys(_FAULTS, True), first


def _check_planted(rank: int, dtype: str) -> dict[str, str]:
    texts = {}
    for kind, (spoil, _) in _FAULTS.items():
        model = _make(EXACT["llama"], getattr(torch, dtype))
        spoil(model)
        texts[kind] = verdict(model, batch_of(), UNEVEN_2)
    return texts


def _with_trained_tokens() -> Any:
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[3, 5], init_lora_weights=False)
    return get_peft_model(_make(EXACT["llama"]), settings)


def test_trained_tokens_leave_rounding_and_gradients_in_sight() -> None:
    first, second = run_ranks(_check_trained_tokens, 2)
    assert first == second
    exact, small, labels = first
    assert exact == ""
    assert "output of base_model.model.model.layers.1.mlp" in small  # rounding accounts for 2e-6 there
    assert "gradient at" in labels


def _check_trained_tokens(rank: int) -> list[str]:
    """What the check says where PEFT puts the rows of a few tokens in the place of the embedding's: without a fault,
    with one just above rounding on shards, and with one that only gradients show."""

    def spoil_shards(model: Any) -> None:
        layer = model.base_model.model.model.layers[1]
        layer.mlp = _Changed(layer.mlp, None, lambda x: x * (1 + 4e-6) if x.shape[1] < 50 else x)

    texts = []
    for spoil in (lambda model: None, spoil_shards, lambda model: _labels_moved_by_the_model(model.base_model.model)):
        model = _with_trained_tokens()
        spoil(model)
        texts.append(verdict(model, batch_of(), UNEVEN_2))
    return texts


def _adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(_make(EXACT["llama"]), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def _recomputing(reentrant: bool) -> Any:
    model = _make(EXACT["llama"])
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    return model


def _dropping() -> Any:
    """With dropout, whose random state the check must not touch."""
    config, model, changes = EXACT["gpt2"]
    return _make((config, model, {**changes, "resid_pdrop": 0.2, "embd_pdrop": 0.2}))


_TRAINED: dict[str, Callable[[], Any]] = {
    "mixture of experts": lambda: _make(EXACT["mixtral"]),
    "LoRA": _adapted,
    "reentrant": lambda: _recomputing(True),
    "non-reentrant": lambda: _recomputing(False),
    "dropout": _dropping,
    "bf16": lambda: _make(EXACT["llama"], torch.bfloat16),
}


@pytest.mark.sweep(keep=5)
@pytest.mark.parametrize(
    ("stage", "kind"),
    [
        pytest.param(stage, kind, marks=[] if kind == "mixture of experts" and stage in (1, 3) else pytest.mark.slow)
        for kind in _TRAINED
        for stage in (0, 1, 2, 3)
    ],
)
def test_steps_after_the_check_are_those_without_it_to_the_bit(stage: int, kind: str) -> None:
    for with_check, at_every_batch, without in run_deepspeed(_train_with_and_without, 2, stage, kind):
        assert with_check == at_every_batch == without
        assert len(without) == 3


def _train_with_and_without(rank: int, stage: int, kind: str) -> list[list[tuple[float, Any]]]:
    """Return losses and gradient norms with the check of the first batch, of every batch, and without it."""
    import deepspeed

    import ds_hetero

    handle = ds_hetero.register()
    results = []
    for verify in ("first_batch", "always", "off"):
        model = _TRAINED[kind]()
        heads = getattr(model.config, "num_key_value_heads", model.config.num_attention_heads)
        config = ds_config(stage, {**UNEVEN_2, "num_kv_heads": heads})
        config["heterogeneity"]["verify"] = verify
        if kind == "bf16":
            config["bf16"] = {"enabled": True}
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        torch.manual_seed(5)
        steps = []
        for batch in handle.dataloader(batches(3), batches="same"):
            loss = handle.loss(engine(**batch), batch)
            engine.backward(loss)
            engine.step()
            steps.append((float(loss.detach()), engine.get_global_grad_norm()))
        results.append(steps)
        engine.destroy()
    return results


def _plain(rows: int = 1) -> dict[str, Tensor]:
    return {name: entry[:rows] for name, entry in batch_of().items()}


def _padded() -> dict[str, Tensor]:
    return {name: entry[1:2] for name, entry in batch_of("right").items()}


def _unpadded() -> dict[str, Tensor]:
    return {**_plain(), "attention_mask": torch.ones(1, 151, dtype=torch.int64)}


def _packed(*lengths: int) -> dict[str, Any]:
    cuts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    packing = {"cu_seq_lens_q": cuts, "cu_seq_lens_k": cuts, "max_length_q": max(lengths), "max_length_k": max(lengths)}
    return {**_plain(), **packing, "position_ids": torch.cat([torch.arange(length) for length in lengths])[None]}


# By what only the last batch shows: the batches of both ranks, or of each.
_LATER: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "several rows": ([_plain(), _plain(), _plain(2)],) * 2,
    "padding": ([_unpadded(), _unpadded(), _padded()],) * 2,
    "documents": ([_packed(151), _packed(151), _packed(70, 41, 40)],) * 2,
    "an argument": ([_plain(), _plain(), _unpadded()],) * 2,
    "padding on one rank": ([_unpadded(), _unpadded(), _unpadded()], [_unpadded(), _unpadded(), _padded()]),
    "an adapter": ([_plain(), _plain(), _plain()],) * 2,
}


def test_what_only_a_later_batch_shows_is_refused_at_that_batch() -> None:
    for kinds in run_deepspeed(_meet_later_batches, 2):
        for kind, (forwards, text) in kinds.items():
            own = kind == "padding on one rank"
            assert forwards == [1] * (4 if own else 2), (kind, forwards, text)
            assert "output of model.layers.1.mlp" in text or "output of base_model" in text, (kind, text)


def _meet_later_batches(rank: int) -> dict[str, tuple[list[int], str]]:
    """By kind: forwards of the model for each batch that was trained on, and the refusal."""
    import deepspeed

    import ds_hetero
    from ds_hetero.errors import ModelError

    handle = ds_hetero.register()
    results = {}
    for kind, batches_of_ranks in _LATER.items():
        model = _make(EXACT["llama"]) if kind != "an adapter" else _with_two_adapters()
        _spoil_for(kind, model)
        trained = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        engine, *_ = deepspeed.initialize(model=model, optimizer=trained, config=ds_config(1, UNEVEN_2))
        calls: list[int] = []
        model.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        forwards, mode = [], "own" if kind == "padding on one rank" else "same"
        try:
            for batch in handle.dataloader(batches_of_ranks[rank], batches=mode):
                calls.clear()
                engine.backward(handle.loss(engine(**batch), batch))
                engine.step()
                forwards.append(len(calls))
                if kind == "an adapter" and len(forwards) == 2:
                    model.set_adapter("spoilt")
            text = "trained"
        except ModelError as error:
            text = str(error)
        results[kind] = forwards, text
        engine.destroy()
    return results


def _with_two_adapters() -> Any:
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=4, target_modules=["up_proj"], init_lora_weights=False)
    model = get_peft_model(_make(EXACT["llama"]), settings)
    model.add_adapter("spoilt", settings)
    return model


def _spoil_for(kind: str, model: Any) -> None:
    """Have the model mix neighbours in one layer where a batch is of this kind."""
    if kind == "an adapter":
        layer = model.base_model.model.model.layers[1].mlp.up_proj
        layer.lora_dropout["spoilt"] = _Changed(
            layer.lora_dropout["spoilt"], _MLP_FAULTS["neighbour to the left"], None
        )
        return
    seen: dict[str, Any] = {}
    model.model.register_forward_pre_hook(lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True)
    layer = model.model.layers[1]

    def mix(x: Tensor) -> Tensor:
        mask, packing = seen.get("attention_mask"), seen.get("cu_seq_lens_q")
        is_met = {
            "several rows": len(x) > 1,
            "padding": mask is not None and not bool(mask.all()),
            "documents": packing is not None and len(packing) > 2,
            "an argument": mask is not None,
        }
        return _MLP_FAULTS["neighbour to the left"](x) if is_met[kind.removesuffix(" on one rank")] else x

    layer.mlp = _Changed(layer.mlp, mix, None)


@pytest.mark.slow
def test_the_check_of_the_quick_start_is_little_work() -> None:
    for tokens in run_deepspeed(_tokens_of_check, 4):
        assert tokens and sum(tokens) <= 512  # the batch has 8,192 and more


def _tokens_of_check(rank: int) -> list[int]:
    """Tokens of each forward that the check of the first batch of examples/quickstart.py makes."""
    import sys

    import deepspeed

    import ds_hetero

    sys.path.insert(0, str(ROOT / "examples"))
    import corpus
    from tiny_llama import tiny_llama

    handle = ds_hetero.register()
    config = json.loads((ROOT / "ds_configs" / "zero2.json").read_text())
    data = corpus.long_files(min_tokens=8192, max_tokens=10240, count=1)
    config["heterogeneity"]["verify"] = "first_batch"
    tokens: list[int] = []
    model = tiny_llama()
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: tokens.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=config)
    loader = handle.dataloader(torch.utils.data.DataLoader(data, batch_size=1), batches="same")
    next(iter(loader))
    engine.destroy()
    return tokens


def test_a_refusal_reaches_the_loop_of_every_rank() -> None:
    texts = run_deepspeed(_train_mobilebert, 2)
    assert texts[0] == texts[1]
    assert "MobileBertForMaskedLM computes something else" in texts[0]
    assert '"checks": {"compare_every": "off"}' in texts[0]


def _train_mobilebert(rank: int) -> str:
    import deepspeed

    import ds_hetero
    from ds_hetero.errors import ModelError

    handle = ds_hetero.register()
    model = _make(SILENTLY_WRONG["mobilebert"])
    config = ds_config(1, {**UNEVEN_2, "num_kv_heads": 4})
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=config)
    try:
        for batch in handle.dataloader(batches(1), batches="same"):
            engine(**batch)
    except ModelError as error:
        return str(error)
    return "trained"
