"""A plan of pipelines with one rank per stage, over all ranks, with unequal numbers of layers and of stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from ds_hetero.common.reading import JsonDict
from ds_hetero.selftest.uneven_schedules import NUM_HEADS, NUM_KV_HEADS
from ds_hetero.values.plans import Plan, read_plan
from ds_hetero.values.splits import share

NUM_LAYERS = 5
_MAX_STAGES = 4
_MICRO_BATCH_SIZE_CYCLE = (1, 2)  # sequences of a micro-batch: of the 1st, 3rd ... pipeline, of the 2nd, 4th ...
_MICRO_BATCHES = 3


def lone_stages(size: int) -> Plan:
    """Return a plan for ``size`` ranks: pipelines of four stages, and a last one of the remaining ranks.

    Args:
        size: number of ranks, at least two.
    """
    pipelines = []
    for number, first in enumerate(range(0, size, _MAX_STAGES)):
        ranks = range(first, min(first + _MAX_STAGES, size))
        pipelines.append(_pipeline(ranks, _MICRO_BATCH_SIZE_CYCLE[number % len(_MICRO_BATCH_SIZE_CYCLE)]))
    model = {"num_layers": NUM_LAYERS, "num_heads": NUM_HEADS, "num_kv_heads": NUM_KV_HEADS}
    return read_plan({"version": 2, "model": model, "pipelines": pipelines}, None)


def _pipeline(ranks: Sequence[int], micro_batch_size: int) -> JsonDict:
    """Return a pipeline as in a plan file, with a stage for each rank; earlier stages have more layers."""
    further_layers = share(NUM_LAYERS - len(ranks), range(len(ranks), 0, -1))
    layers = [1 + further for further in further_layers]
    bounds = pairwise(accumulate(layers, initial=0))
    stages = [{"ranks": [rank], "layers": list(bound)} for rank, bound in zip(ranks, bounds, strict=True)]
    return {"micro_batch_size": micro_batch_size, "micro_batches": _MICRO_BATCHES, "stages": stages}
