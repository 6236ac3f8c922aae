"""Timings of one rank on its own device: layers, attention blocks, memory.

All ranks run the same probes at the same moment, as they will in training: devices that share a host, a power budget or
a memory bus are measured with their neighbours at work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_hetero.profiler.fit import AttentionSample, LayerSample
from ds_hetero.runtime.devices import default_device


@dataclass(frozen=True, slots=True)
class Timer:
    """Times a call on ``device`` over at least ``window_s``, after one call to warm up."""

    device: torch.device
    window_s: float

    def __call__(self, fn: Callable[[], Any]) -> float:
        """Mean seconds of a call: a device that is throttled works in bursts, of which a median sees one kind."""
        fn()
        self.wait()
        begin, calls = time.perf_counter(), 0
        while not calls or time.perf_counter() < begin + self.window_s:
            fn()
            self.wait()
            calls += 1
        return (time.perf_counter() - begin) / calls

    def wait(self) -> None:
        """Wait until the device has done everything."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def layer_probes(timer: Timer, dtype: torch.dtype) -> Iterator[LayerSample]:
    """Layers without attention, of a few widths and token counts."""
    small = timer.device.type == "cpu"
    for hidden in (256, 768) if small else (2048, 5120):
        layer = _Layer(hidden, timer.device, dtype)
        for tokens in (128, 512, 1024) if small else (256, 1024, 4096):
            x = torch.randn(1, tokens, hidden, device=timer.device, dtype=dtype, requires_grad=True)
            grad = torch.randn_like(x)
            forward_s = timer(lambda x=x, layer=layer: layer(x))  # type: ignore[misc]
            both_s = timer(lambda x=x, layer=layer, grad=grad: layer(x).backward(grad))  # type: ignore[misc]
            yield LayerSample(
                tokens=tokens,
                flops=2.0 * tokens * layer.num_weights,
                elementwise_bytes=float(tokens * layer.elements * x.element_size()),
                forward_s=forward_s,
                backward_s=max(both_s - forward_s, 0.1 * both_s),
            )


class _Layer:
    """A Llama layer with something cheap for attention, written as frameworks do, one kernel per operation.

    Two RMS norms, four projections, rotary embedding of queries and keys, a gated MLP.
    """

    def __init__(self, hidden: int, device: torch.device, dtype: torch.dtype) -> None:
        self.heads, self.head_dim, self.mlp = hidden // 64, 64, hidden * 11 // 4

        def weight(rows: int, columns: int) -> Tensor:
            scaled: Tensor = torch.randn(rows, columns, device=device, dtype=dtype) / columns**0.5
            return scaled.requires_grad_()

        self.q, self.k, self.v, self.o = (weight(hidden, hidden) for _ in range(4))
        self.gate, self.up, self.down = weight(self.mlp, hidden), weight(self.mlp, hidden), weight(hidden, self.mlp)
        self.norms = [torch.ones(hidden, device=device, dtype=dtype, requires_grad=True) for _ in range(2)]
        self.num_weights = 4 * hidden * hidden + 3 * hidden * self.mlp
        # As in cost.flops.elementwise_elements.
        self.elements = 10 * hidden + 2 * 2 * hidden + 3 * self.mlp

    def __call__(self, x: Tensor) -> Tensor:
        y = self._norm(x, 0)
        q, k = (self._rotary(F.linear(y, weight)) for weight in (self.q, self.k))
        x = x + F.linear(q + k * F.linear(y, self.v), self.o)
        y = self._norm(x, 1)
        return x + F.linear(F.silu(F.linear(y, self.gate)) * F.linear(y, self.up), self.down)

    def _norm(self, x: Tensor, index: int) -> Tensor:
        wide = x.float()
        normal: Tensor = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return self.norms[index] * normal.to(x.dtype)

    def _rotary(self, x: Tensor) -> Tensor:
        heads = x.view(*x.shape[:-1], self.heads, self.head_dim).transpose(1, 2)
        first, second = heads.chunk(2, dim=-1)
        return (heads * 0.8 + torch.cat((-second, first), dim=-1) * 0.6).transpose(1, 2).reshape(x.shape)


class AttentionProbe(Protocol):
    """A kernel as the profiler times it: both methods do one pass over one block."""

    name: str
    head_dim: int  # D of the blocks that it is timed with
    softcap: float | None  # bound of the scores, see `ds_hetero.runtime.attention.kernels.Scores`

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Any:
        """Attention of q [B, H, Q, D] to k, v [B, G, K, D]; returns what `backward` needs."""

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, state: Any, causal: bool) -> None:
        """Gradients of the same block."""


class SdpaProbe:
    """torch's scaled_dot_product_attention, for callers that know nothing better; see `head_dim_on`."""

    name = "sdpa"
    softcap: float | None = None

    def __init__(self, head_dim: int | None = None) -> None:
        self.head_dim = head_dim_on(default_device()) if head_dim is None else head_dim

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        """See `AttentionProbe`."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, state: Any, causal: bool) -> None:
        """See `AttentionProbe`; autograd needs the graph, so the forward's time is in it and taken off again."""
        torch.autograd.grad(state, (q, k, v), dout, retain_graph=True)


def head_dim_on(device: torch.device) -> int:
    """Head size of the probes where no model says it."""
    return 64 if device.type == "cpu" else 128


def attention_probes(timer: Timer, dtype: torch.dtype, probe: AttentionProbe) -> Iterator[AttentionSample]:
    """Blocks from few heads and short keys to many and long."""
    if timer.device.type == "cpu":
        blocks = [(1, 256, 256), (1, 1024, 256), (4, 256, 256), (1, 256, 1024), (4, 1024, 1024), (2, 1024, 1024)]
        causal = [(1, 512), (4, 512), (4, 1024), (2, 2048)]
    else:
        blocks = [(1, 1024, 1024), (4, 1024, 1024), (1, 8192, 1024), (4, 1024, 8192), (8, 4096, 4096), (8, 8192, 8192)]
        causal = [(1, 4096), (8, 4096), (8, 8192), (4, 16384)]
    shapes = [(heads, queries, keys, False) for heads, queries, keys in blocks]
    shapes += [(heads, tokens, tokens, True) for heads, tokens in causal]
    for heads, queries, keys, is_causal in shapes:
        q, k, v, dout = (
            torch.randn(1, heads, tokens, probe.head_dim, device=timer.device, dtype=dtype, requires_grad=True)
            for tokens in (queries, keys, keys, queries)
        )
        forward_s = timer(lambda: probe.forward(q, k, v, is_causal))  # noqa: B023
        state = probe.forward(q, k, v, is_causal)
        backward_s = timer(lambda: probe.backward(dout, q, k, v, state, is_causal))  # noqa: B023
        yield AttentionSample(
            rows=queries * heads,
            keys=keys,
            causal=is_causal,
            head_dim=probe.head_dim,
            forward_s=forward_s,
            backward_s=backward_s,
        )


def attention_table(timer: Timer, dtype: torch.dtype, probe: AttentionProbe) -> list[tuple[int, float]]:
    """Forward seconds of causal attention by tokens, one sequence of few heads: the table of the hetero-ring paper."""
    heads, lengths = (4, (256, 512, 1024)) if timer.device.type == "cpu" else (8, (2048, 4096, 8192, 16384))
    table = []
    for tokens in lengths:
        shape = 1, heads, tokens, probe.head_dim
        q, k, v = (torch.randn(shape, device=timer.device, dtype=dtype) for _ in range(3))
        table.append((tokens, timer(lambda: probe.forward(q, k, v, True))))  # noqa: B023
    return table


def memory_probe(timer: Timer) -> float:
    """Bytes per second of a large copy, counting what is read and what is written."""
    num_bytes = 2**25 if timer.device.type == "cpu" else 2**30
    source = torch.empty(num_bytes, dtype=torch.uint8, device=timer.device).fill_(1)
    target = torch.empty_like(source)
    return 2 * num_bytes / timer(lambda: target.copy_(source))


def matmul_probe(timer: Timer, dtype: torch.dtype) -> float:
    """Operations per second of a large square product: the peak of a device that no catalogue knows."""
    size = 1024 if timer.device.type == "cpu" else 8192
    a, b = (torch.randn(size, size, device=timer.device, dtype=dtype) for _ in range(2))
    return float(2 * size**3 / timer(lambda: a @ b))
