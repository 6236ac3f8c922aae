"""Layouts of parameters: how the replicas and the ZeRO owners of a job cut each of them.

Example: a [10, 4] parameter that replica 0 holds on rank 0, and replica 1 cuts by rows over ranks 1 and 2:

    ParameterLayout((10, 4), (Cut.whole((10, 4), 0), Cut.along(0, [1, 2], [6, 4])))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod

from ds_hetero.errors import SyncError
from ds_hetero.values.splits import Split


@dataclass(frozen=True, slots=True)
class Cut:
    """A cut of a parameter between the ranks of one replica, or between the ZeRO owners.

    Args:
        partial: whether the gradients of copies are parts of a sum (a norm under Megatron's sequence parallelism, a KV
            head that several ranks share). Otherwise they are equal, and each copy contributes a slice.

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
        """Return a cut of one part: each of ``ranks`` holds all of a parameter of this shape."""
        return cls((ranks,), (prod(shape),), partial=partial)

    @classmethod
    def along(cls, dim: int | None, ranks: Sequence[int], sizes: Sequence[int]) -> Cut:
        """Return a cut along ``dim``, or of the flat elements if it is None: ``ranks[i]`` holds ``sizes[i]`` units."""
        return cls(tuple((rank,) for rank in ranks), tuple(sizes), dim)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of all holders, in order of the parts."""
        return tuple(chain.from_iterable(self.holders))

    def part(self, rank: int) -> tuple[int, int] | None:
        """Return ``(start, stop)`` of the part of ``rank`` along ``dim``; None if it holds no part."""
        for holders, extent in zip(self.holders, Split(self.sizes).ranges, strict=True):
            if rank in holders:
                return extent
        return None


@dataclass(frozen=True, slots=True)
class ParameterLayout:
    """How one parameter is cut in every replica (or stage), and between its ZeRO owners.

    Args:
        shape: of the whole parameter.
        cuts: one per summand of the gradient: one for each replica, in the same order for every parameter, or one for
            each stage that holds the parameter. A rank belongs to one of them.
        owners: cut of the sums of gradients and of the optimizer state, one rank per part. None lets the holders of an
            element own it, which costs the fewest bytes.

    Raises:
        SyncError: a cut whose sizes do not sum to the shape, a dimension that does not exist, a rank in two
            replicas, no rank at all, or a part with several owners.
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
                unit_name = "elements" if cut.dim is None else f"units of dimension {cut.dim}"
                raise SyncError(
                    f"a parameter of shape {self.shape} has {units} {unit_name}, but the sizes of a cut sum to "
                    f"{sum(cut.sizes)}: {cut}."
                )
        ranks = [rank for cut in self.cuts for rank in cut.ranks]
        if not ranks or len(set(ranks)) < len(ranks):
            raise SyncError(f"every rank must belong to one replica, got {[cut.ranks for cut in self.cuts]}.")
        if any(len(holders) > 1 for cut in owners for holders in cut.holders):
            raise SyncError(f"every element must have one owner, got {self.owners}.")
