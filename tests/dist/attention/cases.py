"""Random schedules, models and masks for the parity tests: all that is legal, the same on each rank for one seed."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from ds_hetero.values.placement import Lane, Placement, Range, stream_placement
from ds_hetero.values.schedule import LAYOUTS, Group, Schedule
from ds_hetero.values.splits import share


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
    """A case of the stream, or one whose spans of documents are dealt by chance, see `random_placement`."""
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
        placement = random_placement(random.Random(seed), schedule, documents)
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


def random_placement(rng: random.Random, schedule: Schedule, documents: Tensor, *, widest: bool = False) -> Placement:
    """Each document in a lane of its own or with others, over units that are drawn by chance.

    There are units and ranks with nothing, members of a lane without tokens of a span, and spans of one token, the
    tokens of padding among them.

    Args:
        schedule: with the units.
        documents: [B, L], see `Case`.
        widest: one of the lanes is over all units.
    """
    units = range(schedule.ring_size)
    members_of_lanes = [tuple(rng.sample(units, rng.randint(1, len(units)))) for _ in range(rng.randint(1, 5))]
    if widest:
        members_of_lanes[:1] = [tuple(rng.sample(units, len(units)))]
    lanes = defaultdict(list)
    for start, stop in _spans(documents):
        members = rng.choice(members_of_lanes)
        weights = [rng.choice([0, 0, 1, 2, 5]) for _ in members]
        tokens = share(stop - start, weights if any(weights) else [1] * len(members))
        lanes[members].append(((start, stop), tokens))
    held = [0] * len(units)
    for members, spans in lanes.items():
        for _, tokens in spans:
            for member, count in zip(members, tokens, strict=True):
                held[member] += count
    return Placement(
        schedule=schedule,
        length=documents.shape[1],
        rank_tokens=_rank_tokens(rng, schedule, held),
        lanes=tuple(
            Lane(
                members=members,
                spans=tuple(span for span, _ in spans),
                tokens=tuple(tokens for _, tokens in spans),
                layout=rng.choice(LAYOUTS),
            )
            for members, spans in rng.sample(sorted(lanes.items()), len(lanes))
        ),
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
        groups = tuple(Group(ranks=(rank,), tokens=(1,), heads=(heads,)) for rank in range(world_size))
        case.schedule = replace(case.schedule, groups=groups, ring=tuple(rng.sample(range(world_size), world_size)))
        case.placement = random_placement(rng, case.schedule, case.documents, widest=rng.random() < 0.7)
    node = [rng.randrange(rng.choice([1, 2, 2, 3])) for _ in range(case.schedule.ring_size)]
    lanes = [
        replace(lane, nodes=tuple(node[unit] for unit in lane.members), proxies=rng.random() < 0.5)
        for lane in case.placement.lanes
    ]
    case.placement = replace(case.placement, lanes=tuple(lanes))
    return case


def case_by_heads(seed: int, nodes: int, per_node: int) -> Case:
    """A case some of whose lanes exchange heads between nodes of as many ranks, among others that do not."""
    rng = random.Random(seed)
    world_size = nodes * per_node
    case = random_case(seed, world_size, by_documents=True)
    case.sinks = False
    ranks, heads = rng.sample(range(world_size), world_size), case.schedule.num_heads
    groups = tuple(Group(ranks=(rank,), tokens=(1,), heads=(heads,)) for rank in ranks)
    case.schedule = replace(case.schedule, groups=groups, ring=tuple(range(world_size)))
    placement = random_placement(rng, case.schedule, case.documents, widest=True)
    node = [unit // per_node for unit in range(world_size)]
    weights = [rng.choice([0, 1, 1, 2]) for _ in range(nodes)]
    of_nodes = share(heads, weights if any(weights) else [1] * nodes)
    lanes = []
    for lane in placement.lanes:
        if len(lane.members) == world_size and rng.random() < 0.8:
            order = sorted(range(world_size), key=lambda index: lane.members[index])
            tokens = tuple(tuple(of_span[index] for index in order) for of_span in lane.tokens)
            lane = replace(lane, members=tuple(range(world_size)), tokens=tokens, nodes=tuple(node), by_heads=of_nodes)
        lanes.append(lane)
    case.placement = replace(placement, lanes=tuple(lanes))
    return case


def _spans(documents: Tensor) -> Sequence[Range]:
    """Intervals of positions between which no token sees another one in any row."""
    together = ((documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] >= 0)).any(0)
    cuts = [0, *(i + 1 for i, joined in enumerate(together.tolist()) if not joined), documents.shape[1]]
    return list(pairwise(cuts))


def _rank_tokens(rng: random.Random, schedule: Schedule, held: Sequence[int]) -> tuple[int, ...]:
    tokens = {}
    for group, count in zip(schedule.ring_groups, held, strict=True):
        weights = [rng.choice([0, 1, 3]) for _ in group.ranks]
        shares = share(count, weights if any(weights) else [1] * len(weights))
        tokens |= dict(zip(group.ranks, shares, strict=True))
    return tuple(tokens[rank] for rank in schedule.ranks)


def random_schedule(rng: random.Random, world_size: int, num_heads: int, num_kv_heads: int) -> Schedule:
    """Any legal schedule: groups in any order, ranks without tokens, heads, or both."""
    ranks = rng.sample(range(world_size), world_size)
    num_groups = rng.randint(1, world_size)
    cuts = [0, *sorted(rng.sample(range(1, world_size), num_groups - 1)), world_size]
    groups = []
    for start, stop in pairwise(cuts):
        size = stop - start
        weights = [rng.randint(0, 4) for _ in range(size)]
        groups.append(
            Group(
                ranks=tuple(ranks[start:stop]),
                tokens=tuple(rng.choice([0, 1, 2, 3.5, 5]) for _ in range(size)),
                heads=share(num_heads, weights if any(weights) else [1] * size),
            )
        )
    if not any(group.weight for group in groups):
        groups[0] = Group(ranks=groups[0].ranks, tokens=(1,) * len(groups[0].ranks), heads=groups[0].heads)
    return Schedule(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        groups=tuple(groups),
        ring=tuple(rng.sample(range(num_groups), num_groups)),
        layout=rng.choice(LAYOUTS),
    )


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
