"""Steps of a mixture whose experts are divided by speed and in equal numbers, taken in turns by the same two ranks.

    equal       each rank has half of the experts of every layer
    by speed    the fast rank has three quarters

A step is a forward and a backward of a small Mixtral in float32. Both hold tokens 3:1, as the speeds are. Every token
chooses two experts. Routers are drawn at random until the experts get nearly equal numbers of tokens, which is what the
prediction assumes and what auxiliary losses train for; the largest deviation is in the result.

Both are predicted from a profile that is taken before, at the speed of the machine in the rounds: a matmul of every
rank is timed between the contenders.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

import ds_hetero
from benchmarks.emulation.cluster import EmulatedCluster, EmulatedNode
from benchmarks.emulation.emulator import RankLab
from benchmarks.lab.planning import product_rate, scaled
from benchmarks.measure.turns import take_turns
from benchmarks.pipelines.run import of_rank_0, profile_of, speeds_meanwhile
from ds_hetero.cluster import Cluster
from ds_hetero.cost import Workload, make_cost_model
from ds_hetero.models import load_model
from ds_hetero.planner.jobs.quick import micro_batch_and_shared_s
from ds_hetero.values.schedule import Schedule
from ds_hetero.values.splits import share as allot

SPEEDS = (3, 1)
CLUSTER = EmulatedCluster(nodes=(EmulatedNode(speeds=SPEEDS),))
EQUAL, BY_SPEED, _MACHINE = "equal", "by speed", "machine"
SHARES = {EQUAL: (1, 1), BY_SPEED: SPEEDS}
NUM_EXPERTS, _VOCABULARY, _RTOL = 8, 256, 1e-5
_SPEED_S = 0.5  # of a look at how fast the machine is
_ROUTER_DRAWS = 2000  # of one draw, some experts get twice what others get


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
    profile = profile_of(lab)
    lab.set_speeds(CLUSTER.cores)
    result: dict[str, Any] = {"speeds": lab.describe(), "cases": []}
    for number, tokens in enumerate(plan.tokens):
        lab.report(number / len(plan.tokens), f"{tokens:,} tokens")
        losses: dict[str, float] = {}
        loads: dict[str, list[float]] = {}
        handle = ds_hetero.register()
        contenders = {name: _step(handle, plan, tokens, name, share, losses, loads) for name, share in SHARES.items()}
        for step in contenders.values():
            step()
        if abs(losses[EQUAL] - losses[BY_SPEED]) > _RTOL * losses[EQUAL]:
            raise RuntimeError(f"{tokens} tokens: the losses differ: {losses}.")
        rates: list[float] = []
        turns = take_turns(
            {_MACHINE: partial(_note_speed, rates), **contenders}, plan.rounds, plan.budget_s, lab.own_pids
        )
        del turns.seconds[_MACHINE]
        handle.undo()
        speeds = speeds_meanwhile(lab, median(rates) / profile[1])
        predicted_s = of_rank_0(partial(_predicted_s, scaled(profile[0], speeds), plan, tokens))
        case = {
            "tokens": tokens,
            "loss": losses[BY_SPEED],
            "rows_over_mean": loads,
            "predicted_s": predicted_s,
            "speeds_meanwhile": speeds,
        }
        result["cases"].append({**case, **asdict(turns)})
    return result


def _note_speed(rates: list[float]) -> None:
    """Append the speed of a matmul that every rank runs now."""
    rates.append(product_rate(_SPEED_S))


def _config_of(plan: ExpertsPlan, tokens: int) -> dict[str, Any]:
    """Return the configuration of the model, as config.json has it."""
    return {
        "model_type": "mixtral",
        "hidden_size": 64 * plan.num_heads,
        "intermediate_size": 128 * plan.num_heads,
        "num_hidden_layers": plan.num_layers,
        "num_attention_heads": plan.num_heads,
        "num_key_value_heads": plan.num_heads,
        "num_local_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "vocab_size": _VOCABULARY,
        "max_position_embeddings": max(tokens, 128),
    }


def _schedule_of(plan: ExpertsPlan) -> dict[str, Any]:
    """Return the schedule of both contenders: a ring whose ranks hold tokens by speed."""
    groups = [{"ranks": [rank], "tokens": [speed], "heads": [plan.num_heads]} for rank, speed in enumerate(SPEEDS)]
    return {"version": 1, "num_heads": plan.num_heads, "num_kv_heads": plan.num_heads, "groups": groups}


def _predicted_s(cluster: Cluster, plan: ExpertsPlan, tokens: int) -> dict[str, float]:
    """Return the predicted seconds of a forward and backward of both contenders on a cluster, without a step."""
    model = load_model(_config_of(plan, tokens))
    schedule = Schedule.from_dict(_schedule_of(plan))
    predicted = {}
    for name, share in SHARES.items():
        work = Workload(
            seq_len=tokens,
            zero_stage=0,
            activation_checkpointing=False,
            tiled_logits=False,
            element_bytes=4,
            gradient_bytes=4,
            experts=tuple(map(float, share)),
        )
        cost = make_cost_model("calibrated", cluster, model, work)
        predicted[name], _ = micro_batch_and_shared_s(cost, *cost.arrays(schedule))
    return predicted


def _step(
    handle: Any,
    plan: ExpertsPlan,
    tokens: int,
    name: str,
    share: tuple[int, ...],
    losses: dict[str, float],
    loads: dict[str, list[float]],
) -> Callable[[], None]:
    """Return a function that runs one step of a model of its own, and stores the loss under ``name``.

    The rows of each rank over those of equally loaded experts are stored under ``name`` in ``loads``.
    """
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(**_config_of(plan, tokens), attn_implementation="sdpa")
    model = MixtralForCausalLM(config).train()
    ids = torch.randint(0, _VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(1))
    loads[name] = _of_ranks(_balance_routers(model, ids), share)
    section = {"schedule": _schedule_of(plan), "checks": "off", "experts": list(share)}
    handle.registry.prepare(model, {"heterogeneity": section}, {})
    (shard,) = handle.dataloader([{"input_ids": ids, "labels": ids.clone()}])
    return partial(_run_step, model, handle, shard, name, losses)


def _balance_routers(model: Any, ids: Tensor) -> Tensor:
    """Replace every layer's router by the best of many random ones, the one under which experts are loaded alike.

    It is chosen for the whole sequence ``ids`` [1, T], on every rank alike. Returns the share of rows of each expert,
    the mean of all layers ``[experts]``.
    """
    random = torch.Generator().manual_seed(2)
    shares = []

    def choose(router: Any, inputs: tuple[Tensor, ...]) -> None:
        hidden_TH = inputs[0].reshape(-1, router.weight.shape[1])
        best: tuple[float, Tensor, Tensor] | None = None
        for _ in range(_ROUTER_DRAWS):
            weight = router.weight.std() * torch.randn(router.weight.shape, generator=random)
            chosen = (hidden_TH @ weight.T).topk(model.config.num_experts_per_tok).indices
            share_E = torch.bincount(chosen.flatten(), minlength=NUM_EXPERTS) / chosen.numel()
            unevenness = float(share_E.max() - share_E.min())
            if best is None or unevenness < best[0]:
                best = unevenness, weight, share_E
        assert best is not None
        router.weight.copy_(best[1])
        shares.append(best[2])

    hooks = [layer.mlp.gate.register_forward_pre_hook(choose) for layer in model.model.layers]
    with torch.no_grad():
        model.model(ids)  # layer by layer: a router's input depends on the router before
    for hook in hooks:
        hook.remove()
    return torch.stack(shares).mean(dim=0)


def _of_ranks(share_E: Tensor, experts: tuple[int, ...]) -> list[float]:
    """Return each rank's rows over those that it would get if its experts were loaded like all others."""
    counts = allot(NUM_EXPERTS, experts)
    rows = share_E.split(list(counts))
    return [float(part.sum()) * NUM_EXPERTS / len(part) for part in rows]


def _run_step(model: Any, handle: Any, shard: dict[str, Any], name: str, losses: dict[str, float]) -> None:
    model.zero_grad()
    loss = handle.loss(model(**{**shard, "labels": shard["shift_labels"]}), shard)
    loss.backward()
    losses[name] = float(loss)


def summarize(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row of every case: the median step of both contenders and its prediction, and the median speedup."""
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
                "predicted_equal_s": case["predicted_s"][EQUAL],
                "predicted_by_speed_s": case["predicted_s"][BY_SPEED],
                "error_equal": case["predicted_s"][EQUAL] / median(equal) - 1,
                "error_by_speed": case["predicted_s"][BY_SPEED] / median(by_speed) - 1,
                "pairs": len(speedups),
                "foreign_cores": case["foreign_cores"],
            }
        )
    return rows
