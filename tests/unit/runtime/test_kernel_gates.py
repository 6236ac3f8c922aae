"""Which kernel runs where: each gate by its reason, and calls that fit the schemas of torch's operators."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import kernel_gates
from ds_hetero.batch.tiles import CAUSAL, FULL, Band
from ds_hetero.runtime.attention.kernels import KERNELS, PackedBlocks, SavedForward, Scores, rates_of, select
from ds_hetero.runtime.attention.kernels import cudnn as cudnn_module
from ds_hetero.runtime.attention.kernels.cudnn import CudnnKernel, Operators, block_refusal, cudnn_refusal, of_torch
from ds_hetero.runtime.attention.kernels.flash_attn import flash_attn_refusal
from ds_hetero.runtime.attention.kernels.plain import plain_backward, plain_forward
from ds_hetero.runtime.attention.kernels.torch_cuda import flash_refusal

CUDA = torch.device("cuda")
BF16 = (CUDA, torch.bfloat16, 128, None)
Card = Callable[..., None]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    """A card that torch believes to have: its compute capability, cuDNN's version, and what replaces flash."""

    def have(capability: tuple[int, int], cudnn: int | None = 91900, impl: str | None = None) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
        monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: impl, raising=False)

    return have


# --- cuDNN ------------------------------------------------------------------------------------------


def test_gates_of_cudnn(card: Card) -> None:
    card((9, 0))
    assert cudnn_refusal(*BF16) is None
    assert "on CUDA devices, not on cpu" in str(cudnn_refusal(torch.device("cpu"), *BF16[1:]))
    assert "does not cap scores" in str(cudnn_refusal(*BF16[:3], 50.0))
    assert "up to 128, not 192" in str(cudnn_refusal(CUDA, torch.bfloat16, 192, None))
    assert "not torch.float32" in str(cudnn_refusal(CUDA, torch.float32, 128, None))
    card((9, 0), cudnn=91500)
    assert "cuDNN 9.15.1 or newer is needed, found 9.15.0" in str(cudnn_refusal(*BF16))
    card((9, 0), cudnn=None)
    assert "found none" in str(cudnn_refusal(*BF16))
    card((10, 0))
    assert cudnn_refusal(*BF16) is None
    for capability in ((8, 0), (8, 9), (12, 0)):
        card(capability)
        assert "is used on Hopper" in str(cudnn_refusal(*BF16))


def test_cudnn_runs_only_where_it_is_named(card: Card) -> None:
    card((9, 0))
    assert select(*BF16, None).name != "cudnn"
    assert select(*BF16, "cudnn").name == "cudnn"
    assert rates_of(select(*BF16, "cudnn"), *BF16) == "cudnn"


@pytest.mark.parametrize(
    ("queries", "keys", "blocks", "reason"),
    [
        (40, 40, CAUSAL, None),
        (24, 50, FULL, None),
        (24, 50, CAUSAL, "causal squares"),
        (40, 40, Band(-8, 0), "causal squares"),
        (5, 5, PackedBlocks.of_sizes((3, 2), (3, 2), (CAUSAL, CAUSAL)), "causal squares"),
        (1, 9, FULL, "single query"),
        (9, 1, FULL, "single query"),
    ],
)
def test_blocks_that_cudnn_takes(queries: int, keys: int, blocks: Any, reason: str | None) -> None:
    q, k = torch.empty(1, 4, queries, 64, dtype=torch.bfloat16), torch.empty(1, 2, keys, 64, dtype=torch.bfloat16)
    refused = block_refusal(q, k, Scores(0.125), blocks)
    assert refused is None if reason is None else reason in str(refused)


def test_other_blocks_run_on_the_flash_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(cudnn_module, "flash_forward", lambda *call: ran.append("forward"))
    monkeypatch.setattr(cudnn_module, "flash_backward", lambda *call: ran.append("backward"))
    q = torch.empty(1, 4, 40, 64, dtype=torch.bfloat16)
    CudnnKernel().forward(q, q, q, Scores(0.125), Band(-8, 0))
    CudnnKernel().backward(q, SavedForward(q, q, q, q, q[..., 0].float()), Scores(0.125), Band(-8, 0))
    assert ran == ["forward", "backward"]


@pytest.mark.parametrize(("queries", "keys", "band"), [(40, 40, CAUSAL), (24, 50, FULL)])
@pytest.mark.parametrize("lse_has_a_dimension_more", [True, False])
def test_calls_of_cudnn_fit_its_schemas(queries: int, keys: int, band: Band, lse_has_a_dimension_more: bool) -> None:
    """torch's operators take the arguments, on tensors without numbers; the numbers are those of plain operations."""
    stock = of_torch()

    def meta(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in tensors]

    def forward(q: Any, k: Any, v: Any, *rest: Any, scale: float) -> Any:
        assert stock.forward(*meta(q, k, v), *rest, scale=scale)[0].shape == q.shape
        out, lse = plain_forward(q, k, v, Scores(scale), band)
        return out, lse.unsqueeze(-1) if lse_has_a_dimension_more else lse

    def backward(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *rest: Any, scale: float) -> Any:
        shapes = [x.shape for x in stock.backward(*meta(dout, q, k, v, out, lse), *rest, scale=scale)]
        assert shapes == [q.shape, k.shape, v.shape] and lse.shape == (*q.shape[:3], 1) and lse.is_contiguous()
        assert out.stride() == dout.stride()
        return plain_backward(dout, SavedForward(q, k, v, out, lse.squeeze(-1)), Scores(scale), band)

    q, dout = torch.randn(2, 1, queries, 4, 64).bfloat16().transpose(2, 3).contiguous().transpose(2, 3).transpose(2, 3)
    k, v = torch.randn(2, 1, 2, keys, 64).bfloat16()
    scores, kernel = Scores(0.125), CudnnKernel(Operators(forward, backward))
    out, lse = kernel.forward(q, k, v, scores, band)
    assert lse.shape == (1, 4, queries)
    grads = kernel.backward(dout, SavedForward(q, k, v, out, lse), scores, band)
    expected = plain_backward(dout, SavedForward(q, k, v, out, lse), scores, band)
    assert all(torch.equal(got, want) for got, want in zip(grads, expected, strict=True))


# --- FlashAttention 3 and 4 -------------------------------------------------------------------------


def test_what_replaces_torchs_flash_operator_decides_where_it_runs(card: Card) -> None:
    for capability, impl, works in [
        ((9, 0), "FA3", True),
        ((8, 0), "FA3", False),
        ((10, 0), "FA3", False),
        ((9, 0), "FA4", True),
        ((10, 0), "FA4", True),
        ((12, 0), "FA4", False),
        ((9, 0), "FA5", False),
        ((8, 0), None, True),
    ]:
        card(capability, impl=impl)
        refused = flash_refusal(CUDA, torch.bfloat16, 128)
        assert (refused is None) == works
        assert works or f'replaced by "{impl}"' in str(refused)
        if works:
            expected = {None: "torch", "FA3": "flash_attn_3", "FA4": "flash_attn_4"}[impl]
            assert rates_of(select(*BF16, "torch"), *BF16) == expected


def test_flash_attn_4_alone_is_refused_with_the_way_to_use_it(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    from ds_hetero.runtime.attention.kernels import flash_attn

    def version(name: str) -> str:
        if name == "flash-attn-4":
            return "4.0.0"
        raise importlib.metadata.PackageNotFoundError(name)

    card((10, 0))
    flash_attn._version_2.cache_clear()
    monkeypatch.setattr(importlib.metadata, "version", version)
    refused = str(flash_attn_refusal(*BF16))
    flash_attn._version_2.cache_clear()
    assert "flash-attn is not installed" in refused and 'activate_flash_attention_impl("FA4")' in refused


def test_the_profiles_key_names_a_newer_version(monkeypatch: pytest.MonkeyPatch) -> None:
    from ds_hetero.profiler.kernel_probe import KernelProbe

    kernel: Any = SimpleNamespace(name="flash_attn")
    assert KernelProbe(kernel, 128, None, "flash_attn_2").name == "flash_attn"
    assert KernelProbe(kernel, 128, None, "flash_attn_3").name == "flash_attn (flash_attn_3)"


def test_flash_calls_fit_the_schemas_of_torch() -> None:
    """Every argument that the flash calls give by name is in the operators' schemas; the number by position fits."""
    aten = torch.ops.aten
    for operator, positional in ((aten._flash_attention_forward, 10), (aten._flash_attention_backward, 14)):
        arguments = operator.default._schema.arguments
        by_position = [argument.name for argument in arguments if not argument.kwarg_only]
        assert len(by_position) == positional
        by_name = {argument.name for argument in arguments if argument.kwarg_only}
        assert {"scale", "window_size_left", "window_size_right"} <= by_name
    assert [entry.name for entry in KERNELS] == ["flash_attn", "torch", "triton", "cudnn"]


def test_the_tables_of_the_docs_are_those_of_the_code() -> None:
    page = kernel_gates.PAGE.read_text(encoding="utf-8")
    assert kernel_gates.with_tables(page) == page, "run python -m benchmarks.kernel_gates --write"


def test_a_rank_runs_what_is_planned_for_it_or_the_table_names_the_difference() -> None:
    for card in kernel_gates.CARDS:
        for packages, requested in kernel_gates.SETTINGS.values():
            *operators, planned = kernel_gates.row(card, packages, requested)
            if operators[0] == "refused":
                continue
            is_equal = "flash-attn 3" not in operators and "cuDNN" not in operators
            assert ("name it" in planned) != is_equal, (card, operators, planned)
