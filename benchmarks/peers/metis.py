"""Metis (github.com/SamsungLabs/Metis, CC BY-NC 4.0: it may be run, and none of it is copied here).

It needs numpy. It reads profiles of layers by device, tensor degree and samples, which are written here from our cost
model; a hostfile and a clusterfile. It knows four device names, so kinds of ours take them in turn. Every node must
have as many devices as the first one, so nodes of ours are cut into nodes of their greatest common power of two. Its
search begins with one stage, whose devices are a power of two (`InterStagePlanGenerator`), so it is given the fastest
nodes that make up one. Where it asks for the bandwidth between nodes, its code takes the one inside
(`get_inter_bandwidth`).

Its stages have data-parallel degrees of their own. Plans of ours have pipelines, so its best plan whose stages share
one degree is judged.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import gcd
from pathlib import Path

from benchmarks.peers.judge import Case, NoPlan, PeerStage, plan_of
from benchmarks.peers.process import printed_by
from ds_hetero.cost.stages.calibrated import CalibratedStageCosts
from ds_hetero.cost.workload import Workload
from ds_hetero.planner.pipeline_search.blocks import sizes_up_to
from ds_hetero.values.plans import Plan

NAMES = ("A100", "V100", "P100", "T4")
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
MIB = 2**20
VARIANCE, MAX_PERMUTATION = 1, 4
MAX_SLOTS = 8  # a power of two; it reads one digit


def plans(checkout: Path, python: str, case: Case, timeout_s: float) -> Iterator[Plan]:
    """Yield Metis' plans whose stages have the same degree of data parallelism, best first by its own cost.

    Raises:
        NoPlan: it does not end, or cannot express the case.
    """
    costs = CalibratedStageCosts(case.cluster, case.model, Workload(seq_len=case.seq_len))
    slots = gcd(*(len(node.devices) for node in case.cluster.nodes), MAX_SLOTS)
    if len(costs.pools.kinds) > len(NAMES):
        raise NoPlan(f"it takes up to {len(NAMES)} kinds of devices")
    nodes = _nodes(case, slots)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write(folder, case, costs, nodes, slots)
        model = case.model
        options = {
            "model_name": "GPT",
            "model_size": "1.5B",
            "num_layers": model.num_layers + 2,
            "gbs": case.batch,
            "hidden_size": model.hidden_size,
            "sequence_length": case.seq_len,
            "vocab_size": model.vocab_size,
            "attention_head_size": model.num_heads,
            "hostfile_path": folder / "hostfile",
            "clusterfile_path": folder / "clusterfile.json",
            "profile_data_path": folder / "profiles",
            "max_profiled_tp_degree": max(sizes_up_to(slots)),
            "max_profiled_batch_size": max(BATCHES),
            "min_group_scale_variance": VARIANCE,
            "max_permute_len": MAX_PERMUTATION,
        }
        command = [python, "cost_het_cluster.py", *(f"--{key}={value}" for key, value in options.items())]
        printed = printed_by(command, checkout, timeout_s)
    yield from _read(case, costs, printed, {node: slots * nodes.count(node) for node in set(nodes)})


def _nodes(case: Case, slots: int) -> list[int]:
    """Return the nodes that it gets, one for every ``slots`` devices: the fastest ones, a power of two of them."""
    speed = [node.devices[0].peak_flops_per_s for node in case.cluster.nodes]
    every = [i for i, node in enumerate(case.cluster.nodes) for _ in range(len(node.devices) // slots)]
    fastest = sorted(every, key=lambda i: -speed[i])[: 1 << (len(every).bit_length() - 1)]
    return sorted(fastest)


def _write(folder: Path, case: Case, costs: CalibratedStageCosts, nodes: Sequence[int], slots: int) -> None:
    """Write profiles, hostfile and clusterfile, with nodes of ``slots`` devices."""
    (folder / "profiles").mkdir()
    for kind in range(len(costs.pools.kinds)):
        for size in sizes_up_to(slots):
            for samples in BATCHES:
                profile = _profile(costs, kind, size, samples)
                if profile is not None:
                    path = folder / "profiles" / f"DeviceType.{NAMES[kind]}_tp{size}_bs{samples}.json"
                    path.write_text(json.dumps(profile))
    kind_of = {pool.node: pool.kind for pool in costs.pools.pools}
    (folder / "hostfile").write_text("".join(f"ip{i} slots={slots}\n" for i in range(len(nodes))))
    entries = {
        f"ip{i}": {
            "instance_type": NAMES[kind_of[node]],
            "inter_bandwidth": case.cluster.network.bytes_per_s / 1e9,
            "intra_bandwidth": case.cluster.nodes[node].link.bytes_per_s / 1e9,
            "memory": case.cluster.nodes[node].devices[0].memory_bytes / 2**30,
        }
        for i, node in enumerate(nodes)
    }
    (folder / "clusterfile.json").write_text(json.dumps(entries))


def _profile(costs: CalibratedStageCosts, kind: int, size: int, samples: int) -> dict[str, object] | None:
    """Return embedding, layers and head of one device kind, tensor degree and micro-batch, in its format."""
    option = costs.stage(kind, size, "one" if size == 1 else "tensor", samples, 1)
    if option is None:
        return None
    model = costs.model
    count, table = model.num_layers, model.vocab_size * model.hidden_size
    parameters = [2 * table, *[2 * model.layer_parameters] * count, 2 * table]
    times = [1e-3, *[1e3 * option.layer_s] * count, 1e3 * option.last_s + 1e-3]
    alone = [  # tensors of one layer, without a neighbour's communicators
        option.memory_bytes(1, *ends, 1) - option.memory.communicator_bytes(*ends)
        for ends in ((False, False), (True, False), (False, True))
    ]
    layer_bytes = option.memory_bytes(2, False, False, 1) - option.memory_bytes(1, False, False, 1)
    memory = [alone[1] - layer_bytes, *[layer_bytes] * count, alone[2] - alone[0]]
    return {
        "model": {
            "model_name": "GPT3",
            "num_layers": count + 2,
            "parameters": {"total_parameters_bytes": sum(parameters), "parameters_per_layer_bytes": parameters},
        },
        "execution_time": {
            "total_time_ms": sum(times),
            "forward_backward_time_ms": sum(times) + 1e-3,
            "batch_generator_time_ms": 1e-3,
            "layernorm_grads_all_reduce_time_ms": 0.0,
            "embedding_grads_all_reduce_time_ms": 0.0,
            "optimizer_time_ms": 1e-3,
            "layer_compute_total_ms": times,
        },
        "execution_memory": {
            "total_memory_mb": sum(memory) / MIB,
            "layer_memory_total_mb": [part / MIB for part in memory],
        },
    }


def _read(case: Case, costs: CalibratedStageCosts, printed: str, devices: Mapping[int, int]) -> Iterator[Plan]:
    """Yield those plans of its table that ours can express, in its order."""
    for line in printed.splitlines():
        parts = re.fullmatch(r"\d+, [\d.]+, (\(.*?\)|\[.*?\]), (\[[\d, ]*\]), (\[.*?\]), (\d+), (\[[\d, ]*\])", line)
        if parts is None:
            continue
        order = re.findall(r"DeviceType\.(\w+)", parts[1])
        groups, strategies, layers = (ast.literal_eval(parts[i]) for i in (2, 3, 5))
        if len({data for data, _ in strategies}) == 1:
            with contextlib.suppress(NoPlan):
                nodes = [
                    pool.node
                    for name in order
                    for pool in costs.pools.pools
                    if NAMES[pool.kind] == name
                    for _ in range(devices.get(pool.node, 0))
                ]
                yield _converted(case, (nodes, groups, strategies), int(parts[4]), layers)


def _converted(
    case: Case,
    placed: tuple[list[int], list[int], list[tuple[int, int]]],
    micro_batches: int,
    layers: Sequence[int],
) -> Plan:
    """Return the pipelines of one plan, from the nodes of its ranks, devices of its stages, and parallel degrees."""
    nodes, groups, strategies = placed
    data = strategies[0][0]
    size, rest = divmod(case.batch // micro_batches, data)
    if rest:
        raise NoPlan(f"its micro-batches of {case.batch // micro_batches} samples do not divide by {data} lanes")
    counts = [stop - start for start, stop in pairwise(layers)]
    counts[0] -= 1  # the embedding and the head are layers of its own
    counts[-1] -= 1
    lanes: list[list[PeerStage]] = [[] for _ in range(data)]
    first = 0
    for devices, (_, tensor), count in zip(groups, strategies, counts, strict=True):
        for lane in range(data):
            stage_nodes = nodes[first + lane * tensor : first + (lane + 1) * tensor]
            if len(set(stage_nodes)) > 1:
                raise NoPlan("a stage of its plan spans machines")
            if count:
                lanes[lane].append(PeerStage(stage_nodes[0], tensor, count))
        first += devices
    return plan_of(case, lanes, [(size, micro_batches)] * data)
