"""The kinds of input: a valid example of each, its reader, and the invariants of accepted values."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any

from ds_hetero.cluster import cluster_from_dict, cluster_to_dict, load_cluster
from ds_hetero.cluster.topology import Cluster
from ds_hetero.cost import make_cost_model
from ds_hetero.cost.workload import Workload
from ds_hetero.decision.decide import decide
from ds_hetero.decision.facts import JobFacts, ModelFacts
from ds_hetero.decision.resolve import given_plan, needs_planner
from ds_hetero.engine.ds_config import read_training_facts, section_of
from ds_hetero.errors import ConfigError, HeteroError
from ds_hetero.models import model_from_config
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.profiler.cache import read_profile
from ds_hetero.profiler.cluster_file import VERSION, RankFacts, fingerprint
from ds_hetero.values.baselines import ulysses
from ds_hetero.values.plans import Plan, read_plan

WORLD_SIZE = 4
SEQ_LEN = 4096


class Nonsense(AssertionError):
    """A value was accepted that breaks an invariant."""


def expect(holds: bool, rule: str) -> None:
    """Raise `Nonsense` with the broken rule unless ``holds``."""
    if not holds:
        raise Nonsense(rule)


_GROUPS = [{"ranks": [0, 1], "tokens": [3, 2.5], "heads": [6, 2]}, {"ranks": [2, 3], "tokens": [1, 0], "heads": [8, 0]}]
_SCHEDULE = {
    "version": 1,
    "num_heads": 8,
    "num_kv_heads": 4,
    "layout": "zigzag",
    "ring": [1, 0],
    "groups": _GROUPS,
}
_REPLICA = {"version": 1, "num_heads": 8, "num_kv_heads": 4}
_REPLICAS = {
    "version": 1,
    "replicas": [
        {
            "schedule": _REPLICA | {"groups": [{"ranks": ranks, "tokens": [1.5] * len(ranks), "heads": heads}]},
            "micro_batch_size": 2,
            "micro_batches": batches,
        }
        for ranks, heads, batches in (([0, 1, 2], [4, 2, 2], 3), ([3], [8], 1))
    ],
}
_LINK = {"bandwidth_gb_per_s": 25, "latency_us": 5, "p2p_efficiency": 0.9, "all_to_all_efficiency": 1.1}
_DEVICE = {"peak_tflops": 120, "memory_gib": 24, "memory_bandwidth_gb_per_s": 900, "reserved_gib": 1, "watts": 300}
_CLUSTER = {
    "description": "two nodes",
    "nodes": [
        {"name": "a", "device": "L40S", "count": 2, "link": {**_LINK, "total_gb_per_s": 50}},
        {"name": "b", "devices": ["mine", "T4"], "link": _LINK, "nics": {"count": 1, "bandwidth_gb_per_s": 12}},
    ],
    "network": {**_LINK, "all_to_all_latency_us": 30},
    "links": [{"between": ["a", "b"], "bandwidth_gb_per_s": 6}],
    "devices": {"mine": {**_DEVICE, "efficiency": {"matmul": 0.6, "memory": 0.8, "attention_half_rows": 64}}},
}
_MODEL = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 512,
    "vocab_size": 1000,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "layer_types": ["full_attention"] * 4,
}
_SECTION = {
    "train_batch_size": 8,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
    "heterogeneity": {
        "enabled": True,
        "cluster": _CLUSTER,
        "schedule": _SCHEDULE,
        "seq_len": 4096,
        "layout": "zigzag",
        "zero_partition": [1, 2, 1, 0.5],
        "replan": {"enabled": False, "interval_steps": 5, "min_gain": 0.05},
        "verify": "first_batch",
    },
}
_RANKS = [
    RankFacts(node=f"n{i // 2}", host=f"n{i // 2}", device="CPU", memory_bytes=device.memory_bytes, torch="2",
              dtype="float32", attention="sdpa")
    for i, device in enumerate(cluster_from_dict(_CLUSTER).devices)
]  # fmt: skip
_CACHE = {
    **_CLUSTER,
    "profile": {
        "version": VERSION,
        "fingerprint": fingerprint(_RANKS),
        "measured_at": "2026-11-22T08:00:00+00:00",
        "machine": {"others_share": 0.1, "spread": 0.05},
        "samples": [],
    },
}


def _read_schedule(data: Any) -> None:
    check_plan(read_plan(data, WORLD_SIZE))


def _read_section(data: Any) -> None:
    """Read a section, and check its invariants."""
    if not isinstance(data, dict):
        raise ConfigError("a DeepSpeed configuration is an object.")
    section, training = section_of(data), read_training_facts(data)
    if section is None:
        return
    expect(1 <= section.replan.interval_steps <= 10**9, "interval_steps is a number of steps")
    expect(section.seq_len is None or 1 <= section.seq_len <= 2**40, "seq_len is a length")
    facts = JobFacts(
        section=section,
        model=ModelFacts(name="m", num_heads=8, num_kv_heads=4, spec=_model(), max_seq_len=SEQ_LEN),
        training=training,
        sp_sizes={"sequence_parallel_size": training.sp_size},
    )
    if needs_planner(section) or section.cluster == "measure":
        return
    plan = given_plan(section, WORLD_SIZE)
    decision = decide(facts, WORLD_SIZE, measured=None, on_host=False, plan=plan)
    check_plan(decision.plan)
    for replica in decision.forecasts:
        _expect_sound_times(replica.prediction)


def _read_cluster(data: Any) -> None:
    _check_cluster(cluster_from_dict(data))


def _read_model(data: Any) -> None:
    """Read a model, and check its invariants."""
    model = model_from_config(data, "m")
    for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "mlp_size", "vocab_size"):
        value = getattr(model, name)
        expect(isinstance(value, int) and not isinstance(value, bool) and value >= 1, f"{name} is a size")
    expect(isinstance(model.tied_embeddings, bool), "tie_word_embeddings is true or false")
    expect(model.num_heads % model.num_kv_heads == 0, "KV heads divide the heads")
    _expect_prediction(load_cluster("lab"), model)


def _read_cache(data: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "p.json"
        path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8", errors="surrogatepass")
        content = read_profile(path, _RANKS)
    if content is None:
        raise ConfigError("ignored")
    _check_cluster(cluster_from_dict(content))


@dataclass(frozen=True)
class Kind:
    """A kind of input: an example, its reader, and whether errors name keys."""

    example: Any
    read: Callable[[Any], None]
    names_keys: bool = True


KINDS = {
    "section": Kind(_SECTION, _read_section),
    "schedule": Kind(_SCHEDULE, _read_schedule),
    "replicas": Kind(_REPLICAS, _read_schedule),
    "plan": Kind(read_plan(_REPLICAS).to_dict() | {"seq_len": 4096, "predicted": {"step_s": 2.5}}, _read_schedule),
    "cluster": Kind(_CLUSTER, _read_cluster),
    "model": Kind(_MODEL, _read_model),
    "cache": Kind(_CACHE, _read_cache, names_keys=False),
}


def check_plan(plan: Plan) -> None:
    """Check the invariants of a plan."""
    ranks = plan.ranks
    expect(len(set(ranks)) == len(ranks), "every rank has one place")
    expect(all(0 <= rank <= 10**6 for rank in ranks), "ranks are ranks")
    for schedule in plan.schedules:
        tokens = schedule.tokens(SEQ_LEN)
        expect(sum(tokens.values()) == SEQ_LEN and min(tokens.values()) >= 0, "tokens sum to the length")
        expect(all(sum(group.heads) == schedule.num_heads for group in schedule.groups), "heads sum to the model's")
    if plan.batch_split is not None:
        expect(0 < plan.batch_split.samples < 2**63, "the samples of a step can be counted")
    expect(read_plan(json.loads(json.dumps(plan.to_dict()))) == plan, "a plan survives its file")


def _check_cluster(cluster: Cluster) -> None:
    expect(1 <= cluster.num_ranks <= 10**6, "a cluster has 1 to 1,000,000 devices")
    expect(len({node.name for node in cluster.nodes}) == len(cluster.nodes), "nodes have names of their own")
    for node in cluster.nodes[:64]:
        for device in node.devices[:64]:
            efficiency = device.efficiency
            shares = (efficiency.matmul, efficiency.attention_forward, efficiency.attention_backward, efficiency.memory)
            expect(all(0 < share <= 1 for share in shares), "a device reaches its peak at most")
            expect(device.reserved_bytes < device.memory_bytes, "some memory is left for tensors")
            expect(1e6 <= device.peak_flops_per_s <= 1e18, "peaks are of this world")
        expect(0 < node.link.bytes_per_s <= 1e15 and 0 <= node.link.latency_s < 1e4, "links are of this world")
    if cluster.num_ranks <= 16 and len(cluster.nodes) <= 16:
        again = cluster_from_dict(json.loads(json.dumps(cluster_to_dict(cluster))))
        expect(again.num_ranks == cluster.num_ranks, "a cluster survives its file")
        _expect_prediction(cluster, _model())


def _model() -> ModelSpec:
    return model_from_config(_MODEL, "m")


def _expect_prediction(cluster: Cluster, model: ModelSpec) -> None:
    try:
        schedule = ulysses(cluster.num_ranks, model.num_heads, model.num_kv_heads)
    except HeteroError:  # fewer heads than ranks
        return
    for name in ("calibrated", "published"):
        _expect_sound_times(make_cost_model(name, cluster, model, Workload(seq_len=SEQ_LEN)).predict(schedule))


def _expect_sound_times(prediction: Any) -> None:
    expect(
        0 < prediction.iteration_s < inf and isfinite(prediction.tokens_per_s), "predictions are finite and positive"
    )
    expect(all(isfinite(value) and value >= 0 for value in prediction.memory_bytes), "memory is finite")
