"""flash-attn 3 leaves SMs to messages by an argument that releases may lack; torch's dispatcher checks the calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch

from ds_hetero.batch.tiles import CAUSAL
from ds_hetero.runtime.attention.kernels import MESSAGE_SMS, SavedForward, Scores, beside_messages, flash_attn
from ds_hetero.runtime.attention.kernels.flash_attn import FlashAttnKernel
from ds_hetero.runtime.attention.kernels.plain import plain_backward, plain_forward
from ds_hetero.runtime.attention.kernels.torch_native import TorchKernel

# As torch reads them from hopper/flash_attn_interface.py of Dao-AILab/flash-attention, commit 01afd16d.
_LENGTHS = "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None"
_WINDOW = "SymInt window_size_left=-1, SymInt window_size_right=-1"
FORWARD = (
    "_flash_attn_forward(Tensor q, Tensor k, Tensor v, Tensor? k_new=None, Tensor? v_new=None, Tensor? qv=None, "
    f"Tensor? out_=None, {_LENGTHS}, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, Tensor? seqused_k=None, "
    "SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, Tensor? page_table=None, Tensor? kv_batch_idx=None, "
    "Tensor? leftpad_k=None, Tensor? rotary_cos=None, Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, "
    "Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None, float? softmax_scale=None, "
    f"bool causal=False, {_WINDOW}, SymInt attention_chunk=0, float softcap=0.0, bool rotary_interleaved=True, "
    "Tensor? scheduler_metadata=None, SymInt num_splits=1, bool? pack_gqa=None{margin}) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
BACKWARD = (
    f"_flash_attn_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, {_LENGTHS}, "
    "Tensor? sequed_q=None, Tensor? sequed_k=None, SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, "
    "Tensor(a!)? dq=None, Tensor(b!)? dk=None, Tensor(c!)? dv=None, float? softmax_scale=None, bool is_causal=False, "
    f"{_WINDOW}, float softcap=0.0, bool deterministic=False{{margin}}) -> Tensor"
)
NAMES = ("_flash_attn_forward", "_flash_attn_backward")


@contextmanager
def version_3(monkeypatch: pytest.MonkeyPatch, margin: str) -> Iterator[list[Any]]:
    """Operators of flash-attn 3 on CPU; yields the margin of every call, None where the operators take none."""
    margins: list[Any] = []
    operators = torch.ops.flash_attn_3

    def arguments(name: str, given: tuple[Any, ...]) -> dict[str, Any]:
        schema = getattr(operators, name).default._schema
        values = {argument.name: argument.default_value for argument in schema.arguments}
        values |= {argument.name: value for argument, value in zip(schema.arguments, given, strict=False)}
        margins.append(values.get("sm_margin"))
        return values

    def forward(*given: Any) -> Any:
        call = arguments(NAMES[0], given)
        q, k, v = (call[name].transpose(1, 2) for name in "qkv")
        out, lse = plain_forward(q, k, v, Scores(call["softmax_scale"]), CAUSAL)
        return out.transpose(1, 2), lse, q.new_empty(0), q.new_empty(0)

    def backward(*given: Any) -> Any:
        call = arguments(NAMES[1], given)
        dout, q, k, v, out = (call[name].transpose(1, 2) for name in ("dout", "q", "k", "v", "out"))
        saved = SavedForward(q, k, v, out, call["softmax_lse"])
        grads = plain_backward(dout, saved, Scores(call["softmax_scale"]), CAUSAL)
        for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
            call[name].copy_(grad.transpose(1, 2))
        return q.new_empty(0)

    with torch.library._scoped_library("flash_attn_3", "FRAGMENT") as library:
        for name, schema, function in zip(NAMES, (FORWARD, BACKWARD), (forward, backward), strict=True):
            library.define(schema.format(margin=margin))
            library.impl(name, function, "CPU")
        module: Any = ModuleType("flash_attn_interface")
        module._flash_attn_forward = operators._flash_attn_forward
        module._flash_attn_backward = operators._flash_attn_backward
        module.flash_attn_func = (lambda q, k, v, sm_margin=0: None) if margin else (lambda q, k, v: None)
        monkeypatch.setattr(flash_attn, "_version_3", lambda device: module)
        yield margins
    for name in NAMES:  # the namespace keeps operators that it has looked up
        operators.__dict__.pop(name, None)


@pytest.mark.parametrize(
    ("margin", "passed"), [(", SymInt sm_margin=0", MESSAGE_SMS), ("", None)], ids=["takes it", "an older release"]
)
def test_only_blocks_beside_messages_leave_sms(monkeypatch: pytest.MonkeyPatch, margin: str, passed: Any) -> None:
    torch.manual_seed(0)
    q, k, v, dout = torch.randn(4, 1, 2, 24, 8)
    with version_3(monkeypatch, margin) as margins:
        results = []
        for kernel in (FlashAttnKernel(), beside_messages(FlashAttnKernel())):
            out, lse = kernel.forward(q, k, v, Scores(0.3), CAUSAL)
            results.append((out, lse, *kernel.backward(dout, SavedForward(q, k, v, out, lse), Scores(0.3), CAUSAL)))
    assert margins == [None if passed is None else 0] * 2 + [passed] * 2
    for alone, beside in zip(*results, strict=True):
        assert torch.equal(alone, beside)
    expected = plain_forward(q, k, v, Scores(0.3), CAUSAL)
    assert torch.equal(results[0][0], expected[0]) and torch.equal(results[0][1], expected[1])


def test_other_kernels_stay_as_they_are() -> None:
    kernel = TorchKernel()
    assert beside_messages(kernel) is kernel
