"""Weighted ZeRO-3 trains as DeepSpeed's does, step by step, and every rank holds its share.

Budget: 45 s.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ds_hetero.errors import ConfigError
from ds_hetero.sharding.zero_partition import alignment_of, cut_parameter
from tests.integration.tiny import (
    VOCAB,
    adam,
    assert_same_parameters,
    batches,
    ds_config,
    llama,
    parameters,
    train_on_one_process,
)
from tests.support import run_deepspeed

STEPS = 5
STATES = ("exp_avg", "exp_avg_sq")
# Every rank is a replica of its own.
ONE_EACH = {
    "version": 1,
    "num_heads": 4,
    "num_kv_heads": 2,
    "groups": [{"ranks": [0], "tokens": [1], "heads": [4]}],
}

# One group; rank 1 holds no token.
NO_TOKENS_2 = {**ONE_EACH, "groups": [{"ranks": [0, 1], "tokens": [1, 0], "heads": [3, 1]}]}

CPU = {"device": "cpu"}
SMALL = {"reduce_bucket_size": 3000, "stage3_prefetch_bucket_size": 2000, "sub_group_size": 1500}
# Weights, and what differs from the plain run.
CASES: dict[str, tuple[tuple[float, ...], dict[str, Any]]] = {
    "2 ranks": ((3, 1), {}),
    "offload": ((1, 4), {"zero": {"offload_optimizer": CPU, "offload_param": CPU}, "gradient_clipping": 0.1}),
    "no overlap": ((0.37, 1.61), {"zero": {**SMALL, "overlap_comm": False, "contiguous_gradients": False}}),
    "sequential": ((3, 1), {"zero": {"reduce_scatter": False, "stage3_allgather_sequential": True}}),
    "bf16": ((3, 1), {"bf16": {"enabled": True}}),
    "4 ranks": ((4, 3, 2, 1), {"zero": SMALL}),
    "accumulation": ((1, 1, 1, 3), {"gradient_accumulation_steps": 2, "zero": {"offload_optimizer": CPU}}),
    "persistent": (
        (0.31, 1.87, 0.52, 1.14),
        {"zero": {"stage3_param_persistence_threshold": 1100, "reduce_scatter": False}},
    ),
}


def start(weights: Any, schedule: Any = ONE_EACH, model: Any = None, **more: Any) -> tuple[Any, Any]:
    """Handle and engine; ``None`` for DeepSpeed's own partitions."""
    import deepspeed

    import ds_hetero

    handle = ds_hetero.register()
    zero = {"stage3_param_persistence_threshold": 0, **more.pop("zero", {})}
    section = {**more.pop("section", {})}
    config = ds_config(3, schedule, zero=zero, zero_force_ds_cpu_optimizer=False, **more)
    if weights is not None:
        section |= {"zero_partition": list(weights)}
    if section:
        config["heterogeneity"] |= section
    model = llama() if model is None else model
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=config)
    return handle, engine


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    """With two groups of parameters."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for name, p in named if "norm" not in name], "weight_decay": 0.1},
        {"params": [p for name, p in named if "norm" in name], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)


def train(handle: Any, engine: Any, whole: list[Any]) -> tuple[list[float], list[float]]:
    """Losses and gradient norms, one per batch."""
    losses, norms = [], []
    for batch in handle.dataloader(whole, batches="own"):
        loss = handle.loss(engine(**batch), batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(float(engine.get_global_grad_norm() or 0))  # none before the first boundary
    return losses, norms


def states(engine: Any) -> dict[str, np.ndarray]:
    """Whole master weights and optimizer states."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = {}
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            found[name] = safe_get_full_fp32_param(param).float().numpy().copy()
            for key in STATES:
                found[f"{name} {key}"] = safe_get_full_optimizer_state(param, key).float().numpy().copy()
    return found


_SLOW = ("2 ranks", "no overlap", "sequential", "persistent")


@pytest.mark.parametrize(
    ("weights", "more"),
    [pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name in _SLOW)) for name, case in CASES.items()],
)
def test_training_equals_that_of_equal_shards(weights: tuple[float, ...], more: dict[str, Any]) -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    keys = {key for name, field in DeepSpeedZeroConfig.model_fields.items() for key in (name, field.alias)}
    unknown = {*more.get("zero", {})} - keys
    if unknown:
        pytest.skip(f"this release of DeepSpeed has no {', '.join(unknown)}")
    run_deepspeed(_train_both, len(weights), weights, more)


def _train_both(rank: int, weights: tuple[float, ...], more: dict[str, Any]) -> None:
    whole = batches(STEPS * len(weights))[rank :: len(weights)]
    results = []
    for of_ranks in (None, weights):
        handle, engine = start(of_ranks, **more)
        results.append((*train(handle, engine, whole), states(engine)))
        if of_ranks:
            _check_shares(engine, rank, weights)
        engine.destroy()
    (losses, norms, expected), (our_losses, our_norms, ours) = results
    np.testing.assert_allclose(our_losses, losses, rtol=1e-6)
    np.testing.assert_allclose(our_norms, norms, rtol=1e-6)
    assert_same_parameters(ours, expected, rtol=2e-6)


def _check_shares(engine: Any, rank: int, weights: Any) -> None:
    """Parameters, gradients, master weights and states: each parameter's within one unit of alignment."""
    optimizer, share = engine.optimizer, weights[rank] / sum(weights)
    params = list(engine.module.parameters())
    for param in params:
        unit = alignment_of(param.ds_numel, len(weights), least=1)
        assert abs(param.ds_tensor.numel() - param.ds_numel * share) <= unit
    mine = sum(param.ds_tensor.numel() for param in params)
    held = [optimizer.grad_partitions_flat_buffer, *optimizer.fp32_partitioned_groups_flat]
    held += [state[key] for state in optimizer.optimizer.state.values() for key in STATES]
    assert sum(part.numel() for part in held) == mine * (2 + len(STATES))


def test_shards_are_gathered_and_gradients_reduced_in_few_messages() -> None:
    run_deepspeed(_move_shards, 3)


def _move_shards(rank: int) -> None:
    import deepspeed
    import torch.distributed as dist
    from torch.distributed.tensor.debug import CommDebugMode

    from ds_hetero.frameworks.deepspeed.zero.weighted_gathering import Gathering, reduce_to_owners
    from ds_hetero.frameworks.deepspeed.zero.weighted_shards import own_shard

    deepspeed.init_distributed("gloo")
    for weights in ((1, 2, 3), (5, 0.1, 1)):
        wholes = [torch.arange(float(numel)) for numel in (1, 50, 4099)]
        cuts = [cut_parameter(whole.numel(), weights) for whole in wholes]
        shards = [own_shard(whole, cut, dist.group.WORLD) for whole, cut in zip(wholes, cuts, strict=True)]
        with CommDebugMode() as comms:
            gathered = Gathering(shards, cuts, dist.group.WORLD).wait()
        assert comms.get_total_counts() == 3  # a broadcast per rank
        for flat, whole, cut in zip(gathered, wholes, cuts, strict=True):
            assert flat.numel() == cut.total
            assert torch.equal(flat[: whole.numel()], whole)
        with CommDebugMode() as comms:
            reduced = reduce_to_owners([whole * (rank + 1) for whole in wholes], cuts, dist.group.WORLD, 3)
        assert comms.get_total_counts() == 1  # a reduce_scatter
        for mine, shard in zip(reduced, shards, strict=True):
            torch.testing.assert_close(mine, shard * 2)  # the mean of once, twice and three times
    large = torch.full((50,), 40_000.0, dtype=torch.float16)  # the sum of three would be infinite
    (mean,) = reduce_to_owners([large], cuts[1:2], dist.group.WORLD, 3)
    torch.testing.assert_close(mean, large[: mean.numel()], rtol=1e-3, atol=0)


def test_parameters_made_under_zero_init_are_written_and_trained() -> None:
    run_deepspeed(_use_parameters, 2)


def _use_parameters(rank: int) -> None:
    import deepspeed
    from deepspeed.utils import (
        safe_get_full_fp32_param,
        safe_get_full_grad,
        safe_get_full_optimizer_state,
        safe_set_full_fp32_param,
        safe_set_full_grad,
        safe_set_full_optimizer_state,
    )

    from ds_hetero.frameworks.deepspeed.zero.parameter_cut import is_weighted

    weights = (3, 1)
    with deepspeed.zero.Init(config_dict_or_path=ds_config(3, ONE_EACH)):
        model = llama()
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        if rank == 0:
            model.load_state_dict(llama().state_dict())
    model.model.embed_tokens.weight.requires_grad = False
    handle, engine = start(weights, model=model)
    expected = [llama()(**batch).loss.item() for batch in batches(2)]
    losses, _ = train(handle, engine, batches(2)[rank::2])
    np.testing.assert_allclose(losses, expected[rank::2], rtol=1e-5)

    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    assert all(is_weighted(param) for param in model.parameters())
    for param in params.values():
        new = torch.arange(float(param.ds_numel)).view(param.ds_shape)
        for key in STATES:
            safe_set_full_optimizer_state(param, new, key)
            assert torch.equal(safe_get_full_optimizer_state(param, key), new)
        safe_set_full_fp32_param(param, new + 1)
        assert torch.equal(safe_get_full_fp32_param(param), new + 1)
        safe_set_full_grad(param, new + 2)
        assert torch.equal(safe_get_full_grad(param), new + 2)

    # A model beside it whose shards are DeepSpeed's may be gathered and written to together with it.
    with deepspeed.zero.Init(config_dict_or_path=ds_config(3, ONE_EACH)):
        other = torch.nn.Linear(5, 3)
    both = [other.weight, model.model.norm.weight, model.lm_head.weight]
    with deepspeed.zero.GatheredParameters(both, modifier_rank=1):
        if rank == 1:
            for i, param in enumerate(both):
                param.data.fill_(i)
    with deepspeed.zero.GatheredParameters(both):
        assert [float(param.min()) for param in both] == [float(param.max()) for param in both] == [0, 1, 2]

    # The same model, set to where it began, in another engine with other weights.
    for weights in ((1, 1), (1, 2)):
        engine.destroy()
        with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
            if rank == 0:
                model.load_state_dict(llama().state_dict())
        handle, engine = start(weights, model=model)
        losses, _ = train(handle, engine, batches(2)[rank::2])
        np.testing.assert_allclose(losses, expected[rank::2], rtol=1e-5)
    engine.destroy()


def test_ranks_whose_tokens_choose_other_experts_train_as_one_process() -> None:
    run_deepspeed(_train_experts, 2, timeout_s=50)


def _train_experts(rank: int) -> None:
    import deepspeed

    import ds_hetero

    handle = ds_hetero.register()
    model, expected, whole = _mixture(), _mixture(), batches(3)
    config = ds_config(3, NO_TOKENS_2, zero={"stage3_param_persistence_threshold": 0})
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=config)
    losses, norms = [], []
    for batch in handle.dataloader(whole, batches="same"):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(float(engine.get_global_grad_norm()))
    expected_losses, expected_norms = train_on_one_process(expected, [[batch] for batch in whole])
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    np.testing.assert_allclose(norms, expected_norms, rtol=1e-5)
    assert_same_parameters(parameters(model, stage=3), parameters(expected))
    engine.destroy()


def _mixture() -> Any:
    """Eight experts in each of two layers; every one that a token chooses is called by itself."""
    from transformers import AutoModelForCausalLM, OlmoeConfig

    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 16, "hidden_size": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": VOCAB}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(OlmoeConfig(**sizes, **heads), experts_implementation="eager")


def test_what_needs_equal_shards_is_refused() -> None:
    from ds_hetero.frameworks.deepspeed.zero.optimizers import expect_possible

    config = {"zero_optimization": {"stage": 3, "stage3_use_all_reduce_for_fetch_params": True}}
    with pytest.raises(ConfigError, match="stage3_use_all_reduce_for_fetch_params"):
        expect_possible(config, (3, 1), torch.nn.Linear(2, 2))
    expect_possible(config, (1, 1), torch.nn.Linear(2, 2))


def test_a_rank_without_a_share_is_refused() -> None:
    run_deepspeed(_weigh_nothing, 2)


def _weigh_nothing(rank: int) -> None:
    with pytest.raises(ConfigError, match="gives rank 1 a weight of 0"):
        start((1, 0))


# By name: the parts of the tensors that travel together, and what gathers and reduces them.
PARTS: dict[str, tuple[tuple[tuple[int, ...], ...], set[str], set[str]]] = {
    "even": (((4, 4, 4), (2, 2, 2)), {"_allgather_base"}, {"_reduce_scatter_base"}),
    "even together": (((4, 2, 3), (2, 4, 3)), {"_allgather_base"}, {"_reduce_scatter_base"}),
    "uneven": (((4, 1, 1), (2, 2, 2)), {"broadcast"}, {"reduce_scatter"}),
    "a rank without a part": (((4, 2, 0),), {"broadcast"}, {"reduce_scatter"}),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_travel_by_the_even_collective_where_they_are_even(name: str) -> None:
    parts, gathers, reduces = PARTS[name]
    for gathered, reduced, sent in run_deepspeed(_move_parts, 3, parts, strict=True):
        assert {_GENERAL.get(call, call) for call, _ in gathered} == gathers
        assert {_GENERAL.get(call, call) for call, _ in reduced} == reduces
        assert sent == sum(map(sum, parts))


_GENERAL = {"all_gather_single": "_allgather_base", "reduce_scatter_single": "_reduce_scatter_base"}


def _move_parts(rank: int, parts: tuple[tuple[int, ...], ...]) -> tuple[list[Any], list[Any], int]:
    """The calls that gather tensors and reduce their gradients, with what they move; the values are compared here."""
    import deepspeed

    from benchmarks.proof.events import Call
    from benchmarks.proof.recording import recording
    from ds_hetero.frameworks.deepspeed.zero.weighted_gathering import Gathering, reduce_to_owners
    from ds_hetero.values.splits import Split

    deepspeed.init_distributed("gloo", verbose=False)
    group = torch.distributed.group.WORLD
    assert group is not None
    cuts = [Split(sizes) for sizes in parts]
    whole = [torch.arange(cut.total, dtype=torch.float64) + 10 * i for i, cut in enumerate(cuts)]
    shards = [x[slice(*cut.ranges[rank])] for x, cut in zip(whole, cuts, strict=True)]
    with recording() as events:
        gathered = Gathering(shards, cuts, group).wait()
    calls = [(event.name, event.shape) for event in events if isinstance(event, Call)]
    with recording() as events:
        reduced = reduce_to_owners([x * (rank + 1) for x in whole], cuts, group, divisor=2)
    for x, shard, both, average in zip(whole, shards, gathered, reduced, strict=True):
        assert torch.equal(both, x)
        assert torch.equal(average, shard * 3)  # halves of (1 + 2 + 3) are exact
    sent = sum(x.numel() for x in gathered)
    return calls, [(event.name, event.shape) for event in events if isinstance(event, Call)], sent
