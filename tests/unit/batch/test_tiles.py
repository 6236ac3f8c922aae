"""Bands, and the tiles they are cut into: each visible pair once, nothing outside."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hetero.batch.tiles import CAUSAL, decompose
from tests.unit.runtime.kernel_checks import blocks, visible_in


@given(blocks())
def test_pairs_of_a_band_are_counted(block):
    num_queries, num_keys, band = block
    visible = visible_in(band, num_queries, num_keys)
    assert band.pairs(num_queries, num_keys) == sum(visible(i, j) for i in range(num_queries) for j in range(num_keys))


SIZES = [(1, 1), (2, 4), (3, 7), (4, 16), (8, 64), (1, 1, 1), (2, 4, 3), (2, 8, 5)]  # leaf, chunk, side of a rectangle


def pairs(tile):
    lo, hi = tile.band.bounds(tile.rows, tile.cols)
    for shift in range(0, tile.copies * tile.step or 1, tile.step or 1):
        for i in range(tile.rows):
            for j in range(max(i + lo, 0), min(i + hi + 1, tile.cols)):
                yield tile.row + shift + i, tile.col + shift + j


@settings(max_examples=150)
@given(blocks(largest=30), st.sampled_from(SIZES))
def test_tiles_cover_what_is_visible_once_and_stay_inside(block, sizes):
    num_queries, num_keys, band = block
    covered = [pair for tile in decompose(num_queries, num_keys, band, *sizes) for pair in pairs(tile)]
    visible = visible_in(band, num_queries, num_keys)
    assert sorted(covered) == [(i, j) for i in range(num_queries) for j in range(num_keys) if visible(i, j)]


@settings(max_examples=150)
@given(blocks(largest=30), st.sampled_from(SIZES))
def test_the_first_tile_of_every_query_is_marked_and_comes_first(block, sizes):
    seen: set[int] = set()
    for tile in decompose(*block, *sizes):
        queries = {i for i, _ in pairs(tile)}
        assert len(queries) == tile.copies * tile.rows, "a query of the tile sees nothing, or two copies share one"
        assert seen.isdisjoint(queries) if tile.first else seen.issuperset(queries)
        seen.update(queries)


@settings(max_examples=150)
@given(blocks(largest=30), st.sampled_from([(2, 4), (4, 16, 5)]))
def test_copies_of_a_tile_share_no_key(block, sizes):
    for tile in decompose(*block, *sizes):
        assert tile.copies == 1 or tile.step >= max(tile.rows, tile.cols)


@pytest.mark.parametrize(("tokens", "most"), [(64, 2.0), (372, 1.18), (1024, 1.07), (4096, 1.02)])
def test_a_causal_square_costs_little_more_than_its_triangle(tokens, most):
    area = sum(tile.copies * tile.rows * tile.cols for tile in decompose(tokens, tokens, CAUSAL))
    assert area <= most * tokens * (tokens + 1) / 2


@given(blocks())
def test_a_window_counts_from_the_last_corner(block):
    num_queries, num_keys, band = block
    left, right = band.window(num_queries, num_keys)
    assert min(left, right) >= -1
    visible = visible_in(band, num_queries, num_keys)
    for i in range(num_queries):
        middle = i + num_keys - num_queries
        for j in range(num_keys):
            in_window = (left == -1 or j >= middle - left) and (right == -1 or j <= middle + right)
            assert in_window == visible(i, j)
