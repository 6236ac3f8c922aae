"""Memory decides: where an equal share does not fit into the small rank, a share by memory trains.

Budget: 20 s.
"""

from __future__ import annotations

import ctypes
import re
import resource
from pathlib import Path

import pytest
import torch

from ds_hetero.sharding.zero_partition import alignment_of, cut_flat_group
from tests.integration.tiny import LR, batches, ds_config, llama
from tests.support import run_deepspeed

# About 12 million parameters, 45 MiB in fp32; master weights, moments and their gradient are four times that.
SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 1}
# The small share was seen to need less than 168 on one kind of machine and less than 185 on others, with the stacks of
# threads; the equal one needs 67 more. Ranks of the strict group need more than 200 for the small one.
BUDGET_MIB = 210
MIB = 2**20
M_MMAP_THRESHOLD = -3


@pytest.mark.measured
def test_the_small_rank_runs_out_of_memory_with_an_equal_share_and_trains_with_a_small_one() -> None:
    with pytest.raises(AssertionError, match=r"--- rank 1 ---(?s:.)*DefaultCPUAllocator: can't allocate memory"):
        run_deepspeed(_train_within, 2, [1, 1], BUDGET_MIB)
    losses = run_deepspeed(_train_within, 2, [7, 1], BUDGET_MIB)
    assert losses[0][-1] < losses[0][0]


def _train_within(rank: int, weights: list[float], budget_mib: float) -> list[float]:
    """Losses of two steps, where rank 1 may take so much memory beyond that of the model as it was loaded."""
    import deepspeed

    import ds_hetero

    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)  # what is freed leaves the process at once
    handle = ds_hetero.register()
    deepspeed.init_distributed("gloo")
    model = llama(**SIZES)
    config = ds_config(1, "ulysses", sequence_parallel_size=1)
    config["heterogeneity"]["zero_partition"] = weights
    if rank == 1:
        limit = data_bytes() + int(budget_mib * MIB)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR / 10)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    losses = []
    batch = batches(1)[0]
    for shard in handle.dataloader([batch] * 3, batches="same"):
        loss = handle.loss(engine(**shard), shard)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def data_bytes() -> int:
    """Private writable memory of this process, which RLIMIT_DATA limits."""
    found = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def test_shares_by_the_memory_that_the_cluster_file_gives() -> None:
    """In a running engine, ``"zero_partition": "memory"`` owns what the cost model's room for it says."""
    first, second = run_deepspeed(_train_by_memory, 2)
    assert first == second
    assert first[0] > 2 * first[1]


def _train_by_memory(rank: int) -> list[float]:
    import deepspeed

    import ds_hetero

    handle = ds_hetero.register()
    devices = {
        name: {"peak_tflops": 1, "memory_gib": gib, "memory_bandwidth_gb_per_s": 20}
        for name, gib in (("large", 3), ("small", 1))
    }
    cluster = {
        "nodes": [{"name": "here", "devices": ["large", "small"], "link": {"bandwidth_gb_per_s": 1, "latency_us": 20}}],
        "devices": devices,
    }
    model = llama()
    section = {"schedule": "ulysses", "cluster": cluster, "zero_partition": "memory", "seq_len": 64}
    config = ds_config(2, None, heterogeneity=section)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for shard in handle.dataloader(batches(2), batches="same"):
        loss = handle.loss(engine(**shard), shard)
        engine.backward(loss)
        engine.step()
    weights = engine.optimizer.weights
    flat = engine.optimizer.bit16_groups_flat[0].numel()
    moment = engine.optimizer.state[engine.optimizer.param_groups[0]["params"][0]]["exp_avg"].numel()
    assert moment == cut_flat_group(flat, weights).sizes[rank]
    assert abs(moment - flat * weights[rank] / sum(weights)) <= alignment_of(flat, 2)
    return list(weights)
