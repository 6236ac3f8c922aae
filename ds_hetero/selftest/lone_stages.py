"""Pipelines of lone stages over all ranks, uneven in layers and in stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from ds_hetero.common.reading import JsonDict
from ds_hetero.selftest.uneven_schedules import NUM_HEADS, NUM_KV_HEADS
from ds_hetero.values.plans import Plan, read_plan
from ds_hetero.values.splits import share

NUM_LAYERS = 5
_MOST_STAGES = 4
_SIZES_OF_MICRO_BATCHES = (1, 2)  # sequences of a micro-batch, by pipeline in turn
_MICRO_BATCHES = 3


def lone_stages(size: int) -> Plan:
    """Pipelines of four stages, one rank each; the last pipeline has what is left. Of two ranks on."""
    pipelines = []
    for number, first in enumerate(range(0, size, _MOST_STAGES)):
        ranks = range(first, min(first + _MOST_STAGES, size))
        pipelines.append(_pipeline(ranks, _SIZES_OF_MICRO_BATCHES[number % len(_SIZES_OF_MICRO_BATCHES)]))
    model = {"num_layers": NUM_LAYERS, "num_heads": NUM_HEADS, "num_kv_heads": NUM_KV_HEADS}
    return read_plan({"version": 2, "model": model, "pipelines": pipelines}, None)


def _pipeline(ranks: Sequence[int], micro_batch_size: int) -> JsonDict:
    """Every stage has a layer; the first ones have the layers beyond that."""
    layers = [1 + more for more in share(NUM_LAYERS - len(ranks), range(len(ranks), 0, -1))]
    bounds = pairwise(accumulate(layers, initial=0))
    stages = [{"ranks": [rank], "layers": list(bound)} for rank, bound in zip(ranks, bounds, strict=True)]
    return {"micro_batch_size": micro_batch_size, "micro_batches": _MICRO_BATCHES, "stages": stages}
