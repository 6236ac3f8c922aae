"""Launches of one attention layer, forward and backward: in rings, and beside stock Ulysses with equal shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.fake_gpu.device import device, rank_of
from benchmarks.fake_gpu.recorder import Recorder
from benchmarks.fake_gpu.step import DTYPE, the_mode
from ds_hetero.cost.replay import Operation
from ds_hetero.runtime.attention.attention import AttentionSpec, attention
from ds_hetero.runtime.attention.batch_layout import batch_layout
from ds_hetero.runtime.attention.kernels.torch_native import TorchKernel
from ds_hetero.runtime.process_groups import ProcessGroups
from ds_hetero.runtime.replica import Replica
from ds_hetero.values.baselines import proportional, ring, ulysses
from ds_hetero.values.placement import Rows, stream_placement
from ds_hetero.values.plans import Plan
from ds_hetero.values.schedule import Group, Schedule

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128  # of Llama-3.1-8B
_Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def launches_per_layer(num_ranks: int, length: int = 65_536) -> dict[str, Any]:
    """Return the launches of rank 0 by contender: forward and backward, and of which operators."""
    result: dict[str, Any] = {"ranks": num_ranks, "tokens": length}
    for name, make in (("stock", _stock), ("ours", _ours)):
        with rank_of(0, num_ranks):
            recorder = Recorder(the_mode())
            with the_mode(), recorder:
                operations = _run(make(num_ranks, length), length // num_ranks, recorder)
        result[name] = len(operations)
        result[f"{name}_operators"] = dict(Counter(operation.name for operation in operations).most_common())
    result["ratio"] = result["ours"] / result["stock"]
    return result


# Rings of 65,536 tokens: of single ranks, and of two groups of which the first has GPUs of twice the speed. Then what
# no uniform plan has: a ring of unequal shares, and groups of unequal sizes, whose cuts lie inside KV heads.
RINGS = {
    "ring of 8": ring(8, HEADS, KV_HEADS),
    "uneven ring of 8": replace(proportional((4, 1) * 4, HEADS, KV_HEADS), layout="zigzag"),
    "groups of 6 and 2": Schedule(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        groups=(
            Group(ranks=tuple(range(6)), tokens=(1,) * 6, heads=(6, 6, 5, 5, 5, 5)),
            Group(ranks=(6, 7), tokens=(2, 1), heads=(20, 12)),
        ),
        layout="zigzag",
    ),
    "two unequal groups of 4": Schedule(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        groups=tuple(
            Group(ranks=tuple(range(4 * i, 4 * i + 4)), tokens=(weight,) * 4, heads=(HEADS // 4,) * 4)
            for i, weight in enumerate((2, 1))
        ),
        layout="zigzag",
    ),
}


def launches_of_ring(name: str, length: int = 65_536) -> dict[str, Any]:
    """Return the launches of rank 0 in a ring of `RINGS`, forward and backward, messages at each end."""
    schedule = RINGS[name]
    num_ranks = len(schedule.ranks)
    with rank_of(0, num_ranks):
        recorder = Recorder(the_mode())
        with the_mode(), recorder:
            attend, tokens = _in_ring(schedule, length)
            forward = _run(attend, tokens, recorder, backward=False)
            both = _run(attend, tokens, recorder)
    counts = Counter(operation.name for operation in both)
    return {"ring": name, "forward": len(forward), "backward": len(both) - len(forward), "operators": dict(counts)}


def _in_ring(schedule: Schedule, length: int) -> tuple[_Attend, int]:
    """Return this engine's attention in a ring, and the tokens of rank 0."""
    groups = ProcessGroups()
    own = schedule.ring_groups[schedule.ring_position(0)]
    replica = Replica(
        plan=Plan.of_replicas([schedule]),
        rank=0,
        sp_group=groups.of(schedule.ranks),
        a2a_group=groups.of(own.ranks) if len(own.ranks) > 1 else None,
        far_group=groups.of(schedule.ranks, "far"),
    )
    placement = stream_placement(schedule, length, (Rows(0, 1, ((0, length),)),))
    layout, spec = batch_layout(placement, placement.rows), AttentionSpec(TorchKernel())
    return lambda q, k, v: attention(q, k, v, replica, layout, spec).flatten(2), placement.tokens(0)


def _run(attend: _Attend, tokens: int, recorder: Recorder, *, backward: bool = True) -> list[Operation]:
    """Run a forward of attention, and a backward, under the recorder."""

    def made(heads: int) -> Tensor:  # a projection's output as a layer hands it on
        x = torch.empty(1, tokens, heads, HEAD_DIM, device=device(), dtype=DTYPE).transpose(1, 2)
        return x.requires_grad_()

    q, k, v = made(HEADS), made(KV_HEADS), made(KV_HEADS)
    dout = torch.empty(1, tokens, HEADS * HEAD_DIM, device=device(), dtype=DTYPE)
    recorder.record.events.clear()
    out = attend(q, k, v)
    if backward:
        out.backward(dout)
    return list(recorder.record.operations)


def _ours(num_ranks: int, length: int) -> _Attend:
    """Return this engine's attention."""
    schedule: Schedule = ulysses(num_ranks, HEADS, KV_HEADS)
    groups = ProcessGroups()
    group = groups.of(schedule.ranks)
    replica = Replica(plan=Plan.of_replicas([schedule]), rank=dist.get_rank(), sp_group=group, a2a_group=group)
    placement = stream_placement(schedule, length, (Rows(0, 1, ((0, length),)),))
    layout, spec = batch_layout(placement, placement.rows), AttentionSpec(TorchKernel())
    return lambda q, k, v: attention(q, k, v, replica, layout, spec).flatten(2)


def _stock(num_ranks: int, length: int) -> _Attend:
    """Return stock Ulysses' attention."""
    import deepspeed.comm
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    deepspeed.comm.init_distributed("fake", verbose=False)
    layer = UlyssesSPAttentionHF(
        _flash, 1, HEADS, HEAD_DIM, KV_HEADS, num_hidden_layers=1, process_group=dist.group.WORLD,
        seq_length_is_variable=True,
    )  # fmt: skip
    module = SimpleNamespace(num_key_value_groups=HEADS // KV_HEADS, is_causal=True, training=True)
    positions = torch.arange(length // num_ranks, device=device())[None]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = layer(module, q, k, v, None, position_ids=positions, scaling=HEAD_DIM**-0.5)[0]
        return out.flatten(2)

    return attend


def _flash(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    """Call torch's flash operator like transformers' attention functions: [B, heads, S, D] in, [B, S, heads, D] out."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], 0.0, True, False, scale=scaling
    )
    return out, None
