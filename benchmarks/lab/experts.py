"""Steps of a mixture whose experts are divided by speed and in equal numbers, taken in turns by the same two ranks.

    equal       each rank has half of the experts of every layer
    by speed    the fast rank has three quarters

A step is a forward and a backward of a small Mixtral in float32. Both hold tokens 3:1, as the speeds are. Every token
chooses two experts; the router's weights are random, so the experts get nearly equal numbers of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

import ds_hetero
from benchmarks.emulation.cluster import EmulatedCluster, EmulatedNode
from benchmarks.emulation.emulator import RankLab
from benchmarks.measure.turns import take_turns

SPEEDS = (3, 1)
CLUSTER = EmulatedCluster(nodes=(EmulatedNode(speeds=SPEEDS),))
EQUAL, BY_SPEED = "equal", "by speed"
NUM_EXPERTS, _VOCABULARY, _RTOL = 8, 256, 1e-5


@dataclass(frozen=True)
class ExpertsPlan:
    """What to measure: heads of 64 elements and layers of the model, sequence lengths, and turns of both contenders."""

    num_heads: int
    num_layers: int
    tokens: tuple[int, ...]
    rounds: int
    budget_s: float


def measure(lab: RankLab, plan: ExpertsPlan) -> dict[str, Any]:
    """Measure all cases on this rank; the result of rank 0 is complete. Raises `RuntimeError`: losses differ."""
    lab.set_speeds(CLUSTER.cores)
    result: dict[str, Any] = {"speeds": lab.describe(), "cases": []}
    for number, tokens in enumerate(plan.tokens):
        lab.report(number / len(plan.tokens), f"{tokens:,} tokens")
        losses: dict[str, float] = {}
        handle = ds_hetero.register()
        shares = {EQUAL: [1, 1], BY_SPEED: list(SPEEDS)}
        contenders = {name: _step(handle, plan, tokens, name, share, losses) for name, share in shares.items()}
        for step in contenders.values():
            step()
        if abs(losses[EQUAL] - losses[BY_SPEED]) > _RTOL * losses[EQUAL]:
            raise RuntimeError(f"{tokens} tokens: the losses differ: {losses}.")
        turns = take_turns(contenders, plan.rounds, plan.budget_s, lab.own_pids)
        handle.undo()
        result["cases"].append({"tokens": tokens, "loss": losses[BY_SPEED], **asdict(turns)})
    return result


def _step(
    handle: Any, plan: ExpertsPlan, tokens: int, name: str, share: list[int], losses: dict[str, float]
) -> Callable[[], None]:
    """Return a function that runs one step of a model of its own, and stores the loss under ``name``."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=64 * plan.num_heads,
        intermediate_size=128 * plan.num_heads,
        num_hidden_layers=plan.num_layers,
        num_attention_heads=plan.num_heads,
        num_key_value_heads=plan.num_heads,
        num_local_experts=NUM_EXPERTS,
        num_experts_per_tok=2,
        vocab_size=_VOCABULARY,
        max_position_embeddings=max(tokens, 128),
        attn_implementation="sdpa",
    )
    model = MixtralForCausalLM(config).train()
    groups = [{"ranks": [rank], "tokens": [speed], "heads": [plan.num_heads]} for rank, speed in enumerate(SPEEDS)]
    schedule = {"version": 1, "num_heads": plan.num_heads, "num_kv_heads": plan.num_heads, "groups": groups}
    section = {"schedule": schedule, "checks": "off", "experts": share}
    handle.registry.prepare(model, {"heterogeneity": section}, {})
    ids = torch.randint(0, _VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(1))
    (shard,) = handle.dataloader([{"input_ids": ids, "labels": ids.clone()}])
    return partial(_run_step, model, handle, shard, name, losses)


def _run_step(model: Any, handle: Any, shard: dict[str, Any], name: str, losses: dict[str, float]) -> None:
    model.zero_grad()
    loss = handle.loss(model(**{**shard, "labels": shard["shift_labels"]}), shard)
    loss.backward()
    losses[name] = float(loss)


def summarize(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row of every case: the median step of both contenders, and the median speedup of a pair."""
    rows = []
    for case in cases:
        equal, by_speed = (case["seconds"][name] for name in (EQUAL, BY_SPEED))
        speedups = [theirs / ours for ours, theirs in zip(by_speed, equal, strict=True)]
        rows.append(
            {
                "tokens": case["tokens"],
                "equal_s": median(equal),
                "by_speed_s": median(by_speed),
                "speedup": median(speedups),
                "pairs": len(speedups),
                "foreign_cores": case["foreign_cores"],
            }
        )
    return rows
