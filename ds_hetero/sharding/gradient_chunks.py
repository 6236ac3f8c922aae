"""Gradient chunks of replicas that cut a parameter differently.

HexiScale (arXiv:2409.01143, asymmetric gradient synchronization) lets every pipeline cut a layer for itself: one rank
holds all of it, two others a half each. Their cuts and that of the ZeRO owners have a common refinement, whose pieces
each lie within one part of every cut. Such a chunk is summed over one holder per replica alone, so that nothing is
sent twice: as many bytes as if all replicas cut alike.

A cut along a dimension is a strided range of memory, a cut of the flat elements is not one of any dimension. Both are
unions of boxes, one (start, stop) per dimension, and boxes are what is intersected here. Plain integers; no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, product
from math import prod

from ds_hetero.common.rounding import ceil_div
from ds_hetero.errors import SyncError
from ds_hetero.sharding.parameter_layouts import ParameterLayout
from ds_hetero.sharding.zero_partition import ALIGNMENT, alignment_of
from ds_hetero.values.splits import Split, refine, share_in_units

Box = tuple[tuple[int, int], ...]
"""``(start, stop)`` in every dimension of a parameter."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements of a parameter that the same ranks sum, own and hold."""

    name: str
    boxes: tuple[Box, ...]  # disjoint; elements travel box after box, each in row-major order
    contributors: tuple[int, ...]  # ranks whose gradients are summed, by replica: one, or all copies if partial
    owner: int  # the rank that keeps the sum and the optimizer state
    holders: tuple[int, ...]  # ranks that want the updated values, by replica

    @property
    def size(self) -> int:
        """Elements."""
        return sum(map(box_size, self.boxes))


def box_size(box: Box) -> int:
    """Elements in a box."""
    return prod(stop - start for start, stop in box)


def overlaps(old: Sequence[Box], new: Sequence[Box]) -> Iterator[Box]:
    """Overlaps of the boxes of two owners; every part lies in one box of each."""
    for old_box, new_box in product(old, new):
        part = _overlap(old_box, new_box)
        if all(start < stop for start, stop in part):
            yield part


def _overlap(one: Box, other: Box) -> Box:
    """Elements of both boxes; a range whose stop is not behind its start is empty."""
    ranges = zip(one, other, strict=True)
    return tuple(
        (max(start, other_start), min(stop, other_stop)) for (start, stop), (other_start, other_stop) in ranges
    )


def chunks_of(
    name: str, layout: ParameterLayout, alignment: int = ALIGNMENT, owner_weights: Mapping[int, float] | None = None
) -> tuple[Chunk, ...]:
    """The chunks of one parameter: disjoint, and together all of it. Raises `SyncError`: a holder has no weight.

    Elements with the same members are one chunk, however many boxes they are.

    Args:
        alignment: elements of which the boundaries between owners and between equal copies are multiples, within what
            the same ranks hold; smaller for what is too small (`ds_hetero.sharding.zero_partition.alignment_of`).
        owner_weights: by rank; where ``layout`` names no owners, the holders of the same elements own them in these
            proportions. None shares them evenly: then no rank sends more than if all replicas were cut as its own.
    """
    weights = None
    if owner_weights is not None:
        ranks = chain.from_iterable(cut.ranks for cut in layout.cuts)
        without = [rank for rank in ranks if not owner_weights.get(rank, 0) > 0]
        if without:
            raise SyncError(f"every rank that holds {name} needs a positive owner weight; ranks {without} have none.")
        weights = tuple(sorted(owner_weights.items()))
    return tuple(Chunk(name, *fields) for fields in _chunk_fields(layout, alignment, weights))


@lru_cache(maxsize=1024)  # the layers of a model have the same few layouts
def _chunk_fields(
    layout: ParameterLayout, alignment: int, owner_weights: tuple[tuple[int, float], ...] | None
) -> tuple[tuple[tuple[Box, ...], tuple[int, ...], int, tuple[int, ...]], ...]:
    weights = None if owner_weights is None else dict(owner_weights)
    chunks: dict[tuple[tuple[int, ...], int, tuple[int, ...]], list[Box]] = {}
    for parts, boxes in _regions(layout).items():
        held_by = [cut.holders[part] for cut, part in zip(layout.cuts, parts, strict=False)]
        for start, stop, contributors in _contributions(layout, held_by, sum(map(box_size, boxes)), alignment):
            owners = contributors
            sizes: tuple[int, ...] = (stop - start,)
            if layout.owners is not None:
                owners = layout.owners.holders[parts[-1]]
            else:
                shares = [1.0 if weights is None else weights[rank] for rank in owners]
                sizes = _share(stop - start, shares, alignment)
            for owner, (low, high) in zip(owners, Split(sizes).ranges, strict=True):
                key = contributors, owner, tuple(chain.from_iterable(held_by))
                chunks.setdefault(key, []).extend(_slice(boxes, start + low, start + high))
    return tuple((tuple(boxes), *key) for key, boxes in chunks.items() if boxes)


def _contributions(
    layout: ParameterLayout, held_by: Sequence[tuple[int, ...]], size: int, alignment: int
) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """``(start, stop, contributors)`` of ``size`` elements: equal copies account for a slice each."""
    copies = [1 if cut.partial else len(ranks) for cut, ranks in zip(layout.cuts, held_by, strict=True)]
    for piece in refine([Split(_share(size, [1.0] * number, alignment)) for number in copies]):
        contributors: list[int] = []
        for cut, ranks, copy in zip(layout.cuts, held_by, piece.owners, strict=True):
            contributors += ranks if cut.partial else (ranks[copy],)
        yield piece.start, piece.stop, tuple(contributors)


def _share(size: int, weights: Sequence[float], alignment: int) -> tuple[int, ...]:
    """Shares of ``size`` elements, in smaller units where one of ``alignment`` would make them too uneven."""
    return share_in_units(size, weights, min(alignment, alignment_of(size, len(weights))))


def _regions(layout: ParameterLayout) -> dict[tuple[int, ...], list[Box]]:
    """Boxes by the part of every cut, the owners' last, that contains them: the common refinement of all cuts.

    Cuts along one dimension, or of the flat elements, refine one another as splits of that axis. The dimensions make a
    grid, and every piece of the flat axis takes its boxes out of the grid.
    """
    cuts = [*layout.cuts, *([] if layout.owners is None else [layout.owners])]
    by_axis: dict[int | None, list[int]] = {axis: [] for axis in (None, *range(len(layout.shape)))}
    for index, cut in enumerate(cuts):
        by_axis[cut.dim].append(index)
    pieces = {}
    for axis, indices in by_axis.items():
        uncut = Split((prod(layout.shape) if axis is None else layout.shape[axis],))
        pieces[axis] = refine([uncut, *(Split(cuts[index].sizes) for index in indices)])
    regions: dict[tuple[int, ...], list[Box]] = {}
    parts = [0] * len(cuts)
    for flat in pieces[None]:
        for index, part in zip(by_axis[None], flat.owners[1:], strict=True):
            parts[index] = part
        for box in _flat_boxes(tuple((0, size) for size in layout.shape), flat.start, flat.stop):
            # Pieces of every dimension that reach into the box, and the cells of the grid that they make.
            within = []
            for dim, (start, stop) in enumerate(box):
                within.append([piece for piece in pieces[dim] if piece.start < stop and start < piece.stop])
            for cell in product(*within):
                for dim, piece in enumerate(cell):
                    for index, part in zip(by_axis[dim], piece.owners[1:], strict=True):
                        parts[index] = part
                cell_box = tuple((piece.start, piece.stop) for piece in cell)
                regions.setdefault(tuple(parts), []).append(_overlap(cell_box, box))
    return regions


def _slice(boxes: Iterable[Box], start: int, stop: int) -> Iterator[Box]:
    """Elements ``[start, stop)`` of boxes laid end to end, as boxes."""
    offset = 0
    for box in boxes:
        size = box_size(box)
        low, high = max(start - offset, 0), min(stop - offset, size)
        if low < high:
            yield from _flat_boxes(box, low, high)
        offset += size


def _flat_boxes(box: Box, start: int, stop: int) -> Iterator[Box]:
    """Elements ``[start, stop)`` of a box in row-major order, as at most ``2 * dims - 1`` boxes (none if empty).

    Elements [3, 11) of a box of 3 rows of 4: the end of row 0, row 1 whole, and the beginning of row 2.
    """
    if start >= stop:
        return
    if not box:
        yield box
        return
    (first_row, _), rest = box[0], box[1:]
    row_size = box_size(rest)
    whole_from, whole_to = ceil_div(start, row_size), stop // row_size  # rows that are wanted whole, if any

    def part_of_row(row: int, low: int, high: int) -> Iterator[Box]:
        for inner in _flat_boxes(rest, low, high):
            yield ((first_row + row, first_row + row + 1), *inner)

    if whole_from > whole_to:  # begins and ends within one row
        yield from part_of_row(whole_to, start - whole_to * row_size, stop - whole_to * row_size)
        return
    yield from part_of_row(whole_from - 1, start - (whole_from - 1) * row_size, row_size)
    if whole_from < whole_to:
        yield ((first_row + whole_from, first_row + whole_to), *rest)
    yield from part_of_row(whole_to, 0, stop - whole_to * row_size)


def fit_owner_weights(
    layouts: Iterable[ParameterLayout], targets: Mapping[int, float], rounds: int = 200
) -> dict[int, float]:
    """Weights for `chunks_of` with which ranks own shares as ``targets`` say. Raises `SyncError`: one has no target.

    Only a holder can own, so a rank's weight among the holders of one chunk differs from its target: with replicas of
    1, 2 and 4 ranks and equal targets it is 1 : 2 : 4. Every weight is scaled by wanted over owned in turns (iterative
    proportional fitting, Deming and Stephan 1940). A rank that holds less than its share ends with nearly all that it
    holds.

    Args:
        layouts: of all parameters that are synchronized; layouts that name their owners are skipped.
        targets: positive, by rank: free memory, say.
        rounds: how often every weight is scaled.
    """
    regions: dict[tuple[int, ...], int] = {}
    for layout in layouts:
        if layout.owners is None:
            for boxes, contributors, _, _ in _chunk_fields(layout, 1, None):
                regions[contributors] = regions.get(contributors, 0) + sum(map(box_size, boxes))
    ranks = sorted(set(chain.from_iterable(regions)))
    if any(not targets.get(rank, 0) > 0 for rank in ranks):
        raise SyncError(f"every rank that holds parameters needs a positive target, got {dict(targets)} for {ranks}.")
    weights = {rank: float(targets[rank]) for rank in ranks}
    per_target = sum(regions.values()) / sum(targets[rank] for rank in ranks)
    for _ in range(rounds):
        owned = dict.fromkeys(ranks, 0.0)
        for contributors, size in regions.items():
            total = sum(weights[rank] for rank in contributors)
            for rank in contributors:
                owned[rank] += size * weights[rank] / total
        scaled = {rank: weights[rank] * per_target * targets[rank] / owned[rank] for rank in ranks}
        largest = max(scaled.values())
        weights = {rank: max(weight / largest, 1e-9) for rank, weight in scaled.items()}
    return weights


def reduced_elements(chunks: Iterable[Chunk], rank: int) -> int:
    """Count the elements that ``rank`` sends to other ranks so that every owner has its sums."""
    return sum(chunk.size for chunk in chunks if rank in chunk.contributors and chunk.owner != rank)


def gathered_elements(chunks: Iterable[Chunk], rank: int) -> int:
    """Count the elements that ``rank`` sends to other ranks so that every holder has the owners' values."""
    return sum(chunk.size * sum(holder != rank for holder in chunk.holders) for chunk in chunks if chunk.owner == rank)
