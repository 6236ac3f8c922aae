"""Layers of one pipeline and micro-batches of several, against trying everything."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from ds_hetero.cluster.files import load_cluster
from ds_hetero.cost.stages.calibrated import CalibratedStageCosts
from ds_hetero.cost.workload import Workload
from ds_hetero.models import load_model
from ds_hetero.planner.pipeline_search.batches import batch_bound_s, split_global_batch
from ds_hetero.planner.pipeline_search.blocks import block_of
from ds_hetero.planner.pipeline_search.cuts import LayerCuts, make_cut

MODEL = replace(load_model("llama-2-7b"), num_layers=20)


def costs_of(cluster="hexiscale-setting-2", **work):
    return CalibratedStageCosts(load_cluster(cluster), MODEL, Workload(seq_len=4096, **work))


def random_blocks(costs, rng, most=4):
    pools = rng.sample(costs.pools.pools, rng.randint(1, most))
    return tuple(block_of(pool, rng.choice((1, 2, 4))) for pool in pools)


def every_cut(num_layers, stages):
    for at in itertools.combinations(range(1, num_layers), stages - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *at, num_layers)))


def test_the_best_cut_is_found_for_any_number_of_micro_batches():
    rng, costs = random.Random(0), costs_of()
    cuts, gaps = LayerCuts(costs), []
    for _ in range(12):
        blocks = random_blocks(costs, rng)
        found = [make_cut(costs, blocks, layers, 1, 2) for layers in every_cut(MODEL.num_layers, len(blocks))]
        fitting = [cut for cut in found if cut is not None]
        assert bool(fitting) == bool(cuts(blocks, 1, 2))
        if fitting:
            for micro_batches in (1, 4, 24, 100):
                best = min(cut.time_s(micro_batches) for cut in fitting)
                gaps.append(cuts.best(blocks, 1, 2, micro_batches).time_s(micro_batches) / best - 1)
    assert len(gaps) > 20
    assert max(gaps) < 2e-3
    assert np.mean(np.array(gaps) < 1e-9) > 0.9


def test_cuts_fit_into_memory_and_hold_every_layer():
    rng, costs = random.Random(1), costs_of()
    cuts = LayerCuts(costs)
    for _ in range(30):
        blocks = random_blocks(costs, rng)
        for cut in cuts(blocks, 2, 1):
            assert sum(cut.layers) == MODEL.num_layers
            for j, (block, layers) in enumerate(zip(blocks, cut.layers, strict=True)):
                option = costs.stage(block.kind, block.size, block.inner, 2, 1)
                first, last, in_flight = j == 0, j == len(blocks) - 1, len(blocks) - j
                assert layers >= 1
                assert option.memory_bytes(layers, first, last, in_flight) <= option.capacity_bytes


def test_no_cut_is_beaten_by_another_in_all_times():
    costs = costs_of()
    cuts = LayerCuts(costs)(random_blocks(costs, random.Random(3)), 1, 1)
    for a, b in itertools.pairwise(cuts):
        assert a.period_s <= b.period_s
        assert a.fill_s > b.fill_s or a.latency_s > b.latency_s


def test_equal_blocks_on_other_nodes_are_solved_once():
    costs = costs_of("hexiscale-setting-1")
    cuts, nodes = LayerCuts(costs), [pool for pool in costs.pools.pools if pool.kind == costs.pools.pools[-1].kind]
    assert len(nodes) == 3
    for a, b in itertools.permutations(nodes, 2):
        cuts((block_of(a, 4), block_of(b, 4)), 1, 1)
    assert cuts.num_solved == 1


def best_split(fill, period, sizes, samples):
    """The least time over all micro-batches, by trying them."""
    ranges = [range(1, samples // size + 1) for size in sizes]
    times = [
        max(f + (m - 1) * p for f, p, m in zip(fill, period, counts, strict=True))
        for counts in itertools.product(*ranges)
        if sum(m * size for m, size in zip(counts, sizes, strict=True)) == samples
    ]
    return min(times, default=None)


@pytest.mark.parametrize("choice", [(1,), (2,), (1, 2, 4)])
def test_micro_batches_are_split_exactly(choice):
    rng = random.Random(2)
    for _ in range(150):
        pipelines = rng.randint(1, 3)
        fill, period = ([rng.uniform(0.5, 5) for _ in range(pipelines)] for _ in range(2))
        sizes = [rng.choice(choice) for _ in range(pipelines)]
        samples = rng.randint(1, 16)
        expected, counts = best_split(fill, period, sizes, samples), split_global_batch(fill, period, sizes, samples)
        if expected is None:
            assert counts is None
            continue
        assert sum(m * size for m, size in zip(counts, sizes, strict=True)) == samples
        time = max(f + (m - 1) * p for f, p, m in zip(fill, period, counts, strict=True))
        assert time == pytest.approx(expected, 1e-6)
        assert batch_bound_s(fill, period, sizes, samples) <= expected * (1 + 1e-9)
