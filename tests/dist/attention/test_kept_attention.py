"""Attention that is kept over recomputation gives the same bits, and its recomputation posts no message."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.proof.events import Wait
from benchmarks.proof.recording import recording
from ds_hetero.runtime.attention.attention import AttentionSpec, attention
from ds_hetero.runtime.attention.batch_layout import agree_on_batch
from ds_hetero.runtime.attention.kept_results import checkpoint_keeping_attention
from ds_hetero.runtime.attention.kernels import select
from ds_hetero.runtime.attention.local_batch import LocalBatch
from ds_hetero.runtime.replica import make_replica
from ds_hetero.values.baselines import ring, ulysses, usp
from ds_hetero.values.plans import Plan
from tests.dist.attention.cases import Case, case_by_heads, moved_case, random_case
from tests.support import run_ranks

_REENTRANT = partial(checkpoint, use_reentrant=True)
_OTHER = partial(checkpoint, use_reentrant=False)


@pytest.mark.parametrize("torch_checkpoint", [_REENTRANT, _OTHER], ids=["reentrant", "non-reentrant"])
def test_kept_attention_equals_recomputed_attention_without_its_messages(torch_checkpoint: Any) -> None:
    """Schedules and placements by chance: rings, groups, lanes, moved tokens, sinks, ranks without tokens."""
    counts = run_ranks(_check_cases, 4, torch_checkpoint, nccl_rules=False)
    assert sum(again for _, again in counts) > 0  # the cases do send messages in a recomputation that keeps nothing


def _check_cases(rank: int, torch_checkpoint: Any) -> tuple[int, int]:
    cases = [random_case(seed, 4) for seed in range(6)] + [random_case(seed, 4, True) for seed in range(4)]
    cases += [moved_case(seed, 4) for seed in range(4)] + [case_by_heads(seed, 2, 2) for seed in range(3)]
    total_kept = total_again = 0
    for seed, case in enumerate(cases):
        run = _layers(case, rank, seed)
        plain, plain_messages = run(lambda function, *x: function(*x))
        again, messages_again = run(torch_checkpoint)
        kept, messages_kept = run(partial(checkpoint_keeping_attention, torch_checkpoint, False))
        for a, b, c in zip(plain, again, kept, strict=True):
            assert torch.equal(a, b), f"{seed}"
            assert torch.equal(a, c), f"{seed}"
        assert messages_kept == plain_messages, (seed, messages_kept, plain_messages, messages_again)
        total_kept += messages_kept
        total_again += messages_again - plain_messages
    return total_kept, total_again


def _layers(case: Case, rank: int, seed: int) -> Callable[[Any], tuple[list[Tensor], int]]:
    """Return a function that trains two layers, the second of two attentions, and counts what the rank posts."""
    replica = make_replica(Plan.of_replicas([case.schedule]))
    torch.manual_seed(seed)
    q, k, v, dout, sinks = case.tensors(torch.float32)
    mine = case.placement.positions(rank)
    local = LocalBatch(
        batch_size=case.batch_size, tokens=len(mine), dtype=q.dtype, placement=case.placement, **case.shard(rank)
    )
    batch = agree_on_batch(replica, local)
    kernel = select(q.device, q.dtype, case.head_dim, case.softcap, None)

    def run(checkpointed: Any) -> tuple[list[Tensor], int]:
        leaves = [x[:, :, mine].clone().requires_grad_() for x in (q, k, v)]
        own_sinks = None if sinks is None else sinks.clone().requires_grad_()
        spec = AttentionSpec(kernel, causal=case.causal, window=case.window, softcap=case.softcap, sinks=own_sinks)

        def layer(x: Tensor, k: Tensor, v: Tensor, attentions: int) -> Tensor:
            for _ in range(attentions):
                x = 2 * attention(x.sin(), k * 1.5, v, replica, batch, spec).transpose(1, 2)
            return x

        posted: list[Any] = []
        with recording(posted):
            x = leaves[0]
            for attentions in (1, 2):
                x = checkpointed(layer, x, *leaves[1:], attentions)
            x.backward(dout[:, :, mine])
        tensors = [x.detach(), *(leaf.grad for leaf in leaves)]
        return tensors, sum(not isinstance(event, Wait) for event in posted)

    return run


@pytest.mark.parametrize("make", [ring, ulysses, lambda n, h, g: usp(n, h, g, 2)], ids=["ring", "ulysses", "usp"])
def test_a_recomputation_that_keeps_attention_posts_nothing(make: Any) -> None:
    """The messages of a layer in order: in the backward there are those of gradients alone."""
    schedule = make(4, 8, 4)
    for before, during in run_ranks(_messages, 4, schedule, nccl_rules=False):
        assert before > 0
        assert during == 0


def _messages(rank: int, schedule: Any) -> tuple[int, int]:
    length, dim = 64, 4
    replica = make_replica(Plan.of_replicas([schedule]))
    torch.manual_seed(0)
    batch = agree_on_batch(replica, LocalBatch(batch_size=1, tokens=length // 4, dtype=torch.float32))
    spec = AttentionSpec(select(torch.device("cpu"), torch.float32, dim, None, None))
    x = torch.randn(1, 8, length // 4, dim, requires_grad=True)
    posted: list[Any] = []
    counts: list[int] = []

    def layer(x: Tensor) -> Tensor:
        begun = len(posted)
        out = attention(x, x[:, :4], x[:, 4:], replica, batch, spec)
        counts.append(len(posted) - begun)
        return out.sin()

    with recording(posted):
        checkpoint_keeping_attention(_OTHER, False, layer, x).sum().backward()
    first, again = counts
    return first, again
