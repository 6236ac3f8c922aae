"""Every kernel against the dense reference: forward, backward from a global log-sum-exp, and the tiles in between."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hetero.errors import ConfigError
from ds_hetero.kernel_names import KERNEL_NAMES
from ds_hetero.runtime.attention.kernels import (
    KERNELS,
    Band,
    SavedForward,
    Scores,
    available,
    flash_attn,
    merge_,
    select,
    torch_cuda,
)
from ds_hetero.runtime.attention.kernels.plain import plain_backward, plain_forward
from ds_hetero.runtime.attention.kernels.tiles import CAUSAL, FULL, decompose
from ds_hetero.runtime.attention.kernels.torch_native import TorchKernel
from ds_hetero.runtime.attention.reference import dense_attention, dense_lse, merged_attention

CPU = torch.device("cpu")

# Relative to the largest element, or to the inputs (1) where a gradient is 0 by nature. float64 and float32: what
# the order of additions costs. 16 bit: inputs are taken as exact, and probabilities, outputs and partial gradients are
# rounded to 11 or 8 bits (2 ** -11 and 2 ** -8) a few times.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@st.composite
def blocks(draw, largest=70):
    """(queries, keys, band) as the ring asks for them: nothing goes unseen."""
    num_queries, num_keys = draw(st.integers(1, largest)), draw(st.integers(1, largest))
    corner = num_keys - num_queries
    lo = draw(st.none() | st.integers(min(1 - num_queries, corner), min(0, corner)))
    hi = draw(st.none() | st.integers(max(0, corner), max(num_keys - 1, corner)))
    return num_queries, num_keys, Band(lo, hi)


@given(blocks())
def test_pairs_of_a_band_are_counted(block):
    num_queries, num_keys, band = block
    visible = visible_in(band, num_queries, num_keys)
    assert band.pairs(num_queries, num_keys) == sum(visible(i, j) for i in range(num_queries) for j in range(num_keys))


def visible_in(band, num_queries, num_keys):
    lo, hi = band.bounds(num_queries, num_keys)
    return lambda i, j: (lo <= j - i) & (j - i <= hi)


def tensors(block, dtype=torch.float32, batch_size=1, heads=2, kv_heads=1, head_dim=8, seed=0):
    """(dout, q, k, v), reproducible."""
    generator = torch.Generator().manual_seed(seed)
    num_queries, num_keys, _ = block
    shapes = ((heads, num_queries), (heads, num_queries), (kv_heads, num_keys), (kv_heads, num_keys))
    return [
        torch.randn(batch_size, h, n, head_dim, generator=generator, dtype=torch.float64).to(dtype) for h, n in shapes
    ]


def reference(dout, q, k, v, band, scale=0.3, softcap=None, sinks=None):
    """(out, lse, dq, dk, dv) in float64."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    visible = visible_in(band, q.shape[2], k.shape[2])
    out = dense_attention(q, k, v, visible, scale, softcap, sinks)
    lse = dense_lse(q, k, visible, scale, softcap).detach()
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.double()[:, None])
    return out.detach(), lse, *torch.autograd.grad(out, (q, k, v), dout.double())


def assert_close(got, want, dtype):
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        error = ((a.double() - b).abs().max() / b.abs().max().clamp(min=1.0)).item()
        assert error <= TOLERANCE[dtype], f"{name}: {error:.1e}"


def check(kernel, block, dtype=torch.float32, softcap=None, sinks=None, inputs=None, **shape):
    """Forward, and backward from the exact out and lse, against the reference."""
    dout, q, k, v = inputs or tensors(block, dtype, **shape)
    band = block[2]
    want = reference(dout, q, k, v, band, softcap=softcap, sinks=sinks)
    scores = Scores(0.3, softcap)
    out, lse = kernel.forward(q, k, v, scores, band)
    assert out.dtype == dtype
    assert lse.dtype == torch.promote_types(dtype, torch.float32)
    if sinks is not None:
        out = out * torch.sigmoid(lse - sinks[:, None]).unsqueeze(-1).to(dtype)
        lse = torch.logaddexp(lse, sinks[:, None].to(lse.dtype))
    saved = SavedForward(q, k, v, want[0].to(dtype), want[1].to(lse.dtype))
    grads = kernel.backward(dout, saved, scores, band)
    assert all(x.dtype in (dtype, lse.dtype) for x in grads)
    assert_close((out, lse, *grads), want, dtype)


# --- bands and tiles -------------------------------------------------------------------------------


SIZES = [(1, 1), (2, 4), (3, 7), (4, 16), (8, 64), (1, 1, 1), (2, 4, 3), (2, 8, 5)]  # leaf, chunk, side of a rectangle


def pairs(tile):
    lo, hi = tile.band.bounds(tile.rows, tile.cols)
    for shift in range(0, tile.copies * tile.step or 1, tile.step or 1):
        for i in range(tile.rows):
            for j in range(max(i + lo, 0), min(i + hi + 1, tile.cols)):
                yield tile.row + shift + i, tile.col + shift + j


@settings(max_examples=150)
@given(blocks(largest=30), st.sampled_from(SIZES))
def test_tiles_cover_what_is_visible_once_and_stay_inside(block, sizes):
    num_queries, num_keys, band = block
    covered = [pair for tile in decompose(num_queries, num_keys, band, *sizes) for pair in pairs(tile)]
    visible = visible_in(band, num_queries, num_keys)
    assert sorted(covered) == [(i, j) for i in range(num_queries) for j in range(num_keys) if visible(i, j)]


@settings(max_examples=150)
@given(blocks(largest=30), st.sampled_from(SIZES))
def test_the_first_tile_of_every_query_is_marked_and_comes_first(block, sizes):
    seen: set[int] = set()
    for tile in decompose(*block, *sizes):
        queries = {i for i, _ in pairs(tile)}
        assert len(queries) == tile.copies * tile.rows, "a query of the tile sees nothing, or two copies share one"
        assert seen.isdisjoint(queries) if tile.first else seen.issuperset(queries)
        seen.update(queries)


@settings(max_examples=150)
@given(blocks(largest=30), st.sampled_from([(2, 4), (4, 16, 5)]))
def test_copies_of_a_tile_share_no_key(block, sizes):
    for tile in decompose(*block, *sizes):
        assert tile.copies == 1 or tile.step >= max(tile.rows, tile.cols)


@pytest.mark.parametrize(("tokens", "most"), [(64, 2.0), (372, 1.18), (1024, 1.07), (4096, 1.02)])
def test_a_causal_square_costs_little_more_than_its_triangle(tokens, most):
    area = sum(tile.copies * tile.rows * tile.cols for tile in decompose(tokens, tokens, CAUSAL))
    assert area <= most * tokens * (tokens + 1) / 2


@given(blocks())
def test_a_window_counts_from_the_last_corner(block):
    num_queries, num_keys, band = block
    left, right = band.window(num_queries, num_keys)
    assert min(left, right) >= -1
    visible = visible_in(band, num_queries, num_keys)
    for i in range(num_queries):
        middle = i + num_keys - num_queries
        for j in range(num_keys):
            in_window = (left == -1 or j >= middle - left) and (right == -1 or j <= middle + right)
            assert in_window == visible(i, j)


# --- the torch kernel ------------------------------------------------------------------------------


@given(blocks(largest=200), st.sampled_from([torch.float64, torch.float32]), st.sampled_from([(2, 2), (4, 2), (3, 1)]))
def test_torch_kernel_on_any_band(block, dtype, heads):
    check(TorchKernel(), block, dtype, heads=heads[0], kv_heads=heads[1])


@given(blocks(largest=90), st.sampled_from([torch.float64, torch.float32]))
def test_torch_kernel_with_soft_cap_on_any_band(block, dtype):
    check(TorchKernel(), block, dtype, softcap=1.5)


# 700 tokens are more than one chunk; two samples make batched tiles go one sample at a time, nine make them go one copy
# at a time.
@pytest.mark.parametrize(
    ("block", "batch_size"),
    [
        ((700, 700, CAUSAL), 2),
        ((700, 700, Band(-299, 0)), 2),
        ((300, 700, Band(None, 450)), 1),
        ((700, 300, Band(-500, None)), 1),
        ((700, 300, FULL), 2),
        ((150, 150, CAUSAL), 9),
    ],
)
def test_torch_kernel_on_large_blocks(block, batch_size):
    check(TorchKernel(), block, batch_size=batch_size, heads=4, kv_heads=2, head_dim=16)


@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("head_dim", [1, 5, 24, 80])
def test_torch_kernel_for_every_head_size_and_grouping(group, head_dim):
    check(TorchKernel(), (100, 100, CAUSAL), heads=8, kv_heads=8 // group, head_dim=head_dim)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("block", [(150, 150, CAUSAL), (150, 150, Band(-80, 0)), (33, 70, FULL)])
def test_torch_kernel_in_16_bit(dtype, softcap, block):
    check(TorchKernel(), block, dtype, softcap=softcap, heads=4, kv_heads=2, head_dim=32)


def test_plain_operations_agree_over_the_borders_of_their_parts():
    plain = SimpleNamespace(forward=plain_forward, backward=plain_backward)
    check(plain, (300, 1300, Band(-20, 1100)), torch.float64)
    check(plain, (300, 1300, FULL), torch.float64, softcap=1.5, heads=4, kv_heads=2)


def strided(dout, q, k, v):
    """The same numbers as views: one packed token-major buffer, a transposed one, every second column, one repeated."""
    packed = torch.cat((q, k, v), dim=1).permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    q, k, v = packed.split((q.shape[1], k.shape[1], v.shape[1]), dim=1)
    v = torch.stack((v, v), dim=-1).flatten(-2)[..., ::2]
    return dout[..., :1].expand(dout.shape), q.mT.contiguous().mT, k, v


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("band", [CAUSAL, FULL, Band(-40, 3)])
def test_torch_kernel_reads_any_strides(band, softcap):
    block = (130, 130, band)
    inputs = strided(*tensors(block, batch_size=2, heads=4, kv_heads=2))
    assert not any(x.is_contiguous() for x in inputs)
    check(TorchKernel(), block, softcap=softcap, inputs=inputs)


# --- parts of a row --------------------------------------------------------------------------------


def in_parts(kernel, dout, q, k, v, band, cuts, dtype, sinks, softcap=None):
    """The same attention with the keys cut into blocks, as a ring does it."""
    wide = torch.promote_types(dtype, torch.float32)
    out = torch.zeros(q.shape, dtype=wide)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=wide)
    calls, scores = [], Scores(0.3, softcap)
    for start, stop in pairwise(cuts):
        lo, hi = band.bounds(q.shape[2], k.shape[2])
        rows = slice(max(start - hi, 0), min(stop - lo, q.shape[2]))  # queries that see any of these keys
        part = Band(lo + rows.start - start, hi + rows.start - start)
        calls.append((rows, slice(start, stop), part))
        merge_(
            out[:, :, rows],
            lse[:, :, rows],
            *kernel.forward(q[:, :, rows], *(x[:, :, start:stop] for x in (k, v)), scores, part),
        )
    if sinks is not None:
        out = out * torch.sigmoid(lse - sinks[:, None]).unsqueeze(-1)
        lse = torch.logaddexp(lse, sinks[:, None].to(wide))
    out = out.to(dtype)
    grads = [torch.zeros(x.shape, dtype=wide) for x in (q, k, v)]
    for rows, cols, part in calls:
        saved = SavedForward(q[:, :, rows], k[:, :, cols], v[:, :, cols], out[:, :, rows], lse[:, :, rows])
        dq, dk, dv = kernel.backward(dout[:, :, rows], saved, scores, part)
        grads[0][:, :, rows] += dq
        grads[1][:, :, cols] += dk
        grads[2][:, :, cols] += dv
    return out, lse, *grads


@settings(max_examples=30)
@given(st.data(), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]), st.booleans())
def test_parts_merge_into_the_whole_and_their_gradients_add_up(data, dtype, with_sinks):
    tokens = data.draw(st.integers(2, 90))
    width = data.draw(st.none() | st.integers(1, tokens))
    band = Band(None if width is None else 1 - width, 0)
    cuts = [0, *sorted(data.draw(st.sets(st.integers(1, tokens - 1), max_size=3))), tokens]
    dout, q, k, v = tensors((tokens, tokens, band), dtype, heads=4, kv_heads=2)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0]) if with_sinks else None
    got = in_parts(TorchKernel(), dout, q, k, v, band, cuts, dtype, sinks)
    assert_close(got, reference(dout, q, k, v, band, sinks=sinks), dtype)


@given(
    st.lists(st.sampled_from([-torch.inf, -900.0, -2.0, 0.0, 3.0, 800.0]), min_size=1, max_size=5), st.integers(0, 99)
)
def test_merging_block_by_block_equals_merging_by_definition(sizes, seed):
    """Blocks whose log-sum-exps are about ``sizes``; -inf for a block of which the query sees nothing."""
    generator = torch.Generator().manual_seed(seed)
    parts = [
        (
            torch.randn(1, 2, 3, 4, generator=generator).double(),
            size + torch.rand(1, 2, 3, generator=generator).double(),
        )
        for size in sizes
    ]
    out, lse = torch.zeros(1, 2, 3, 4).double(), torch.full((1, 2, 3), -torch.inf).double()
    for part in parts:
        merge_(out, lse, *part)
    torch.testing.assert_close((out, lse), merged_attention(parts), rtol=1e-12, atol=1e-13)


def test_merging_nothing_changes_nothing():
    out, lse = torch.zeros(3, 4), torch.full((3,), -torch.inf)
    merge_(out, lse, torch.ones(3, 4), torch.tensor([-torch.inf, 1.0, -torch.inf]))
    assert torch.equal(out, torch.tensor([0.0, 1.0, 0.0])[:, None].expand(3, 4))
    assert torch.equal(lse, torch.tensor([-torch.inf, 1.0, -torch.inf]))
    merge_(out, lse, torch.full((3, 4), 5.0), torch.full((3,), -torch.inf))
    assert torch.equal(out, torch.tensor([0.0, 1.0, 0.0])[:, None].expand(3, 4))


def test_merging_is_exact_however_far_apart_the_parts():
    out, lse = torch.full((1, 2), 2.0), torch.tensor([-1000.0])
    merge_(out, lse, torch.full((1, 2), 7.0), torch.tensor([1000.0]))
    assert torch.equal(out, torch.full((1, 2), 7.0))
    assert torch.equal(lse, torch.tensor([1000.0]))


# --- the reference itself --------------------------------------------------------------------------


def test_reference_is_torch_attention():
    _, q, k, v = tensors((9, 9, CAUSAL), torch.float64, heads=4, kv_heads=2)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(dense_attention(q, k, v, lambda i, j: j <= i), want)


def test_a_sink_is_a_key_with_value_zero():
    _, q, k, v = tensors((5, 6, FULL), torch.float64, heads=1)
    sink = torch.tensor([0.7], dtype=torch.float64)
    scores = torch.cat((q @ k.mT * 0.3, sink.expand(1, 1, 5, 1)), dim=-1)
    want = scores.softmax(-1) @ torch.cat((v, torch.zeros(1, 1, 1, 8)), dim=2)
    torch.testing.assert_close(dense_attention(q, k, v, lambda i, j: j == j, 0.3, sinks_H=sink), want)


def test_a_query_that_sees_nothing_gets_zero_and_no_gradient():
    _, q, k, v = tensors((2, 3, FULL), torch.float64)
    q.requires_grad_()
    out = dense_attention(q, k, v, torch.tensor([[True, True, False], [False, False, False]]))
    out.sum().backward()
    assert torch.equal(out[:, :, 1], torch.zeros_like(out[:, :, 1]))
    assert torch.equal(q.grad[:, :, 1], torch.zeros_like(q[:, :, 1]))
    assert not q.grad.isnan().any()


# --- choosing --------------------------------------------------------------------------------------


def test_the_list_of_kernels_is_the_list_of_names():
    assert tuple(entry.name for entry in KERNELS) == KERNEL_NAMES
    assert tuple(entry.make().name for entry in KERNELS) == KERNEL_NAMES


def test_on_cpu_torch_is_the_best():
    assert select(CPU, torch.float32, 64, None, None).name == "torch"
    assert select(CPU, torch.float32, 64, 50.0, "torch").name == "torch"
    reasons = available(CPU, torch.bfloat16, 64)
    assert list(reasons) == ["flash_attn", "torch", "triton"]
    assert reasons["torch"] is None
    assert "CUDA" in reasons["flash_attn"]


@pytest.mark.parametrize("requested", ["flash_attn", "sdpa"])
def test_a_kernel_that_does_not_work_here_is_refused_with_all_reasons(requested):
    with pytest.raises(ConfigError, match=r"heterogeneity\.attention") as error:
        select(CPU, torch.float32, 64, None, requested)
    for word in (requested, '"torch": works', '"flash_attn": flash-attn runs on CUDA', "leave the key out"):
        assert word in str(error.value)


# --- CUDA operators, on stand-ins ------------------------------------------------------------------
#
# There is a GPU test of the real ones below. The stand-ins have the operators' signatures, layouts and alignment of
# windows, and check what the real ones take for granted, so that our side of each call is tested everywhere.


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


# --- real GPUs -------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("head_dim", [24, 64, 128, 256])
@pytest.mark.parametrize("name", ["torch", "flash_attn", "triton"])
def test_on_a_gpu(name, head_dim, softcap, dtype):
    device = torch.device("cuda")
    try:
        kernel = select(device, dtype, head_dim, softcap, name)
    except ConfigError as error:
        pytest.skip(str(error))
    for block in [
        (200, 200, CAUSAL),
        (300, 300, Band(-99, 0)),
        (1, 70, FULL),
        (130, 260, FULL),
        (70, 90, Band(-5, 60)),
    ]:
        inputs = [x.to(device) for x in tensors(block, dtype, batch_size=2, heads=4, kv_heads=2, head_dim=head_dim)]
        check(kernel, block, dtype, softcap=softcap, inputs=inputs)
