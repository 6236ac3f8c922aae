"""Every kernel against the dense reference: forward, and backward from a global log-sum-exp."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_hetero.batch.tiles import CAUSAL, FULL
from ds_hetero.errors import ConfigError
from ds_hetero.runtime.attention.kernels import (
    KERNELS,
    Band,
    available,
    merge_,
    select,
)
from ds_hetero.runtime.attention.kernels.plain import plain_backward, plain_forward
from ds_hetero.runtime.attention.kernels.torch_native import TorchKernel
from ds_hetero.values.section import KERNEL_NAMES
from tests.unit.runtime.kernel_checks import assert_close, blocks, check, in_parts, reference, strided, tensors

CPU = torch.device("cpu")


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


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("band", [CAUSAL, FULL, Band(-40, 3)])
def test_torch_kernel_reads_any_strides(band, softcap):
    block = (130, 130, band)
    inputs = strided(*tensors(block, batch_size=2, heads=4, kv_heads=2))
    assert not any(x.is_contiguous() for x in inputs)
    check(TorchKernel(), block, softcap=softcap, inputs=inputs)


# --- parts of a row --------------------------------------------------------------------------------


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
    torch.testing.assert_close((out, lse), _merged_attention(parts), rtol=1e-12, atol=1e-13)


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


# --- choosing --------------------------------------------------------------------------------------


def test_the_list_of_kernels_is_the_list_of_names():
    assert tuple(entry.name for entry in KERNELS) == KERNEL_NAMES
    assert tuple(entry.make().name for entry in KERNELS) == KERNEL_NAMES


def test_on_cpu_torch_is_the_best():
    assert select(CPU, torch.float32, 64, None, None).name == "torch"
    assert select(CPU, torch.float32, 64, 50.0, "torch").name == "torch"
    reasons = available(CPU, torch.bfloat16, 64)
    assert list(reasons) == ["flash_attn", "torch", "triton", "cudnn"]
    assert reasons["torch"] is None
    assert "CUDA" in reasons["flash_attn"]


@pytest.mark.parametrize("requested", ["flash_attn", "sdpa"])
def test_a_kernel_that_does_not_work_here_is_refused_with_all_reasons(requested):
    with pytest.raises(ConfigError, match=r"heterogeneity\.attention") as error:
        select(CPU, torch.float32, 64, None, requested)
    for word in (requested, '"torch": works', '"flash_attn": flash-attn runs on CUDA', "leave the key out"):
        assert word in str(error.value)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("head_dim", [24, 64, 128, 256])
@pytest.mark.parametrize("name", ["torch", "flash_attn", "triton", "cudnn"])
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


def _merged_attention(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Attention over all keys, from the attention over each block of them.

    Block i has the share exp(lse_i) / sum(exp(lse)) of the softmax; where every lse is -inf, nothing is visible and the
    output is 0.

    Args:
        parts: (out [B, H, Q, D], lse [B, H, Q]) of every block.
    """
    lse_BHQ = torch.stack([lse for _, lse in parts]).logsumexp(0)
    shares = [torch.exp(lse - lse_BHQ).nan_to_num(0.0).unsqueeze(-1) for _, lse in parts]
    out_BHQD = torch.stack([share * out for share, (out, _) in zip(shares, parts, strict=True)]).sum(0)
    return out_BHQD, lse_BHQ
