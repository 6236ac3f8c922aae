"""Random schedules, models and masks for the parity tests: all that is legal, the same on each rank for one seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from benchmarks.proof.chance import random_placement, random_schedule, with_lanes_by_heads, with_moves, with_nodes
from ds_hetero.values.placement import Placement, Range, stream_placement
from ds_hetero.values.schedule import Group, Schedule


@dataclass
class Case:
    schedule: Schedule
    placement: Placement  # without rows
    length: int
    batch_size: int
    head_dim: int
    causal: bool
    window: int | None
    softcap: float | None
    sinks: bool
    documents: Tensor  # [B, L] number of the document of each token, -1 for padding
    agreed: dict[str, Tensor] = field(default_factory=dict)  # what agree_on_batch is given, whole

    @property
    def visible(self) -> Tensor:
        """[B, L, L] whether a query (row) sees a key (column)."""
        i = torch.arange(self.length)
        visible = (self.documents[:, :, None] == self.documents[:, None, :]) & (self.documents[:, :, None] >= 0)
        if self.causal:
            visible &= i[None, :] <= i[:, None]
        if self.window is not None:
            visible &= i[None, :] > i[:, None] - self.window
        return visible

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Whole q, k, v, gradient of the output (all [B, heads, L, D]) and sinks [H]."""
        s, shape = self.schedule, (self.length, self.head_dim)
        q, dout = torch.randn(2, self.batch_size, s.num_heads, *shape, dtype=torch.float64).to(dtype)
        k, v = torch.randn(2, self.batch_size, s.num_kv_heads, *shape, dtype=torch.float64).to(dtype)
        return q, k, v, dout, torch.randn(s.num_heads, dtype=torch.float64).to(dtype) if self.sinks else None

    def shard(self, rank: int) -> dict[str, Tensor]:
        """What `rank` gives to agree_on_batch."""
        mine = self.placement.positions(rank)
        return {name: x if name == "cu_seqlens" else x[:, mine] for name, x in self.agreed.items()}


def random_case(seed: int, world_size: int, by_documents: bool = False) -> Case:
    """A case of the stream, or one whose spans of documents are dealt by chance, see
    `benchmarks.proof.chance.random_placement`.
    """
    rng = random.Random(seed)
    num_kv_heads = rng.choice([1, 2, 3, 4, 5])
    schedule = random_schedule(rng, world_size, num_kv_heads * rng.choice([1, 2, 3, 4]), num_kv_heads)
    length = rng.choice([rng.randint(max(world_size, 4), 30), rng.randint(30, 90)])
    batch_size = rng.choice([1, 1, 2, 3])
    causal = rng.random() < 0.75
    kind = rng.choice(["plain", "positions", "padding", "cu_seqlens"])
    if kind == "cu_seqlens":
        batch_size = 1
    documents, agreed = _documents(rng, kind, batch_size, length)
    placement = stream_placement(schedule, length)
    if by_documents:
        placement = random_placement(random.Random(seed), schedule, _spans(documents))
    return Case(
        schedule=schedule,
        placement=placement,
        length=length,
        batch_size=batch_size,
        head_dim=rng.choice([4, 8, 16]),
        causal=causal,
        window=rng.randint(1, length) if causal and rng.random() < 0.35 else None,
        softcap=3.0 if rng.random() < 0.15 else None,
        sinks=rng.random() < 0.25,
        documents=documents,
        agreed=agreed,
    )


def routed_case(seed: int, world_size: int) -> Case:
    """A case of documents whose lanes go from node to node, with and without proxies; nodes are drawn by chance.

    Mostly every rank is a unit, and some lane is over all units, so that blocks pass through several nodes. Without
    sinks, which act on what the rings have made.
    """
    rng = random.Random(seed)
    case = random_case(seed, world_size, by_documents=True)
    case.sinks = False
    if rng.random() < 0.7:
        heads = case.schedule.num_heads
        tokens = [rng.randint(1, 3) for _ in range(world_size)]  # uneven: such a ring has communicators by colour
        groups = tuple(Group(ranks=(rank,), tokens=(tokens[rank],), heads=(heads,)) for rank in range(world_size))
        case.schedule = replace(case.schedule, groups=groups, ring=tuple(rng.sample(range(world_size), world_size)))
        case.placement = random_placement(rng, case.schedule, _spans(case.documents), widest=rng.random() < 0.7)
    case.placement = with_nodes(rng, case.placement)
    return case


def case_by_heads(seed: int, nodes: int, per_node: int) -> Case:
    """A case some of whose lanes exchange heads between nodes of as many ranks, among others that do not."""
    rng = random.Random(seed)
    world_size = nodes * per_node
    case = random_case(seed, world_size, by_documents=True)
    case.sinks = False
    ranks, heads = rng.sample(range(world_size), world_size), case.schedule.num_heads
    groups = tuple(Group(ranks=(rank,), tokens=(rng.randint(1, 3),), heads=(heads,)) for rank in ranks)
    case.schedule = replace(case.schedule, groups=groups, ring=tuple(range(world_size)))
    placement = random_placement(rng, case.schedule, _spans(case.documents), widest=True)
    case.placement = with_lanes_by_heads(rng, placement, nodes)
    return case


def moved_case(seed: int, world_size: int) -> Case:
    """A case some of whose tokens are held by other ranks than attend to them; of every kind that there is."""
    if world_size == 4 and seed % 4 == 0:
        case = case_by_heads(seed, 2, 2)
    elif seed % 4 == 1:
        case = routed_case(seed, world_size)
    else:
        case = random_case(seed, world_size, by_documents=seed % 4 == 2)
    case.placement = with_moves(random.Random(seed), case.placement)
    return case


def _spans(documents: Tensor) -> Sequence[Range]:
    """Intervals of positions between which no token sees another one in any row."""
    together = ((documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] >= 0)).any(0)
    cuts = [0, *(i + 1 for i, joined in enumerate(together.tolist()) if not joined), documents.shape[1]]
    return list(pairwise(cuts))


def _documents(rng: random.Random, kind: str, batch_size: int, length: int) -> tuple[Tensor, dict[str, Tensor]]:
    documents = torch.zeros(batch_size, length, dtype=torch.long)
    positions = torch.arange(length).expand(batch_size, -1).clone()
    if kind == "padding":
        mask = torch.ones(batch_size, length, dtype=torch.long)
        for row in range(batch_size):
            padding = rng.choice([0, rng.randint(0, length - 1)])
            mask[row, slice(0, padding) if rng.random() < 0.5 else slice(length - padding, length)] = 0
        return documents.masked_fill(mask == 0, -1), {"attention_mask": mask, "position_ids": positions}
    if kind == "plain":
        return documents, {"position_ids": positions}
    for row in range(batch_size):
        starts = [0, *sorted(rng.sample(range(1, length), rng.randint(0, 3)))]
        for i, (start, stop) in enumerate(zip(starts, [*starts[1:], length], strict=True)):
            documents[row, start:stop] = i
            positions[row, start:stop] = torch.arange(stop - start)
    if kind == "cu_seqlens":
        return documents, {"cu_seqlens": torch.tensor([*starts, length], dtype=torch.int32)}
    return documents, {"position_ids": positions}
