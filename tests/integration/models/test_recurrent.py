"""Layers that carry a state along the sequence, split unevenly: linear attention, state spaces, convolutions.

Loss and every gradient equal those of one process. In float64 this shows a fault of one part in 1e12; the modelling
files cast to float32 inside, so these casts are casts to float64 here.

Budget: 60 s.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_hetero.runtime.recurrent import scan as scans
from tests.integration.self_checking import batch_of as rows_of
from tests.integration.self_checking import verdict
from tests.integration.tiny import (
    BY_DOCUMENTS,
    UNEVEN_2,
    adam,
    assert_same_parameters,
    batches,
    ds_config,
    parameters,
    train_on_one_process,
)
from tests.support import run_deepspeed, run_ranks

_BASE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 3,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "sdpa",
}
_LINEAR_FULL_LINEAR = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_DELTA = {
    **_LINEAR_FULL_LINEAR,
    "linear_num_value_heads": 6,
    "linear_num_key_heads": 3,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 4,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3Next": {**_DELTA, **_EXPERTS, "mlp_only_layers": [0, 1, 2]},
    "Qwen3_5": _DELTA,
    "OlmoHybrid": {**_DELTA, "linear_num_key_heads": 6},
    "KimiLinear": {
        **_LINEAR_FULL_LINEAR,
        "linear_head_dim": 8,
        "linear_num_heads": 5,
        "mlp_layer_types": ["dense"] * 3,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
    "Bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "FalconH1": {**_MAMBA, "mamba_d_ssm": 64},
    "GraniteMoeHybrid": {**_MAMBA, "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 0},
    "NemotronH": {
        "layers_block_type": ["mamba", "attention", "mamba"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 8,
        "chunk_size": 16,
    },
    "Zamba2": {
        "layers_block_type": ["mamba", "hybrid", "mamba"],
        "mamba_d_state": 8,
        "mamba_ngroups": 2,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "num_mem_blocks": 1,
        "chunk_size": 16,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
    },
    "Lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
}
_LENGTH, _CUT = 150, 50
KINDS = ("plain", "packed", "left", "right", "checkpointing", "all_to_all")


def make(name: str) -> Any:
    import transformers

    torch.manual_seed(0)
    of_text = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    config = of_text(**{**_BASE, **MODELS[name]})
    model = getattr(transformers, f"{name}ForCausalLM")(config).double()
    with torch.no_grad():  # parameters that start at zero or one, and so would hide a fault
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, dtype=parameter.dtype))
    return model.train()


def batch_of(kind: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 60, (1 if kind == "packed" else 2, _LENGTH), generator=generator)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if kind == "packed":
        batch["position_ids"] = torch.cat([torch.arange(_CUT), torch.arange(_LENGTH - _CUT)])[None]
        batch["labels"][0, _CUT] = -100
    if kind in ("left", "right"):
        mask = torch.ones_like(ids)
        mask[1, :9] = 0
        mask = mask if kind == "left" else mask.flip(1)
        batch["attention_mask"] = mask
        batch["labels"][mask == 0] = -100
        batch["labels"][1, 9] = -100  # stock's last padding token predicts it, from an undefined state
    return batch


def _loss_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The model's own of the whole batch; of packed documents, each on its own."""
    if "position_ids" not in batch:
        return model(**batch).loss
    parts = batch["input_ids"].split([_CUT, _LENGTH - _CUT], dim=1)
    logits = torch.cat([model(part).logits for part in parts], dim=1)
    return torch.nn.functional.cross_entropy(logits[0, :-1], batch["labels"][0, 1:])


def schedule_of(model: Any, kind: str, tokens: tuple[int, ...]) -> dict[str, Any]:
    """A ring of ranks that hold these tokens; for packed batches one all-to-all group, for padded ones zigzag."""
    config = model.config.get_text_config()
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    groups: list[dict[str, Any]] = [
        {"ranks": [rank], "tokens": [weight], "heads": [heads]} for rank, weight in enumerate(tokens)
    ]
    if kind == "packed":
        shares = [heads - 1, 1] + [0] * (len(tokens) - 2)
        groups = [{"ranks": list(range(len(tokens))), "tokens": list(tokens), "heads": shares}]
    layout = "zigzag" if kind in ("left", "right") else "contiguous"
    return {"version": 1, "num_heads": heads, "num_kv_heads": kv_heads, "layout": layout, "groups": groups}


_QUICK = {("Qwen3Next", "packed"), ("Qwen3_5", "checkpointing"), ("Bamba", "left"), ("KimiLinear", "plain")}
CASES = [(name, kind, (3, 1)) for name in MODELS for kind in ("packed", "left")]
CASES += [(name, kind, (3, 1)) for name in ("Qwen3_5", "FalconH1") for kind in ("plain", "right", "checkpointing")]
CASES += [(name, "packed", (5, 3, 1)) for name in ("Qwen3Next", "NemotronH")]  # cuts inside groups of heads
CASES += [(name, "left", (30, 1, 1)) for name in ("Qwen3_5", "Bamba")]  # no heads; shards shorter than a convolution
CASES += [(name, "plain", (1, 0)) for name in ("KimiLinear", "Zamba2")]  # no tokens
CASES += [("Bamba", "packed", (5, 0, 1)), ("NemotronH", "right", (5, 3, 1))]  # states pass over a rank; zigzag
CASES += [("FalconH1", "all_to_all", (3, 1))]  # heads for tokens, though states could be passed on


@pytest.mark.sweep(keep=8)
@pytest.mark.parametrize(
    ("name", "kind", "tokens"),
    [
        pytest.param(*case, id=", ".join(map(str, case)), marks=() if case[:2] in _QUICK else pytest.mark.slow)
        for case in CASES
    ],
)
def test_gradients_equal_those_of_the_undivided_model(name: str, kind: str, tokens: tuple[int, ...]) -> None:
    run_ranks(_check, len(tokens), name, kind, tokens)


def _check(rank: int, name: str, kind: str, tokens: tuple[int, ...]) -> None:
    import ds_hetero

    torch.float32, torch.Tensor.float = torch.float64, torch.Tensor.double  # type: ignore[misc, method-assign]
    if kind == "all_to_all":
        scans.should_pass_states = lambda *args: False
    batch, whole, model = batch_of(kind), make(name), make(name)
    loss = _loss_of(whole, batch)
    loss.backward()
    if kind == "checkpointing":
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    handle = ds_hetero.register()
    handle.registry.prepare(
        model, {"heterogeneity": {"schedule": schedule_of(model, kind, tokens), "verify": "off"}}, {}
    )
    (shard,) = handle.dataloader([batch])
    ours = handle.loss(model(**{**shard, "labels": shard["shift_labels"]}), shard)
    ours.backward()
    handle.undo()
    assert abs(float(ours - loss)) < 1e-12 * float(loss)
    largest = max(float(parameter.grad.norm()) for parameter in whole.parameters() if parameter.grad is not None)
    for (parameter, expected), own in zip(whole.named_parameters(), model.parameters(), strict=True):
        if expected.grad is None:
            assert own.grad is None or not own.grad.any(), parameter
            continue
        assert own.grad is not None, (
            f"{parameter} has no gradient here, and ZeRO's buckets are to hold the same everywhere"
        )
        grad = own.grad
        dist.all_reduce(grad)
        error = (grad / dist.get_world_size() - expected.grad).norm() / (expected.grad.norm() + 1e-3 * largest)
        assert error < 1e-11, f"{parameter} is off by {float(error):.1e}"


@pytest.mark.parametrize("name", ["Qwen3_5", pytest.param("FalconH1", marks=pytest.mark.slow)])
def test_the_self_check_passes_them_and_finds_a_layer_that_stays_on_its_rank(name: str) -> None:
    run_ranks(_check_self_check, 2, name, nccl_rules=False)


def _check_self_check(rank: int, name: str) -> None:
    from ds_hetero.frameworks.transformers.model import recurrent_layers

    for kind in ("plain", "packed", "left", "right"):
        model, batch = make(name).float(), rows_of(kind)
        said = verdict(model, {key: entry[:1] for key, entry in batch.items()}, schedule_of(model, "plain", (3, 1)))
        assert not said, (kind, said)
    recurrent_layers._CONVOLUTION, kept = "another_name", recurrent_layers._CONVOLUTION
    try:
        model = make(name).float()
        said = verdict(model, rows_of("plain"), schedule_of(model, "plain", (3, 1)))
    finally:
        recurrent_layers._CONVOLUTION = kept
    assert "the output of model.layers.0" in said, said


def test_layers_that_something_else_replaced_are_refused() -> None:
    run_ranks(_replace_layers, 2, nccl_rules=False)


def _replace_layers(rank: int) -> None:
    import ds_hetero
    from ds_hetero.errors import ModelError

    model = make("Lfm2").float()
    for layer in model.model.layers:
        if hasattr(layer, "conv"):
            layer.conv = _TokenWise()
    handle = ds_hetero.register()
    section = {"schedule": schedule_of(model, "plain", (3, 1)), "verify": "off"}
    handle.registry.prepare(model, {"heterogeneity": section}, {})
    (shard,) = handle.dataloader([batch_of("plain")])
    with pytest.raises(ModelError, match="layers of type conv of Lfm2Model did not call causal_conv1d_fn"):
        model(**{**shard, "labels": shard["shift_labels"]})
    handle.undo()


class _TokenWise(torch.nn.Module):
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states


def test_files_are_as_they_were_after_the_last_model_of_theirs() -> None:
    from transformers.models.qwen3_5 import modeling_qwen3_5 as file

    from ds_hetero.frameworks.transformers.model.recurrent_layers import wrap_functions

    before = file.causal_conv1d_fn, file.torch_chunk_gated_delta_rule
    models = make("Qwen3_5"), make("Qwen3_5")
    unwraps = [wrap_functions(model) for model in models]
    unwraps[0]()
    unwraps[0]()
    assert file.causal_conv1d_fn is not before[0]
    unwraps[1]()
    assert (file.causal_conv1d_fn, file.torch_chunk_gated_delta_rule) == before


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_training_equals_one_process(stage: int) -> None:
    run_deepspeed(_check_training, 2, stage)


def _check_training(rank: int, stage: int) -> None:
    whole, expected = batches(3), make("Qwen3_5").float()
    losses, norms = train_on_one_process(expected, [[batch] for batch in whole])
    ours, own_norms, model = _train(whole, stage, "stream")
    torch.testing.assert_close(ours, losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(own_norms, norms, rtol=1e-5, atol=0)
    assert_same_parameters(parameters(model, stage), parameters(expected))


def _train(whole: list[dict[str, Tensor]], stage: int, placement: Any) -> tuple[list[float], list[float], Any]:
    import deepspeed

    import ds_hetero

    handle, model = ds_hetero.register(), make("Qwen3_5").float()
    config = ds_config(stage, UNEVEN_2, placement=placement)
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=config)
    losses, norms = [], []
    for batch in handle.dataloader(whole, batches="same"):
        loss = handle.loss(engine(**batch), batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(float(engine.get_global_grad_norm()))
    handle.undo()
    return losses, norms, model


@pytest.mark.slow
def test_documents_placed_on_ranks_train_as_a_cut_stream() -> None:
    run_deepspeed(_check_documents, 2)


def _check_documents(rank: int) -> None:
    whole = batches(3, batch_size=1, length=60)
    for batch in whole:
        batch["position_ids"] = torch.cat([torch.arange(n) for n in (9, 31, 4, 16)])[None]
    losses, norms, _ = _train(whole, 1, "stream")
    for remap in ("never", "always"):
        placed, placed_norms, _ = _train(whole, 1, {**BY_DOCUMENTS, "remap": remap})
        torch.testing.assert_close(placed, losses, rtol=1e-5, atol=0)
        torch.testing.assert_close(placed_norms, norms, rtol=1e-5, atol=0)
