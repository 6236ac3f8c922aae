"""Mutated inputs through the readers: what ends in a traceback, hangs, or is believed although it is nonsense?

    python -m benchmarks.fuzz                        # 30,000 mutations, some minutes
    python -m benchmarks.fuzz --count 3000 --seed 7

Sound examples of every kind of input are changed at one to three places, as objects or as text, and read in this
process. What is accepted must hold the invariants of its kind, and its predictions must be finite and positive. The
exit code is 1 if anything but a clear error or a sound value came of a mutation.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import random
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any

from ds_hetero.baselines import ulysses
from ds_hetero.cluster import cluster_from_dict, cluster_to_dict, load_cluster
from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.reading import parse
from ds_hetero.cost import make_cost_model
from ds_hetero.cost.workload import Workload
from ds_hetero.errors import ConfigError, HeteroError
from ds_hetero.integrations.deepspeed.facts import read_training_facts, section_of
from ds_hetero.job.decide import decide
from ds_hetero.job.facts import JobFacts, ModelFacts
from ds_hetero.job.resolve import needs_planner
from ds_hetero.models import ModelSpec, model_from_config
from ds_hetero.plans import Plan, read_plan
from ds_hetero.profiler.cache import read_profile
from ds_hetero.profiler.cluster_file import VERSION, RankFacts, fingerprint

__all__ = ["KINDS", "Tally", "fuzz"]

CPU_LIMIT_S = 5.0
WORLD_SIZE = 4
SEQ_LEN = 4096

Place = tuple[str | int, ...]


class Hang(BaseException):
    """Reading took more than `CPU_LIMIT_S` of CPU time."""


class Nonsense(AssertionError):
    """A value was accepted that breaks an invariant."""


def expect(holds: bool, rule: str) -> None:
    """Raise `Nonsense` with the rule that does not hold."""
    if not holds:
        raise Nonsense(rule)


# Examples and readers

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
    RankFacts(node=f"n{i // 2}", host=f"n{i // 2}", device="CPU", memory_bytes=2**30, torch="2", dtype="float32",
              attention="sdpa")
    for i in range(WORLD_SIZE)
]  # fmt: skip
_CACHE = {**_CLUSTER, "profile": {"version": VERSION, "fingerprint": fingerprint(_RANKS), "samples": []}}


def _read_schedule(data: Any) -> None:
    _check_plan(read_plan(data, WORLD_SIZE))


def _read_section(data: Any) -> None:
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
    decision = decide(facts, WORLD_SIZE, measured=None, on_host=False)
    _check_plan(decision.plan)
    for replica in decision.forecasts:
        _expect_sound_times(replica.prediction)


def _read_cluster(data: Any) -> None:
    _check_cluster(cluster_from_dict(data))


def _read_model(data: Any) -> None:
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
    """A kind of input: an example, what reads it, and whether that names keys."""

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


# Invariants


def _check_plan(plan: Plan) -> None:
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


# Mutations


def _deep() -> Any:
    value: Any = None
    for _ in range(3_000):
        value = [value]
    return value


_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 0.5, -0.5, 1.5, 1e-300, 1e300, nan, inf, -inf, 2**31, 2**53, 2**63 - 1,
    2**63, 10**30, 10**400, -(10**30), "", "x", "0", "auto", "\0", "a\0b", "\ud800", "é" * 300, "x" * 5_000,
    "a" * 10**5, [], {}, [1, 2], ["x"], [[]], {"x": 1}, [None], list(range(2_000)), _deep, {"version": 1},
    "H100-SXM-80GB", "measure", "plan",
)  # fmt: skip
_OBJECT_ONLY: tuple[Any, ...] = (object(), b"x", {1: 2}, {None: 1}, {"a"}, 1j, (1,))


def _places(value: Any, place: Place = ()) -> Iterator[Place]:
    yield place
    if len(place) > 12:
        return
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in inner:
        yield from _places(child, (*place, key))


def _mutate(content: Any, rng: random.Random, as_object: bool) -> tuple[Any, tuple[str, ...]]:
    """Change one place; return the content and the keys of which a message must have one."""
    place = rng.choice([place for place in _places(content) if place])
    parent = content
    for key in place[:-1]:
        parent = parent[key]
    key, names = place[-1], tuple(key for key in place if isinstance(key, str))[-1:]
    how = rng.choice(("value", "value", "value", "drop", "rename", "double", "swap", "nest", "scale"))
    if how == "drop":
        del parent[key]
    elif how == "rename" and isinstance(parent, dict):
        new = rng.choice((f"{key}s", str(key)[:-1], str(key).upper(), "\0", "x" * 1_000, "\ud800", str(key) + "é"))
        parent[new] = parent.pop(key)
        names = (str(key), new, new[:20])
    elif how == "double":
        if isinstance(parent, list):
            parent.insert(key, parent[key])
        else:
            parent[key] = [parent[key], parent[key]]
    elif how == "swap":
        other = rng.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
        parent[key], parent[other] = parent[other], parent[key]
        names = (*names, *([other] if isinstance(other, str) else []))
    elif how == "nest":
        parent[key] = rng.choice(([parent[key]], {str(key): parent[key]}))
    elif how == "scale" and isinstance(parent[key], (int, float)) and abs(parent[key]) < 1e300:
        parent[key] = parent[key] * rng.choice((-1, 0, 1e-12, 1e12, 10**6, 10**20, 1.0000001))
    else:
        value = rng.choice(_VALUES + (_OBJECT_ONLY if as_object else ()))
        parent[key] = _deep() if value is _deep else copy.deepcopy(value)
    return content, names


def _tear(text: str, rng: random.Random) -> str:
    """Damage a text as a whole."""
    at = rng.randrange(len(text) + 1)
    return rng.choice(
        (
            text[:at],
            text[at:],
            text[:at] + rng.choice(("\0", "{", "[", '"', ",", "9" * 5_000, "\ufeff", "NaN")) + text[at:],
            "[" * 100_000,
            '{"a":' * 2_000,
            text + text,
            text.replace("{", '{"version": 1, ', 1),
        )
    )


# The trials


@dataclass
class Tally:
    """What came of the mutations of one kind."""

    outcomes: Counter[str] = field(default_factory=Counter)
    single: int = 0
    named: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Whether every mutation was refused clearly or made sense."""
        return not self.faults


def fuzz(kind: Kind, count: int, rng: random.Random) -> Tally:
    """Read ``count`` mutations of a kind's example."""
    tally = Tally()
    for _ in range(count):
        content, names = copy.deepcopy(kind.example), ()
        as_object = rng.random() < 0.4 and kind.names_keys
        changes = rng.choice((1, 1, 1, 2, 3))
        for _ in range(changes):
            if any(_places(content)) and isinstance(content, (dict, list)) and content:
                content, names = _mutate(content, rng, as_object)
        given: Any = content
        if not as_object:
            try:
                given = json.dumps(content)
            except RecursionError:
                given = "[" * 100_000
            if rng.random() < 0.15:
                given, names = _tear(given, rng), ()
        outcome, message = _outcome(kind, given)
        tally.outcomes[outcome] += 1
        if outcome in ("traceback", "hang", "nonsense"):
            tally.faults.append(f"{message}\n  of {repr(given)[:300]}")
        if outcome == "clear error" and changes == 1 and names and kind.names_keys:
            tally.single += 1
            tally.named += any(name in message or ascii(name)[1:-1] in message for name in names)
    return tally


def _outcome(kind: Kind, given: Any) -> tuple[str, str]:
    try:
        with _cpu_limit(CPU_LIMIT_S):
            if isinstance(given, str) and kind.names_keys:
                given = parse(given, "input", ConfigError)
            kind.read(given)
    except HeteroError as error:
        return ("clear error", str(error)) if len(str(error)) < 3_000 else ("traceback", "a message without end")
    except Hang:
        return "hang", f"more than {CPU_LIMIT_S} s of CPU time"
    except Nonsense as error:
        return "nonsense", f"nonsense: {error}"
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return "traceback", f"{type(error).__name__}: {str(error)[:200]} at {Path(frame.filename).name}:{frame.lineno}"
    return "accepted", ""


@contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def main() -> int:
    """Fuzz every kind and print a table; 1 if there was a fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=30_000, help="mutations over all kinds")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    columns = ("accepted", "clear error", "traceback", "hang", "nonsense")
    print(f"{'input':<10} {'tried':>7} " + " ".join(f"{name:>12}" for name in columns) + f" {'names the key':>16}")
    tallies = {}
    for name, kind in KINDS.items():
        tally = fuzz(kind, options.count // len(KINDS), random.Random(f"{options.seed} {name}"))
        tallies[name] = tally
        counts = " ".join(f"{tally.outcomes[column]:>12,}" for column in columns)
        print(f"{name:<10} {tally.outcomes.total():>7,} {counts} {f'{tally.named} of {tally.single}':>16}", flush=True)
    for name, tally in tallies.items():
        for fault, times in Counter(fault.split("\n")[0] for fault in tally.faults).most_common(20):
            example = next(text for text in tally.faults if text.startswith(fault))
            print(f"\n{name}, {times} times: {example}")
    return 0 if all(tally.is_clean for tally in tallies.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
