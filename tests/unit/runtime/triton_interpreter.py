"""What the Triton kernels compute, in Triton's interpreter on CPU; `test_triton` runs this file in a new process.

By hand: TRITON_INTERPRET=1 python -m pytest tests/unit/runtime/triton_interpreter.py
"""

import pytest
import torch

from ds_hetero.batch.tiles import CAUSAL, FULL
from ds_hetero.runtime.attention.kernels import Band, SavedForward, Scores, triton_merge, triton_native
from ds_hetero.runtime.attention.kernels.merge import merge_by_operators_, one_kernel_refusal
from ds_hetero.runtime.attention.kernels.triton_blocks import BlockSizes, Launch
from ds_hetero.runtime.attention.kernels.triton_native import _LARGEST_STRIDE, TritonKernel, _dense_rows, _has_edges
from tests.unit.runtime.kernel_checks import assert_close, check, check_many, in_parts, reference, strided, tensors

KERNEL = TritonKernel()


# Tiles before, in and after the wholly visible part of the walk, lengths and head sizes that fill no tile, groups of 1,
# 2 and 4 heads, two samples. The interpreter takes about 0.02 s for a tile of 16 x 16.
@pytest.mark.parametrize(
    ("block", "softcap", "shape"),
    [
        ((50, 50, CAUSAL), None, {"heads": 1, "head_dim": 16}),
        ((40, 60, Band(-10, 40)), 1.5, {"heads": 1, "head_dim": 24}),
        ((70, 40, Band(-45, 3)), None, {"heads": 1, "head_dim": 8}),
        ((17, 33, FULL), 1.5, {"heads": 4, "head_dim": 40}),
        ((3, 5, FULL), None, {"heads": 4, "kv_heads": 2, "batch_size": 2, "head_dim": 1}),
    ],
)
def test_triton_equals_the_reference_on_any_band(block, softcap, shape):
    check(KERNEL, block, softcap=softcap, **shape)


@pytest.mark.parametrize(
    ("block", "edges"),
    [
        ((32, 48, FULL), False),
        ((32, 48, Band(-40, 50)), False),  # wider than the block
        ((32, 40, FULL), True),
        ((30, 48, FULL), True),
        ((32, 48, Band(-40, 46)), True),
    ],
)
def test_blocks_without_an_edge_have_kernels_without_masks(block, edges):
    assert _has_edges(block[2], *block[:2], BlockSizes(16, 16)) == edges
    check(KERNEL, block, softcap=1.5, heads=2, head_dim=24)


@pytest.mark.parametrize(
    ("sizes", "band_of"),
    [
        ([(5, 5), (1, 1), (33, 33)], lambda queries, keys: CAUSAL),
        ([(17, 9), (1, 20), (4, 33)], lambda queries, keys: FULL),
        ([(20, 20), (18, 30)], lambda queries, keys: Band(-3, keys - queries)),
    ],
)
def test_triton_takes_many_blocks_at_a_time(sizes, band_of):
    check_many(KERNEL, sizes, band_of, head_dim=8, softcap=1.5 if sizes[0] == (17, 9) else None)


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_programs_that_sum_dk_and_dv_apart_compute_the_same_bits(softcap, monkeypatch):
    block = (40, 60, Band(-10, 40))
    dout, q, k, v = tensors(block, batch_size=2, heads=4, kv_heads=2, head_dim=24)
    scores = Scores(0.2, softcap)
    out, lse = KERNEL.forward(q, k, v, scores, block[2])
    together = KERNEL.backward(dout, SavedForward(q, k, v, out, lse), scores, block[2])
    small = BlockSizes(16, 16, 1, 1)
    monkeypatch.setattr(triton_native, "_launch", lambda q: Launch(small, small, small._replace(sums_apart=True)))
    apart = KERNEL.backward(dout, SavedForward(q, k, v, out, lse), scores, block[2])
    assert all(map(torch.equal, apart, together))
    check(KERNEL, block, softcap=softcap, heads=4, kv_heads=2, head_dim=24)
    check_many(KERNEL, [(5, 5), (1, 1), (33, 33)], lambda queries, keys: CAUSAL, head_dim=8, softcap=softcap)


def test_triton_equals_the_reference_in_float16():
    check(KERNEL, (40, 40, CAUSAL), torch.float16, heads=2, head_dim=16)


def test_triton_reads_any_strides():
    block = (20, 20, CAUSAL)
    check(KERNEL, block, inputs=strided(*tensors(block, batch_size=2, heads=2)))


def test_rows_too_far_apart_for_offsets_of_32_bits_are_copied():
    far = torch.empty_strided((1, 1, 3, 16), (0, 0, _LARGEST_STRIDE, 1), device="meta")
    near = torch.empty_strided((1, 1, 3, 16), (0, 0, _LARGEST_STRIDE - 16, 1), device="meta")
    assert _dense_rows(far).stride(2) == 16
    assert _dense_rows(near) is near


def test_parts_merge_into_the_whole():
    dout, q, k, v = tensors((30, 30, CAUSAL), heads=2)
    sinks = torch.tensor([0.5, -1.0])
    got = in_parts(KERNEL, dout, q, k, v, CAUSAL, [0, 13, 30], torch.float32, sinks)
    assert_close(got, reference(dout, q, k, v, CAUSAL, sinks=sinks), torch.float32)


@pytest.mark.parametrize("head_dim", [16, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_merge_in_one_kernel_equals_that_of_operators(head_dim, dtype):
    """Of queries of a longer tensor, token-major as rings have it; some see nothing before, in the part, or at all."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(100, 2, 3, head_dim, generator=generator).permute(1, 2, 0, 3)
    out = whole[:, :, 20:90]
    lse = torch.randn(2, 3, 100, generator=generator)[:, :, 20:90]
    lse[0, 1, :5] = -torch.inf
    out[0, 1, :5] = 1e4  # does not count
    part = torch.randn(2, 70, 3, head_dim, generator=generator).transpose(1, 2).to(dtype)
    lse_part = torch.randn(2, 3, 70, generator=generator)
    lse_part[0, 1, 3:9] = -torch.inf
    expected, expected_lse = out.double(), lse.double()
    merge_by_operators_(expected, expected_lse, part, lse_part.double())
    around = whole[:, :, :20].clone(), whole[:, :, 90:].clone()
    triton_merge.launch(out, lse, part, lse_part)
    torch.testing.assert_close(out.double(), expected, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=2e-6, atol=2e-6)
    assert torch.equal(whole[:, :, :20], around[0]) and torch.equal(whole[:, :, 90:], around[1])


def test_the_trial_of_a_merge_passes_where_it_works():
    assert one_kernel_refusal(torch.device("cpu")) is None
