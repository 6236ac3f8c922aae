"""Speeds of the ranks in attention itself, while all of them compute.

Products of small matrices say what share of a core a rank has. Attention also needs caches and memory, which the ranks
of one machine share, so where all compute at once each may be slower, or faster, than its share says.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.measure.contenders import Shape

__all__ = ["kernel_speeds"]

_LENGTH = 1024  # of the document that is computed again and again
_WINDOW_S, _ALONE_S = 5.0, 1.5


def kernel_speeds(shape: Shape) -> list[float]:
    """Passes per second of every rank while all compute, over those of rank 0 while the others wait.

    A pass is forward and backward of one causal document. Caller: every rank.
    """
    one_pass = _pass_of(shape)
    one_pass()
    dist.barrier()
    alone = _rate(one_pass, _ALONE_S) if dist.get_rank() == 0 else 0.0
    dist.barrier()
    together = _rate(one_pass, _WINDOW_S)
    rates = torch.tensor([alone, *([0.0] * dist.get_world_size())], dtype=torch.float64)
    rates[1 + dist.get_rank()] = together
    dist.all_reduce(rates)
    return (rates[1:] / rates[0]).tolist()


def _pass_of(shape: Shape) -> Callable[[], None]:
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    q, k, v = (torch.randn(1, h, _LENGTH, shape.head_dim, requires_grad=True) for h in heads)
    dout = torch.randn(1, shape.num_heads, _LENGTH, shape.head_dim)

    def one_pass() -> None:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        torch.autograd.grad(out, (q, k, v), dout)

    return one_pass


def _rate(one_pass: Callable[[], None], window_s: float) -> float:
    """Passes per second, of whole passes."""
    begin, passes = time.perf_counter(), 0
    while time.perf_counter() < begin + window_s:
        one_pass()
        passes += 1
    return passes / (time.perf_counter() - begin)
