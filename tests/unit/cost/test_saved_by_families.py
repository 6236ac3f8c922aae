"""Activations that layers save: what the planner counts, beside what autograd saves of transformers' layers."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, masking_utils

from ds_hetero.cost.terms.layer_memory import LayerShare, layer_memory
from ds_hetero.cost.workload import Workload
from ds_hetero.models.shapes import ModelSpec
from tests.families import Family, built

MAX_SAVED_ERROR = 0.01  # rotary tables, indices of experts and lengths of tokens are not counted
NUM_TOKENS = 4096  # so many that a router's fp32 copy of its weight, which is not counted either, is small beside them
KERNEL = "saves_as_a_kernel"
TYPES = (
    *("llama", "qwen2", "gemma2", "gemma3_text", "mistral"),
    *("phi3", "olmo3", "apertus", "gpt_oss", "deepseek_v3"),
)
OTHER_TYPES = (
    *(
        "arcee",
        "dots1",
        "exaone4",
        "exaone_moe",
        "flex_olmo",
        "gemma",
        "glm4",
        "glm4_moe",
        "helium",
        "hunyuan_v1_dense",
    ),
    *("hyperclovax", "hy_v3", "lfm2", "minimax_m2", "mixtral", "olmo2", "olmoe", "qwen3", "solar_open", "stablelm"),
    *("starcoder2",),
)


@pytest.mark.parametrize("model_type", TYPES)
def test_layers_of_ten_families_save_what_autograd_saves(model_type: str) -> None:
    _expect_saved(model_type)


@pytest.mark.sweep(keep=5)
@pytest.mark.parametrize("model_type", OTHER_TYPES)
def test_layers_of_other_families_save_what_autograd_saves(model_type: str) -> None:
    _expect_saved(model_type)


def _expect_saved(model_type: str) -> None:
    family = Family(model_type)
    spec = family.planned()
    assert isinstance(spec, ModelSpec)
    work = Workload(seq_len=NUM_TOKENS, zero_stage=1, activation_checkpointing=False)
    counted = layer_memory(spec, work, LayerShare.of_cut(spec, work, 1)).all_layers_saved_bytes
    assert float(np.sum(counted)) == pytest.approx(_saved_bytes(family), rel=MAX_SAVED_ERROR)


class _Kernel(torch.autograd.Function):
    """Saves what a kernel of attention saves: queries, keys, values, its output, and the log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # type: ignore[override]
        out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1])
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:3], dtype=torch.float32))
        return out


def _attention(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return _Kernel.apply(q, k, v), None


def _saved_bytes(family: Family) -> int:
    """Return the bytes of the tensors that autograd saves in the layers of a model on the meta device, without weights.

    A storage that is saved twice counts once.
    """
    AttentionInterface.register(KERNEL, _attention)
    model = built(family).to(torch.bfloat16).train()
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = KERNEL
            module.config._experts_implementation = "grouped_mm"
    layers = max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=_num_parameters)
    weights = {x.untyped_storage()._cdata for x in (*model.parameters(), *model.buffers())}
    saved: dict[int, Tensor] = {}  # by storage; kept, so that no storage gets the number of a freed one
    depth = 0

    def enter(*_: Any) -> None:
        nonlocal depth
        depth += 1

    def leave(*_: Any) -> None:
        nonlocal depth
        depth -= 1

    def note(tensor: Tensor) -> Tensor:
        number = tensor.untyped_storage()._cdata
        if depth and number not in weights:
            saved.setdefault(number, tensor)
        return tensor

    for layer in layers:
        layer.register_forward_pre_hook(enter)
        layer.register_forward_hook(leave)
    token_ids = torch.zeros(1, NUM_TOKENS, dtype=torch.long, device="meta")
    # It looks for restarts of positions, which are numbers that a tensor without data has not.
    no_packing = mock.patch.object(masking_utils, "find_packed_sequence_indices", lambda positions: None)
    with no_packing, torch.device("meta"), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(input_ids=token_ids, use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
