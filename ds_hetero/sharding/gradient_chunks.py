"""Gradient chunks of replicas that cut a parameter differently.

HexiScale (arXiv:2409.01143, asymmetric gradient synchronization) lets every pipeline cut a layer in its own way: in one
pipeline a rank holds the full layer, in another two ranks hold a half each. The cuts of the replicas and of the ZeRO
owners have a common refinement: each of its pieces lies within one part of every cut. Such a piece, a chunk, is summed
over one holder per replica, so that no element is sent twice: the replicas send as many bytes as if all of them cut the
parameter in the same way.

Example: replica 0 holds a parameter of 8 rows on rank 0, replica 1 holds rows 0-3 on rank 1 and rows 4-7 on rank 2. The
chunks are rows 0-3, summed over ranks 0 and 1, and rows 4-7, summed over ranks 0 and 2; the ranks of a sum share out
who owns it.

A part of a dimension (columns 2-3 of a matrix) is strided in memory; a part of the flat elements (elements 3-10) may
begin and end within a row. Both are unions of boxes, one (start, stop) per dimension, so this module intersects boxes.
Plain integers; no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, product
from math import prod
from typing import NamedTuple

from ds_hetero.common.rounding import ceil_div
from ds_hetero.errors import SyncError
from ds_hetero.sharding.parameter_layouts import ParameterLayout
from ds_hetero.sharding.zero_partition import ALIGNMENT, alignment_of
from ds_hetero.values.splits import Piece, Split, refine, share_in_units

Box = tuple[tuple[int, int], ...]
"""``(start, stop)`` in every dimension of a parameter."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements of a parameter that the same ranks sum, own and hold."""

    name: str
    boxes: tuple[Box, ...]  # disjoint; elements travel box after box, each in row-major order
    contributors: tuple[int, ...]  # ranks whose gradients are summed: one of each replica, or all if `Cut.partial`
    owner: int  # the rank that has the sum and the optimizer state
    holders: tuple[int, ...]  # ranks that need the updated values, replica after replica

    @property
    def size(self) -> int:
        """Number of elements."""
        return sum(map(box_size, self.boxes))


class _ChunkRanks(NamedTuple):
    """Ranks of a chunk, see `Chunk`. All elements of a parameter with equal ranks are one chunk."""

    contributors: tuple[int, ...]
    owner: int
    holders: tuple[int, ...]


class _Contribution(NamedTuple):
    """Elements ``[start, stop)`` of a region, and the ranks whose gradients of them are summed."""

    start: int
    stop: int
    contributors: tuple[int, ...]


def box_size(box: Box) -> int:
    """Return the number of elements in a box."""
    return prod(stop - start for start, stop in box)


def overlaps(old: Sequence[Box], new: Sequence[Box]) -> Iterator[Box]:
    """Yield the elements that are in ``old`` and in ``new``, as boxes that each lie in one box of both."""
    for old_box, new_box in product(old, new):
        part = _overlap(old_box, new_box)
        if all(start < stop for start, stop in part):
            yield part


def _overlap(box: Box, other: Box) -> Box:
    """Return the intersection of two boxes; it is empty if a range has ``start >= stop``."""
    ranges = zip(box, other, strict=True)
    return tuple(
        (max(start, other_start), min(stop, other_stop)) for (start, stop), (other_start, other_stop) in ranges
    )


def chunks_of(
    name: str, layout: ParameterLayout, alignment: int = ALIGNMENT, owner_weights: Mapping[int, float] | None = None
) -> tuple[Chunk, ...]:
    """Cut one parameter into disjoint chunks that together have all of its elements.

    Elements with the same contributors, owner and holders are one chunk, however many boxes they are.

    Args:
        name: the parameter's name.
        layout: how replicas, and owners if it names any, cut the parameter.
        alignment: unit in elements. Boundaries between owners, and between equal copies, are multiples of it, counted
            from the first element of a region, which the same ranks hold. Small regions use a smaller unit, see
            `ds_hetero.sharding.zero_partition.alignment_of`.
        owner_weights: by rank; where ``layout`` names no owners, the contributors of a region share its elements as
            owners in these proportions. None: evenly. Then no rank sends more than if all replicas had its own cut.

    Raises:
        SyncError: a holder has no positive weight.
    """
    weights = None
    if owner_weights is not None:
        ranks = chain.from_iterable(cut.ranks for cut in layout.cuts)
        without_weight = [rank for rank in ranks if not owner_weights.get(rank, 0) > 0]
        if without_weight:
            raise SyncError(
                f"every rank that holds {name} needs a positive owner weight; ranks {without_weight} have none."
            )
        weights = tuple(sorted(owner_weights.items()))
    chunks = _boxes_by_ranks(layout, alignment, weights)
    return tuple(Chunk(name, boxes, *ranks) for ranks, boxes in chunks)


@lru_cache(maxsize=1024)  # the layers of a model have the same few layouts
def _boxes_by_ranks(
    layout: ParameterLayout, alignment: int, owner_weights: tuple[tuple[int, float], ...] | None
) -> tuple[tuple[_ChunkRanks, tuple[Box, ...]], ...]:
    """Return the ranks and the boxes of every chunk of a layout; see `chunks_of`."""
    weights = None if owner_weights is None else dict(owner_weights)
    chunks: dict[_ChunkRanks, list[Box]] = {}
    for parts, boxes in _regions(layout).items():
        # ``parts`` has one more entry than ``layout.cuts`` if the layout names owners: the owner's part.
        holders_by_replica = [cut.holders[part] for cut, part in zip(layout.cuts, parts, strict=False)]
        holders = tuple(chain.from_iterable(holders_by_replica))
        size = sum(map(box_size, boxes))
        for start, stop, contributors in _contributions(layout, holders_by_replica, size, alignment):
            owners = contributors
            sizes: tuple[int, ...] = (stop - start,)
            if layout.owners is not None:
                owners = layout.owners.holders[parts[-1]]
            else:
                shares = [1.0 if weights is None else weights[rank] for rank in owners]
                sizes = _share(stop - start, shares, alignment)
            for owner, (low, high) in zip(owners, Split(sizes).ranges, strict=True):
                ranks = _ChunkRanks(contributors, owner, holders)
                chunks.setdefault(ranks, []).extend(_slice(boxes, start + low, start + high))
    return tuple((ranks, tuple(boxes)) for ranks, boxes in chunks.items() if boxes)


def _contributions(
    layout: ParameterLayout, holders_by_replica: Sequence[tuple[int, ...]], size: int, alignment: int
) -> Iterator[_Contribution]:
    """Cut ``size`` elements that the same ranks hold into slices, so that equal copies contribute a slice each.

    Two equal copies on ranks 1 and 2: rank 1 contributes the first half, rank 2 the second. Partial copies both
    contribute everything.
    """
    num_copies = []
    for cut, holders in zip(layout.cuts, holders_by_replica, strict=True):
        num_copies.append(1 if cut.partial else len(holders))
    for piece in refine([Split(_share(size, [1.0] * number, alignment)) for number in num_copies]):
        contributors: list[int] = []
        for cut, holders, copy in zip(layout.cuts, holders_by_replica, piece.owners, strict=True):
            contributors += holders if cut.partial else (holders[copy],)
        yield _Contribution(piece.start, piece.stop, tuple(contributors))


def _share(size: int, weights: Sequence[float], alignment: int) -> tuple[int, ...]:
    """Share ``size`` elements by ``weights`` in units of ``alignment``, or smaller ones if ``size`` is small."""
    return share_in_units(size, weights, min(alignment, alignment_of(size, len(weights))))


def _regions(layout: ParameterLayout) -> dict[tuple[int, ...], list[Box]]:
    """Return the common refinement of all cuts: its boxes, by the indices of the parts that contain them.

    A key has the index of one part of every cut, in the order of ``layout.cuts``, then of ``layout.owners`` if given.
    Cuts along one dimension
    refine one another as splits of that axis, and so do cuts of the flat elements. The dimensions make a grid, and
    every piece of the flat axis takes its boxes out of the grid.

    Example: 2 rows of 4, replica 0 cut into columns 0-1 and 2-3, replica 1 into elements 0-2 and 3-7. The pieces of the
    flat axis are element 0-2 (columns 0-2 of row 0) and 3-7 (column 3 of row 0, and row 1), so that the regions are

        parts (0, 0)   row 0, columns 0-1
        parts (1, 0)   row 0, column 2
        parts (1, 1)   row 0, column 3; row 1, columns 2-3
        parts (0, 1)   row 1, columns 0-1
    """
    cuts = [*layout.cuts, *([] if layout.owners is None else [layout.owners])]
    cuts_of_axis: dict[int | None, list[int]] = {axis: [] for axis in (None, *range(len(layout.shape)))}
    for index, cut in enumerate(cuts):
        cuts_of_axis[cut.dim].append(index)
    pieces = {}
    for axis, indices in cuts_of_axis.items():
        uncut = Split((prod(layout.shape) if axis is None else layout.shape[axis],))
        pieces[axis] = refine([uncut, *(Split(cuts[index].sizes) for index in indices)])
    parts = [0] * len(cuts)

    def set_parts(axis: int | None, piece: Piece) -> None:
        """Store in ``parts`` which part of each cut along ``axis`` contains ``piece``."""
        # piece.owners[0] belongs to the uncut axis, which is the first split of the refinement.
        for index, part in zip(cuts_of_axis[axis], piece.owners[1:], strict=True):
            parts[index] = part

    regions: dict[tuple[int, ...], list[Box]] = {}
    for flat_piece in pieces[None]:
        set_parts(None, flat_piece)
        for box in _flat_boxes(tuple((0, size) for size in layout.shape), flat_piece.start, flat_piece.stop):
            # Pieces of every dimension that reach into the box; one of each dimension makes a cell of the grid.
            pieces_in_box = []
            for dim, (start, stop) in enumerate(box):
                pieces_in_box.append([piece for piece in pieces[dim] if piece.start < stop and start < piece.stop])
            for cell in product(*pieces_in_box):
                for dim, piece in enumerate(cell):
                    set_parts(dim, piece)
                cell_box = tuple((piece.start, piece.stop) for piece in cell)
                regions.setdefault(tuple(parts), []).append(_overlap(cell_box, box))
    return regions


def _slice(boxes: Iterable[Box], start: int, stop: int) -> Iterator[Box]:
    """Yield elements ``[start, stop)`` of boxes that are laid end to end, as boxes."""
    offset = 0
    for box in boxes:
        size = box_size(box)
        low, high = max(start - offset, 0), min(stop - offset, size)
        if low < high:
            yield from _flat_boxes(box, low, high)
        offset += size


def _flat_boxes(box: Box, start: int, stop: int) -> Iterator[Box]:
    """Yield elements ``[start, stop)`` of a box in row-major order, as at most ``2 * dims - 1`` boxes (none if empty).

    Elements [3, 11) of a box of 3 rows of 4: the end of row 0, all of row 1, and the beginning of row 2.
    """
    if start >= stop:
        return
    if not box:
        yield box
        return
    (first_row, _), rest = box[0], box[1:]
    row_size = box_size(rest)
    # Complete rows are [full_start, full_stop). For elements [3, 11) of rows of 4 they are [1, 2).
    full_start, full_stop = ceil_div(start, row_size), stop // row_size

    def part_of_row(row: int, low: int, high: int) -> Iterator[Box]:
        """Yield elements ``[low, high)`` of one row."""
        for box_of_row in _flat_boxes(rest, low, high):
            yield ((first_row + row, first_row + row + 1), *box_of_row)

    if full_start > full_stop:  # the elements begin and end within row ``full_stop``
        yield from part_of_row(full_stop, start - full_stop * row_size, stop - full_stop * row_size)
        return
    yield from part_of_row(full_start - 1, start - (full_start - 1) * row_size, row_size)
    if full_start < full_stop:
        yield ((first_row + full_start, first_row + full_stop), *rest)
    yield from part_of_row(full_stop, 0, stop - full_stop * row_size)


def fit_owner_weights(
    layouts: Iterable[ParameterLayout], targets: Mapping[int, float], rounds: int = 200
) -> dict[int, float]:
    """Return owner weights for `chunks_of` with which ranks own elements in proportion to ``targets``.

    Only a holder can own an element, so weights differ from targets. Example: replicas of 1, 2 and 4 ranks cut the same
    parameter evenly, and all targets are equal. Each quarter has three holders: the first holds all four quarters, the
    second two, the third this one alone. Their weights are 1 : 2 : 4. To find them, every weight is multiplied by
    wanted over owned elements, again and again (iterative proportional fitting, Deming and Stephan 1940). A rank that
    holds fewer elements than its target owns nearly all that it holds in the end.

    Args:
        layouts: layouts of all parameters that are synchronized; those that name their owners are skipped.
        targets: positive numbers by rank, such as free memory.
        rounds: how often every weight is scaled.

    Raises:
        SyncError: a holder has no positive target.
    """
    regions: dict[tuple[int, ...], int] = {}  # elements by the ranks that can own them
    for layout in layouts:
        if layout.owners is None:
            for chunk_ranks, boxes in _boxes_by_ranks(layout, 1, None):
                size = sum(map(box_size, boxes))
                regions[chunk_ranks.contributors] = regions.get(chunk_ranks.contributors, 0) + size
    ranks = sorted(set(chain.from_iterable(regions)))
    if any(not targets.get(rank, 0) > 0 for rank in ranks):
        raise SyncError(f"every rank that holds parameters needs a positive target, got {dict(targets)} for {ranks}.")
    weights = {rank: float(targets[rank]) for rank in ranks}
    elements_per_target = sum(regions.values()) / sum(targets[rank] for rank in ranks)
    for _ in range(rounds):
        owned = dict.fromkeys(ranks, 0.0)
        for contributors, size in regions.items():
            total = sum(weights[rank] for rank in contributors)
            for rank in contributors:
                owned[rank] += size * weights[rank] / total
        scaled = {rank: weights[rank] * elements_per_target * targets[rank] / owned[rank] for rank in ranks}
        largest = max(scaled.values())
        # At least 1e-9: weights have to stay positive, also those of ranks whose share vanishes.
        weights = {rank: max(weight / largest, 1e-9) for rank, weight in scaled.items()}
    return weights


def reduced_elements(chunks: Iterable[Chunk], rank: int) -> int:
    """Return how many elements ``rank`` sends to other ranks when all gradients go to their owners."""
    return sum(chunk.size for chunk in chunks if rank in chunk.contributors and chunk.owner != rank)


def gathered_elements(chunks: Iterable[Chunk], rank: int) -> int:
    """Return how many elements ``rank`` sends to other ranks when all owners send new values to the holders."""
    return sum(chunk.size * sum(holder != rank for holder in chunk.holders) for chunk in chunks if chunk.owner == rank)
