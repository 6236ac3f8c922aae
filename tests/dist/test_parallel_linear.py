"""A gated MLP whose columns and rows are cut over ranks, against one process with all of them."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from ds_hetero.runtime.parallel_linear import ParallelLinears
from tests.support import run_ranks

WIDTH = 6


def whole_mlp(inner):
    """Weights of gate, up and down, a bias of down, an input and a gradient of the output."""
    generator = torch.Generator().manual_seed(inner)
    shapes = (inner, WIDTH), (inner, WIDTH), (WIDTH, inner), (WIDTH,)
    weights = [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in shapes]
    x, dy = torch.randn(2, 2, 5, WIDTH, generator=generator, dtype=torch.float64)
    return weights, x.requires_grad_(), dy


def equals_one_process(rank, inner):
    (gate, up, down, bias), x, dy = whole_mlp(inner)
    hidden = x.sin()
    y = nn.functional.linear(nn.functional.linear(hidden, gate).tanh() * nn.functional.linear(hidden, up), down, bias)
    y.backward(dy)

    (own_gate, own_up, own_down, own_bias), own_x, _ = whole_mlp(inner)
    part = slice(*[(inner * at) // dist.get_world_size() for at in (rank, rank + 1)])
    own_gate, own_up, own_down = (
        nn.Parameter(p.detach().clone()) for p in (own_gate[part], own_up[part], own_down[:, part])
    )
    linears = ParallelLinears(dist.group.WORLD)
    with CommDebugMode() as comms:
        own = own_x.sin()
        a, b = (linears.columns(lambda v, w=w: nn.functional.linear(v, w), own) for w in (own_gate, own_up))
        own_y = linears.rows(lambda v: nn.functional.linear(v, own_down), a.tanh() * b, own_bias)
        forward = comms.get_total_counts()
        own_y.backward(dy)
    close = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(own_y, y, **close)
    torch.testing.assert_close(own_x.grad, x.grad, **close)
    wanted = gate.grad[part], up.grad[part], down.grad[:, part], bias.grad
    for parameter, gradient in zip((own_gate, own_up, own_down, own_bias), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, **close)
    return forward, comms.get_total_counts()


@pytest.mark.parametrize("inner", [12, 7, 3], ids=["even", "uneven", "one column each"])
def test_a_cut_mlp_computes_what_one_process_does_with_one_sum_in_each_pass(inner):
    assert run_ranks(equals_one_process, 3, inner) == [(1, 2)] * 3


def takes_other_inputs(rank):
    """Layers that take different tensors have a sum each, and so has a tensor that comes again after another one."""
    linears, first, second = ParallelLinears(dist.group.WORLD), *torch.ones(2, 4, WIDTH).requires_grad_().unbind()
    weight = torch.full((1, WIDTH), 1.0 + rank)
    with CommDebugMode() as comms:
        sums = [linears.columns(lambda x: nn.functional.linear(x, weight), x).sum() for x in (first, second, first)]
        sum(sums).backward()
    return comms.get_total_counts()


def test_layers_that_take_other_tensors_have_sums_of_their_own():
    assert run_ranks(takes_other_inputs, 2) == [3, 3]
