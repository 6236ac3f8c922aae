"""What the tests of attention kernels share: random blocks, and the comparison with the dense reference."""

from itertools import pairwise

import torch
from hypothesis import strategies as st

from ds_hetero.runtime.attention.kernels import (
    Band,
    PackedBlocks,
    SavedForward,
    Scores,
    merge_,
)
from ds_hetero.runtime.attention.reference import dense_attention, dense_lse

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


def check_many(kernel, sizes, band_of, dtype=torch.float32, softcap=None, heads=4, kv_heads=2, head_dim=16):
    """Blocks that lie one behind the other, forward and backward in one call each, against the reference.

    Args:
        kernel: to be checked.
        sizes: (queries, keys) of every block.
        band_of: (queries, keys) -> band; the same window for all where the kernel needs that.
    """
    blocks = [(*size, band_of(*size)) for size in sizes]
    each = [
        tensors(block, dtype, heads=heads, kv_heads=kv_heads, head_dim=head_dim, seed=i)
        for i, block in enumerate(blocks)
    ]
    wanted = [reference(*inputs, block[2], softcap=softcap) for inputs, block in zip(each, blocks, strict=True)]
    want = [torch.cat(parts, dim=2) for parts in zip(*wanted, strict=True)]
    dout, q, k, v = (torch.cat(parts, dim=2) for parts in zip(*each, strict=True))
    packed, scores = (
        PackedBlocks.of_sizes(*zip(*sizes, strict=True), [band for *_, band in blocks]),
        Scores(0.3, softcap),
    )
    out, lse = kernel.forward(q, k, v, scores, packed)
    assert out.dtype == dtype
    assert lse.shape == q.shape[:3]
    saved = SavedForward(q, k, v, want[0].to(dtype), want[1].to(lse.dtype))
    assert_close((out, lse, *kernel.backward(dout, saved, scores, packed)), want, dtype)


def strided(dout, q, k, v):
    """The same numbers as views: one packed token-major buffer, a transposed one, every second column, one repeated."""
    packed = torch.cat((q, k, v), dim=1).permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    q, k, v = packed.split((q.shape[1], k.shape[1], v.shape[1]), dim=1)
    v = torch.stack((v, v), dim=-1).flatten(-2)[..., ::2]
    return dout[..., :1].expand(dout.shape), q.mT.contiguous().mT, k, v


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
