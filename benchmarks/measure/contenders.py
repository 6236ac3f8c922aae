"""Implementations of attention over a sequence that is split evenly over all ranks, with one interface.

    stock       DeepSpeed's `UlyssesSPAttentionHF` around transformers' sdpa attention
    torch-ring  torch's ring attention, which its context_parallel, accelerate's cp and torchtitan use
    ringmaster  Ulysses of axolotl-ringmaster around transformers' sdpa attention; linear-attention layers pass states
    ulysses     this engine with the uniform schedule "ulysses"
    ring        this engine with the uniform schedule "ring"

Each gets queries, keys and values as Llama makes them, [B, heads, s, D] views of [B, s, heads, D], and returns
[B, s, H * D].

torch's ring: `context_parallel` itself accepts CUDA's operators only. The ring below it, `_templated_ring_attention`,
is generic in the operator, and runs here with torch's flash operator for CPU, the kernel of all other contenders.
Causal work is balanced by its own zigzag. Other published rings do not run on a CPU: ring-flash-attn needs flash-attn,
and yunchang 0.6.4 falls back to an operator that exists for CUDA only, and has no backward for it. ringmaster's rings
do not run either; its gated delta rule needs the kernels of flash-linear-attention.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ds_hetero.runtime.attention import kernels
from ds_hetero.runtime.attention.attention import AttentionSpec, attention
from ds_hetero.runtime.attention.batch_layout import agree_on_batch
from ds_hetero.runtime.attention.local_batch import LocalBatch
from ds_hetero.runtime.replica import make_replica
from ds_hetero.values.baselines import UNIFORM
from ds_hetero.values.placement import stream_placement
from ds_hetero.values.plans import Plan
from ds_hetero.values.schedule import Schedule

CONTESTS = {
    "ulysses": ("stock", "ulysses"),
    "ring": ("torch-ring", "ring"),
    "ringmaster": ("ringmaster", "ulysses"),
}
"""What is compared with what: (peer, ours). The last one takes a package that is not installed with the others."""


@dataclass(frozen=True)
class Shape:
    """Shape of the models, in float32.

    It is narrow, so that attention has the share of a step that it has on long sequences.

    ``family`` is one of `benchmarks.measure.models.FAMILIES`.
    """

    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 64
    batch_size: int = 1
    hidden_size: int = 256
    num_layers: int = 2
    family: str = "llama"


@dataclass(frozen=True)
class Contender:
    """One implementation on this rank.

    Args:
        positions: returns for a length the positions of this rank's tokens in the sequence.
        attend: (q, k, v, position_ids [B, s]) -> out.
    """

    name: str
    positions: Callable[[int], list[int]]
    attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

    def layer(self, shape: Shape, length: int) -> Layer:
        """Return one attention layer on this rank's shard of a sequence that is the same for all contenders."""
        positions = self.positions(length)
        generator = torch.Generator().manual_seed(0)
        heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads, shape.num_heads)
        whole_tensors = [torch.randn(shape.batch_size, length, h, shape.head_dim, generator=generator) for h in heads]
        q, k, v, dout = (x[:, positions].contiguous().transpose(1, 2) for x in whole_tensors)
        return Layer(
            attend=self.attend,
            inputs=(q.requires_grad_(), k.requires_grad_(), v.requires_grad_()),
            dout=dout.transpose(1, 2).flatten(2),
            position_ids=torch.tensor([positions] * shape.batch_size),
        )


@dataclass(frozen=True)
class Layer:
    """A layer that runs forward and backward when called; it returns the output, and ``inputs`` get the gradients."""

    attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    inputs: tuple[Tensor, Tensor, Tensor]
    dout: Tensor
    position_ids: Tensor

    def forward(self) -> Tensor:
        """Run the forward alone, as in prefill."""
        with torch.no_grad():
            return self.attend(*self.inputs, self.position_ids)

    def __call__(self) -> Tensor:
        """Run forward and backward."""
        for x in self.inputs:
            x.grad = None
        out = self.attend(*self.inputs, self.position_ids)
        out.backward(self.dout)
        return out


def make_contender(name: str, shape: Shape) -> Contender:
    """Set a contender up on this rank; it makes process groups, so every rank calls it in the same order."""
    makers = {
        "stock": _stock,
        "torch-ring": _torch_ring,
        "ringmaster": _ringmaster,
        "ulysses": _engine,
        "ring": _engine,
    }
    return makers[name](name, shape)


def make_engine(name: str, schedule: Schedule, shape: Shape) -> Contender:
    """Set this engine up with a schedule for all ranks.

    It makes process groups, so every rank calls it in the same order.
    """
    replica = make_replica(Plan.of_replicas([schedule]))
    spec = AttentionSpec(kernels.select(torch.device("cpu"), torch.float32, shape.head_dim, None, None))

    def attend(q: Tensor, k: Tensor, v: Tensor, position_ids: Tensor) -> Tensor:
        # A model does this once for all its layers. Stock gathers position ids in every layer, so here every call does.
        batch_size, tokens = position_ids.shape
        shard = LocalBatch(batch_size=batch_size, tokens=tokens, dtype=q.dtype, position_ids=position_ids)
        batch = agree_on_batch(replica, shard)
        return attention(q, k, v, replica, batch, spec).flatten(2)

    return Contender(name, lambda length: stream_placement(schedule, length).positions(dist.get_rank()), attend)


def contiguous_positions(length: int, rank: int, num_ranks: int) -> list[int]:
    """Return the positions of rank r under stock Ulysses: chunk r of n equal ones."""
    if length % num_ranks:
        raise ValueError(f"{length} tokens do not make an equal chunk for each of {num_ranks} ranks.")
    chunk = length // num_ranks
    return list(range(rank * chunk, (rank + 1) * chunk))


def zigzag_positions(length: int, rank: int, num_ranks: int) -> list[int]:
    """Return the positions of rank r under balanced rings like torch's: chunks r and 2 n - 1 - r of 2 n equal ones."""
    if length % (2 * num_ranks):
        raise ValueError(f"{length} tokens do not make 2 equal chunks for each of {num_ranks} ranks.")
    chunk = length // (2 * num_ranks)
    return [c * chunk + i for c in (rank, 2 * num_ranks - 1 - rank) for i in range(chunk)]


def _stock(name: str, shape: Shape) -> Contender:
    """Set stock DeepSpeed Ulysses up."""
    import deepspeed.comm
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    deepspeed.comm.init_distributed("gloo", verbose=False)
    ulysses = UlyssesSPAttentionHF(
        ALL_ATTENTION_FUNCTIONS["sdpa"],
        shape.batch_size,
        shape.num_heads,
        shape.head_dim,
        shape.num_kv_heads,
        num_hidden_layers=1,
        process_group=dist.group.WORLD,
        seq_length_is_variable=True,
    )
    module = SimpleNamespace(num_key_value_groups=shape.num_heads // shape.num_kv_heads, is_causal=True, training=True)

    def attend(q: Tensor, k: Tensor, v: Tensor, position_ids: Tensor) -> Tensor:
        out: Tensor = ulysses(module, q, k, v, None, position_ids=position_ids, scaling=shape.head_dim**-0.5)[0]
        return out

    return Contender(name, partial(contiguous_positions, rank=dist.get_rank(), num_ranks=dist.get_world_size()), attend)


def set_up_ringmaster(shape: Shape) -> str:
    """Set ringmaster's Ulysses up over all ranks; return the name of its attention function.

    Raises:
        SystemExit: the package is not installed.
    """
    try:
        import ringmaster
    except ImportError:
        raise SystemExit(
            "the contest needs axolotl-ringmaster: pip install --no-deps axolotl-ringmaster==0.2.7"
        ) from None
    size = dist.get_world_size()
    config = ringmaster.RingmasterConfig(size=size, backend=ringmaster.Backend.ULYSSES)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    runtime = ringmaster.setup(
        config, num_kv_heads=shape.num_kv_heads, device_mesh=mesh, device_type="cpu", inner_attn="sdpa"
    )
    name: str = runtime.attn_implementation
    return name


def _ringmaster(name: str, shape: Shape) -> Contender:
    """Set ringmaster's Ulysses up."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ulysses = ALL_ATTENTION_FUNCTIONS[set_up_ringmaster(shape)]
    module = SimpleNamespace(num_key_value_groups=shape.num_heads // shape.num_kv_heads, is_causal=True, training=True)

    def attend(q: Tensor, k: Tensor, v: Tensor, position_ids: Tensor) -> Tensor:
        out: Tensor = ulysses(module, q, k, v, None, scaling=shape.head_dim**-0.5)[0]
        return out.flatten(2)

    return Contender(name, partial(contiguous_positions, rank=dist.get_rank(), num_ranks=dist.get_world_size()), attend)


def _torch_ring(name: str, shape: Shape) -> Contender:
    def attend(q: Tensor, k: Tensor, v: Tensor, position_ids: Tensor) -> Tensor:
        out: Tensor = TorchRing.apply(q, k, v, dist.group.WORLD)
        return out.transpose(1, 2).flatten(2)

    return Contender(name, partial(zigzag_positions, rank=dist.get_rank(), num_ranks=dist.get_world_size()), attend)


class TorchRing(torch.autograd.Function):
    """torch's causal ring attention with its flash operator for CPU; KV is sent from neighbour to neighbour."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:  # noqa: D102
        torchs = _torchs_ring()
        torchs.set_rotate_method("alltoall")  # the other method is one all-gather
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = torchs._templated_ring_attention(group, 2, flash, q, k, v, is_causal=True, dropout_p=0.0)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        saved: Sequence[Tensor] = ctx.saved_tensors
        dq, dk, dv = _torchs_ring()._templated_ring_attention_backward(
            ctx.group, 2, flash_backward, dout, "grad_out", *saved, is_causal=True, dropout_p=0.0
        )
        return dq, dk, dv, None


def _torchs_ring() -> Any:
    """Return the module of torch's ring; torch has moved it once and left half of the names behind."""
    from torch.distributed.tensor.experimental import _attention

    return sys.modules[_attention._templated_ring_attention.__module__]


def _engine(name: str, shape: Shape) -> Contender:
    return make_engine(name, UNIFORM[name](dist.get_world_size(), shape.num_heads, shape.num_kv_heads), shape)
