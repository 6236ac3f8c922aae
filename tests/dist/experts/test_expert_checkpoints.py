"""The optimizer of divided experts steps as one over all of them, and its state loads under any other division."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_hetero.errors import CheckpointError
from ds_hetero.runtime.experts.parts import WHOLE_SHAPE, ExpertParts, Holder
from ds_hetero.runtime.experts.replicas import ReplicaExperts
from ds_hetero.values.splits import Split, share
from tests.support import run_ranks

EXPERTS, STEPS, LR = 5, 3, 1e-2


class Layer:
    """A placed layer with one weight, [experts of this rank, 3, 2]."""

    def __init__(self, weights: list[int], rank: int) -> None:
        self.experts, self.module = Split(share(EXPERTS, weights)), nn.Module()
        self.in_replicas = ReplicaExperts((tuple(range(len(weights))),), (self.experts,))
        start, stop = self.experts.ranges[rank]
        self.rows = [0] * (stop - start)
        whole = torch.arange(EXPERTS * 6, dtype=torch.float32).view(EXPERTS, 3, 2)
        self.module.weight = nn.Parameter(whole[start:stop].clone())
        setattr(self.module.weight, WHOLE_SHAPE, tuple(whole.shape))
        self.holders = [Holder(self.module, "layer")]


def gradient(step: int) -> torch.Tensor:
    """Of all experts in a step."""
    return torch.randn(EXPERTS, 3, 2, generator=torch.Generator().manual_seed(step))


def build(weights: list[int], rank: int) -> tuple[ExpertParts, Any]:
    """Experts of this rank, and their optimizer beside that of an engine without clipping."""
    from ds_hetero.frameworks.deepspeed.experts.optimizer import ExpertOptimizer

    parts = ExpertParts([Layer(weights, rank)], dist.group.WORLD)
    other = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([other], lr=LR)
    engine: Any = SimpleNamespace(optimizer=optimizer, gradient_clipping=lambda: 0.0, module=nn.Module())
    make = lambda groups: torch.optim.AdamW(groups, lr=LR)  # noqa: E731
    return parts, ExpertOptimizer(engine, parts, make, [(0, ["layer.weight"])])


def run(parts: ExpertParts, experts: Any, steps: range) -> None:
    """Steps in which every expert gets the gradient of one process; DeepSpeed divides sums by the number of ranks."""
    part = parts.parts["layer.weight"]
    start, stop = part.experts.ranges[parts.rank]
    for step in steps:
        for half in (0.25, 0.75):  # two micro-batches
            (part.parameter * (half * dist.get_world_size() * gradient(step)[start:stop])).sum().backward()
        experts.take()
        assert abs(experts.squares - float(gradient(step).square().sum())) < 1e-3
        experts.update(is_applied=True)


def saves_and_loads(rank: int, folder: str) -> None:
    """Under shares with zeros, on the same ranks."""
    from ds_hetero.frameworks.deepspeed.experts.checkpoints import load_experts, save_experts

    whole = nn.Parameter(torch.arange(EXPERTS * 6, dtype=torch.float32).view(EXPERTS, 3, 2))
    one = torch.optim.AdamW([whole], lr=LR)
    halfway = whole.detach()
    for step in range(2 * STEPS):
        if step == STEPS:
            halfway = whole.detach().clone()
        whole.grad = gradient(step)
        one.step()

    parts, experts = build([3, 0, 2], rank)
    run(parts, experts, range(STEPS))
    writer: Any = SimpleNamespace(save=torch.save)
    save_experts(writer, Path(folder), parts, experts)
    dist.barrier()
    manifest: Any = SimpleNamespace(parts=dict.fromkeys(path.name for path in Path(folder).iterdir()))
    for weights in ([3, 0, 2], [1, 1, 1], [0, 1, 0]):
        parts, experts = build(weights, rank)
        part = parts.parts["layer.weight"]
        start, stop = part.experts.ranges[rank]
        load_experts(Path(folder), manifest, parts, experts, with_state=True)
        assert torch.allclose(part.parameter, halfway[start:stop], rtol=1e-6, atol=0), weights
        run(parts, experts, range(STEPS, 2 * STEPS))
        torch.testing.assert_close(part.parameter, whole[start:stop], rtol=1e-6, atol=1e-7)
        with parts.gathered():
            saved = parts._layers[0].holders[0].module.state_dict().get("weight")
        if rank == 0:
            torch.testing.assert_close(saved, whole.detach(), rtol=1e-6, atol=1e-7)
            assert saved.shape == whole.shape
    manifest = SimpleNamespace(parts={})
    try:
        load_experts(Path(folder), manifest, parts, experts, with_state=True)
    except CheckpointError as error:
        assert "has no optimizer state of experts" in str(error)
    else:
        raise AssertionError("a checkpoint without experts was loaded")


def test_experts_resume_under_other_shares(tmp_path: Path) -> None:
    run_ranks(saves_and_loads, 3, str(tmp_path))
