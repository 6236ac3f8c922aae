"""Who owns which elements under weighted ZeRO: plain integers, the same on every rank and every machine.

Stages 1 and 2 cut the flat vector of a parameter group once, `cut_flat_group`. Stage 3 cuts every parameter by itself,
`Slots`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from itertools import accumulate, pairwise
from math import ceil, gcd, isfinite

from ds_hetero.errors import ConfigError
from ds_hetero.splits import Split, share

__all__ = ["ALIGNMENT", "Slots", "alignment_of", "check_weights", "cut_flat_group", "is_even"]

ALIGNMENT = 128  # elements: 256 bytes of a 16-bit type, what vectorized kernels and NCCL's fast paths want
LEAST_ALIGNMENT = 2  # elements: DeepSpeed wants partitions to start at multiples of 4 bytes
UNITS_PER_RANK = 8  # a group too small to give every rank so many units is cut in smaller ones

SLOTS_PER_RANK = 128  # at most, on average: more follow the weights closer, and pad every parameter more
CLOSE_ENOUGH = Fraction(1, 100)  # of a rank's share


# --- weights ------------------------------------------------------------------------------------------


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


# --- stages 1 and 2 -----------------------------------------------------------------------------------


def alignment_of(num_elements: int, num_ranks: int) -> int:
    """Elements of which every inner boundary of `cut_flat_group` is a multiple.

    `ALIGNMENT`, or the largest power of two below it with which a small group still has `UNITS_PER_RANK` for each rank.
    """
    unit = ALIGNMENT
    while unit > LEAST_ALIGNMENT and num_elements < unit * UNITS_PER_RANK * num_ranks:
        unit //= 2
    return unit


def cut_flat_group(num_elements: int, weights: Sequence[float]) -> Split:
    """Cut a flat vector into one contiguous part per rank, in proportion to ``weights``.

    Every boundary is the ideal one rounded to a multiple of `alignment_of`, so a part is at most one such unit larger
    or smaller than its exact share, tail included. The last rank with a positive weight takes the tail that fills no
    unit; a weight of zero gets nothing. Equal weights give DeepSpeed's own partitions where the vector divides, as
    DeepSpeed's does.

    Raises:
        ConfigError: see `check_weights`.
    """
    check_weights(weights, len(weights), zero_stage=1)
    if is_even(weights) and num_elements % len(weights) == 0:
        return Split((num_elements // len(weights),) * len(weights))
    unit = alignment_of(num_elements, len(weights))
    sums = list(accumulate(map(Fraction, weights)))
    cuts = [0]
    for before in sums:
        ideal = num_elements * before / sums[-1]
        cuts.append(num_elements if before == sums[-1] else min(round(ideal / unit) * unit, num_elements))
    return Split(tuple(stop - start for start, stop in pairwise(cuts)))


# --- stage 3 ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Slots:
    """Stage 3's cut of every parameter: ``total`` equal slots, of which rank ``r`` owns ``counts[r]`` in a row.

    This is DeepSpeed's layout for ``total`` ranks, with several of its shards on one rank: shards stay contiguous, and
    what DeepSpeed computes as shard size times rank is still right if the rank is a slot.

    Args:
        counts: slots of each rank, at least one.

    Raises:
        ConfigError: a count below one.
    """

    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.counts or min(self.counts) < 1:
            raise ConfigError(f"every rank owns at least one slot on ZeRO stage 3, got {self.counts}.")

    @classmethod
    def from_weights(cls, weights: Sequence[float]) -> Slots:
        """Few slots that follow ``weights``: each rank's share is within one percent of its weight.

        Tried are the numbers of slots that give the least weight 1, 2, 3, ... of them. Where `SLOTS_PER_RANK` on
        average are not enough, the number of slots that came closest is taken.

        Raises:
            ConfigError: see `check_weights`.
        """
        check_weights(weights, len(weights), zero_stage=3)
        exact = [Fraction(weight) for weight in weights]
        wanted = [weight / sum(exact) for weight in exact]
        limit = SLOTS_PER_RANK * len(weights)
        best: tuple[Fraction, tuple[int, ...]] | None = None
        for total in (*(round(k / min(wanted)) for k in range(1, int(limit * min(wanted)) + 1)), limit):
            counts = tuple(max(count, 1) for count in share(total, weights))
            error = max(abs(Fraction(n, sum(counts)) / want - 1) for n, want in zip(counts, wanted, strict=True))
            if best is None or error < best[0]:
                best = error, counts
            if error <= CLOSE_ENOUGH:
                break
        assert best is not None
        common = reduce(gcd, best[1])
        return cls(tuple(count // common for count in best[1]))

    @property
    def total(self) -> int:
        """Slots of all ranks."""
        return sum(self.counts)

    def first(self, rank: int) -> int:
        """The first slot of ``rank``."""
        return sum(self.counts[:rank])

    def slot_elements(self, num_elements: int) -> int:
        """Elements of one slot of a parameter of ``num_elements``; the last slots may be padding."""
        return ceil(num_elements / self.total)

    def shard_elements(self, num_elements: int, rank: int) -> int:
        """Elements that ``rank`` allocates for its shard, padding included."""
        return self.slot_elements(num_elements) * self.counts[rank]

    def shard_range(self, num_elements: int, rank: int) -> tuple[int, int]:
        """``(start, stop)`` of the elements that ``rank`` owns, without padding; possibly empty."""
        slot = self.slot_elements(num_elements)
        start = min(slot * self.first(rank), num_elements)
        return start, min(start + self.shard_elements(num_elements, rank), num_elements)
