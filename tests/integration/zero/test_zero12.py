"""ZeRO-1 and 2 with weighted partitions train as stock DeepSpeed does with equal ones.

Budget: 60 s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn

from ds_hetero.engine.framework_source import has_name
from ds_hetero.errors import ConfigError
from ds_hetero.sharding.zero_partition import alignment_of
from tests.integration.tiny import LR, batches, ds_config, llama, skip_where_refused
from tests.support import run_deepspeed

STEPS = 5


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def train(
    weights: Any, stage: int, *, steps: int = STEPS, zero: Any = None, accumulate: int = 1, **config: Any
) -> dict[str, Any]:
    """Five steps, each rank on batches of its own; with ``"stock"`` for weights by DeepSpeed's own optimizer."""
    import deepspeed
    import torch.distributed as dist

    import ds_hetero
    from ds_hetero.frameworks.deepspeed.zero.optimizers import OPTIMIZERS

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


def assert_same(ours: dict[str, Any], stock: dict[str, Any], rtol: float = 2e-6) -> None:
    """All that `train` returned but who owns what; ``rtol`` is what fp32 rounding may grow to in these steps."""
    np.testing.assert_allclose(ours["norms"], stock["norms"], rtol=rtol)
    for kind in ("model", "fp32", "exp_avg", "exp_avg_sq"):
        for name, expected in stock[kind].items():
            error = np.linalg.norm(ours[kind][name] - expected) / np.linalg.norm(expected)
            assert error <= rtol, f"{kind} of {name} is off by {error:.1e}"


OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
BF16 = {"bf16": {"enabled": True}}
# The first backward reduces in the reverse order of the parameters, stock in that in which gradients are made, so that
# buckets hold other elements in it and gloo adds up other ranks first. Sums in bf16 show that, unless every gradient
# travels alone and whole or there are two ranks, whose sum has one order.
ALONE = {"zero": {"reduce_bucket_size": 1, "reduce_scatter": False}}
IN_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}
RANDOM = [0.3, 0.05, 7.0, 0.55]
# Weights, stage, options.
CASES: dict[str, tuple[list[float], int, dict[str, Any]]] = {
    "stage 1": ([4, 3, 2, 1], 1, {}),
    "stage 2, accumulation": ([4, 3, 2, 1], 2, {"accumulate": 2}),
    "a weight of zero, no clipping": ([1, 0, 1, 2], 1, {"accumulate": 2, "gradient_clipping": 0.0}),
    "a weight of zero": ([1, 0, 1, 2], 2, {}),
    "equal weights": ([1, 1, 1, 1], 2, {}),
    "overlap, small buckets": (RANDOM, 2, {"zero": {"overlap_comm": True, "reduce_bucket_size": 3000}}),
    "overlap, all-reduce": ([4, 3, 2, 1], 1, {"zero": {"overlap_comm": True, "reduce_scatter": False}}),
    "all-reduce, not contiguous": (RANDOM, 2, {"zero": {"reduce_scatter": False, "contiguous_gradients": False}}),
    "a bucket per rank": ([4, 3, 2, 1], 2, {"zero": {"use_multi_rank_bucket_allreduce": False}}),
    "round robin": ([4, 3, 2, 1], 2, {"zero": {"round_robin_gradients": True}}),
    "offload, stage 1": (RANDOM, 1, {"zero": OFFLOAD, "accumulate": 2}),
    "offload, weights of zero": ([0, 1, 2, 0], 2, {"zero": OFFLOAD, "accumulate": 2}),
    "offload, round robin": ([4, 3, 2, 1], 2, {"zero": OFFLOAD | {"round_robin_gradients": True}}),
    "bf16, stage 1": ([4, 3, 2, 1], 1, BF16 | ALONE),
    "bf16, stage 2": (RANDOM, 2, BF16 | ALONE | {"accumulate": 2}),
    "bf16, two ranks, stage 1": ([3, 1], 1, BF16),
    "bf16, two ranks, stage 2": ([1, 2], 2, BF16 | {"accumulate": 2}),
    "bf16, summed in fp32, stage 1": ([1, 0, 1, 2], 1, BF16 | IN_FP32 | {"accumulate": 3}),
    "bf16, summed in fp32, stage 2": ([4, 3, 2, 1], 2, BF16 | IN_FP32 | {"accumulate": 3}),
}


_QUICK = (
    "stage 2, accumulation",
    "overlap, small buckets",
    "offload, weights of zero",
    "bf16, summed in fp32, stage 1",
)


@pytest.mark.sweep(keep=6)
@pytest.mark.parametrize(
    ("weights", "stage", "options"),
    [pytest.param(*case, id=name, marks=[] if name in _QUICK else pytest.mark.slow) for name, case in CASES.items()],
)
def test_training_equals_equal_partitions(weights: list[float], stage: int, options: dict[str, Any]) -> None:
    skip_where_refused(ds_config(stage, "ulysses", **{"zero": {}, **options}))
    assert_owned_by_weight(run_deepspeed(_compare, len(weights), weights, stage, options), weights)


def _compare(rank: int, weights: list[float], stage: int, options: dict[str, Any]) -> list[int]:
    import deepspeed

    deepspeed.init_distributed("gloo")
    # Under round_robin_gradients, which changes only who owns what, stock reads its fp32 parameters wrongly.
    zero = {name: value for name, value in options.get("zero", {}).items() if name != "round_robin_gradients"}
    stock = train("stock", stage, **{**options, "zero": zero})
    ours = train(weights, stage, **options)
    assert_same(ours, stock)
    return ours["owned"]


def assert_owned_by_weight(of_rank: Sequence[Sequence[int]], weights: Sequence[float]) -> None:
    """Every moment of every group is shared in proportion to the weights, within one unit of alignment."""
    for parts in zip(*of_rank, strict=True):
        unit = alignment_of(sum(parts), len(parts))
        for part, weight in zip(parts, weights, strict=True):
            assert abs(part - sum(parts) * weight / sum(weights)) <= unit


@pytest.mark.skipif(
    not has_name("deepspeed.runtime.zero.config:DeepSpeedZeroConfig.parameter_alignment"), reason="a key of 0.19.8"
)
def test_parameters_stay_aligned_for_kernels() -> None:
    run_deepspeed(_compare, 2, [3, 1], 2, {"zero": {"parameter_alignment": True, "round_robin_gradients": True}})


def test_impossible_combinations_are_refused() -> None:
    run_deepspeed(_refuse_combinations, 1)


def _refuse_combinations(rank: int) -> None:
    from ds_hetero.frameworks.deepspeed.zero.optimizers import expect_possible

    for more, said in (
        ({"zero_optimization": {"stage": 0}}, "needs ZeRO, but"),
        ({"optimizer": {"type": "Muon"}}, "the Muon optimizer"),
    ):
        config = {"zero_optimization": {"stage": 1}, **more}
        with pytest.raises(ConfigError, match=said):
            expect_possible(config, (3, 1), nn.Linear(2, 2))
        expect_possible(config, (1, 1), nn.Linear(2, 2))


def test_weights_for_another_number_of_ranks_are_refused_on_all() -> None:
    run_deepspeed(_refused, 2)


def _refused(rank: int) -> None:
    import deepspeed

    deepspeed.init_distributed("gloo")
    for weights, said in (([1, 2, 3], "lists 3 weights, but the job has 2 ranks"), ([0, 0], "not only zeros")):
        with pytest.raises(ConfigError, match=said):
            train(weights, 1)
