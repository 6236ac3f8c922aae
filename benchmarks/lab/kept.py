"""Steps of a checkpointed model with ``"keep_attention"`` and without, taken in turns by the same four ranks.

    recomputed   the backward computes every layer again, attention and its messages included
    kept         the recomputation takes attention from the forward

A step is a forward and a backward of a small Llama with transformers' checkpointing, float32, causal. Ranks hold tokens
4:3:2:1, as their speeds are; each is a group of its own, or two ranks share heads.
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

SPEEDS = (4, 3, 2, 1)
CLUSTER = EmulatedCluster(nodes=(EmulatedNode(speeds=SPEEDS),))
RECOMPUTED, KEPT = "recomputed", "kept"
_VOCABULARY = 256


@dataclass(frozen=True)
class KeptPlan:
    """What to measure: heads of 64 elements and layers of the model, sequence lengths, and turns of every contender."""

    num_heads: int
    num_layers: int
    tokens: tuple[int, ...]
    rounds: int
    budget_s: float


def measure(lab: RankLab, plan: KeptPlan) -> dict[str, Any]:
    """Measure all cases on this rank; the result of rank 0 is complete."""
    lab.set_speeds(CLUSTER.cores)
    result: dict[str, Any] = {"speeds": lab.describe(), "cases": []}
    schedules = schedules_of(plan.num_heads)
    for number, (name, schedule) in enumerate(schedules.items()):
        for tokens in plan.tokens:
            lab.report(number / len(schedules), f"{name}, {tokens:,} tokens")
            losses: dict[str, float] = {}
            handle = ds_hetero.register()
            contenders = {how: _step(handle, plan, schedule, tokens, how, losses) for how in (RECOMPUTED, KEPT)}
            for step in contenders.values():
                step()
            if losses[RECOMPUTED] != losses[KEPT]:
                raise RuntimeError(f"{name}, {tokens} tokens: the losses differ: {losses}.")
            turns = take_turns(contenders, plan.rounds, plan.budget_s, lab.own_pids)
            handle.undo()
            result["cases"].append({"schedule": name, "tokens": tokens, "loss": losses[KEPT], **asdict(turns)})
    return result


def schedules_of(num_heads: int) -> dict[str, dict[str, Any]]:
    """Return the schedules by name: a ring of four ranks, and a ring of two groups that share heads."""
    common = {"version": 1, "num_heads": num_heads, "num_kv_heads": num_heads}
    ring = [{"ranks": [rank], "tokens": [tokens], "heads": [num_heads]} for rank, tokens in enumerate(SPEEDS)]
    first = num_heads // 2
    groups = [
        {"ranks": ranks, "tokens": [SPEEDS[rank] for rank in ranks], "heads": [num_heads - first, first]}
        for ranks in ([0, 1], [2, 3])
    ]
    return {"ring of four": {**common, "groups": ring}, "two groups of two": {**common, "groups": groups}}


def _step(
    handle: Any, plan: KeptPlan, schedule: dict[str, Any], tokens: int, how: str, losses: dict[str, float]
) -> Callable[[], None]:
    """Return a function that runs one step of a model of its own, and stores the loss under ``how``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64 * plan.num_heads,
        intermediate_size=128 * plan.num_heads,
        num_hidden_layers=plan.num_layers,
        num_attention_heads=plan.num_heads,
        num_key_value_heads=plan.num_heads,
        vocab_size=_VOCABULARY,
        max_position_embeddings=max(tokens, 128),
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    section = {"schedule": schedule, "checks": "off", "keep_attention": how == KEPT}
    handle.registry.prepare(model, {"heterogeneity": section}, {})
    ids = torch.randint(0, _VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(1))
    (shard,) = handle.dataloader([{"input_ids": ids, "labels": ids.clone()}])
    return partial(_run_step, model, handle, shard, how, losses)


def _run_step(model: Any, handle: Any, shard: dict[str, Any], how: str, losses: dict[str, float]) -> None:
    model.zero_grad()
    loss = handle.loss(model(**{**shard, "labels": shard["shift_labels"]}), shard)
    loss.backward()
    losses[how] = float(loss)


def summarize(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row of every case: the median step of both contenders, and the median gain of a pair."""
    rows = []
    for case in cases:
        recomputed, kept = (case["seconds"][how] for how in (RECOMPUTED, KEPT))
        gains = [1 - ours / theirs for ours, theirs in zip(kept, recomputed, strict=True)]
        rows.append(
            {
                "schedule": case["schedule"],
                "tokens": case["tokens"],
                "recomputed_s": median(recomputed),
                "kept_s": median(kept),
                "less_time": median(gains),
                "pairs": len(gains),
                "foreign_cores": case["foreign_cores"],
            }
        )
    return rows
