"""Stages that share sequences between tensor groups train as one process does."""

import itertools
import random

import pytest
import torch

from benchmarks.proof.chance import random_parts
from ds_hetero.frameworks.transformers.stages.tensor_cut import may_share_tokens
from ds_hetero.gradient_sync.shards import local_tensor
from tests.integration.pipelines.test_pipelines import (
    HEADS,
    LAYERS,
    errors_against_one_process,
    grouped_stage,
    made_model,
    pipeline,
    plan_of,
    sequence_stage,
)
from tests.integration.tiny import checkpoint_activations, compute_in, llama
from tests.support import run_deepspeed

PLANS = {
    "one stage": plan_of(pipeline(2, 2, grouped_stage([0, 4], 2, [([0, 2], [3, 1], [2, 2])]))),
    "a ring, and a pipeline without groups": plan_of(
        pipeline(2, 2, grouped_stage([0, 4], 2, [([0], [3], [4]), ([2], [1], [4])], layout="contiguous")),
        pipeline(1, 1, sequence_stage([4, 5], [0, 4], [1, 2], [1, 3])),
    ),
    "between single ranks": plan_of(
        pipeline(
            1, 3, {"ranks": [0], "layers": [0, 1]},
            grouped_stage([1, 3], 2, [([1, 3], [2.5, 1], [4, 0])]), {"ranks": [5], "layers": [3, 4]},
        ),
    ),
    "a group without tokens": plan_of(
        pipeline(1, 3, {"ranks": [4, 5], "layers": [0, 1], "inner": "tensor"},
                 grouped_stage([1, 4], 2, [([0, 2], [0, 1], [2, 2])])),
    ),
}  # fmt: skip
RANKS = (2, 8, 3, 6, 4, 8, 5, 7, 6, 8)  # of the random plans, twenty of each
CASES = {
    "packed, tied": {"changes": {"tie_word_embeddings": True}, "packed": True},
    "adapters": {"changes": {}, "lora": True},
    "in tiles": {"changes": {}, "section": {"tile_tokens": 4}},
}


def errors(rank, plans, cases):
    """By plan and case: the largest difference of a loss, a norm or a parameter, elements that this rank holds, and the
    tokens of its first norm in the first forward."""
    import ds_hetero

    compute_in(torch.float64)
    handle = ds_hetero.register()
    found = {}
    for name, case in itertools.product(plans, cases):
        model = made_model(cases[case]["changes"], cases[case].get("lora", False))
        tokens = []
        norm = next(module for module in model.modules() if "RMSNorm" in type(module).__name__)
        norm.register_forward_pre_hook(lambda _, args, tokens=tokens: tokens.append(args[0].shape[1]))
        worst, _ = errors_against_one_process(handle, plans[name], model=model, **cases[case])
        held = sum(local_tensor(parameter).numel() for parameter in model.parameters())
        found[name, case] = worst, held, tokens[0] if tokens else 0
    return found


def test_tensor_groups_train_as_one_process():
    outcomes = run_deepspeed(errors, 6, PLANS, CASES)
    assert max(error for of_rank in outcomes for error, *_ in of_rank.values()) < 1e-12, outcomes
    # Of two ranks of a tensor group, each holds half of the weights that are cut: all but norms.
    whole = {name: parameter.numel() for name, parameter in made_model({}, False).named_parameters()}
    norms = sum(number for name, number in whole.items() if "norm" in name)
    held = [of_rank["one stage", "in tiles"][1] for of_rank in outcomes[:4]]
    assert held == [norms + (sum(whole.values()) - norms) / 2] * 4
    # 24 tokens are 18 and 6 of the two groups. Their ranks share them in norms, but not where adapters are trained.
    assert [of_rank["one stage", "in tiles"][2] for of_rank in outcomes[:4]] == [9, 9, 3, 3]
    assert [of_rank["one stage", "adapters"][2] for of_rank in outcomes[:4]] == [18, 18, 6, 6]


@pytest.mark.parametrize(
    ("changed", "shares"),
    [({}, True), ({"layers.*.mlp.down_proj": None}, False), ({"layers.*.self_attn.q_proj": None}, False)],
    ids=["as it is", "an MLP that ends sharded", "whole queries"],
)
def test_tokens_are_shared_where_attention_and_mlp_begin_and_end_whole(changed, shares):
    model = llama(num_hidden_layers=LAYERS)
    plan = {**model.config.base_model_tp_plan, **changed}
    model.config.base_model_tp_plan = {name: style for name, style in plan.items() if style is not None}
    assert may_share_tokens(model) == shares


def random_plan(rng, num_ranks):
    """Pipelines with tensor groups of one, two or four ranks, some of them beside others of another size.

    At least one is of two ranks or more. A group alone is a tensor stage, groups of one rank are a sequence stage.
    """
    pipelines, first, degrees = [], 0, set()
    while num_ranks - first >= 2:
        left = num_ranks - first
        size = rng.choice([size for size in (1, 2, 2, 4, 4) if size <= left])
        if size == 1 and degrees <= {1} and left <= 3:
            size = 2  # so that one pipeline has tensor groups
        members = rng.randint(1, left // size)
        has_stage_before = first + members * size < num_ranks and rng.random() < 0.5
        cut = rng.randint(1, LAYERS - 1) if has_stage_before else 0
        stages = []
        if has_stage_before:
            stages, first = [{"ranks": [first], "layers": [0, cut]}], first + 1
        stages.append(random_stage(rng, first, [cut, LAYERS], size, members))
        pipelines.append(pipeline(rng.randint(1, 2), rng.randint(1, 3), *stages))
        first += members * size
        degrees.add(size)
    return plan_of(*pipelines, kv_heads=HEADS) if max(degrees) > 1 else random_plan(rng, num_ranks)


def random_stage(rng, first, layers, size, members):
    """A stage of ``members`` tensor groups of ``size`` ranks from ``first`` on, in one or two groups of all-to-alls."""
    if members == 1:
        ranks = list(range(first, first + size))
        return {"ranks": ranks, "layers": layers, "inner": "one" if size == 1 else "tensor"}
    firsts = [first + size * member for member in range(members)]
    rng.shuffle(firsts)
    groups = []
    sizes = random_parts(rng, members, rng.randint(1, min(2, members)))
    for start, count in zip(itertools.accumulate([0, *sizes[:-1]]), sizes, strict=True):
        ranks = firsts[start : start + count]
        heads = [size * (share - 1) for share in random_parts(rng, HEADS // size + count, count)]
        groups.append((ranks, [rng.choice((0, 1, 2.5)) for _ in ranks], heads))
    groups[0][1][0] = 1
    layout = rng.choice(("zigzag", "contiguous"))
    stage = grouped_stage(layers, size, groups, HEADS, layout)
    if size == 1:
        del stage["tensor_size"]
    return stage


def random_errors(rank, world_size, seeds):
    import ds_hetero

    compute_in(torch.float64)
    handle = ds_hetero.register()
    worst = {}
    for seed in seeds:
        rng = random.Random(seed)
        plan = random_plan(rng, world_size)
        changes = {"num_key_value_heads": HEADS, "tie_word_embeddings": rng.random() < 0.4}
        packed, lora = rng.random() < 0.4, rng.random() < 0.3
        padded = not packed and rng.random() < 0.6
        model = made_model(changes, lora)
        if rng.random() < 0.3:
            checkpoint_activations(model, reentrant=False)
        section = {"tile_tokens": 4} if rng.random() < 0.2 else None
        worst[seed], _ = errors_against_one_process(
            handle, plan, changes, packed, lora, model=model, section=section, padded=padded
        )
    return worst


def test_random_plans_have_degrees_of_all_sizes_beside_each_other():
    """What the sweep below draws."""
    mixed, degrees = 0, set()
    for first_seed in range(0, 200, 20):
        for seed in range(first_seed, first_seed + 20):
            plan = random_plan(random.Random(seed), RANKS[first_seed // 20])
            of_plan = {degree_of(p["stages"][-1]) for p in plan["pipelines"]}
            assert max(of_plan) > 1
            mixed += len(of_plan) > 1
            degrees |= of_plan
    assert degrees == {1, 2, 4} and mixed > 30


def degree_of(stage):
    return len(stage["ranks"]) if stage.get("inner") == "tensor" else stage.get("tensor_size", 1)


@pytest.mark.slow
@pytest.mark.sweep(keep=1)
@pytest.mark.parametrize("first_seed", range(0, 200, 20))
def test_random_tensor_groups_train_as_one_process(first_seed):
    world_size = RANKS[first_seed // 20]
    outcomes = run_deepspeed(random_errors, world_size, world_size, range(first_seed, first_seed + 20), timeout_s=280)
    assert max(error for of_rank in outcomes for error in of_rank.values()) < 1e-11, outcomes
