"""Chunks of random layouts, element by element; buckets; bytes against the symmetric algorithm."""

from __future__ import annotations

from itertools import accumulate, pairwise, product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.gradient_sync import ring_reduce_scatter_elements
from ds_hetero.errors import SyncError
from ds_hetero.sharding.buckets import fuse
from ds_hetero.sharding.gradient_chunks import Chunk, chunks_of, fit_owner_weights, gathered_elements, reduced_elements
from ds_hetero.sharding.parameter_layouts import Cut, ParameterLayout

ONE_TWO_FOUR = ((0,), (1, 2), (3, 4, 5, 6))


# --- worked by hand ---------------------------------------------------------------------------------


def test_a_whole_layer_and_two_halves():
    # rows:      0 1 2 3
    # replica 0: 0 0 0 0        the halves of replica 1 are the chunks; each is shared by its two holders, in units of
    # replica 1: 1 1 2 2        four elements, which are a row here
    layout = ParameterLayout((4, 4), (Cut.whole((4, 4), 0), Cut.along(0, (1, 2), (2, 2))))
    assert chunks_of("w", layout, alignment=4) == (
        Chunk("w", (((0, 1), (0, 4)),), (0, 1), 0, (0, 1)),
        Chunk("w", (((1, 2), (0, 4)),), (0, 1), 1, (0, 1)),
        Chunk("w", (((2, 3), (0, 4)),), (0, 2), 0, (0, 2)),
        Chunk("w", (((3, 4), (0, 4)),), (0, 2), 2, (0, 2)),
    )


def test_rows_against_columns_with_the_owner_given():
    layout = ParameterLayout(
        (4, 6), (Cut.along(0, (0, 1), (1, 3)), Cut.along(1, (2, 3), (4, 2))), owners=Cut.along(None, (4, 0), (8, 16))
    )
    # Owner 4 has flat elements 0 to 7: row 0 and two elements of row 1. The last chunk is three pieces of memory.
    assert {(c.contributors, c.owner): c.boxes for c in chunks_of("w", layout)} == {
        ((0, 2), 4): (((0, 1), (0, 4)),),
        ((0, 3), 4): (((0, 1), (4, 6)),),
        ((1, 2), 4): (((1, 2), (0, 2)),),
        ((1, 2), 0): (((1, 2), (2, 4)), ((2, 4), (0, 4))),
        ((1, 3), 0): (((1, 2), (4, 6)), ((2, 4), (4, 6))),
    }


def test_equal_copies_account_for_a_slice_each_and_partial_ones_all_contribute():
    def contributors(partial):
        cuts = Cut.whole((8,), 0), Cut.whole((8,), 1, 2, partial=partial)
        chunks = chunks_of("norm", ParameterLayout((8,), cuts, owners=Cut.whole((8,), 0)), alignment=1)
        return [(chunk.boxes, chunk.contributors, chunk.holders) for chunk in chunks]

    assert contributors(partial=False) == [((((0, 4),),), (0, 1), (0, 1, 2)), ((((4, 8),),), (0, 2), (0, 1, 2))]
    assert contributors(partial=True) == [((((0, 8),),), (0, 1, 2), (0, 1, 2))]


def test_norms_travel_with_the_matrices_they_stand_beside():
    """Copies are sliced as the other replicas' shards are, so they need no communicator of their own to be summed."""
    norm = ParameterLayout((64,), tuple(Cut.whole((64,), *ranks) for ranks in ONE_TWO_FOUR))
    matrix = _one_two_four((64, 64), 0, 1)
    members = [{chunk.contributors for chunk in chunks_of("x", layout, 4)} for layout in (norm, matrix)]
    assert members[0] == {(0, 1, 3), (0, 1, 4), (0, 2, 5), (0, 2, 6)}
    assert members[0] < members[1]  # rows against columns pair up everybody


def test_parts_of_one_rank_and_alignment():
    layout = ParameterLayout((1000,), (Cut.whole((1000,), 0), Cut.whole((1000,), 1)))
    chunks = chunks_of("w", layout)  # in units of 32: eight of 128 for each would be more than there is
    assert [(chunk.owner, chunk.boxes) for chunk in chunks] == [(0, (((0, 512),),)), (1, (((512, 1000),),))]
    thirds = chunks_of("w", layout, owner_weights={0: 1, 1: 2})
    assert [(chunk.owner, chunk.boxes) for chunk in thirds] == [(0, (((0, 320),),)), (1, (((320, 1000),),))]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Cut(((0,), (1,)), (3,)), r"one size >= 0 and at least one rank for each part, got sizes \(3,\)"),
        (lambda: Cut(((0,),), (-1,)), "one size >= 0"),
        (lambda: Cut(((0,), ()), (1, 2)), "at least one rank"),
        (lambda: Cut.along(0, (1, 1), (1, 2)), "a rank may hold only one part of a cut"),
        (
            lambda: _layout(Cut.along(0, (0, 1), (2, 3))),
            r"shape \(4, 6\) has 4 units of dimension 0, but the sizes of a cut sum to 5",
        ),
        (lambda: _layout(Cut.along(None, (0,), (23,))), "has 24 elements, but the sizes of a cut sum to 23"),
        (lambda: _layout(Cut.along(2, (0,), (4,))), "has no dimension 2"),
        (
            lambda: _layout(Cut.whole((4, 6), 0), Cut.whole((4, 6), 1, 0)),
            r"must belong to one replica, got \[\(0,\), \(1, 0\)\]",
        ),
        (lambda: _layout(Cut.whole((4, 6), 0), owners=Cut.whole((4, 6), 0, 1)), "every element must have one owner"),
    ],
)
def test_layouts_that_do_not_fit_together_are_refused(make, says):
    with pytest.raises(SyncError, match=says):
        make()


def _layout(*cuts, owners=None):
    return ParameterLayout((4, 6), cuts, owners)


# --- any layout -------------------------------------------------------------------------------------


@st.composite
def cuts(draw, shape, ranks, copies=True):
    """A cut of ``shape`` in contiguous parts, along a dimension or flat; some parts on several ranks."""
    dim = draw(st.sampled_from([None, *range(len(shape))]))
    units = prod(shape) if dim is None else shape[dim]
    holders = [[rank] for rank in ranks]
    if copies and draw(st.booleans()):
        holders = [[ranks[0]]]
        for rank in ranks[1:]:
            if draw(st.booleans()):
                holders[-1].append(rank)
            else:
                holders.append([rank])
    bounds = [0, *sorted(draw(st.integers(0, units)) for _ in holders[1:]), units]
    sizes = tuple(b - a for a, b in pairwise(bounds))
    return Cut(tuple(map(tuple, holders)), sizes, dim, partial=draw(st.booleans()))


@st.composite
def layouts(draw, owners=True):
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
    degrees = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    ranks = draw(st.permutations(range(sum(degrees))))
    stops = list(accumulate(degrees))
    replicas = [ranks[stop - degree : stop] for stop, degree in zip(stops, degrees, strict=True)]
    owner_cut = draw(st.none() | cuts(shape, draw(st.permutations(range(12)))[:3], copies=False)) if owners else None
    return ParameterLayout(shape, tuple(draw(cuts(shape, members)) for members in replicas), owner_cut)


@settings(max_examples=500)
@given(layouts(), st.sampled_from([1, 2, 4]), st.booleans())
def test_every_element_is_summed_once_over_those_who_hold_it(layout, alignment, weighted):
    weights = {rank: 1 + rank % 3 for rank in range(12)} if weighted else None
    chunks = chunks_of("p", layout, alignment, weights)
    assert len({(c.contributors, c.owner, c.holders) for c in chunks}) == len(chunks)  # what can be one chunk is one
    of_element = {}
    for chunk in chunks:
        for box in chunk.boxes:
            for element in product(*(range(*extent) for extent in box)):
                assert element not in of_element
                of_element[element] = chunk
    elements = list(product(*map(range, layout.shape)))
    assert sorted(of_element) == elements
    assert sum(chunk.size for chunk in chunks) == len(elements)
    for flat, element in enumerate(elements):
        chunk = of_element[element]
        held = [_holders(cut, flat, element) for cut in layout.cuts]
        assert chunk.holders == tuple(rank for ranks in held for rank in ranks)
        left = list(chunk.contributors)
        for cut, ranks in zip(layout.cuts, held, strict=True):
            number = len(ranks) if cut.partial else 1
            assert set(left[:number]) <= set(ranks) and len(set(left[:number])) == number
            left = left[number:]
        assert not left
        if layout.owners is None:
            assert chunk.owner in chunk.contributors
        else:
            assert (chunk.owner,) == _holders(layout.owners, flat, element)


def _holders(cut, flat, element):
    unit = flat if cut.dim is None else element[cut.dim]
    for holders, stop in zip(cut.holders, accumulate(cut.sizes), strict=True):
        if unit < stop:
            return holders
    raise AssertionError


@settings(max_examples=200)
@given(layouts(owners=False))
def test_no_more_is_sent_than_if_all_replicas_were_cut_alike(layout):
    """In total exactly as much; by a rank no more than in a ring over copies of what it holds, but for rounding."""
    chunks = chunks_of("p", layout, alignment=1)
    replicas = len(layout.cuts)
    one_each = all(len(c.contributors) == replicas for c in chunks)
    ranks = [rank for cut in layout.cuts for rank in cut.ranks]
    assert sum(reduced_elements(chunks, rank) for rank in ranks) == sum(
        (len(chunk.contributors) - 1) * chunk.size for chunk in chunks
    )
    if one_each:
        size = prod(layout.shape)
        total = sum(reduced_elements(chunks, rank) for rank in ranks)
        assert total == replicas * ring_reduce_scatter_elements(size, replicas) == (replicas - 1) * size
        for rank in ranks:
            contributed = sum(chunk.size for chunk in chunks if rank in chunk.contributors)
            rounding = len({c.contributors for c in chunks if rank in c.contributors})
            assert reduced_elements(chunks, rank) <= ring_reduce_scatter_elements(contributed, replicas) + rounding
    assert sum(gathered_elements(chunks, rank) for rank in ranks) == sum(
        (len(chunk.holders) - 1) * chunk.size for chunk in chunks
    )


@pytest.mark.parametrize("rows_or_columns", [(0, 0), (1, 1), (0, 1)])
def test_degrees_one_two_and_four_send_what_equal_degrees_send(rows_or_columns):
    shape = (768, 1536)
    size = prod(shape)
    chunks = chunks_of("w", _one_two_four(shape, *rows_or_columns))
    for degree, ranks in zip((1, 2, 4), ONE_TWO_FOUR, strict=True):
        symmetric = [tuple(range(degree * replica, degree * (replica + 1))) for replica in range(3)]
        parts = [shape[0] // degree] * degree
        alike = ParameterLayout(shape, tuple(Cut.along(0, members, parts) for members in symmetric))
        sent_alike = reduced_elements(chunks_of("w", alike), 0)
        assert sent_alike == ring_reduce_scatter_elements(size // degree, 3)
        for rank in ranks:
            assert reduced_elements(chunks, rank) == sent_alike
            assert gathered_elements(chunks, rank) == sent_alike


def _one_two_four(shape, dim_of_two, dim_of_four):
    halves, quarters = [shape[dim_of_two] // 2] * 2, [shape[dim_of_four] // 4] * 4
    cuts = Cut.whole(shape, 0), Cut.along(dim_of_two, (1, 2), halves), Cut.along(dim_of_four, (3, 4, 5, 6), quarters)
    return ParameterLayout(shape, cuts)


def test_a_large_matrix_is_cut_in_a_moment():
    """Columns against rows of a 70B layer: boxes, not the 28,672 strided rows of every chunk."""
    shape = (28672, 8192)
    stops = list(accumulate(degrees := (1, 8, 16, 64)))
    replica_cuts = [
        Cut.along(dim, range(stop - degree, stop), [shape[dim] // degree] * degree)
        for dim, degree, stop in zip((0, 0, 1, 0), degrees, stops, strict=True)
    ]
    chunks = chunks_of("w", ParameterLayout(shape, tuple(replica_cuts)))
    assert sum(chunk.size for chunk in chunks) == prod(shape)
    assert len(chunks) == 64 * 16 * 4
    assert sum(len(chunk.boxes) for chunk in chunks) <= 3 * len(chunks)


# --- owners in proportion to memory -----------------------------------------------------------------


def test_equal_targets_give_every_rank_a_seventh():
    layouts = [_one_two_four((896, 896), 0, 0), _one_two_four((1792, 896), 1, 1)]
    owned = _owned(layouts, dict.fromkeys(range(7), 1))
    assert set(owned.values()) == {sum(prod(layout.shape) for layout in layouts) // 7}


def test_owners_follow_memory_and_end_at_what_they_hold():
    layouts = [_one_two_four((896, 896), 0, 1)] * 3
    total = sum(prod(layout.shape) for layout in layouts)
    memory = {0: 80, 1: 40, 2: 24, 3: 24, 4: 24, 5: 16, 6: 16}
    owned = _owned(layouts, memory)
    for rank, gib in memory.items():
        assert owned[rank] == pytest.approx(total * gib / sum(memory.values()), rel=0.005)
    too_much = _owned(layouts, dict.fromkeys(range(7), 1) | {6: 1000})
    assert too_much[6] > 0.99 * total / 4


def test_every_holder_needs_a_target():
    with pytest.raises(SyncError, match="needs a positive target"):
        fit_owner_weights([_one_two_four((8, 8), 0, 0)], {0: 1})
    with pytest.raises(SyncError, match=r"holds w needs a positive owner weight; ranks \[2, 3, 4, 5, 6\] have none"):
        chunks_of("w", _one_two_four((8, 8), 0, 0), owner_weights={0: 1, 1: 2, 2: 0})


def _owned(layouts, targets):
    weights = fit_owner_weights(layouts, targets)
    owned = dict.fromkeys(targets, 0)
    for layout in layouts:
        for chunk in chunks_of("w", layout, owner_weights=weights):
            owned[chunk.owner] += chunk.size
    return owned


# --- buckets ----------------------------------------------------------------------------------------


@given(st.lists(layouts(), min_size=1, max_size=4), st.integers(1, 200))
def test_buckets_hold_every_chunk_once_in_order_and_start_when_full(some_layouts, bucket_bytes):
    chunks = [chunk for i, layout in enumerate(some_layouts) for chunk in chunks_of(f"p{i}", layout, 1)]
    dtypes = {f"p{i}": i % 2 for i in range(4)}
    item_bytes = {name: 2 + 2 * dtype for name, dtype in dtypes.items()}
    buckets = fuse(chunks, lambda chunk: chunk.contributors, dtypes, item_bytes, bucket_bytes)
    position = {id(chunk): i for i, chunk in enumerate(chunks)}
    assert sorted(position[id(chunk)] for bucket in buckets for chunk in bucket.chunks) == list(range(len(chunks)))
    last = [bucket.chunks[-1].name for bucket in buckets]
    assert last == sorted(last)
    seen = {}
    for bucket in buckets:
        before = [chunk for chunk in bucket.chunks if chunk.name != bucket.chunks[-1].name]
        assert sum(chunk.size * item_bytes[chunk.name] for chunk in before) < bucket_bytes
        in_bucket = {(chunk.contributors, dtypes[chunk.name]) for chunk in bucket.chunks}
        assert in_bucket == {(bucket.contributors, bucket.dtypes)}
        assert {*bucket.contributors, *(chunk.owner for chunk in bucket.chunks)} <= set(bucket.members)
        assert seen.setdefault(bucket.contributors, bucket.members) == bucket.members
        owned = [sum(chunk.size for chunk in bucket.owned(rank)) for rank in bucket.members]
        assert list(bucket.owned_sizes()) == owned
