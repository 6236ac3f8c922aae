"""Every value of a small scope: splits, groups, masks, placements, pipelines. Plain enumerations, in a fixed order."""

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
    """Largest values that are enumerated; all smaller ones are too."""

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
    """Every way to cut ``total`` into so many parts of at least ``least``, in order."""
    if parts == 1:
        if total >= least:
            yield (total,)
        return
    for first in range(least, total - least * (parts - 1) + 1):
        for rest in cuts(total - first, parts - 1, least):
            yield (first, *rest)


@lru_cache
def set_partitions(size: int) -> tuple[tuple[int, ...], ...]:
    """Every way to put ``size`` things into classes, as the class of each, numbered by first appearance."""
    found = [()]
    for _ in range(size):
        found = [(*classes, new) for classes in found for new in range(max(classes, default=-1) + 2)]  # type: ignore[misc]
    return tuple(found)


def groupings(ranks: int) -> Iterator[tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]]:
    """``(groups, ring)``: every set of groups of so many ranks, in every ring order."""
    for classes in set_partitions(ranks):
        groups = tuple(tuple(r for r in range(ranks) if classes[r] == c) for c in range(max(classes) + 1))
        for ring in permutations(range(len(groups))):
            yield groups, ring


def schedules_by_tokens(ranks: int, tokens: Sequence[int]) -> Iterator[Schedule]:
    """Every grouping and layout with these tokens by rank, all heads with the first rank of a group."""
    for groups, ring in groupings(ranks):
        made = tuple(
            Group(ranks=group, tokens=tuple(tokens[r] for r in group), heads=(1, *(0,) * (len(group) - 1)))
            for group in groups
        )
        for layout in LAYOUTS:
            yield Schedule(num_heads=1, num_kv_heads=1, groups=made, ring=ring, layout=layout)


def schedules_by_heads(ranks: int, num_heads: int) -> Iterator[Schedule]:
    """Every grouping, cut of the heads and number of KV heads, with a token on every rank."""
    for groups, ring in groupings(ranks):
        for heads in product(*(list(cuts(num_heads, len(group))) for group in groups)):
            pairs = zip(groups, heads, strict=True)
            made = tuple(Group(ranks=group, tokens=(1,) * len(group), heads=cut) for group, cut in pairs)
            for num_kv_heads in (n for n in range(1, num_heads + 1) if num_heads % n == 0):
                yield Schedule(num_heads=num_heads, num_kv_heads=num_kv_heads, groups=made, ring=ring)


def documents_of(length: int, most: int) -> Iterator[tuple[Range, ...]]:
    """Every set of at most so many disjoint intervals; what lies between them is padding."""
    yield ()
    if most:
        for start in range(length):
            for stop in range(start + 1, length + 1):
                for rest in documents_of(length - stop, most - 1):
                    yield ((start, stop), *((a + stop, b + stop) for a, b in rest))


def masks_of(length: int) -> list[Mask]:
    """No mask, causal, and causal with every window that cuts something off."""
    return [(False, None), (True, None), *((True, window) for window in range(1, length))]


def one_lane(tokens: Sequence[int], layout: str, nodes: Sequence[int] = (), *, proxies: bool = False) -> Lane:
    """A sequence that is cut over as many units as there are ``tokens``."""
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
    """Single ranks in a ring, in the order of their numbers."""
    groups = tuple(Group(ranks=(r,), tokens=(1,), heads=(num_heads,)) for r in range(units))
    return Schedule(num_heads=num_heads, num_kv_heads=1, groups=groups, layout="contiguous")


def placement_of(lanes: Sequence[Lane], units: int, documents: tuple[Range, ...]) -> Placement:
    """One batch row on single ranks."""
    held = [0] * units
    for lane in lanes:
        for member, tokens in zip(lane.members, zip(*lane.tokens, strict=True), strict=True):
            held[member] += sum(tokens)
    return Placement(
        schedule=ring_of_ranks(units),
        length=sum(held),
        rank_tokens=tuple(held),
        lanes=tuple(lanes),
        rows=(Rows(0, 1, documents),),
    )


def document_placements(units: int, lengths: Sequence[int], layout: str) -> Iterator[Placement]:
    """Every cut of each document over the units; those over the same units are spans of one lane."""
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
    """A single rank, two ranks of tensor parallelism, and two of a sequence with each of these token weights."""
    pair = (first_rank, first_rank + 1)
    yield Stage(ranks=(first_rank,), layers=layers)
    yield Stage(ranks=pair, layers=layers, inner="tensor")
    for weights in tokens:
        groups = tuple(Group(ranks=(r,), tokens=(w,), heads=(2,)) for r, w in zip(pair, weights, strict=True))
        schedule = Schedule(num_heads=2, num_kv_heads=2, groups=groups, layout="zigzag")
        yield Stage(ranks=pair, layers=layers, inner="sequence", schedule=schedule)
