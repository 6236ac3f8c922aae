"""Cut parameters between ZeRO ranks in proportion to weights, and find the copies that turn one cut into another.

Stages 1 and 2 flatten a parameter group into one vector, which `cut_flat_group` cuts. Stage 3 cuts every parameter by
itself, with `cut_parameter`. Everything here is plain integers, the same on every rank and machine. Imports no torch.
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

ALIGNMENT = 128  # elements: 256 bytes of a 16-bit dtype, the alignment of vectorized kernels and NCCL's fast paths
LEAST_ALIGNMENT = 2  # elements: DeepSpeed needs partitions that start at multiples of 4 bytes
UNITS_PER_RANK = 8  # with fewer units of `ALIGNMENT` for each rank, smaller units are used; chosen, never measured


def check_weights(weights: Sequence[float], world_size: int, *, zero_stage: int) -> None:
    """Check that ``weights`` can be the ZeRO shares of a job.

    Raises:
        ConfigError: there are more or fewer weights than ranks; a weight is negative or not finite; no weight is
            positive; a weight is zero on stage 3, where every rank has to own a shard of every parameter.
    """
    if len(weights) != world_size:
        raise ConfigError(
            f'"zero_partition" lists {len(weights)} weights, but the job has {world_size} ranks. Give one for each.'
        )
    if any(not isfinite(weight) or weight < 0 for weight in weights) or not any(weights):
        raise ConfigError(
            f'"zero_partition" is {list(weights)}; weights must be finite and not negative, one of them positive.'
        )
    if zero_stage == 3 and not all(weights):
        raise ConfigError(
            f'"zero_partition" gives rank {list(weights).index(0)} a weight of 0, which works on ZeRO stages 1 and 2 '
            "only. Give it a small weight, or use stage 2."
        )


def is_even(weights: Sequence[float]) -> bool:
    """Return whether all weights are equal, so that stock DeepSpeed's partition is the wanted one."""
    return len(set(weights)) == 1


def alignment_of(num_elements: int, num_ranks: int, least: int = LEAST_ALIGNMENT) -> int:
    """Return the unit of a weighted cut, in elements: all inner boundaries are multiples of it.

    It is `ALIGNMENT`, or for few elements the largest power of two below it that gives each rank `UNITS_PER_RANK`
    units, but at least ``least``, also a power of two. Example: 1,000 elements over 2 ranks are cut in units of 32,
    since 1,000 < 64 * 8 * 2.
    """
    unit = ALIGNMENT
    while unit > least and num_elements < unit * UNITS_PER_RANK * num_ranks:
        unit //= 2
    return unit


def cut_flat_group(num_elements: int, weights: Sequence[float]) -> Split:
    """Cut a flat vector into one contiguous part per rank, by ``weights``. Raises `ConfigError`: see `check_weights`.

    Every boundary is the ideal one rounded to a multiple of `alignment_of`, so a part is at most one such unit larger
    or smaller than its exact share. The last rank with a positive weight also takes the tail that fills no unit; a
    rank of weight zero gets nothing. Equal weights give the partitions of stock DeepSpeed, if the number of elements
    is a multiple of the number of ranks, to which DeepSpeed pads it.

    Example: 10,000 elements by weights 4, 3, 2, 1 are cut at 3,968, 7,040 and 8,960, all multiples of 128.
    """
    check_weights(weights, len(weights), zero_stage=1)
    if is_even(weights) and num_elements % len(weights) == 0:
        return Split((num_elements // len(weights),) * len(weights))
    cuts = _aligned_cuts(num_elements, weights, alignment_of(num_elements, len(weights)))
    return Split(tuple(stop - start for start, stop in pairwise(cuts)))


def _aligned_cuts(num_elements: int, weights: Sequence[float], unit: int) -> list[int]:
    """Return the boundaries by ``weights``: 0, inner ones rounded to multiples of ``unit``, and ``num_elements``.

    Computed with fractions, so that every machine rounds alike.
    """
    sums = list(accumulate(map(Fraction, weights)))
    boundaries = [0]
    for weight_sum in sums:
        ideal = num_elements * weight_sum / sums[-1]
        is_end = weight_sum == sums[-1]  # the last rank, or only ranks of weight zero come behind this boundary
        boundaries.append(num_elements if is_end else min(round(ideal / unit) * unit, num_elements))
    return boundaries


@dataclass(frozen=True, slots=True)
class Fragment:
    """The elements of one parameter that lie in one part of a flat group."""

    parameter: int  # number of the parameter in the group
    in_parameter: int  # index of the first element in the flattened parameter
    in_part: int  # index of the first element in the part
    count: int  # number of elements


@dataclass(frozen=True, slots=True)
class FlatGroup:
    """Layout of a parameter group that is flattened into one vector, and the cut of this vector between ranks.

    Args:
        starts: index of every parameter's first element in the flat vector, in the order of the optimizer's group.
            With `round_robin_order` or alignment this differs from the running sum of ``sizes``.
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]  # elements of every parameter
    cut: Split  # one part of the flat vector for each rank

    def fragments(self, part: int) -> tuple[Fragment, ...]:
        """Return the fragments of parameters that ``part`` consists of, in the order of its elements."""
        start, stop = self.cut.ranges[part]
        fragments = []
        for parameter, (first, size) in enumerate(zip(self.starts, self.sizes, strict=True)):
            low, high = max(first, start), min(first + size, stop)
            if low < high:
                fragments.append(Fragment(parameter, low - first, low - start, high - low))
        return tuple(sorted(fragments, key=lambda fragment: fragment.in_part))


def round_robin_order(num_parameters: int, num_ranks: int) -> list[int]:
    """Return the order in which DeepSpeed's ``round_robin_gradients`` flattens parameters.

    5 parameters over 2 ranks: 0, 2, 4, then 1, 3. See ``DeepSpeedZeroOptimizer._round_robin_reorder``.
    """
    order: list[int] = []
    for first in range(num_ranks):
        order += range(first, num_parameters, num_ranks)
    return order


@dataclass(frozen=True, slots=True)
class Move:
    """A copy of ``count`` elements from a part of one cut to a part of another cut."""

    source: int  # number of the part that has the elements
    in_source: int  # index of the first element in that part
    in_target: int  # index of the first element in the part to which they are copied
    count: int


def repartition_moves(saved: FlatGroup, wanted: FlatGroup, part: int) -> tuple[Move, ...]:
    """Return the copies that fill part ``part`` of the layout ``wanted`` from the parts of the layout ``saved``.

    Adjacent copies are merged. Both layouts have the same parameters; their order in the flat vector, padding and
    number of ranks may differ.

    Example: 10 elements, saved as 5 and 5, wanted as 8 and 2. Part 0 takes elements 0-4 of the saved part 0, then
    elements 0-2 of the saved part 1: Move(0, 0, 0, 5) and Move(1, 0, 5, 3).

    Raises:
        ValueError: the layouts have parameters of different sizes.
    """
    if saved.sizes != wanted.sizes:
        raise ValueError(
            f"the saved parameters have the sizes {saved.sizes}, the wanted ones {wanted.sizes}; they must be equal."
        )
    merged: list[Move] = []
    cuts = saved.cut.cuts
    for fragment in wanted.fragments(part):
        start = saved.starts[fragment.parameter] + fragment.in_parameter
        stop = start + fragment.count
        position = start  # in the saved flat vector
        while position < stop:
            # The part that contains the position. If several parts begin there, all but the last are empty.
            source = bisect_right(cuts, position) - 1
            count = min(stop, cuts[source + 1]) - position
            move = Move(source, position - cuts[source], fragment.in_part + position - start, count)
            if merged and _is_adjacent(merged[-1], move):
                first = merged.pop()
                move = Move(source, first.in_source, first.in_target, first.count + count)
            merged.append(move)
            position += count
    return tuple(merged)


def _is_adjacent(before: Move, after: Move) -> bool:
    """Return whether ``after`` continues ``before`` in the part that is read, and in the part that is written."""
    return (
        before.source == after.source
        and before.in_source + before.count == after.in_source
        and before.in_target + before.count == after.in_target
    )


def cut_parameter(num_elements: int, weights: Sequence[float]) -> Split:
    """Cut a flat parameter into one shard for every rank, by positive ``weights``.

    Boundaries are the ideal ones rounded to multiples of `alignment_of` with ``least=1``, so a shard is at most one
    such unit larger or smaller than its exact share. But every rank owns at least one unit: DeepSpeed believes that a
    rank which owns nothing of a module need not gather it. A parameter with fewer elements than ranks is padded at its
    end to one element for each rank, so the total of the cut may exceed ``num_elements``.

    Example: 7 elements by weights 100, 1, 1 are cut into 5, 1 and 1; 2 elements over 3 ranks into 1, 1 and 1.

    Raises:
        ConfigError: see `check_weights`.
    """
    check_weights(weights, len(weights), zero_stage=3)
    num_ranks = len(weights)
    total = max(num_elements, num_ranks)
    unit = alignment_of(total, num_ranks, least=1)
    boundaries = _aligned_cuts(total, weights, unit)
    for i in range(1, num_ranks):
        lowest = boundaries[i - 1] + unit  # one unit for rank i - 1
        highest = (total // unit - (num_ranks - i)) * unit  # one unit for rank i, and for each rank after it
        boundaries[i] = min(max(boundaries[i], lowest), highest)
    return Split(tuple(stop - start for start, stop in pairwise(boundaries)))


def cut_as_deepspeed(num_elements: int, num_ranks: int) -> Split:
    """Return stock DeepSpeed's cut of one parameter on stage 3: shards of equal size, the last ones padded."""
    return Split((ceil(num_elements / num_ranks),) * num_ranks)


@lru_cache(maxsize=4096)
def node_pieces(num_elements: int, weights: tuple[tuple[float, ...], ...]) -> tuple[Piece, ...]:
    """Return the common refinement of the nodes' cuts of a parameter, if every node shards it over its own ranks.

    A piece has one owner in each node. One of these owners adds up the piece's gradients over the nodes.

    Args:
        num_elements: elements of the parameter.
        weights: for every node, the positive weights of its ranks.

    Returns:
        The pieces in order, without padding. ``owners[i]`` of a piece is the index of its owner among the ranks of
        node i. The last entry of ``owners`` is the index of the node whose owner adds the gradients up; all nodes do so
        for equally many elements, give or take one.
    """
    cuts = []
    for weights_of_node in weights:
        sizes = []
        for start, stop in cut_parameter(num_elements, weights_of_node).ranges:
            sizes.append(min(stop, num_elements) - min(start, num_elements))  # without padding
        cuts.append(Split(tuple(sizes)))
    adders = Split(share(num_elements, [1] * len(weights)))
    return refine([*cuts, adders])


def node_sizes(within: Literal["node"] | Sequence[int], local_ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the number of ranks of every node, from the setting ``"zero_within"``.

    Args:
        within: the numbers themselves; or ``"node"``, with which a node begins at every local rank 0.
        local_ranks: LOCAL_RANK of every rank, -1 where it is not set.

    Raises:
        ConfigError: there are fewer than two nodes, their ranks do not sum to those of the job, or ranks are not
            numbered node by node.
    """
    world_size = len(local_ranks)
    sizes = within
    if isinstance(sizes, str):
        first_ranks = [rank for rank, local_rank in enumerate(local_ranks) if local_rank == 0]
        sizes = [stop - start for start, stop in pairwise([*first_ranks, world_size])]
        if [local_rank for size in sizes for local_rank in range(size)] != list(local_ranks):
            raise ConfigError(
                f'"zero_within": "node" needs ranks that are numbered node by node, but LOCAL_RANK by rank is '
                f"{list(local_ranks)}. Give the number of ranks of every node, such as [2, 1]."
            )
    if sum(sizes) != world_size or len(sizes) < 2:
        raise ConfigError(
            f'"zero_within" divides {world_size} ranks into nodes of {list(sizes)}. Give two nodes or more whose ranks '
            "sum to those of the job; leave it out on one node."
        )
    return tuple(sizes)
