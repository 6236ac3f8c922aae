"""Draw random schedules, placements and plans: any legal one, and the same for the same seed."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from benchmarks.proof.messages import PipelineJob, ReplicasJob
from ds_hetero.values.placement import Lane, Placement, Range, Rows, TokenMove
from ds_hetero.values.plans import Pipeline, Plan, PlannedModel, Stage
from ds_hetero.values.schedule import LAYOUTS, Group, Schedule
from ds_hetero.values.splits import share


def random_schedule(rng: random.Random, world_size: int, num_heads: int, num_kv_heads: int) -> Schedule:
    """Draw any legal schedule: groups in any order, ranks without tokens, heads, or both."""
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


def random_placement(
    rng: random.Random, schedule: Schedule, spans: Sequence[Range], *, widest: bool = False
) -> Placement:
    """Draw a placement: each span in a lane of its own or with others, over random units.

    Units and ranks may be empty, and members of a lane may have no tokens of a span.

    Args:
        schedule: with the units.
        spans: consecutive intervals; tokens of different ones do not see each other.
        widest: make one of the lanes over all units.
    """
    units = range(schedule.ring_size)
    members_of_lanes = [tuple(rng.sample(units, rng.randint(1, len(units)))) for _ in range(rng.randint(1, 5))]
    if widest:
        members_of_lanes[:1] = [tuple(rng.sample(units, len(units)))]
    lanes = defaultdict(list)
    for start, stop in spans:
        members = rng.choice(members_of_lanes)
        weights = [rng.choice([0, 0, 1, 2, 5]) for _ in members]
        tokens = share(stop - start, weights if any(weights) else [1] * len(members))
        lanes[members].append(((start, stop), tokens))
    unit_tokens = [0] * len(units)
    for members, cut in lanes.items():
        for _, tokens in cut:
            for member, count in zip(members, tokens, strict=True):
                unit_tokens[member] += count
    return Placement(
        schedule=schedule,
        length=spans[-1][1],
        rank_tokens=_rank_tokens(rng, schedule, unit_tokens),
        lanes=tuple(
            Lane(
                members=members,
                spans=tuple(span for span, _ in cut),
                tokens=tuple(tokens for _, tokens in cut),
                layout=rng.choice(LAYOUTS),
            )
            for members, cut in rng.sample(sorted(lanes.items()), len(lanes))
        ),
    )


def _rank_tokens(rng: random.Random, schedule: Schedule, held_tokens: Sequence[int]) -> tuple[int, ...]:
    tokens = {}
    for group, count in zip(schedule.ring_groups, held_tokens, strict=True):
        weights = [rng.choice([0, 1, 3]) for _ in group.ranks]
        shares = share(count, weights if any(weights) else [1] * len(weights))
        tokens |= dict(zip(group.ranks, shares, strict=True))
    return tuple(tokens[rank] for rank in schedule.ranks)


def with_nodes(rng: random.Random, placement: Placement) -> Placement:
    """Draw lanes that go from node to node, with and without proxies, over random nodes."""
    node = [rng.randrange(rng.choice([1, 2, 2, 3])) for _ in range(placement.schedule.ring_size)]
    lanes = [
        replace(lane, nodes=tuple(node[unit] for unit in lane.members), proxies=rng.random() < 0.5)
        for lane in placement.lanes
    ]
    return replace(placement, lanes=tuple(lanes))


def with_lanes_by_heads(rng: random.Random, placement: Placement, nodes: int) -> Placement:
    """Let some of the lanes over all units exchange heads between nodes of equally many units; every unit is a rank."""
    units = placement.schedule.ring_size
    node = tuple(unit * nodes // units for unit in range(units))
    weights = [rng.choice([0, 1, 1, 2]) for _ in range(nodes)]
    of_nodes = share(placement.schedule.num_heads, weights if any(weights) else [1] * nodes)
    lanes = []
    for lane in placement.lanes:
        if len(lane.members) == units and rng.random() < 0.8:
            order = sorted(range(units), key=lambda index: lane.members[index])
            tokens = tuple(tuple(of_span[index] for index in order) for of_span in lane.tokens)
            lane = replace(lane, members=tuple(range(units)), tokens=tokens, nodes=node, by_heads=of_nodes)
        lanes.append(lane)
    return replace(placement, lanes=tuple(lanes))


def with_moves(rng: random.Random, placement: Placement) -> Placement:
    """Draw ranks that hold tokens for which others compute attention: all, none, or any number."""
    ranks = rng.sample(placement.schedule.ranks, placement.schedule.sp_size)
    givers = rng.randint(min(1, len(ranks) - 1), len(ranks) - 1)
    holders, moves = ranks[givers:], []
    for rank in ranks[:givers]:
        num_moved_tokens = rng.choice([placement.tokens(rank), rng.randint(0, placement.tokens(rank))])
        weights = [rng.choice([0, 1, 3]) for _ in holders]
        shares = share(num_moved_tokens, weights if any(weights) else [1] * len(holders))
        moves += [TokenMove(rank, holder, tokens) for holder, tokens in zip(holders, shares, strict=True) if tokens]
    return placement.with_moves(moves)


def random_plan(rng: random.Random, world_size: int, layers: int, *, tensor: bool = True) -> Plan:
    """Draw pipelines of stages of every kind.

    Args:
        rng: source of randomness.
        world_size: ranks.
        layers: of the model.
        tensor: whether stages of tensor parallelism are among them.
    """
    heads, kv_heads = rng.choice([(4, 4), (4, 2), (6, 2)])
    ranks, pipelines = list(range(world_size)), []
    for number in random_parts(rng, len(ranks), rng.randint(1, min(4, len(ranks)))):
        own, ranks = ranks[:number], ranks[number:]
        sizes = random_parts(rng, number, rng.randint(1, min(4, number, layers)))
        cuts = [0, *accumulate(random_parts(rng, layers, len(sizes)))]
        stages = []
        for size, of_stage in zip(sizes, pairwise(cuts), strict=True):
            members, own = tuple(own[:size]), own[size:]
            cut = tensor and size in (2, 4) and heads % size == 0 and rng.random() < 0.3
            inner = "one" if size == 1 else "tensor" if cut else "sequence"
            schedule = None
            if inner == "sequence":
                schedule = random_schedule(rng, size, heads, kv_heads).shifted(members[0])
            stages.append(Stage(ranks=members, layers=of_stage, inner=inner, schedule=schedule))
        in_flight = [len(stages) - j + rng.choice((0, 0, 1)) for j in range(len(stages))]
        in_flight = [max(in_flight[j:]) for j in range(len(stages))]
        stages = [replace(stage, in_flight=n) for stage, n in zip(stages, in_flight, strict=True)]
        pipelines.append(
            Pipeline(stages=tuple(stages), micro_batch_size=rng.randint(1, 2), micro_batches=rng.randint(1, 5))
        )
    model = PlannedModel(num_layers=layers, num_heads=heads, num_kv_heads=kv_heads)
    return Plan(pipelines=tuple(pipelines), model=model)


def random_parts(rng: random.Random, total: int, number: int) -> list[int]:
    """Divide ``total`` into ``number`` random parts of at least one."""
    cuts = sorted(rng.sample(range(1, total), number - 1))
    return [stop - start for start, stop in pairwise([0, *cuts, total])]


def large_pipelines(seed: int) -> PipelineJob:
    """Return a step of a random plan of up to 48 ranks."""
    rng = random.Random(seed)
    plan = random_plan(rng, rng.randint(6, 48), rng.randint(4, 8))
    size = max(len(stage.ranks) for pipeline in plan.pipelines for stage in pipeline.stages)
    lengths = [[2 * size + rng.randint(0, 9) for _ in range(p.micro_batches or 1)] for p in plan.pipelines]
    return PipelineJob(
        plan=plan, lengths=tuple(map(tuple, lengths)), tied=rng.random() < 0.5, recompute=rng.random() < 0.5
    )


def large_replicas(seed: int) -> ReplicasJob:
    """Return a step of up to three replicas whose micro-batches are placed by documents, in lanes of every kind."""
    rng = random.Random(seed)
    first, placements = 0, []
    count = rng.randint(1, 2)
    for _ in range(rng.randint(1, 3)):
        size, kv_heads = rng.randint(2, 16), rng.randint(1, 4)
        heads = kv_heads * rng.randint(1, 4)
        schedule = random_schedule(rng, size, heads, kv_heads)
        if rng.random() < 0.7:
            # Uneven groups, so that a ring of three or more has communicators by colour.
            groups = tuple(Group(ranks=(rank,), tokens=(rng.randint(1, 3),), heads=(heads,)) for rank in range(size))
            schedule = replace(schedule, groups=groups, ring=tuple(rng.sample(range(size), size)))
        of_replica = [_placement_by_chance(rng, schedule.shifted(first)) for _ in range(count)]
        first += size
        placements.append(tuple(of_replica))
    return ReplicasJob(placements=tuple(placements), layers=rng.randint(1, 2), recompute=rng.random() < 0.5)


def _placement_by_chance(rng: random.Random, schedule: Schedule) -> Placement:
    """Draw a placement of any kind."""
    lengths = [rng.randint(1, 40) for _ in range(rng.randint(1, 8))]
    spans = list(pairwise([0, *accumulate(lengths)]))
    placement = random_placement(rng, schedule, spans, widest=rng.random() < 0.7)
    size, kind = schedule.ring_size, rng.random()
    by_two = size == schedule.sp_size and size % 2 == 0
    if kind < 0.3 and by_two:
        placement = with_lanes_by_heads(rng, placement, 2)
    elif kind < 0.8:
        placement = with_nodes(rng, placement)
    if rng.random() < 0.3:
        placement = with_moves(rng, placement)
    return placement.with_rows((Rows(0, 1, tuple(spans)),))
