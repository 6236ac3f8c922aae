"""ZeRO shares by what memory has room for."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from ds_hetero.cluster import cluster_from_dict
from ds_hetero.common.units import GIB
from ds_hetero.cost import Workload, make_cost_model
from ds_hetero.cost.terms.model_states import partitioned_bytes, partitioned_parts, static_bytes
from ds_hetero.cost.workload import Buffers
from ds_hetero.errors import PlanError
from ds_hetero.models import load_model
from ds_hetero.planner.memory.zero_weights import weights_by_memory, weights_by_room
from ds_hetero.values.baselines import proportional

MODEL = load_model("gpt-7b")


def cost_model(*memory_gib, replicas=1, **work):
    devices = {
        f"of-{gib}": {"peak_tflops": 100, "memory_gib": gib, "memory_bandwidth_gb_per_s": 1000} for gib in memory_gib
    }
    link = {"bandwidth_gb_per_s": 100, "latency_us": 5}
    cluster = cluster_from_dict(
        {"nodes": [{"name": "here", "devices": list(devices), "link": link}], "devices": devices}
    )
    return make_cost_model("calibrated", cluster, MODEL, Workload(seq_len=8192, data_parallel=replicas, **work))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_rank_keeps_the_same_part_of_its_room_free(stage):
    buffers = Buffers(sub_group=10**12)  # so that the step of ZeRO-3, too, grows with what a rank owns
    equal = cost_model(96, 60, 52, zero_stage=stage, buffers=buffers)
    schedule = proportional([1, 1, 1], MODEL.num_heads, MODEL.num_kv_heads)
    weights = weights_by_memory([(equal, schedule)])
    assert all(more > less for more, less in pairwise(weights))
    weighted = cost_model(96, 60, 52, zero_stage=stage, zero_weights=weights, buffers=buffers)
    moments = weighted.memory_phases(*weighted.arrays(schedule)).values()
    free = np.min(
        [(weighted.capacity_bytes_D - at.total) / partitioned_parts(at, weighted.workload) for at in moments], axis=0
    )
    assert free.tolist() == pytest.approx([free[0]] * 3, rel=1e-3)
    assert free[0] > 0


def test_a_model_that_equal_shares_do_not_fit_fits_by_memory():
    schedule = proportional([1, 1], MODEL.num_heads, MODEL.num_kv_heads)
    equal = cost_model(100, 72, zero_stage=1)
    before = equal.predict(schedule)
    assert not before.feasible
    weights = weights_by_memory([(equal, schedule)])
    assert cost_model(100, 72, zero_stage=1, zero_weights=weights).predict(schedule).feasible


def test_replicas_share_one_copy():
    cost = cost_model(80, 40, zero_stage=1, replicas=2)
    schedule = proportional([1, 1], MODEL.num_heads, MODEL.num_kv_heads)
    first, second, third, fourth = weights_by_memory([(cost, schedule)] * 2)
    assert (first, second) == (third, fourth)
    share = partitioned_bytes(MODEL, cost.workload) / 4
    step = cost.memory_phases(*cost.arrays(schedule))["step"]  # which needs the most of what is partitioned
    own = partitioned_parts(step, cost.workload)[0]
    assert first == pytest.approx((cost.capacity_bytes_D[0] - step.total[0] + own) * share / own)


def test_room_that_is_not_enough_is_told_by_rank_and_amount():
    with pytest.raises(PlanError, match=r"exceeded already on rank 1 by 2\.00 GiB"):
        weights_by_room([8 * GIB, -2 * GIB], 1 * GIB)
    with pytest.raises(PlanError, match=r"take 9\.00 GiB, but all ranks together have room for 8\.00 GiB"):
        weights_by_room([6 * GIB, 2 * GIB], 9 * GIB)
    assert weights_by_room([6, 2], 8) == (6, 2)


def test_with_everything_offloaded_shares_are_equal():
    cost = cost_model(80, 40, zero_stage=1, offload_optimizer=True)
    assert weights_by_memory([(cost, proportional([1, 1], MODEL.num_heads, MODEL.num_kv_heads))]) == (1, 1)


@pytest.mark.parametrize(("stage", "states"), [(0, 0), (1, 12), (2, 14), (3, 16)])
def test_what_each_stage_partitions(stage, states):
    workload = Workload(seq_len=1024, zero_stage=stage)
    assert partitioned_bytes(MODEL, workload) == states * MODEL.num_parameters
    kept = (16 - states) * MODEL.num_parameters
    uneven = replace(workload, zero_weights=(3, 1))
    assert static_bytes(MODEL, uneven, cost_model(80, 40).cluster) - kept == pytest.approx(
        [0.75 * states * MODEL.num_parameters, 0.25 * states * MODEL.num_parameters]
    )
