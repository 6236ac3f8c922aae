"""The dense reference is what torch and the papers mean by attention."""

import torch

from ds_hetero.batch.tiles import CAUSAL, FULL
from ds_hetero.runtime.attention.reference import dense_attention
from tests.unit.runtime.kernel_checks import tensors


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
