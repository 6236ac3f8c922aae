"""The planner's knowledge of an emulated cluster, and the schedules of all strategies for it.

Ranks are profiled at equal speed. An emulated slow rank is the same device with lower rates, so its profile is scaled
down: the planner gets exactly the requested speeds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import torch
import torch.distributed as dist

from benchmarks.emulation.emulator import RankLab
from benchmarks.measure.contenders import Shape
from benchmarks.measure.models import config_of
from benchmarks.measure.workloads import workload
from ds_hetero.cluster import Cluster, cluster_from_dict
from ds_hetero.cluster.topology import DeviceSpec
from ds_hetero.cost import make_cost_model
from ds_hetero.cost.model import CostModel
from ds_hetero.models import load_model
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.planner.published.profile_table import ProfileTable
from ds_hetero.runtime.attention.kernels import Band, Scores, select

_MAX_CORES = 1.2  # of all ranks together while they are profiled
_TABLE_S = 0.3  # of one entry of the table


def profile_ranks(lab: RankLab, window_s: float = 0.1) -> Cluster:
    """Profile the live ranks at the same speed; afterwards they have their former speeds. Caller: every rank.

    Args:
        lab: of this rank.
        window_s: seconds per timing.
    """
    return profile_machine(lab, window_s)[0]


def profile_machine(lab: RankLab, window_s: float) -> tuple[Cluster, float]:
    """Profile the live ranks, and measure their matmul rate meanwhile, see `product_rate`. Caller: every rank."""
    from ds_hetero.profiler.kernel_probe import profile_ranks

    count = dist.get_world_size()
    lab.change_speed(min(max(lab.cluster.cores), _MAX_CORES / count))
    dist.barrier()
    content = profile_ranks(window_s=window_s, show_progress=False)
    lab.set_speeds(lab.cluster.cores)
    rates = [rate for of_rank in content["profile"]["samples"] for rate in of_rank["repeats"]]
    return cluster_from_dict(content), median(rates)


def product_rate(window_s: float) -> float:
    """Return this rank's FLOPs per second in the matmul that profiles repeat, which says how fast the machine is now.

    Caller: every rank, at the same moment.
    """
    from ds_hetero.profiler.device_probes import Timer, matmul_probe

    return matmul_probe(Timer(torch.device("cpu"), window_s), torch.float32)


def scaled(profiled: Cluster, speeds: Sequence[float]) -> Cluster:
    """Return the cluster with every rank at ``speeds[rank]`` times the typical rank's profile."""
    typical = sorted(profiled.devices, key=_attention_rate)[len(profiled.devices) // 2]
    rest = iter(speeds)
    nodes = tuple(
        replace(node, devices=tuple(_at_speed(typical, next(rest)) for _ in node.devices)) for node in profiled.nodes
    )
    return replace(profiled, nodes=nodes)


def _attention_rate(device: DeviceSpec) -> float:
    return device.peak_flops_per_s * device.efficiency.attention_forward


def _at_speed(device: DeviceSpec, speed: float) -> DeviceSpec:
    efficiency = device.efficiency
    return replace(
        device,
        name=f"{device.name} at {speed:g}",
        peak_flops_per_s=device.peak_flops_per_s * speed,
        memory_bytes_per_s=device.memory_bytes_per_s * speed,
        attention_s=tuple((tokens, seconds / speed) for tokens, seconds in device.attention_s),
        efficiency=replace(
            efficiency,
            kernel_overhead_s=efficiency.kernel_overhead_s / speed,
            attention_overhead_s=efficiency.attention_overhead_s / speed,
            message_overhead_s=efficiency.message_overhead_s / speed,
        ),
    )


def model_of(shape: Shape) -> ModelSpec:
    """Return the model of `benchmarks.measure.training` in the planner."""
    return load_model(config_of(shape))


def cost_model(cluster: Cluster, shape: Shape, tokens: int) -> CostModel:
    """Return the calibrated cost model of a step of the lab: fp32, ZeRO-1, no checkpointing."""
    work = replace(workload(tokens), micro_batch=shape.batch_size)
    return make_cost_model("calibrated", cluster, model_of(shape), work)


def measure_table(lab: RankLab, shape: Shape, lengths: Sequence[int], fractions: Sequence[float]) -> ProfileTable:
    """Measure the hetero-ring paper's table: rank 0 runs causal attention alone, at every length and speed.

    Caller: every rank; the others wait.
    """
    tables: list[ProfileTable | None] = [None]
    if dist.get_rank() == 0:
        fastest = lab.cluster.fastest_cores
        columns = []
        for fraction in sorted(fractions):
            lab.change_speed(fastest * fraction)
            columns.append([_attention_s(shape, length) for length in lengths])
        lab.change_speed(fastest)
        rows = tuple(tuple(row) for row in zip(*columns, strict=True))
        tables = [ProfileTable(lengths=tuple(lengths), speeds=tuple(sorted(fractions)), seconds=rows)]
    dist.broadcast_object_list(tables, src=0)
    assert tables[0] is not None
    return tables[0]


def _attention_s(shape: Shape, length: int) -> float:
    """Return the seconds of causal attention of one length."""
    kernel = select(torch.device("cpu"), torch.float32, shape.head_dim, None, None)
    q, k, v = (
        torch.randn(shape.batch_size, heads, length, shape.head_dim)
        for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    )
    kernel.forward(q, k, v, Scores(shape.head_dim**-0.5), Band(None, 0))
    begin, calls = time.perf_counter(), 0
    while time.perf_counter() < begin + _TABLE_S:
        kernel.forward(q, k, v, Scores(shape.head_dim**-0.5), Band(None, 0))
        calls += 1
    return (time.perf_counter() - begin) / calls
