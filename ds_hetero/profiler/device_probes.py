"""Probes of one rank's device: times of layers, attention blocks, copies and matmuls.

All ranks run the same probe at the same time, as in training: devices that share a host, a power budget or a memory bus
are measured while their neighbours work.
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
    """Measures the mean time of a call on ``device``, over at least ``window_s``, after one call to warm up."""

    device: torch.device
    window_s: float

    def __call__(self, fn: Callable[[], Any]) -> float:
        """Return the mean seconds of a call.

        The mean, not the median: a throttled device alternates between fast and slow calls, and training gets both.
        """
        fn()
        self.wait()
        begin_s = time.perf_counter()
        num_calls = 0
        while num_calls == 0 or time.perf_counter() < begin_s + self.window_s:
            fn()
            self.wait()
            num_calls += 1
        return (time.perf_counter() - begin_s) / num_calls

    def wait(self) -> None:
        """Wait until the device is idle."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def layer_probes(timer: Timer, dtype: torch.dtype) -> Iterator[LayerSample]:
    """Time layers without attention, for a few widths and numbers of tokens.

    The fit needs several shapes: it looks for the peak rate, and for the tokens at which half of it is achieved.
    """
    is_cpu = timer.device.type == "cpu"
    hidden_sizes = (256, 768) if is_cpu else (2048, 5120)
    token_counts = (128, 512, 1024) if is_cpu else (256, 1024, 4096)
    for hidden in hidden_sizes:
        layer = _Layer(hidden, timer.device, dtype)
        for tokens in token_counts:
            x = torch.randn(1, tokens, hidden, device=timer.device, dtype=dtype, requires_grad=True)
            grad = torch.randn_like(x)
            forward_s = timer(lambda x=x, layer=layer: layer(x))  # type: ignore[misc]
            both_s = timer(lambda x=x, layer=layer, grad=grad: layer(x).backward(grad))  # type: ignore[misc]
            yield LayerSample(
                tokens=tokens,
                flops=2.0 * tokens * layer.num_weights,
                elementwise_bytes=float(tokens * layer.elements * x.element_size()),
                forward_s=forward_s,
                # It is a difference of two timings, which noise could make 0 or negative.
                backward_s=max(both_s - forward_s, 0.1 * both_s),
            )


class _Layer:
    """A Llama layer without attention: q + k * v takes its place, an elementwise operation that uses all projections.

    It has two RMS norms, four projections, the rotary embedding of queries and keys and a gated MLP, with one kernel
    per operation as in transformers.
    """

    def __init__(self, hidden: int, device: torch.device, dtype: torch.dtype) -> None:
        self.heads, self.head_dim = hidden // 64, 64
        self.mlp = hidden * 11 // 4  # width of the MLP, about Llama's 2.7

        def weight(rows: int, columns: int) -> Tensor:
            """Draw a weight whose outputs are about as large as its inputs."""
            scaled: Tensor = torch.randn(rows, columns, device=device, dtype=dtype) / columns**0.5
            return scaled.requires_grad_()

        self.q, self.k, self.v, self.o = (weight(hidden, hidden) for _ in range(4))
        self.gate = weight(self.mlp, hidden)
        self.up = weight(self.mlp, hidden)
        self.down = weight(hidden, self.mlp)
        self.norms = [torch.ones(hidden, device=device, dtype=dtype, requires_grad=True) for _ in range(2)]
        self.num_weights = 4 * hidden * hidden + 3 * hidden * self.mlp
        # Elements that memory-bound kernels read and write per token, as the cost model counts them: norms and
        # residuals, the rotary embedding of q and k, the activation of the MLP.
        self.elements = 10 * hidden + 2 * 2 * hidden + 3 * self.mlp

    def __call__(self, x: Tensor) -> Tensor:
        y = self._norm(x, 0)
        q = self._rotary(F.linear(y, self.q))
        k = self._rotary(F.linear(y, self.k))
        v = F.linear(y, self.v)
        x = x + F.linear(q + k * v, self.o)
        y = self._norm(x, 1)
        activated = F.silu(F.linear(y, self.gate)) * F.linear(y, self.up)
        return x + F.linear(activated, self.down)

    def _norm(self, x: Tensor, index: int) -> Tensor:
        """Apply an RMS norm, computed in float32."""
        wide = x.float()
        normal: Tensor = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return self.norms[index] * normal.to(x.dtype)

    def _rotary(self, x: Tensor) -> Tensor:
        """Rotate x, [1, tokens, heads * D], by one angle for all tokens, which takes as long as the real embedding."""
        heads = x.view(*x.shape[:-1], self.heads, self.head_dim).transpose(1, 2)
        first, second = heads.chunk(2, dim=-1)
        cosine, sine = 0.8, 0.6
        rotated = heads * cosine + torch.cat((-second, first), dim=-1) * sine
        return rotated.transpose(1, 2).reshape(x.shape)


class AttentionProbe(Protocol):
    """Interface of a kernel that the profiler times: each method does one pass over one block."""

    name: str
    head_dim: int  # D of the timed blocks
    softcap: float | None  # bound of the scores, see `ds_hetero.runtime.attention.kernels.Scores`

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Any:
        """Compute attention of q [B, H, Q, D] to k, v [B, G, K, D]; return the state for `backward`."""

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, state: Any, causal: bool) -> None:
        """Compute the gradients of q, k and v for the block that `forward` has computed."""


class SdpaProbe:
    """torch's scaled_dot_product_attention, the default probe; see `head_dim_on`."""

    name = "sdpa"
    softcap: float | None = None

    def __init__(self, head_dim: int | None = None) -> None:
        self.head_dim = head_dim_on(default_device()) if head_dim is None else head_dim

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        """See `AttentionProbe`."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, state: Any, causal: bool) -> None:
        """See `AttentionProbe`; the graph is kept, so that every call repeats the backward of one forward."""
        torch.autograd.grad(state, (q, k, v), dout, retain_graph=True)


def head_dim_on(device: torch.device) -> int:
    """Return the head size that attention is timed with if no model sets it; on GPUs that of most models."""
    return 64 if device.type == "cpu" else 128


# Shapes of attention blocks, from few heads and short keys to many heads and long keys. Chosen, never measured.
_CPU_BLOCKS = [(1, 256, 256), (1, 1024, 256), (4, 256, 256), (1, 256, 1024), (4, 1024, 1024), (2, 1024, 1024)]
_CPU_CAUSAL = [(1, 512), (4, 512), (4, 1024), (2, 2048)]
_GPU_BLOCKS = [
    (1, 1024, 1024),  # heads, queries, keys
    (4, 1024, 1024),
    (1, 8192, 1024),
    (4, 1024, 8192),
    (8, 4096, 4096),
    (8, 8192, 8192),
]
_GPU_CAUSAL = [(1, 4096), (8, 4096), (8, 8192), (4, 16384)]  # heads, tokens


def attention_probes(timer: Timer, dtype: torch.dtype, probe: AttentionProbe) -> Iterator[AttentionSample]:
    """Time attention of full blocks and of causal squares."""
    is_cpu = timer.device.type == "cpu"
    shapes = [(heads, queries, keys, False) for heads, queries, keys in (_CPU_BLOCKS if is_cpu else _GPU_BLOCKS)]
    shapes += [(heads, tokens, tokens, True) for heads, tokens in (_CPU_CAUSAL if is_cpu else _GPU_CAUSAL)]

    def random_block(heads: int, tokens: int) -> Tensor:
        shape = 1, heads, tokens, probe.head_dim
        return torch.randn(shape, device=timer.device, dtype=dtype, requires_grad=True)

    for heads, queries, keys, is_causal in shapes:
        q, k, v = random_block(heads, queries), random_block(heads, keys), random_block(heads, keys)
        dout = random_block(heads, queries)
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
    """Time the forward of causal attention of one sequence; return pairs of tokens and seconds.

    The hetero-ring planner looks times up in this table, as in its paper.
    """
    is_cpu = timer.device.type == "cpu"
    heads = 4 if is_cpu else 8
    lengths = (256, 512, 1024) if is_cpu else (2048, 4096, 8192, 16384)
    table = []
    for tokens in lengths:
        shape = 1, heads, tokens, probe.head_dim
        q, k, v = (torch.randn(shape, device=timer.device, dtype=dtype) for _ in range(3))
        table.append((tokens, timer(lambda: probe.forward(q, k, v, True))))  # noqa: B023
    return table


def memory_probe(timer: Timer) -> float:
    """Return the bytes per second of a large copy, reads and writes both counted."""
    num_bytes = 2**25 if timer.device.type == "cpu" else 2**30
    source = torch.empty(num_bytes, dtype=torch.uint8, device=timer.device).fill_(1)
    target = torch.empty_like(source)
    return 2 * num_bytes / timer(lambda: target.copy_(source))


def matmul_probe(timer: Timer, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a large square matmul: the peak of a device that is not in the catalogue."""
    size = 1024 if timer.device.type == "cpu" else 8192
    left, right = (torch.randn(size, size, device=timer.device, dtype=dtype) for _ in range(2))
    return float(2 * size**3 / timer(lambda: left @ right))
