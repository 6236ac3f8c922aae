"""Layers move between stages while the job trains: state travels with them, and the job stays that of one process."""

import time

import pytest
import torch

from ds_hetero.errors import ConfigError
from ds_hetero.values.plans import read_plan
from tests.integration.pipelines.test_pipelines import (
    LAYERS,
    PLANS,
    adamw,
    batches,
    grouped_stage,
    made_model,
    pipeline,
    plan_of,
    sequence_stage,
    train_alone,
    trained,
)
from tests.integration.tiny import VOCAB, compute_in
from tests.support import run_deepspeed

pytestmark = pytest.mark.alone  # it waits in real time for what other work on the cores would delay

ONE = plan_of(
    pipeline(1, 4, {"ranks": [0], "layers": [0, 2]}, {"ranks": [1], "layers": [2, 4]}),
    pipeline(1, 2, {"ranks": [2], "layers": [0, 1]}, {"ranks": [3], "layers": [1, 4]}),
)
SEQUENCE = plan_of(
    pipeline(2, 3, sequence_stage([0, 1], [0, 3], [3, 1], [3, 1]), {"ranks": [2], "layers": [3, 4]}),
    pipeline(1, 2, {"ranks": [3], "layers": [0, 4]}),
)
TENSOR = plan_of(
    pipeline(1, 4, {"ranks": [1, 0], "layers": [0, 3], "inner": "tensor"}, {"ranks": [2], "layers": [3, 4]}),
    pipeline(1, 2, {"ranks": [3], "layers": [0, 4]}),
)
TENSORS = plan_of(
    pipeline(
        1, 4, {"ranks": [0, 1], "layers": [0, 3], "inner": "tensor"},
        {"ranks": [3, 2], "layers": [3, 4], "inner": "tensor"},
    ),
)  # fmt: skip
GROUPS = plan_of(
    pipeline(1, 4, grouped_stage([0, 3], 2, [([0, 2], [3, 1], [2, 2])]), {"ranks": [4], "layers": [3, 4]}),
)
MOVES = {
    "groups": (GROUPS, [([1, 3],), ([3, 1],), ([2, 2],)]),
    "tensor": (TENSOR, [([1, 3], [4]), ([2, 2], [4])]),
    "tensors": (TENSORS, [([1, 3],), ([3, 1],), ([2, 2],)]),
    "one": (ONE, [([1, 3], [3, 1]), ([3, 1], [2, 2]), ([2, 2], [1, 3])]),
    "sequence": (SEQUENCE, [([1, 3], [4]), ([2, 2], [4])]),
}


def moved_as_one_process(rank, name, changes, lora):
    """The largest difference of a loss, a norm or a parameter to one process, while layers move after every step."""
    import deepspeed

    import ds_hetero
    from ds_hetero.frameworks.deepspeed.pipeline.engine import PipelineInstaller
    from ds_hetero.frameworks.deepspeed.pipeline.layer_moves import move_layers
    from ds_hetero.planner.replan.stage_layers import with_layers

    compute_in(torch.float64)
    plan, moves = MOVES[name]
    handle = ds_hetero.register()
    model, whole = (made_model(changes, lora) for _ in range(2))
    steps = batches(plan, len(moves) + 2, False)
    losses, norms = train_alone(whole, steps, adamw(trained(whole)), 0.5)
    held, install = [], PipelineInstaller.install
    PipelineInstaller.install = lambda installer: (installed := install(installer), held.append(installed[0]))[0]
    zero = {"stage": 1, "reduce_bucket_size": 1000}
    config = {"gradient_clipping": 0.5, "zero_optimization": zero, "heterogeneity": {"schedule": plan}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(trained(model)), config=config)
    worst = 0.0
    for number, (batch, loss, norm) in enumerate(
        zip(handle.for_engine(engine).dataloader(steps), losses, norms, strict=True)
    ):
        ours = engine(**batch).loss
        engine.backward(ours)
        engine.step()
        worst = max(worst, abs(ours.item() - loss), abs(engine.get_global_grad_norm() - norm))
        if number < len(moves):
            move_layers(held[0], with_layers(held[0].plan, moves[number]))
        assert engine.optimizer.sync.bucket_bytes == 8 * 1000
    expected = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        at = name.replace("lm_head", "model.embed_tokens") if name not in expected else name
        full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        worst = max(worst, (full - expected[at]).detach().abs().max().item())
    engine.destroy()
    return worst, len(held_layers(model))


def held_layers(model):
    return {name.split("layers.")[1].split(".")[0] for name, _ in model.named_parameters() if "layers." in name}


@pytest.mark.parametrize(
    ("name", "changes", "lora"),
    [
        pytest.param("one", {}, False, id="", marks=pytest.mark.slow),
        pytest.param("one", {"tie_word_embeddings": True}, False, id="tied"),
        pytest.param("sequence", {}, True, id="sequence stages and adapters"),
        pytest.param("tensor", {}, True, id="tensor stages and adapters"),
        pytest.param("tensors", {"tie_word_embeddings": True, "vocab_size": VOCAB + 3}, False, id="tensor stages"),
        pytest.param("groups", {"tie_word_embeddings": True}, False, id="tensor groups"),
        pytest.param("groups", {}, True, id="tensor groups and adapters", marks=pytest.mark.slow),
    ],
)
def test_training_goes_on_as_on_one_process(name, changes, lora):
    outcomes = run_deepspeed(moved_as_one_process, len(read_plan(MOVES[name][0]).ranks), name, changes, lora)
    assert max(worst for worst, _ in outcomes) < 1e-12
    layers = {"one": [2, 2, 1, 3], "tensors": [2, 2, 2, 2], "groups": [2] * 5}.get(name, [2, 2, 2, 4])
    assert [held for _, held in outcomes] == layers


SLOW_FROM, STEPS = 7, 32
SLOW_S = 0.02  # of a layer of the rank that lost speed, and 0.008 of one that did not: 40 %
SLOW_BESIDE_TENSOR_S = 0.08  # likewise, where all-reduces in the other stage take time, too


def slowed(rank, first):
    """Losses' largest difference to one process, layers after every step, and what was said.

    Args:
        first: ranks of the first stage; the second has one, which slows down.
    """
    import deepspeed

    import ds_hetero
    from ds_hetero.job import replanning

    compute_in(torch.float64)
    slow_s = SLOW_S if len(first) == 1 else SLOW_BESIDE_TENSOR_S
    inner = {"inner": "tensor"} if len(first) > 1 else {}
    stages = {"ranks": first, "layers": [0, 2], **inner}, {"ranks": [len(first)], "layers": [2, 4]}
    plan = plan_of(pipeline(1, 4, *stages))
    told = []
    replanning.announce = told.append
    handle = ds_hetero.register()
    model, whole = (made_model({}, False) for _ in range(2))
    steps = batches(plan, STEPS, False)
    losses, _ = train_alone(whole, steps, adamw(trained(whole)), 0.5)
    done = 0

    def wait(*_):
        time.sleep(slow_s if rank == len(first) and done >= SLOW_FROM else 0.4 * slow_s)

    for layer in model.model.layers:
        layer.register_forward_pre_hook(wait)
        layer.register_full_backward_hook(wait)
    config = {"gradient_clipping": 0.5, "heterogeneity": {"schedule": plan, "replan": {"enabled": True}}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(trained(model)), config=config)
    worst, layers = 0.0, []
    for batch, loss in zip(handle.for_engine(engine).dataloader(steps), losses, strict=True):
        ours = engine(**batch).loss
        engine.backward(ours)
        engine.step()
        done += 1
        worst = max(worst, abs(ours.item() - loss))
        layers.append(len(held_layers(model)))
    engine.destroy()
    return worst, layers, told


@pytest.mark.slow
@pytest.mark.parametrize("first", [[0], [0, 1]], ids=["", "to a tensor stage"])
def test_a_rank_that_slows_down_loses_layers_within_20_steps(first):
    outcomes = run_deepspeed(slowed, len(first) + 1, first)
    (_, at_first, told), (_, at_last, _) = outcomes[0], outcomes[-1]
    assert max(worst for worst, _, _ in outcomes) < 1e-12
    assert at_first[SLOW_FROM - 1] == at_last[SLOW_FROM - 1] == 2
    assert at_first[SLOW_FROM + 19] == LAYERS - 1 and at_last[SLOW_FROM + 19] == 1
    moves = [line for line in told if "layers move," in line]
    assert len(moves) == 1 and "3+1" in moves[0]


def test_layers_that_cannot_move_are_refused():
    from ds_hetero.frameworks.deepspeed.pipeline.layer_moves import expect_movable

    model = made_model({}, False)
    plan = read_plan(PLANS["sequence stage and single stages"])
    expect_movable(model, plan)
    model.model.layers[1].register_buffer("scale", torch.ones(1))
    with pytest.raises(ConfigError, match=r"buffers \(model.layers.1.scale\)"):
        expect_movable(model, plan)
