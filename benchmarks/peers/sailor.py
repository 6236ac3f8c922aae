"""Sailor (github.com/eth-easl/sailor, SOSP 2025, MIT).

Its planner is a C++ library, ``libplanner``, which its own Makefile makes in `LIBRARY` for one Python: the one that
``--python`` names. It reads profiles of layers by device, micro-batch and tensor degree, sizes of a model's layers, and
bandwidths, which are all written here from our cost model. It knows three devices by name, with their memory in its
code, so kinds of ours take the names with the next larger memory, the kinds with most memory first, and what does not
fit is left to our cost model; where only a smaller one is left, a kind takes that. Of more than three kinds it is given
the three that are fastest in all. It uses tensor degrees of 1, 2 and 4, has no nodes, and gives all lanes equal numbers
of micro-batches, rounded up; here they share the batch exactly.

Of the planners that its repository compares it with for unlike devices, FlashFlex and Metis are run from their own
code beside it, and AMP from its (`benchmarks.peers.amp`).
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.peers.judge import MAX_PLANS, Case, NoPlan, PeerStage, plan_of, shared_evenly
from benchmarks.peers.process import printed_by
from ds_hetero.cost.stages.calibrated import CalibratedStageCosts
from ds_hetero.cost.stages.stage_memory import CalibratedStageMemory
from ds_hetero.cost.workload import Workload
from ds_hetero.values.plans import Plan

LIBRARY = Path("sailor/Planner/sailor_planner/cpp_src")
MEMORY_GIB = {"V100-16": 16, "A100-40": 40, "GH-96": 96}
ZONE = "us-central1-a"
DEGREES, SAMPLES = (1, 2, 4), (1, 2, 4)
EDGE_S = 1e-6  # of what it wants a time for and our cost model has none
HALF = 2  # bytes of an element
MEMORY_TOLERANCE = 1.05  # a device of 40 GB has less than 40 GiB, one of 80 GB sold as 80 GiB has more


def plans(checkout: Path, python: str, case: Case, timeout_s: float) -> Iterator[Plan]:
    """Yield Sailor's plans, best first by its own time.

    Raises:
        NoPlan: it does not end, cannot express the case, or has no plan.
    """
    costs = CalibratedStageCosts(case.cluster, case.model, Workload(seq_len=case.seq_len))
    names = _names(costs)
    library = checkout / LIBRARY
    if not list(library.glob("libplanner*.so")):
        raise NoPlan(f"its library is not in {LIBRARY}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write(folder, case, costs, names)
        driver = Path(__file__).with_name("sailor_driver.py")
        printed_by([python, str(driver), str(library), str(folder)], folder, timeout_s)
        its_plans = json.loads((folder / "plans.json").read_text())
    if not its_plans:
        raise NoPlan("it finds no plan that fits")
    kind_of = {name: kind for kind, name in names.items()}
    kinds = {index: kind_of[name] for index, name in enumerate(sorted(kind_of))}
    for plan in its_plans:
        with contextlib.suppress(NoPlan):
            yield on_nodes(case, costs, kinds, plan)


def _names(costs: CalibratedStageCosts) -> dict[int, str]:
    """Return its name for every kind of device: the unused one with the least memory that is enough."""
    sizes = [kind.device.memory_bytes / 2**30 for kind in costs.pools.kinds]
    speeds = [0.0] * len(sizes)
    for pool in costs.pools.pools:
        speeds[pool.kind] += len(pool.ranks) * costs.pools.kinds[pool.kind].device.peak_flops_per_s
    kinds_by_speed = sorted(range(len(sizes)), key=lambda kind: -speeds[kind])[: len(MEMORY_GIB)]
    free, chosen_kinds = sorted(MEMORY_GIB, key=MEMORY_GIB.__getitem__), dict[int, str]()
    for kind in sorted(kinds_by_speed, key=lambda kind: (-sizes[kind], -speeds[kind])):
        enough = (name for name in free if MEMORY_TOLERANCE * MEMORY_GIB[name] > sizes[kind])
        chosen_kinds[kind] = next(enough, free[-1])
        free.remove(chosen_kinds[kind])
    return chosen_kinds


def _write(folder: Path, case: Case, costs: CalibratedStageCosts, names: dict[int, str]) -> None:
    """Write all files that its planner reads."""
    model = case.model
    for kind, name in names.items():
        (folder / name).mkdir()
        _dump(folder / name / "profile.json", {str(n): _profile(costs, kind, n) for n in SAMPLES})
    _dump(folder / "model.json", {model.name: {str(n): sizes_of_layers(costs, n) for n in DEGREES}})
    _dump(
        folder / "training.json",
        {"model": model.name, "optimizer": "Adam", "global_batch_size": case.batch, "num_layers": model.num_layers},
    )
    rate = case.cluster.network.bytes_per_s
    to_all = {ZONE: {name: {str(n): [[0.0, 0.0, rate / 1e9], rate] for n in DEGREES} for name in names.values()}}
    _dump(folder / "network.json", {ZONE: {name: {str(n): to_all for n in DEGREES} for name in names.values()}})
    _dump(folder / "prices.json", {ZONE: {ZONE: 0.0}})
    counts = dict.fromkeys(names.values(), 0)
    for pool in costs.pools.pools:
        if pool.kind in names:
            counts[names[pool.kind]] += len(pool.ranks)
    _dump(folder / "quotas.json", {name: {ZONE: count} for name, count in counts.items()})
    files = ["network.json", "training.json", "model.json", "prices.json"]
    question = {
        "files": [f"{folder}/", *(str(folder / file) for file in files)],
        "quotas": str(folder / "quotas.json"),
        "devices": {ZONE: counts},
        "most": MAX_PLANS,
    }
    _dump(folder / "question.json", question)


def _dump(path: Path, content: object) -> None:
    path.write_text(json.dumps(content))


def _profile(costs: CalibratedStageCosts, kind: int, samples: int) -> dict[str, Any]:
    """Return the seconds of forward, backward and update of every layer, by tensor degree.

    Embedding first, head last.
    """
    profile = {}
    for degree in DEGREES:
        option = costs.stage(kind, degree, "one" if degree == 1 else "tensor", samples, 1)
        if option is None:
            continue
        layer = [option.forward_s, option.backward_s, EDGE_S]
        head = [option.last_s / 3, option.last_s * 2 / 3, EDGE_S]
        layers = [[EDGE_S] * 3, *[layer] * costs.model.num_layers, head]
        profile[str(degree)] = {str(i): times for i, times in enumerate(layers)}
    return profile


def sizes_of_layers(costs: CalibratedStageCosts, degree: int) -> dict[str, Any]:
    """Return parameters and saved activations of every layer on one of ``degree`` devices, in elements."""
    model = costs.model
    option = costs.stage(0, degree, "one" if degree == 1 else "tensor", 1, 1)
    assert option is None or isinstance(option.memory, CalibratedStageMemory)
    activation_elements = 0 if option is None else int(option.memory.saved_bytes / HALF)
    output = costs.seq_len * model.hidden_size
    table = model.vocab_size * model.hidden_size // degree

    def entry(parameters: int, activations: int) -> dict[str, int]:
        return {"params_floats": parameters, "act_mem_floats": activations, "act_output_floats": output}

    layers = [entry(table, output), *[entry(model.layer_parameters // degree, activation_elements)] * model.num_layers]
    return {str(i): layer_entry for i, layer_entry in enumerate([*layers, entry(table, output)])}


def on_nodes(case: Case, costs: CalibratedStageCosts, kinds: Mapping[int, int], plan: dict[str, Any]) -> Plan:
    """Return its groups of devices as pipelines: large groups are placed first, and pipelines stay on their nodes.

    Args:
        case: the task.
        costs: has the devices.
        kinds: of devices, by the planner's number.
        plan: its ``micro_batch_size``, ``layers`` of every stage with embedding and head as layers, and ``groups`` by
            stage and pipeline: kind and number of devices.

    Raises:
        NoPlan: a group spans machines, or the pipelines do not share the batch.
    """
    size, counts = plan["micro_batch_size"], list(plan["layers"])
    counts[0] -= 1  # the embedding and the head are layers of its own
    counts[-1] -= 1
    lanes = len(plan["groups"][0])
    if case.batch % size or case.batch // size < lanes:
        raise NoPlan(f"{lanes} lanes with micro-batches of {size} samples do not share the batch")
    places = [(lane, stage) for lane in range(lanes) for stage in range(len(counts)) if counts[stage]]
    free = {(pool.kind, pool.node): len(pool.ranks) for pool in costs.pools.pools}
    node_of: dict[tuple[int, int], int] = {}
    for lane, stage in sorted(places, key=lambda place: (-plan["groups"][place[1]][place[0]][1], place)):
        index, devices = plan["groups"][stage][lane]
        used_nodes = {node for (other, _), node in node_of.items() if other == lane}
        room = [node for (kind, node), num_free in free.items() if kind == kinds[index] and num_free >= devices]
        if not room:
            raise NoPlan("a stage of its plan spans machines")
        node = min(room, key=lambda node: (node not in used_nodes, node))
        free[kinds[index], node] -= devices
        node_of[lane, stage] = node
    pipelines = [
        [PeerStage(node_of[at], plan["groups"][at[1]][lane][1], counts[at[1]]) for at in places if at[0] == lane]
        for lane in range(lanes)
    ]
    return plan_of(case, pipelines, shared_evenly(case.batch, lanes, size))
