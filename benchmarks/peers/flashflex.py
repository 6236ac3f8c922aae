"""FlashFlex, HexiScale's own planner (github.com/Relaxed-System-Lab/FlashFlex, Apache-2.0).

It needs numpy and pymetis. It is given machines as a JSON file, every node of ours as a machine of its own; its models
are Llama of 7B, 13B and 30B with sequences of 4,096 tokens. It splits the batch evenly over pipelines; while it
searches it keeps the micro-batches of the first number of pipelines, so its own throughput counts too few samples after
that number has changed. Here all samples of the batch count.
"""

from __future__ import annotations

import ast
import json
import re
import tempfile
from pathlib import Path

from benchmarks.peers.judge import Case, NoPlan, PeerStage, plan_of, shared_evenly
from benchmarks.peers.process import printed_by
from ds_hetero.values.plans import Plan

MODELS = {"llama-2-7b": "llama-7b", "llama-2-13b": "llama-13b", "llama-30b": "llama-30b"}
ROUNDS, FIRST_PIPELINES = 60, (1, 2, 4)


def plans(checkout: Path, python: str, case: Case, timeout_s: float) -> list[Plan]:
    """Return FlashFlex's plans for several first numbers of pipelines, best first by its own throughput.

    Raises:
        NoPlan: it has none.
    """
    if case.model.name not in MODELS or case.seq_len != 4096:
        raise NoPlan("it plans Llama of 7B, 13B and 30B with 4,096 tokens only")
    network_gb_per_s = case.cluster.network.bytes_per_s / 1e9
    rated_plans, reasons = list[tuple[float, Plan]](), []
    with tempfile.TemporaryDirectory() as folder:
        machines = Path(folder) / "machines.json"
        machines.write_text(json.dumps(_machines(case)))
        for first in FIRST_PIPELINES:
            options = {
                "model-size": MODELS[case.model.name],
                "npipeline": first,
                "inter_bw": network_gb_per_s,
                "global_bsz": case.batch,
                "micro_bsz": first,  # one sample per micro-batch and pipeline
                "machine_config_path": machines,
                "log_interval": ROUNDS,
                "niter": ROUNDS,
                "verbose": "true",
            }
            command = [python, "main.py", *(str(x) for name, value in options.items() for x in (f"--{name}", value))]
            try:
                printed = printed_by(command, checkout / "experimental", timeout_s)
                rated_plans.append(_read(case, printed))
            except NoPlan as reason:
                reasons.append(str(reason))
    if not rated_plans:
        raise NoPlan("; ".join(dict.fromkeys(reasons)))
    return [plan for _, plan in sorted(rated_plans, key=lambda each: -each[0])]


def _machines(case: Case) -> dict[str, object]:
    """Return every node as a machine of its JSON file: Tflop/s, GiB and GB/s inside."""
    specs, amounts = {}, {}
    for i, node in enumerate(case.cluster.nodes):
        device = node.devices[0]
        specs[f"node{i}"] = [
            device.peak_flops_per_s / 1e12,
            device.memory_bytes / 2**30,
            node.link.bytes_per_s / 1e9,
        ]
        amounts[f"node{i}"] = {str(len(node.devices)): 1}
    return {"machine_specs": specs, "machine_amounts": amounts}


def _read(case: Case, printed: str) -> tuple[float, Plan]:
    """Return its throughput and its plan from its output."""
    rate = re.search(r"Optimal Throughput: ([\d.]+)", printed)
    devices = [ast.literal_eval(text) for text in re.findall(r"- devices: (\[.*\])", printed)]
    layers = [ast.literal_eval(text) for text in re.findall(r"- layer partitions: (\[.*\])", printed)]
    if rate is None or not devices or len(devices) != len(layers):
        raise NoPlan("it finds no plan that fits")
    pipelines = []
    for stages, counts in zip(devices, layers, strict=True):
        if any(len(set(nodes)) > 1 for nodes in stages):
            raise NoPlan("a stage of its plan spans machines")
        pipelines.append([PeerStage(n[0], len(n), int(c)) for n, c in zip(stages, counts, strict=True) if c])
    batches = shared_evenly(case.batch, len(pipelines), 1)
    return float(rate[1]), plan_of(case, pipelines, batches)
