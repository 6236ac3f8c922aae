"""Layouts of parameters: how replicas and ZeRO owners cut them, as users of the gradient synchronization say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod

from ds_hetero.errors import SyncError
from ds_hetero.values.splits import Split


@dataclass(frozen=True, slots=True)
class Cut:
    """A cut of a parameter between the ranks of one replica, or the ZeRO owners.

    Args:
        partial: gradients of copies are parts of a sum (a norm under Megatron's sequence parallelism, a KV head that
            several ranks share); otherwise they are equal, and each copy accounts for a slice.

    Raises:
        SyncError: another number of sizes than of parts, a negative size, a part that no rank holds, or a rank that
            holds two parts.
    """

    holders: tuple[tuple[int, ...], ...]  # global ranks that hold part ``i``; several hold a copy each
    sizes: tuple[int, ...]  # of the parts, in units of ``dim``; zero is legal
    dim: int | None = None  # the dimension that is cut; None cuts the flat elements in row-major order
    partial: bool = False

    def __post_init__(self) -> None:
        ranks = self.ranks
        if len(self.holders) != len(self.sizes) or min(self.sizes, default=-1) < 0 or not all(self.holders):
            raise SyncError(
                f"a cut takes one size >= 0 and at least one rank for each part, got sizes {self.sizes} for holders "
                f"{self.holders}."
            )
        if len(set(ranks)) < len(ranks):
            raise SyncError(f"a rank may hold only one part of a cut, got holders {self.holders}.")

    @classmethod
    def whole(cls, shape: Sequence[int], *ranks: int, partial: bool = False) -> Cut:
        """Every one of ``ranks`` holds all of a parameter of this shape."""
        return cls((ranks,), (prod(shape),), partial=partial)

    @classmethod
    def along(cls, dim: int | None, ranks: Sequence[int], sizes: Sequence[int]) -> Cut:
        """Rank ``ranks[i]`` holds ``sizes[i]`` units of dimension ``dim``, in order (None: of the flat elements)."""
        return cls(tuple((rank,) for rank in ranks), tuple(sizes), dim)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank that holds something, in order of the parts."""
        return tuple(chain.from_iterable(self.holders))

    def part(self, rank: int) -> tuple[int, int] | None:
        """Return ``(start, stop)`` along ``dim`` of the part of ``rank``; None if it holds nothing."""
        for holders, extent in zip(self.holders, Split(self.sizes).ranges, strict=True):
            if rank in holders:
                return extent
        return None


@dataclass(frozen=True, slots=True)
class ParameterLayout:
    """Shards of one parameter on every replica or stage, and on every ZeRO owner.

    Args:
        cuts: one per summand of the gradient: per replica, in the same order for every parameter, or per stage that
            holds the parameter; a rank belongs to one of them.
        owners: who keeps optimizer state and the sum of the gradients of what, one rank per part. None gives every
            element to one of its holders, which costs the fewest bytes.

    Raises:
        SyncError: a cut whose sizes do not sum to the shape, a dimension that does not exist, a rank in two
            replicas, or a part with several owners.
    """

    shape: tuple[int, ...]
    cuts: tuple[Cut, ...]
    owners: Cut | None = None

    def __post_init__(self) -> None:
        owners = () if self.owners is None else (self.owners,)
        for cut in (*self.cuts, *owners):
            if cut.dim is not None and not 0 <= cut.dim < len(self.shape):
                raise SyncError(f"a parameter of shape {self.shape} has no dimension {cut.dim} to cut.")
            units = prod(self.shape) if cut.dim is None else self.shape[cut.dim]
            if sum(cut.sizes) != units:
                what = "elements" if cut.dim is None else f"units of dimension {cut.dim}"
                raise SyncError(
                    f"a parameter of shape {self.shape} has {units} {what}, but a cut holds {sum(cut.sizes)}: {cut}."
                )
        ranks = [rank for cut in self.cuts for rank in cut.ranks]
        if not ranks or len(set(ranks)) < len(ranks):
            raise SyncError(f"every rank must belong to one replica, got {[cut.ranks for cut in self.cuts]}.")
        if any(len(holders) > 1 for cut in owners for holders in cut.holders):
            raise SyncError(f"every element must have one owner, got {self.owners}.")
