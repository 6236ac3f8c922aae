"""The chunked cross-entropy against torch's."""

import pytest
import torch
import torch.nn.functional as F

from ds_hetero.runtime.loss import cross_entropy_sum


def make_logits(dtype, shape=(2, 37, 19)):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(shape, generator=generator, dtype=torch.float64).mul(5).to(dtype).requires_grad_()
    labels = torch.randint(shape[-1], shape[:-1], generator=generator)
    labels[0, ::3] = -100
    return logits, labels


@pytest.mark.parametrize("chunk_tokens", [1, 8, 1024])
def test_sum_and_gradient_equal_torch(chunk_tokens):
    logits, labels = make_logits(torch.float64)
    total = cross_entropy_sum(logits, labels, chunk_tokens)
    (grad,) = torch.autograd.grad(3 * total, logits)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    (expected_grad,) = torch.autograd.grad(3 * expected, logits)
    torch.testing.assert_close(total, expected, rtol=1e-14, atol=0)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_is_added_up_in_fp32(dtype):
    logits, labels = make_logits(dtype)
    total = cross_entropy_sum(logits, labels, 8)
    (grad,) = torch.autograd.grad(total, logits)
    expected = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
    (expected_grad,) = torch.autograd.grad(expected, logits)
    assert total.dtype == torch.float32
    assert grad.dtype == dtype
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(grad, expected_grad)  # rounded once, to ``dtype``, in both


@pytest.mark.parametrize("shape", [(1, 0, 19), (1, 5, 19)])
def test_nothing_valid_is_zero(shape):
    logits, labels = make_logits(torch.float32, shape)
    labels.fill_(-100)
    total = cross_entropy_sum(logits, labels)
    total.backward()
    assert total.item() == 0
    assert not logits.grad.any()


def test_nothing_of_the_size_of_the_logits_is_kept_but_the_logits():
    logits, labels = make_logits(torch.bfloat16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        cross_entropy_sum(logits, labels, 8)
    large = [tensor for tensor in kept if tensor.numel() >= logits.numel()]
    assert [tensor.data_ptr() for tensor in large] == [logits.data_ptr()]
