"""A loop with accelerate trains as one process does: batches, losses, gradients, learning rates, with either loss.

Budget: 45 s.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from tests.integration.tiny import (
    BY_DOCUMENTS,
    CLIP,
    LR,
    UNEVEN_2,
    adam,
    assert_same_parameters,
    ds_config,
    llama,
    mean_over_group,
    parameters,
    samples,
)
from tests.support import run_deepspeed

CASES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0, "steps": 1, "loss": "handle"},
    "stage 1, documented loss": {"stage": 1, "steps": 2, "loss": "recipe"},
    "stage 2": {"stage": 2, "steps": 2, "loss": "outputs"},
    "stage 3, documented loss": {"stage": 3, "steps": 1, "loss": "recipe"},
    "stage 1, by documents": {"stage": 1, "steps": 2, "loss": "handle", "placement": BY_DOCUMENTS},
    "stage 2, a stream": {"stage": 2, "steps": 1, "loss": "handle", "iterable": True},
}


class Stream(IterableDataset[Any]):
    """Samples without a length."""

    def __iter__(self) -> Any:
        return iter(samples(7))


@pytest.fixture(scope="module")
def one_process() -> dict[str, Any]:
    """What the loop of every case comes to without DeepSpeed."""
    return run_deepspeed(_loops_of_one_process, 1, env={"ACCELERATE_USE_CPU": "true"})[0]


_SLOW = ("stage 2", "stage 3, documented loss")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in _SLOW)) for name in CASES])
def test_loop_on_two_ranks_equals_one_process(name: str, one_process: dict[str, Any]) -> None:
    for ours in run_deepspeed(_loop, 2, CASES[name], 1, True, env={"ACCELERATE_USE_CPU": "false"}):
        _assert_same(ours, one_process[name], CASES[name]["stage"])


@pytest.mark.parametrize(
    ("ds_config", "has_parallelism", "says"),
    [
        ({"sequence_parallel_size": 1}, False, '"sequence_parallel_size" is 1, which makes every rank a replica'),
        ({}, True, "sp_size of the ParallelismConfig is 1, which makes every rank a replica"),
        ({}, False, "accelerate does not split them. Give it ParallelismConfig"),
    ],
)
def test_a_size_of_one_is_refused_with_what_is_true_of_it(
    ds_config: dict[str, Any], has_parallelism: bool, says: str
) -> None:
    from ds_hetero.frameworks.accelerate.preparation import _why_not_split

    assert says in _why_not_split(ds_config, has_parallelism)


def test_loop_on_two_replicas_equals_one_process() -> None:
    case = {"stage": 2, "steps": 2, "loss": "handle", "shuffle": False}
    (expected,) = run_deepspeed(_loop, 1, case, 2, False, env={"ACCELERATE_USE_CPU": "true"})
    for ours in run_deepspeed(_loop, 4, case, 1, True, env={"ACCELERATE_USE_CPU": "false"}):
        _assert_same({**ours, "losses": []}, {**expected, "losses": []}, 2)  # each replica sees its own


def _assert_same(ours: Any, expected: Any, stage: int) -> None:
    assert ours["rates"] == expected["rates"]
    np.testing.assert_allclose(ours["losses"], expected["losses"], rtol=1e-5)
    if stage:
        np.testing.assert_allclose(ours["norms"], expected["norms"], rtol=1e-5)
    assert_same_parameters(ours["parameters"], expected["parameters"])


def _loops_of_one_process(rank: int) -> dict[str, Any]:
    return {name: _loop(rank, case, 1, False) for name, case in CASES.items()}


def _loop(rank: int, case: dict[str, Any], batch_size: int, split: bool) -> dict[str, Any]:
    from accelerate import Accelerator, ParallelismConfig
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DeepSpeedPlugin, DeepSpeedSequenceParallelConfig, set_seed

    import ds_hetero

    stage, steps, loss = case["stage"], case["steps"], case["loss"]
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    handle, options = None, {"cpu": True}
    if split:
        handle = ds_hetero.register()
        placement = {"placement": case["placement"]} if "placement" in case else {}
        config = ds_config(
            stage, UNEVEN_2, train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=steps, **placement
        )
        options = {
            "deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=config),
            "parallelism_config": ParallelismConfig(
                sp_backend="deepspeed",
                sp_size=2,
                dp_shard_size=int(os.environ["WORLD_SIZE"]) // 2,
                sp_handler=DeepSpeedSequenceParallelConfig(
                    sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
                ),
            ),
        }
    accelerator = Accelerator(gradient_accumulation_steps=steps, **options)
    model = llama()
    optimizer = adam(model)
    # accelerate means the batches of one process: with several it advances as many steps at a time.
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20 // batch_size)
    rows: Any = Stream() if case.get("iterable") else samples(8)
    if int(os.environ["WORLD_SIZE"]) > 2 or batch_size > 1:  # data parallelism weighs replicas, not tokens, alike
        rows = [{**row, "labels": row["input_ids"]} for row in rows]
    loader: Any = DataLoader(rows, batch_size, shuffle=case.get("shuffle", True) and not case.get("iterable"))
    evaluation: Any = DataLoader(samples(3), 3)
    set_seed(0)
    model, optimizer, loader, evaluation, scheduler = accelerator.prepare(
        model, optimizer, loader, evaluation, scheduler
    )
    losses, norms, rates = [], [], []
    for _ in range(2):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                value = _loss(handle, loss, model, batch)
                accelerator.backward(value)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(value.item())
            if accelerator.sync_gradients:
                norms.append(float(model.get_global_grad_norm() or 0.0 if split else norm))
                rates.append(round(scheduler.get_last_lr()[0] / LR, 9))
        model.eval()
        for batch in evaluation:  # whole, and on every rank
            assert batch["input_ids"].shape == (3, 37)
            with torch.no_grad():
                losses.append(model(**batch).loss.item())
    return {
        "losses": losses,
        "norms": norms,
        "rates": rates,
        "parameters": parameters(accelerator.unwrap_model(model), stage if split else 0),
    }


def _loss(handle: Any, how: str, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    if handle is None or how == "outputs":
        return model(**batch).loss
    if how == "handle":
        return handle.loss(model(**batch), batch)
    labels, group = batch["shift_labels"], handle.replica.sp_group
    return mean_over_group(model(**batch, labels=labels).loss, labels, group)
