"""Owners of elements under weighted ZeRO: plain integers, the same on every rank and every machine.

Stages 1 and 2 cut the flat vector of a parameter group once, `cut_flat_group`. Stage 3 cuts every parameter by itself,
`cut_parameter`. Imports no torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise
from math import ceil, isfinite
from typing import Literal

from ds_hetero.errors import ConfigError
from ds_hetero.values.splits import Piece, Split, refine, share

ALIGNMENT = 128  # elements: 256 bytes of a 16-bit type, what vectorized kernels and NCCL's fast paths want
LEAST_ALIGNMENT = 2  # elements: DeepSpeed wants partitions to start at multiples of 4 bytes
UNITS_PER_RANK = 8  # a group too small to give every rank so many units is cut in smaller ones


def check_weights(weights: Sequence[float], world_size: int, *, zero_stage: int) -> None:
    """Check that ``weights`` can be the ZeRO shares of a job.

    Raises:
        ConfigError: another number of weights than ranks; a weight that is negative or not finite; none positive; a
            weight of zero on stage 3, whose gathers need something of every rank.
    """
    if len(weights) != world_size:
        raise ConfigError(
            f'"zero_partition" lists {len(weights)} weights, but the job has {world_size} ranks. Give one for each.'
        )
    if any(not isfinite(weight) or weight < 0 for weight in weights) or not any(weights):
        raise ConfigError(
            f'"zero_partition" is {list(weights)}; weights are finite, not negative, and one is positive.'
        )
    if zero_stage == 3 and not all(weights):
        raise ConfigError(
            f'"zero_partition" gives rank {list(weights).index(0)} a weight of 0, which works on ZeRO stages 1 and 2 '
            "only. Give it a small weight, or use stage 2."
        )


def is_even(weights: Sequence[float]) -> bool:
    """Whether all weights are equal, so that DeepSpeed's own partitions are those wanted."""
    return len(set(weights)) == 1


def alignment_of(num_elements: int, num_ranks: int, least: int = LEAST_ALIGNMENT) -> int:
    """Return elements of which every inner boundary of a weighted cut is a multiple.

    `ALIGNMENT`, or the largest power of two below it with which few elements still make `UNITS_PER_RANK` for each rank;
    at least ``least``, also a power of two.
    """
    unit = ALIGNMENT
    while unit > least and num_elements < unit * UNITS_PER_RANK * num_ranks:
        unit //= 2
    return unit


def cut_flat_group(num_elements: int, weights: Sequence[float]) -> Split:
    """Cut a flat vector into one contiguous part per rank, by ``weights``. Raises `ConfigError`: see `check_weights`.

    Every boundary is the ideal one rounded to a multiple of `alignment_of`, so a part is at most one such unit larger
    or smaller than its exact share, tail included. The last rank with a positive weight takes the tail that fills no
    unit; a weight of zero gets nothing. Equal weights give DeepSpeed's own partitions where the vector divides, as
    DeepSpeed's does.
    """
    check_weights(weights, len(weights), zero_stage=1)
    if is_even(weights) and num_elements % len(weights) == 0:
        return Split((num_elements // len(weights),) * len(weights))
    cuts = _aligned_cuts(num_elements, weights, alignment_of(num_elements, len(weights)))
    return Split(tuple(stop - start for start, stop in pairwise(cuts)))


def _aligned_cuts(num_elements: int, weights: Sequence[float], unit: int) -> list[int]:
    """Return the ideal boundaries in exact arithmetic, each rounded to a multiple of ``unit`` but for the last."""
    sums = list(accumulate(map(Fraction, weights)))
    cuts = [0]
    for before in sums:
        ideal = num_elements * before / sums[-1]
        cuts.append(num_elements if before == sums[-1] else min(round(ideal / unit) * unit, num_elements))
    return cuts


@dataclass(frozen=True, slots=True)
class Fragment:
    """Fragment of one parameter in one part of a flat group: ``count`` elements.

    ``in_parameter`` and ``in_part`` say where they begin in the flattened parameter and in the part.
    """

    parameter: int
    in_parameter: int
    in_part: int
    count: int


@dataclass(frozen=True, slots=True)
class FlatGroup:
    """Places of a group's parameters in its flat vector, and the owner of each range of it.

    Args:
        starts: of every parameter in the flat vector, in the order of the optimizer's group; `round_robin_order` and
            alignment let them differ from the running sum of ``sizes``.
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]  # elements of every parameter
    cut: Split  # of the flat vector, one part per rank

    def fragments(self, part: int) -> tuple[Fragment, ...]:
        """Fragments of parameters in ``part``, in the order of its elements."""
        start, stop = self.cut.ranges[part]
        fragments = []
        for parameter, (first, size) in enumerate(zip(self.starts, self.sizes, strict=True)):
            low, high = max(first, start), min(first + size, stop)
            if low < high:
                fragments.append(Fragment(parameter, low - first, low - start, high - low))
        return tuple(sorted(fragments, key=lambda fragment: fragment.in_part))


def round_robin_order(num_parameters: int, num_ranks: int) -> list[int]:
    """The order in which ``round_robin_gradients`` lays parameters out: every num_ranks-th from 0, from 1, and so on.

    As in DeepSpeed's ``DeepSpeedZeroOptimizer._round_robin_reorder``.
    """
    return [index for first in range(num_ranks) for index in range(first, num_parameters, num_ranks)]


@dataclass(frozen=True, slots=True)
class Move:
    """A run of ``count`` elements, at ``in_source`` in part ``source`` of one cut, that belongs at ``in_target``."""

    source: int
    in_source: int
    in_target: int
    count: int


def moves(saved: FlatGroup, wanted: FlatGroup, part: int) -> tuple[Move, ...]:
    """Return the copies that assemble partition ``part`` of the layout ``wanted`` from the partitions of ``saved``.

    Adjacent copies are one. Both layouts hold the same parameters, in any order, with any padding, cut for any number
    of ranks.

    Raises:
        ValueError: the layouts hold unlike parameters.
    """
    if saved.sizes != wanted.sizes:
        raise ValueError(f"layouts of different parameters: {saved.sizes} and {wanted.sizes}")
    combined: list[Move] = []
    cuts = saved.cut.cuts
    for fragment in wanted.fragments(part):
        start = saved.starts[fragment.parameter] + fragment.in_parameter
        stop = start + fragment.count
        source = bisect_right(cuts, start) - 1  # the last part that begins there: those before it are empty
        at = start
        while at < stop:
            count = min(stop, cuts[source + 1]) - at
            move = Move(source, at - cuts[source], fragment.in_part + at - start, count)
            if combined and _continues(combined[-1], move):
                move = Move(source, combined[-1].in_source, combined[-1].in_target, combined.pop().count + count)
            combined.append(move)
            at += count
            source = bisect_right(cuts, at) - 1
    return tuple(combined)


def _continues(before: Move, after: Move) -> bool:
    return (
        before.source == after.source
        and before.in_source + before.count == after.in_source
        and before.in_target + before.count == after.in_target
    )


def cut_parameter(num_elements: int, weights: Sequence[float]) -> Split:
    """Cut a flat parameter into a shard for every rank, by ``weights``, none 0. Raises `ConfigError`.

    Boundaries are ideal ones rounded to multiples of `alignment_of` with ``least=1``, so a shard is at most one such
    unit larger or smaller than its exact share; but every rank owns at least one unit, since DeepSpeed takes a rank
    that owns nothing of a module for one that has nothing to gather. A parameter of fewer elements than ranks counts as
    padded at its end to one element for each, so the total may exceed ``num_elements``.
    """
    check_weights(weights, len(weights), zero_stage=3)
    num_ranks = len(weights)
    total = max(num_elements, num_ranks)
    unit = alignment_of(total, num_ranks, least=1)
    cuts = _aligned_cuts(total, weights, unit)
    for i in range(1, num_ranks):
        highest = (total // unit - (num_ranks - i)) * unit
        cuts[i] = min(max(cuts[i], cuts[i - 1] + unit), highest)
    return Split(tuple(stop - start for start, stop in pairwise(cuts)))


def cut_as_deepspeed(num_elements: int, num_ranks: int) -> Split:
    """DeepSpeed's own cut of one parameter on stage 3: shards of one size, the end padded."""
    return Split((ceil(num_elements / num_ranks),) * num_ranks)


@lru_cache(maxsize=4096)
def node_pieces(num_elements: int, weights: tuple[tuple[float, ...], ...]) -> tuple[Piece, ...]:
    """Pieces of a parameter that every node cuts for itself: one rank of each node has a piece, one node adds it up.

    Args:
        weights: of the ranks of every node, positive.

    Returns:
        The pieces in order, without padding. Their ``owners`` are the part in the cut of every node, and last the node
        that adds the piece up; each node adds up as many elements as any other, give or take one.
    """
    cuts = [cut_parameter(num_elements, of_node).ranges for of_node in weights]
    real = [Split(tuple(min(stop, num_elements) - min(start, num_elements) for start, stop in cut)) for cut in cuts]
    return refine([*real, Split(share(num_elements, [1] * len(weights)))])


def node_sizes(within: Literal["node"] | Sequence[int], local_ranks: Sequence[int]) -> tuple[int, ...]:
    """Return ranks of every node, from ``"zero_within"``.

    Args:
        within: the sizes; or ``"node"``, with which a node begins at every local rank 0.
        local_ranks: LOCAL_RANK of every rank, -1 where it has none.

    Raises:
        ConfigError: sizes that are not those of two nodes or more, of all ranks together; ranks that are not numbered
            node by node.
    """
    world, sizes = len(local_ranks), within
    if isinstance(sizes, str):
        starts = [rank for rank, local in enumerate(local_ranks) if local == 0]
        sizes = [stop - start for start, stop in pairwise([*starts, world])]
        if [local for size in sizes for local in range(size)] != list(local_ranks):
            raise ConfigError(
                f'"zero_within": "node" needs ranks that are numbered node by node, but LOCAL_RANK by rank is '
                f"{list(local_ranks)}. Give the ranks of every node, such as [2, 1]."
            )
    if sum(sizes) != world or len(sizes) < 2:
        raise ConfigError(
            f'"zero_within" divides {world} ranks into nodes of {list(sizes)}. Give two nodes or more, with all ranks '
            "of the job; leave it out on one node."
        )
    return tuple(sizes)
