"""ZeRO-1 and 2 with weighted partitions train as stock DeepSpeed does with equal ones.

Budget: 60 s.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

from tests.integration.tiny import LR, batches, ds_config, llama
from tests.support import run_deepspeed

STEPS = 10


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def train(
    weights: Any, stage: int, *, steps: int = STEPS, zero: Any = None, accumulate: int = 1, **config: Any
) -> dict[str, Any]:
    """Ten steps, each rank on batches of its own; with ``"stock"`` for weights by DeepSpeed's own optimizer."""
    import deepspeed
    import torch.distributed as dist

    import ds_hetero
    from ds_hetero.integrations.zero import OPTIMIZERS

    handle = ds_hetero.register()
    rank, world_size = int(dist.get_rank()), dist.get_world_size()
    config = ds_config(stage, "ulysses", zero=zero or {}, gradient_accumulation_steps=accumulate, **config)
    config |= {"sequence_parallel_size": 1, "zero_force_ds_cpu_optimizer": False}
    if weights != "stock":
        config["heterogeneity"]["zero_partition"] = weights
    model = llama()
    optimizer = torch.optim.AdamW(two_groups(model), lr=LR, eps=1e-3)
    with patch.dict(OPTIMIZERS, clear=weights == "stock"):
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    assert ("ds_hetero" in type(engine.optimizer).__module__) == (weights != "stock")
    norms = []
    own = batches(steps * accumulate * world_size)[rank::world_size]
    for batch in handle.dataloader(own, batches="same"):
        loss = handle.loss(engine(**batch), batch)
        engine.backward(loss)
        at_boundary = engine.is_gradient_accumulation_boundary()
        engine.step()
        if at_boundary:
            norms.append(float(engine.get_global_grad_norm()))
    result = {"norms": norms, "owned": owned(engine), **whole_state(engine)}
    engine.destroy()
    return result


def owned(engine: Any) -> list[int]:
    """Elements of optimizer state that this rank holds, by parameter group, each moment by itself."""
    optimizer = engine.optimizer.optimizer
    return [
        value.numel()
        for group in optimizer.param_groups
        for name, value in optimizer.state[group["params"][0]].items()
        if name.startswith("exp_avg")
    ]


def whole_state(engine: Any) -> dict[str, Any]:
    """Master weights and both moments of every parameter, gathered from their owners."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    # Stock links the state of the first group only if the optimizer makes it as late as torch's.
    engine.optimizer._hp_optimizer_states_linked = False
    engine.optimizer._lazy_init_hp_params_optimizer_state()
    named = list(engine.module.named_parameters())
    return {
        "model": {name: p.detach().float().numpy().copy() for name, p in named},
        "fp32": {name: safe_get_full_fp32_param(p).numpy().copy() for name, p in named},
        **{
            moment: {name: safe_get_full_optimizer_state(p, moment).numpy().copy() for name, p in named}
            for moment in ("exp_avg", "exp_avg_sq")
        },
    }


def assert_same(ours: dict[str, Any], stock: dict[str, Any], rtol: float = 2e-6) -> float:
    """All that `train` returned but who owns what, within fp32 rounding of ten steps."""
    np.testing.assert_allclose(ours["norms"], stock["norms"], rtol=rtol)
    worst = 0.0
    for kind in ("model", "fp32", "exp_avg", "exp_avg_sq"):
        for name, expected in stock[kind].items():
            error = np.linalg.norm(ours[kind][name] - expected) / np.linalg.norm(expected)
            worst = max(worst, error)
            assert error <= rtol, f"{kind} of {name} is off by {error:.1e}"
    return worst


OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
BF16 = {"bf16": {"enabled": True}}
IN_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}
CASES = {
    "4:3:2:1, clipping": (4, 3, 2, 1, {}),
}


def _all(rank: int, cases: list[Any]) -> list[Any]:
    import time

    import deepspeed

    deepspeed.init_distributed("gloo")
    found = []
    for weights, stage, options in cases:
        t = time.time()
        zero_ref = {k: v for k, v in options.get("zero", {}).items() if k != "round_robin_gradients"}
        stock = train("stock", stage, **{**options, "zero": zero_ref})
        t2 = time.time()
        ours = train(weights, stage, **options)
        found.append((assert_same(ours, stock), ours["owned"], stock["owned"], t2 - t, time.time() - t2))
        if rank == 0:
            print(weights, stage, options, found[-1], flush=True)
    return found


def test_try():
    cases = [
        ([1, 0, 1, 2], 1, BF16 | IN_FP32 | {"accumulate": 3}),
        ([1, 1, 1, 1], 2, {}),
    ]
    run_deepspeed(_all, 4, cases)
