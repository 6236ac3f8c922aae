"""Enumerate every value of a small scope in a fixed order: divisions, groups, masks, placements, pipelines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations, product

from ds_hetero.values.placement import Lane, Placement, Range, Rows
from ds_hetero.values.plans import Stage
from ds_hetero.values.schedule import LAYOUTS, Group, Schedule

Mask = tuple[bool, int | None]  # causal, window


@dataclass(frozen=True)
class Scope:
    """Largest values to enumerate; all smaller ones are included."""

    ranks: int
    heads: int
    tokens: int
    documents: int
    pipelines: int
    stages: int
    layers: int
    large: int  # plans of up to 48 ranks, drawn by chance


FULL = Scope(ranks=4, heads=6, tokens=8, documents=3, pipelines=3, stages=3, layers=4, large=1000)
QUICK = Scope(ranks=3, heads=4, tokens=5, documents=2, pipelines=2, stages=2, layers=3, large=40)


def cuts(total: int, parts: int, least: int = 0) -> Iterator[tuple[int, ...]]:
    """Yield every way to divide ``total`` into ``parts`` parts of at least ``least``, in order."""
    if parts == 1:
        if total >= least:
            yield (total,)
        return
    for first in range(least, total - least * (parts - 1) + 1):
        for rest in cuts(total - first, parts - 1, least):
            yield (first, *rest)


@lru_cache
def set_partitions(size: int) -> tuple[tuple[int, ...], ...]:
    """Return every way to put ``size`` things into classes, as the class of each, numbered by first appearance."""
    partitions = [()]
    for _ in range(size):
        partitions = [(*classes, new) for classes in partitions for new in range(max(classes, default=-1) + 2)]  # type: ignore[misc]
    return tuple(partitions)


def groupings(ranks: int) -> Iterator[tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]]:
    """Yield ``(groups, ring)``: every set of groups of this many ranks, in every ring order."""
    for classes in set_partitions(ranks):
        groups = tuple(tuple(r for r in range(ranks) if classes[r] == c) for c in range(max(classes) + 1))
        for ring in permutations(range(len(groups))):
            yield groups, ring


def schedules_by_tokens(ranks: int, tokens: Sequence[int]) -> Iterator[Schedule]:
    """Yield every grouping and layout with these tokens by rank; the first rank of a group has all heads."""
    for groups, ring in groupings(ranks):
        schedule_groups = tuple(
            Group(ranks=group, tokens=tuple(tokens[r] for r in group), heads=(1, *(0,) * (len(group) - 1)))
            for group in groups
        )
        for layout in LAYOUTS:
            yield Schedule(num_heads=1, num_kv_heads=1, groups=schedule_groups, ring=ring, layout=layout)


def schedules_by_heads(ranks: int, num_heads: int) -> Iterator[Schedule]:
    """Yield every grouping, division of the heads and number of KV heads, with a token on every rank."""
    for groups, ring in groupings(ranks):
        for heads in product(*(list(cuts(num_heads, len(group))) for group in groups)):
            pairs = zip(groups, heads, strict=True)
            schedule_groups = tuple(Group(ranks=group, tokens=(1,) * len(group), heads=cut) for group, cut in pairs)
            for num_kv_heads in (n for n in range(1, num_heads + 1) if num_heads % n == 0):
                yield Schedule(num_heads=num_heads, num_kv_heads=num_kv_heads, groups=schedule_groups, ring=ring)


def documents_of(length: int, most: int) -> Iterator[tuple[Range, ...]]:
    """Yield every set of at most ``most`` disjoint intervals; positions between them are padding."""
    yield ()
    if most:
        for start in range(length):
            for stop in range(start + 1, length + 1):
                for rest in documents_of(length - stop, most - 1):
                    yield ((start, stop), *((a + stop, b + stop) for a, b in rest))


def masks_of(length: int) -> list[Mask]:
    """Return no mask, causal, and causal with every window that hides something."""
    return [(False, None), (True, None), *((True, window) for window in range(1, length))]


def one_lane(tokens: Sequence[int], layout: str, nodes: Sequence[int] = (), *, proxies: bool = False) -> Lane:
    """Return a sequence that is sharded over as many units as there are ``tokens``."""
    length = sum(tokens)
    return Lane(
        members=tuple(range(len(tokens))),
        spans=((0, length),),
        tokens=(tuple(tokens),),
        layout=layout,
        nodes=tuple(nodes),
        proxies=proxies,
    )


@lru_cache(maxsize=256)
def ring_of_ranks(units: int, num_heads: int = 1) -> Schedule:
    """Return a ring of single ranks, in the order of their numbers."""
    groups = tuple(Group(ranks=(r,), tokens=(1,), heads=(num_heads,)) for r in range(units))
    return Schedule(num_heads=num_heads, num_kv_heads=1, groups=groups, layout="contiguous")


def placement_of(lanes: Sequence[Lane], units: int, documents: tuple[Range, ...]) -> Placement:
    """Return one batch row on single ranks."""
    unit_tokens = [0] * units
    for lane in lanes:
        for member, tokens in zip(lane.members, zip(*lane.tokens, strict=True), strict=True):
            unit_tokens[member] += sum(tokens)
    return Placement(
        schedule=ring_of_ranks(units),
        length=sum(unit_tokens),
        rank_tokens=tuple(unit_tokens),
        lanes=tuple(lanes),
        rows=(Rows(0, 1, documents),),
    )


def document_placements(units: int, lengths: Sequence[int], layout: str) -> Iterator[Placement]:
    """Yield every division of each document over the units; documents over the same units are spans of one lane."""
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    documents = tuple((end - length, end) for end, length in zip(ends, lengths, strict=True))
    for chosen in product(*(list(cuts(length, units)) for length in lengths)):
        by_members: dict[tuple[int, ...], list[int]] = {}
        for number, tokens in enumerate(chosen):
            by_members.setdefault(tuple(u for u in range(units) if tokens[u]), []).append(number)
        lanes = [
            Lane(
                members=members,
                spans=tuple(documents[i] for i in numbers),
                tokens=tuple(tuple(chosen[i][u] for u in members) for i in numbers),
                layout=layout,
            )
            for members, numbers in by_members.items()
        ]
        yield placement_of(lanes, units, documents)


def stage_kinds(first_rank: int, layers: tuple[int, int], tokens: Sequence[Sequence[int]]) -> Iterator[Stage]:
    """Yield a single rank, two ranks of tensor parallelism, and two of a sequence with each of these token weights."""
    pair = (first_rank, first_rank + 1)
    yield Stage(ranks=(first_rank,), layers=layers)
    yield Stage(ranks=pair, layers=layers, inner="tensor")
    for weights in tokens:
        groups = tuple(Group(ranks=(r,), tokens=(w,), heads=(2,)) for r, w in zip(pair, weights, strict=True))
        schedule = Schedule(num_heads=2, num_kv_heads=2, groups=groups, layout="zigzag")
        yield Stage(ranks=pair, layers=layers, inner="sequence", schedule=schedule)
