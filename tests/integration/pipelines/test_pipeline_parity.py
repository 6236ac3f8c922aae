"""Pipelines against one process over five steps: fp32 with SGD, and HexiScale's case study scaled to eight ranks."""

import pytest
import torch

from tests.integration.pipelines.test_pipelines import PLANS, adamw, errors_against_one_process, pipeline, plan_of, sgd
from tests.integration.tiny import compute_in
from tests.support import run_deepspeed

# HexiScale's plan (arXiv:2409.01143, section 3.1) with a fifth of its 40 layers and half of its 24 micro-batches: ranks
# 0 to 2 are its A800, 3 to 5 its 4090, 6 and 7 its 3090.
CASE_STUDY = {
    **plan_of(
        pipeline(
            1,
            7,
            {"ranks": [0, 1], "layers": [0, 6], "inner": "tensor"},
            {"ranks": [3], "layers": [6, 7]},
            {"ranks": [6], "layers": [7, 8]},
        ),
        pipeline(
            1,
            5,
            {"ranks": [2], "layers": [0, 5]},
            {"ranks": [4], "layers": [5, 6]},
            {"ranks": [5], "layers": [6, 7]},
            {"ranks": [7], "layers": [7, 8]},
        ),
    ),
    "model": {"num_layers": 8, "num_heads": 4, "num_kv_heads": 2},
}
PLANS_OF_PARITY = {**PLANS, "case study": CASE_STUDY}
CASES = {
    "plain": {},
    "tied": {"changes": {"tie_word_embeddings": True}},
    "packed": {"packed": True},
    "adapters": {"lora": True},
}


def errors(rank, plans, cases, dtype):
    """By plan and case, the largest difference of a loss, a norm or a parameter over five steps."""
    import ds_hetero

    compute_in(dtype)
    handle = ds_hetero.register()
    optimizer = adamw if dtype is torch.float64 else sgd
    worst = {}
    for name, plan in plans.items():
        for case, options in cases.items():
            changes = {"num_hidden_layers": plan["model"]["num_layers"], **options.get("changes", {})}
            given = {**options, "changes": changes, "steps": 5, "dtype": dtype, "make_optimizer": optimizer}
            worst[name, case], _ = errors_against_one_process(handle, plan, **given)
    return worst


@pytest.mark.slow
def test_the_case_study_trains_as_one_process_in_fp32():
    cases = {"packed": CASES["packed"] | CASES["tied"]}
    outcomes = run_deepspeed(errors, 8, {"case study": CASE_STUDY}, cases, torch.float32)
    assert max(error for of_rank in outcomes for error in of_rank.values()) < 1e-5, outcomes


@pytest.mark.sweep(keep=0)
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=["fp32", "fp64"])
def test_every_plan_and_case_trains_as_one_process(dtype, most):
    outcomes = run_deepspeed(errors, 8, PLANS_OF_PARITY, CASES, dtype, timeout_s=500)
    assert len(outcomes[0]) == 28
    assert max(error for of_rank in outcomes for error in of_rank.values()) < most, outcomes
