"""How the kernels call CUDA operators and flash-attn, on stand-ins.

The stand-ins have the operators' signatures, layouts and alignment of windows, and check what the real ones take for
granted, so that our side of each call is tested without a GPU. `test_kernels.test_on_a_gpu` calls the real ones.
"""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from ds_hetero.batch.tiles import CAUSAL, FULL
from ds_hetero.runtime.attention.kernels import (
    Band,
    SavedForward,
    Scores,
    flash_attn,
    torch_cuda,
)
from ds_hetero.runtime.attention.kernels.plain import plain_backward, plain_forward
from ds_hetero.runtime.attention.kernels.torch_native import TorchKernel
from tests.unit.runtime.kernel_checks import check, check_many, strided, tensors


def flash_stand_in_forward(q, k, v, scale, left, right, softcap=0.0):
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    corner = k.shape[1] - q.shape[1]
    band = Band(None if left == -1 else corner - left, None if right == -1 else corner + right)
    out, lse = plain_forward(*(x.transpose(1, 2) for x in (q, k, v)), Scores(scale, softcap or None), band)
    return out.transpose(1, 2), lse


def flash_stand_in_backward(dout, q, k, v, out, lse, scale, left, right, softcap=0.0):
    assert lse.is_contiguous()
    assert lse.dtype == torch.float32
    assert all(x.dtype == q.dtype for x in (dout, k, v, out))
    corner = k.shape[1] - q.shape[1]
    band = Band(None if left == -1 else corner - left, None if right == -1 else corner + right)
    dout, *saved = [x.transpose(1, 2) for x in (dout, q, k, v, out)]
    grads = plain_backward(dout, SavedForward(*saved, lse), Scores(scale, softcap or None), band)
    return [x.transpose(1, 2).to(q.dtype) for x in grads]


class AtenStandIn:
    """The schemas of torch 2.13; the memory-efficient operator pads lse and knows no grouped heads."""

    def _flash_attention_forward(
        self, q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale, window_size_left, window_size_right
    ):
        assert (cu_q, cu_k, max_q, max_k, dropout, causal, debug) == (
            None,
            None,
            q.shape[1],
            k.shape[1],
            0.0,
            False,
            False,
        )
        return *flash_stand_in_forward(q, k, v, scale, window_size_left, window_size_right), None, None, None

    def _flash_attention_backward(
        self, dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, rng, unused,
        *, scale, window_size_left, window_size_right,
    ):  # fmt: skip
        assert (cu_q, cu_k, max_q, max_k, dropout, causal) == (None, None, q.shape[1], k.shape[1], 0.0, False)
        return flash_stand_in_backward(dout, q, k, v, out, lse, scale, window_size_left, window_size_right)

    def _efficient_attention_forward(
        self, q, k, v, bias, cu_q, cu_k, max_q, max_k, dropout, mask_type, with_lse, *, scale
    ):
        assert (bias, cu_q, cu_k, max_q, max_k, dropout, with_lse) == (None, None, None, None, None, 0.0, True)
        assert q.shape[2] == k.shape[2]
        out, lse = flash_stand_in_forward(q, k, v, scale, *self._window(q, k, mask_type))
        return out, torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32), value=torch.inf), None, None, 0, 0

    def _efficient_attention_backward(
        self,
        dout,
        q,
        k,
        v,
        bias,
        out,
        cu_q,
        cu_k,
        max_q,
        max_k,
        lse,
        dropout,
        seed,
        offset,
        mask_type,
        bias_grad,
        *,
        scale,
    ):
        assert (bias, cu_q, cu_k, max_q, max_k, dropout, bias_grad) == (
            None,
            None,
            None,
            q.shape[1],
            k.shape[1],
            0.0,
            False,
        )
        assert q.shape[2] == k.shape[2]
        assert lse.shape[2] % 32 == 0
        assert lse.stride(1) % 8 == 0
        assert lse[:, :, q.shape[1] :].eq(torch.inf).all()
        assert out.is_contiguous()
        lse = lse[:, :, : q.shape[1]].contiguous()
        return *flash_stand_in_backward(dout, q, k, v, out, lse, scale, *self._window(q, k, mask_type)), None

    def _window(self, q, k, mask_type):
        if mask_type == 0:
            return -1, -1
        assert mask_type == 1  # causal from the top left
        return Band(None, 0).window(q.shape[1], k.shape[1])


BLOCKS = [(40, 40, CAUSAL), (50, 40, CAUSAL), (33, 50, FULL), (300, 300, Band(-290, 0)), (70, 90, Band(-5, 60))]


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("operator", ["flash", "efficient"])
def test_cuda_operators_are_called_as_they_want_it(monkeypatch, operator, block):
    monkeypatch.setattr(torch_cuda, "_aten", AtenStandIn())
    forward, backward = (getattr(torch_cuda, f"{operator}_{way}") for way in ("forward", "backward"))
    kernel = SimpleNamespace(forward=forward, backward=backward)
    check(kernel, block, inputs=strided(*tensors(block, heads=4, kv_heads=2)) if block[0] == block[1] else None)


@pytest.mark.parametrize("rows", [64, 33])
def test_log_sum_exps_of_rows_may_lie_behind_each_other_by_head(monkeypatch, rows):
    """As tiles are added up; the operator refused them on an H200 where the rows needed no padding."""
    monkeypatch.setattr(torch_cuda, "_aten", AtenStandIn())
    dout, q, k, v = tensors((rows, rows, CAUSAL), heads=4, kv_heads=2)
    out, lse = torch_cuda.efficient_forward(q, k, v, Scores(0.3), CAUSAL)
    by_token = lse.transpose(1, 2).contiguous().transpose(1, 2)
    saved = [SavedForward(q, k, v, out, each) for each in (lse, by_token)]
    expected, found = (torch_cuda.efficient_backward(dout, each, Scores(0.3), CAUSAL) for each in saved)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_cuda_operators_accept_our_arguments():
    """On "meta" tensors; torch 2.13's own meta function of the memory-efficient backward forgets the argument `out`."""
    dout, q, k, v = (x.to("meta") for x in tensors((40, 40, CAUSAL), torch.float16, heads=4, kv_heads=2))
    for forward in (torch_cuda.flash_forward, torch_cuda.efficient_forward):
        out, lse = forward(q, k, v, Scores(0.3), CAUSAL)
        assert out.shape == q.shape
        assert lse.shape == q.shape[:3]
    grads = torch_cuda.flash_backward(dout, SavedForward(q, k, v, out, lse), Scores(0.3), CAUSAL)
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]


def flash_2_forward(
    q,
    k,
    v,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    alibi_slopes,
    return_softmax,
):
    assert (dropout_p, alibi_slopes, return_softmax) == (0.0, None, False)
    assert causal == ((window_size_left, window_size_right) == (-1, 0))
    out, lse = flash_stand_in_forward(q, k, v, softmax_scale, window_size_left, window_size_right, softcap)
    return out, lse, None, None


def flash_2_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left, window_size_right,
    softcap, alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    assert (dropout_p, alibi_slopes, deterministic) == (0.0, None, False)
    assert causal == ((window_size_left, window_size_right) == (-1, 0))
    window = (window_size_left, window_size_right)
    grads = flash_stand_in_backward(dout, q, k, v, out, softmax_lse, softmax_scale, *window, softcap)
    for x, grad in zip((dq, dk, dv), grads, strict=True):
        x.copy_(grad)


def flash_3_forward(q, k, v, k_new=None, *, softmax_scale, causal, window_size_left, window_size_right, softcap):
    assert causal == ((window_size_left, window_size_right) == (-1, 0))
    out, lse = flash_stand_in_forward(q, k, v, softmax_scale, window_size_left, window_size_right, softcap)
    return out, lse, None, None


def flash_3_backward(
    dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q, max_seqlen_k,
    dq, dk, dv, softmax_scale, is_causal, window_size_left, window_size_right, softcap, deterministic,
):  # fmt: skip
    assert (cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q, max_seqlen_k) == (None,) * 6
    flash_2_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, 0.0, softmax_scale, is_causal, window_size_left, window_size_right,
        softcap, None, deterministic,
    )  # fmt: skip


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("version", [2, 3])
def test_flash_attn_is_called_as_it_wants_it(monkeypatch, version, softcap, block):
    version_2 = SimpleNamespace(_flash_attn_forward=flash_2_forward, _flash_attn_backward=flash_2_backward)
    version_3 = SimpleNamespace(_flash_attn_forward=flash_3_forward, _flash_attn_backward=flash_3_backward)
    monkeypatch.setattr(flash_attn, "_version_2", lambda: version_2)
    monkeypatch.setattr(flash_attn, "_version_3", lambda device: version_3 if version == 3 else None)
    check(flash_attn.FlashAttnKernel(), block, softcap=softcap, heads=4, kv_heads=2)


# --- many blocks in one call --------------------------------------------------------------------------------------

SIZES = {CAUSAL: [(5, 5), (1, 1), (33, 33), (16, 16)], FULL: [(5, 9), (1, 30), (40, 2)]}


def _each(cu_q, cu_k, function, of_queries, of_keys):
    """``function`` of one document after the other, tensors [tokens, heads, D] and lse [heads, tokens]."""
    assert cu_q.dtype == cu_k.dtype == torch.int32
    results = []
    for (a, b), (c, d) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        queries = [x[None, a:b] if x.dim() == 3 else x[None, :, a:b].contiguous() for x in of_queries]
        results.append(function(*queries, *(x[None, c:d] for x in of_keys)))
    return results


def varlen_forward(q, k, v, cu_q, cu_k, max_q, max_k, scale, left, right, softcap=0.0):
    assert (max_q, max_k) == (int(cu_q.diff().max()), int(cu_k.diff().max()))
    parts = _each(
        cu_q, cu_k, lambda q, k, v: flash_stand_in_forward(q, k, v, scale, left, right, softcap), (q,), (k, v)
    )
    return torch.cat([out[0] for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], dim=1)


def varlen_backward(dout, q, k, v, out, lse, cu_q, cu_k, scale, left, right, softcap=0.0):
    assert lse.is_contiguous()
    assert lse.shape == (q.shape[1], q.shape[0])

    def backward(dout, q, out, lse, k, v):
        return flash_stand_in_backward(dout, q, k, v, out, lse, scale, left, right, softcap)

    parts = _each(cu_q, cu_k, backward, (dout, q, out, lse), (k, v))
    return [torch.cat([grad[0] for grad in grads]) for grads in zip(*parts, strict=True)]


class VarlenStandIn:
    """The flash operator of torch with cumulative lengths."""

    def _flash_attention_forward(
        self, q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale, window_size_left, window_size_right
    ):
        assert (dropout, causal, debug) == (0.0, False, False)
        window = (window_size_left, window_size_right)
        return *varlen_forward(q, k, v, cu_q, cu_k, max_q, max_k, scale, *window), None, None, None

    def _flash_attention_backward(
        self, dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, rng, unused,
        *, scale, window_size_left, window_size_right,
    ):  # fmt: skip
        assert (dropout, causal) == (0.0, False)
        return varlen_backward(dout, q, k, v, out, lse, cu_q, cu_k, scale, window_size_left, window_size_right)


@pytest.mark.parametrize("band", SIZES)
def test_torchs_flash_operator_takes_many_documents_at_a_time(monkeypatch, band):
    monkeypatch.setattr(torch_cuda, "_aten", VarlenStandIn())
    kernel = SimpleNamespace(forward=torch_cuda.flash_forward, backward=torch_cuda.flash_backward)
    check_many(kernel, SIZES[band], lambda queries, keys: band)


def flash_2_varlen_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size_left=-1, window_size_right=-1, softcap=0.0,
):  # fmt: skip
    assert dropout_p == 0.0
    assert causal == ((window_size_left, window_size_right) == (-1, 0))
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return *varlen_forward(q, k, v, *lengths, softmax_scale, window_size_left, window_size_right, softcap), None, None


def flash_2_varlen_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
    softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    assert (dropout_p, alibi_slopes, deterministic) == (0.0, None, False)
    assert causal == ((window_size_left, window_size_right) == (-1, 0))
    window = (window_size_left, window_size_right)
    grads = varlen_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, softmax_scale, *window, softcap
    )
    for x, grad in zip((dq, dk, dv), grads, strict=True):
        x.copy_(grad)


def flash_3_varlen_forward(
    q, k, v, k_new=None, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
    window_size_left, window_size_right, softcap,
):  # fmt: skip
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return flash_2_varlen_forward(
        q, k, v, *lengths, 0.0, softmax_scale, causal, window_size_left, window_size_right, softcap
    )


def flash_3_varlen_backward(
    dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q, max_seqlen_k,
    dq, dk, dv, softmax_scale, is_causal, window_size_left, window_size_right, softcap, deterministic,
):  # fmt: skip
    assert (sequed_q, sequed_k) == (None, None)
    flash_2_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0,
        softmax_scale, is_causal, window_size_left, window_size_right, softcap, None, deterministic,
    )  # fmt: skip


@pytest.mark.parametrize("band", SIZES)
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("version", [2, 3])
def test_flash_attn_takes_many_documents_at_a_time(monkeypatch, version, softcap, band):
    version_2 = SimpleNamespace(
        _flash_attn_varlen_forward=flash_2_varlen_forward, _flash_attn_varlen_backward=flash_2_varlen_backward
    )
    version_3 = SimpleNamespace(
        _flash_attn_forward=flash_3_varlen_forward, _flash_attn_backward=flash_3_varlen_backward
    )
    monkeypatch.setattr(flash_attn, "_version_2", lambda: version_2)
    monkeypatch.setattr(flash_attn, "_version_3", lambda device: version_3 if version == 3 else None)
    check_many(flash_attn.FlashAttnKernel(), SIZES[band], lambda queries, keys: band, softcap=softcap)


@pytest.mark.parametrize("band", SIZES)
def test_a_kernel_for_cpu_takes_one_document_after_the_other(band):
    check_many(TorchKernel(), SIZES[band], lambda queries, keys: band)
    check_many(TorchKernel(), SIZES[band], lambda queries, keys: band, dtype=torch.float64, softcap=2.0)
