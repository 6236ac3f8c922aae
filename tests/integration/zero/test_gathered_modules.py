"""ZeRO-3 gathers parameters where modules are called: ranks that call different ones are refused by name.

What DeepSpeed gathers at once (`set_z3_leaf_modules`) trains as on one process. Budget: 60 s.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.integration.tiny import ds_config, llama
from tests.integration.zero.test_rare_parameters import (
    AT_ONCE,
    BOTH,
    EVEN,
    ODD,
    SCHEDULE,
    assert_as_on_one_process,
    batch,
    on_one_process,
    sgd,
    train,
)
from tests.support import run_to_the_end

GATHERED = {"stage3_param_persistence_threshold": 0}  # else these small parameters stay gathered
AT_ZERO_3: dict[str, dict[str, Any]] = {
    "owned evenly": {"stage": 3, "zero": GATHERED},
    "weighted": {"stage": 3, "weights": [3, 1], "zero": GATHERED},
    "staying gathered": {"stage": 3},
}
ON_FOUR: dict[str, dict[str, Any]] = {
    "owned evenly": {},
    "weighted": {"weights": [4, 3, 2, 1]},
    "in nodes": {"nodes": [3, 1]},
    "in nodes, weighted": {"nodes": [2, 2], "weights": [1, 2, 3, 1]},
}
# Every rank has called both experts, and each alone, before the ranks call different ones.
KNOWN = [(BOTH, BOTH), (EVEN, EVEN), (ODD, ODD), (BOTH, BOTH), (EVEN, ODD)]


EVEN_ALONE = "rank 0 called experts.even, rank 1 called experts.odd.0. "
# The first rank goes on to the layers, the second one to an expert.
WITHOUT_ODD = "rank 0 called model.layers.0.input_layernorm, rank 1 called experts.odd.0. "


@pytest.mark.parametrize(
    ("parities", "owned", "said"),
    [
        pytest.param(AT_ONCE, "owned evenly", EVEN_ALONE, id="in the self-check"),
        pytest.param(AT_ONCE, "staying gathered", EVEN_ALONE, id="parameters that stay gathered"),
        pytest.param([(BOTH, BOTH), (EVEN, BOTH)], "weighted", WITHOUT_ODD, id="from the second step"),
        pytest.param(KNOWN, "owned evenly", EVEN_ALONE, id="where both calls were made before"),
    ],
)
def test_zero_3_refuses_ranks_that_call_different_modules(
    parities: list[tuple[int, int]], owned: str, said: str
) -> None:
    ends = run_to_the_end(train_case, 2, {"parities": parities, **AT_ZERO_3[owned]}, timeout_s=120)
    assert [end.code for end in ends] == [1, 1], ends
    output = "".join(end.output for end in ends)  # rank 0 alone says what all ranks would say
    assert f"StepError: {said}ZeRO-3 gathers" in output, output
    assert "set_z3_leaf_modules" in output, output


def train_case(rank: int, case: dict[str, Any]) -> None:
    train(**case)


def test_zero_3_trains_what_is_gathered_at_once() -> None:
    cases = [{"leaf": True, "parities": AT_ONCE, **case} for case in AT_ZERO_3.values()]
    assert_as_on_one_process(cases, on_one_process(AT_ONCE, "sgd", 1))


def test_zero_3_trains_what_is_gathered_at_once_on_four_ranks_and_in_nodes() -> None:
    cases = [{"leaf": True, "parities": AT_ONCE, "stage": 3, "zero": GATHERED, **case} for case in ON_FOUR.values()]
    assert_as_on_one_process(cases, on_one_process(AT_ONCE, "sgd", 1), world=4)


ON_EVERY_RANK = {
    "a barrier": "whose parameters ZeRO-3 gathers from all ranks: forwards, evaluations and generate, too, run",
    "the next step": "rank 1 is reading the next batch, while the other ranks are calling a module on ZeRO-3, as every "
    "rank has to, in generate too",
}


@pytest.mark.parametrize("then", list(ON_EVERY_RANK))
def test_generate_on_one_rank_alone_is_refused_by_name(then: str) -> None:
    ends = run_to_the_end(generate_alone, 2, then, timeout_s=120)
    assert [end.code for end in ends] == [1, 1], ends
    output = "".join(end.output for end in ends)
    assert "StepError" in output and ON_EVERY_RANK[then] in output, output


def generate_alone(rank: int, then: str) -> None:
    import deepspeed

    import ds_hetero

    handle = ds_hetero.register()
    model = llama()
    config = ds_config(3, SCHEDULE, zero=GATHERED, train_micro_batch_size_per_gpu=1, zero_force_ds_cpu_optimizer=False)
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd(model), config=config)
    for number, each in enumerate(handle.dataloader([batch(step, (BOTH, BOTH)) for step in range(3)])):
        engine.backward(engine(**each).loss)
        engine.step()
        if number == 1:
            if rank == 0:
                engine.eval()
                engine.module.generate(batch(0, (BOTH, BOTH))["input_ids"][:, :5], max_new_tokens=3, do_sample=False)
                engine.train()
            if then == "a barrier":
                torch.distributed.barrier()
