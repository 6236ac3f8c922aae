"""The calls and waits that `benchmarks.proof.messages` makes of tables are those of the runtime's modules.

So what is proved of the one, that no step locks up in whatever order messages arrive, holds for the other.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.proof.chance import random_plan
from benchmarks.proof.events import Call, Event
from benchmarks.proof.messages import (
    COLOUR,
    FAR,
    HEAD_DIM,
    AttentionTables,
    Log,
    PipelineJob,
    communicator_of,
    pipeline_step,
)
from benchmarks.proof.recording import recording
from ds_hetero.batch.ring_colours import num_ring_colours
from ds_hetero.gradient_sync import AsymmetricGradientSync, pipeline_layouts
from ds_hetero.gradient_sync.bucket_transfer import BucketTransfer
from ds_hetero.runtime import replica as replica_module
from ds_hetero.runtime.attention.attention import AttentionSpec, attention
from ds_hetero.runtime.attention.batch_layout import BatchLayout, agree_on_batch, batch_layout
from ds_hetero.runtime.attention.kernels import select
from ds_hetero.runtime.attention.local_batch import LocalBatch
from ds_hetero.runtime.pipeline.runner import PipelineRunner, neighbours_of
from ds_hetero.runtime.pipeline.stage_transfers import make_boundary_groups
from ds_hetero.runtime.process_groups import ProcessGroups
from ds_hetero.runtime.replica import Replica, make_replica
from ds_hetero.values.placement import Rows, stream_placement
from ds_hetero.values.plans import Plan, Stage
from ds_hetero.values.plans.activation_transfers import held_intervals
from ds_hetero.values.schedule import Group, Schedule
from tests.dist.attention.cases import Case, case_by_heads, moved_case, random_case, routed_case
from tests.support import run_ranks

CPU = torch.device("cpu")
_NAMES = {"alltoall_base": "all_to_all", "all_to_all_single": "all_to_all"}


def _told(events: Sequence[Event], communicators: dict[str, str] | None = None) -> list[Any]:
    """Events as plain values: calls by what they move and where, waits by the call, each once."""
    told: list[Any] = []
    numbers: dict[int, int] = {}
    calls = 0
    for event in events:
        if not isinstance(event, Call):
            if (number := numbers.pop(event.work, None)) is not None:
                told.append(("wait", number))
            continue
        numbers[event.work], calls = calls, calls + 1
        where = event.communicator if communicators is None else communicators[event.communicator]
        messages = [(message.sends, message.peer, message.num_bytes) for message in event.messages]
        told.append((_NAMES.get(event.name, event.name), where, event.rank, event.size, event.splits, messages))
    return told


def _names_of(groups: ProcessGroups) -> dict[str, str]:
    """How `benchmarks.proof.messages` calls the groups that were made, by the recorder's names."""
    world = dist.group.WORLD
    assert world is not None
    made = {
        f"group {group.group_name}": communicator_of(*key)
        for key, group in groups._groups.items()
        if isinstance(group, dist.ProcessGroup)
    }
    return made | {f"group {world.group_name}": communicator_of(range(dist.get_world_size()), "world")}


@contextmanager
def _as_on_nccl() -> Iterator[None]:
    """Far messages and colours of a ring have groups of their own; no bucket has arrived before it is waited for."""
    with (
        mock.patch.object(replica_module, "pairs_by_order", lambda group=None: True),
        mock.patch.object(replica_module, "_has_far_group", lambda hosts: True),
        mock.patch.object(BucketTransfer, "has_arrived", lambda transfer: transfer._work is None),
    ):
        yield


def _case(kind: str, seed: int, world_size: int) -> Case:
    if kind == "moved tokens":
        return moved_case(seed, world_size)
    if kind == "lanes by heads":
        return case_by_heads(seed, 2, world_size // 2)
    return routed_case(seed, world_size) if kind == "nodes" else random_case(seed, world_size, kind == "documents")


@pytest.mark.parametrize(
    ("kind", "world_size"),
    [("streams", 3), ("documents", 3), ("documents", 4), ("nodes", 4), ("lanes by heads", 4), ("moved tokens", 4)],
)
def test_attention_posts_the_calls_that_are_proved(kind: str, world_size: int) -> None:
    for recorded, made in run_ranks(_attention_steps, world_size, kind, 6, nccl_rules=False):
        assert any(len(of_case) > 4 for of_case in recorded)
        for of_case, wanted in zip(recorded, made, strict=True):
            assert of_case == wanted


def _attention_steps(rank: int, kind: str, num_cases: int) -> tuple[list[Any], list[Any]]:
    recorded, made = [], []
    with _as_on_nccl():
        for seed in range(num_cases):
            case = _case(kind, 500 + seed, dist.get_world_size())
            groups = ProcessGroups()
            replica = make_replica(Plan.of_replicas([case.schedule]), groups)
            with recording() as events:
                layout = _agreed(case, replica)
                events.clear()
                _forward_and_backward(case, replica, layout)
            recorded.append(_told(events, _names_of(groups)))
            tables = AttentionTables(layout.placement, case.causal, case.window, case.head_dim)
            log = Log(rank, by_order=True)
            tables.post(log, backward=False)
            tables.post(log, backward=True)
            made.append(_told(log.events))
    return recorded, made


@pytest.mark.parametrize("tokens", [(3, 1, 2), (4, 1, 1, 2)], ids=["three colours", "two colours"])
def test_a_ring_by_colour_sends_nothing_first_inside_a_step(tokens: tuple[int, ...]) -> None:
    """The start connects every pair of ranks on every communicator over which the ring sends."""
    assert all(run_ranks(_connected_at_the_start, len(tokens), tokens, nccl_rules=False))


def _connected_at_the_start(rank: int, tokens: tuple[int, ...]) -> bool:
    groups = tuple(Group(ranks=(member,), tokens=(count,), heads=(4,)) for member, count in enumerate(tokens))
    schedule = Schedule(num_heads=4, num_kv_heads=2, groups=groups)
    made = ProcessGroups()
    with _as_on_nccl(), recording() as events:
        make_replica(Plan.of_replicas([schedule]), made)
    names = _names_of(made)
    connected = {(names[call.communicator], end) for call in _with_messages(events) for end in _ends(call)}
    placement = stream_placement(schedule, 8 * sum(tokens), (Rows(0, 1, ((0, 8 * sum(tokens)),)),))
    tables, log = AttentionTables(placement, causal=False), Log(rank, by_order=True)
    tables.post(log, backward=False)
    tables.post(log, backward=True)
    used = {(call.communicator, end) for call in _with_messages(log.events) for end in _ends(call)}
    assert len({communicator for communicator, _ in used}) > 1
    return used <= connected


def _with_messages(events: Sequence[Event]) -> list[Call]:
    return [event for event in events if isinstance(event, Call) and event.messages]


def _ends(call: Call) -> set[tuple[bool, int]]:
    """Direction and peer of a call's messages."""
    return {(message.sends, message.peer) for message in call.messages}


def _agreed(case: Case, replica: Replica) -> BatchLayout:
    tokens = case.placement.tokens(replica.rank)
    given = case.shard(replica.rank)
    return agree_on_batch(
        replica,
        LocalBatch(batch_size=case.batch_size, tokens=tokens, dtype=torch.float32, placement=case.placement, **given),
    )


def _forward_and_backward(case: Case, replica: Replica, layout: BatchLayout) -> None:
    q, k, v, dout, _ = case.tensors(torch.float32)
    mine = case.placement.positions(replica.rank)
    q, k, v = (x[:, :, mine].detach().requires_grad_() for x in (q, k, v))
    kernel = select(CPU, torch.float32, case.head_dim, None, None)
    spec = AttentionSpec(kernel, causal=case.causal, window=case.window)
    attention(q, k, v, replica, layout, spec).backward(dout[:, :, mine].transpose(1, 2))


# --- pipelines ----------------------------------------------------------------------------------------


class _Batch:
    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens
        self.rows, self.length = tokens.shape


class _Stage(nn.Module):
    """Layers of a product, attention and a product; the first stage embeds, the last makes a loss."""

    def __init__(self, job: PipelineJob, stage: Stage, replica: Replica | None) -> None:
        super().__init__()
        model = job.plan.model
        assert model is not None
        self._job, self._stage, self._replica, self._model = job, stage, replica, model
        self.held = {name: nn.Parameter(torch.zeros(job.shapes[name])) for name in job.held(stage)}
        self._spec = AttentionSpec(select(CPU, torch.float32, HEAD_DIM, None, None))

    def forward(self, batch: _Batch, hidden: Tensor | None) -> Tensor:
        rank, layers = dist.get_rank(), self._stage.layers
        assert layers is not None
        held = held_intervals(self._stage, batch.length, rank)
        tokens = torch.cat([batch.tokens[:, start:stop] for start, stop in held] or [batch.tokens[:, :0]], dim=1)
        x = nn.functional.embedding(tokens, self.held["embedding"]) if hidden is None else hidden
        for layer in range(*layers):
            if self._job.recompute:
                x = checkpoint(self._layer, layer, x, batch, use_reentrant=False)
            else:
                x = self._layer(layer, x, batch)
        if layers[1] < self._model.num_layers:
            return x
        head = self.held["embedding" if self._job.tied else "head"]
        return nn.functional.linear(x, head).sum()

    def _layer(self, layer: int, x: Tensor, batch: _Batch) -> Tensor:
        heads, kv_heads = self._model.num_heads, self._model.num_kv_heads
        qkv = nn.functional.linear(x, self.held[f"layers.{layer}.qkv"]).unflatten(2, (-1, HEAD_DIM)).transpose(1, 2)
        q, k, v = qkv.split_with_sizes([heads, kv_heads, kv_heads], dim=1)
        if self._replica is None:
            out = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)
        else:
            rows = (Rows(0, batch.rows, ((0, batch.length),)),)
            layout = batch_layout(stream_placement(self._replica.schedule, batch.length), rows)
            out = attention(q, k, v, self._replica, layout, self._spec)
        return x + nn.functional.linear(out.flatten(2), self.held[f"layers.{layer}.out"])


@pytest.mark.parametrize("world_size", [3, 5])
def test_a_pipelined_step_posts_the_calls_that_are_proved(world_size: int) -> None:
    by_rank = run_ranks(_pipelined_steps, world_size, 6, nccl_rules=False)
    assert max(len(of_step) for recorded, _ in by_rank for of_step in recorded) > 40
    for recorded, made in by_rank:
        for of_step, wanted in zip(recorded, made, strict=True):
            assert of_step == wanted


def _job(seed: int, world_size: int) -> PipelineJob:
    rng = random.Random(seed)
    plan = random_plan(rng, world_size, 4, tensor=False)
    lengths = tuple(tuple(12 + 3 * (k % 3) for k in range(p.micro_batches or 1)) for p in plan.pipelines)
    return PipelineJob(plan=plan, lengths=lengths, tied=rng.random() < 0.5, recompute=rng.random() < 0.5)


def _pipelined_steps(rank: int, num_plans: int) -> tuple[list[Any], list[Any]]:
    recorded, made = [], []
    with _as_on_nccl():
        for seed in range(num_plans):
            job, groups = _job(seed, dist.get_world_size()), ProcessGroups()
            recorded.append(_told(_pipelined_step(job, rank, groups), _names_of(groups)))
            made.append(_told(pipeline_step(job, rank, by_order=True)))
    return recorded, made


def _pipelined_step(job: PipelineJob, rank: int, groups: ProcessGroups) -> list[Event]:
    plan = job.plan
    replicas = {stage.ranks: _replica(stage, rank, groups) for p in plan.pipelines for stage in p.stages}
    boundaries = make_boundary_groups(plan, groups)
    place, own = plan.place_of(rank), plan.stage_of(rank)
    assert place is not None and own is not None
    stage = _Stage(job, own, replicas[own.ranks])
    layouts = pipeline_layouts(stage.held, plan)
    assert layouts == job.layouts
    buckets = {"bucket_bytes": job.buckets.bucket_bytes, "alignment": job.buckets.alignment}
    sync = AsymmetricGradientSync(
        stage.held, layouts, replicas=[p.ranks for p in plan.pipelines], groups=groups, **buckets
    )
    runner = PipelineRunner(neighbours_of(plan, rank, boundaries, CPU), stage, job.width, torch.float32)
    rows = plan.pipelines[place[0]].micro_batch_size or 1
    batches = [_Batch(torch.zeros(rows, length, dtype=torch.int64)) for length in job.lengths[place[0]]]
    with recording() as events:
        loss = runner.train(batches, sync)
        dist.all_reduce(torch.zeros(()) if loss is None else loss)
        sync.finish()
        sync.grad_norm()
        sync.gather()
    return events


def _replica(stage: Stage, rank: int, groups: ProcessGroups) -> Replica | None:
    """Groups as `make_replica` makes them, on every rank for every stage."""
    if stage.schedule is None:
        return None
    sp_group, far_group = groups.of(stage.ranks), groups.of(stage.ranks, FAR)
    num_colours = num_ring_colours(stage.schedule)
    colours = [groups.of(stage.ranks, f"{COLOUR} {colour}", connects=False) for colour in range(1, num_colours)]
    a2a = [groups.of(g.ranks) if len(g.ranks) > 1 else None for g in stage.schedule.ring_groups]
    if rank not in stage.ranks:
        return None
    return Replica(
        plan=Plan.of_replicas([stage.schedule]),
        rank=rank,
        sp_group=sp_group,
        a2a_group=a2a[stage.schedule.ring_position(rank)],
        far_group=far_group,
        colour_groups=tuple(colours),
    )
