"""Losses that a script computes itself, by every convention, give the gradient of one process on every ZeRO stage.

Budget: 40 s.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from tests.integration.loops.test_replicas import REPLICAS
from tests.integration.tiny import UNEVEN_2, collate, ds_config, llama, parameters, samples
from tests.support import run_deepspeed

STAGES = [(0, True), (1, True), (1, False), (2, True), (2, False), (3, True), (3, False)]  # and reduce_scatter
CONVENTIONS = ("handle", "replica_mean", "local_mean", "local_sum", "local_share")
GLOBAL_BATCH = 8


def data() -> list[dict[str, Tensor]]:
    """As many samples as all conventions take, one step each; rank 1 has no label of some of them."""
    rows = samples(GLOBAL_BATCH * len(CONVENTIONS))
    for row in rows[::3]:
        row["labels"] = row["labels"].clone()
        row["labels"][20:] = -100
    return rows


def sgd(model: Any) -> torch.optim.Optimizer:
    """Unlike Adam, its steps are in proportion to the gradient's scale."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.fixture(scope="module")
def one_process() -> tuple[list[float], dict[str, np.ndarray]]:
    """Gradient norms of the steps and parameters after them."""
    expected = llama()
    optimizer = sgd(expected)
    norms = []
    for i in range(len(CONVENTIONS)):
        optimizer.zero_grad()
        expected(**collate(data()[i * GLOBAL_BATCH : (i + 1) * GLOBAL_BATCH])).loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(expected.parameters(), torch.inf)))
        optimizer.step()
    return norms, parameters(expected)


@pytest.mark.sweep(keep=5)
@pytest.mark.parametrize(("stage", "reduce_scatter"), STAGES)
@pytest.mark.parametrize("schedule", [UNEVEN_2, REPLICAS], ids=["one replica", "replicas of 3 and 1"])
def test_every_loss_convention_on_every_stage_equals_one_process(
    schedule: Any, stage: int, reduce_scatter: bool, one_process: tuple[list[float], dict[str, np.ndarray]]
) -> None:
    norms, expected = one_process
    world_size = 2 if schedule is UNEVEN_2 else 4
    for ours, trained in run_deepspeed(_train, world_size, schedule, stage, reduce_scatter):
        if stage:  # DeepSpeed keeps no norm without ZeRO
            np.testing.assert_allclose(ours, norms, rtol=2e-5, err_msg=f"steps by {CONVENTIONS}")
        for name, value in expected.items():
            np.testing.assert_allclose(trained[name], value, atol=2e-6, err_msg=name)


def _train(rank: int, schedule: Any, stage: int, reduce_scatter: bool) -> Any:
    import deepspeed

    import ds_hetero

    handle = ds_hetero.register()
    model = llama()
    config = ds_config(stage, schedule, gradient_clipping=0.0, zero={"reduce_scatter": reduce_scatter})
    if "replicas" not in schedule:
        config["train_micro_batch_size_per_gpu"] = GLOBAL_BATCH
    else:
        del config["train_micro_batch_size_per_gpu"]
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd(model), config=config)
    norms = []
    steps = engine.gradient_accumulation_steps()
    for i, batch in enumerate(handle.dataloader(DataLoader(data(), batch_size=GLOBAL_BATCH), batches="same")):
        convention = CONVENTIONS[i // steps]
        if convention == "handle":
            loss = handle.loss(engine(**batch), batch)
        else:
            handle.registry.find(model).sequences.losses.declare(convention)  # as "loss" in the section declares it
            loss = _loss(engine(**batch).logits, batch["shift_labels"], convention, handle.replica)
        engine.backward(loss)
        engine.step()
        if i % steps == steps - 1:
            norms.append(float(engine.get_global_grad_norm() or 0.0))
    assert len(norms) == len(CONVENTIONS)
    return norms, parameters(model, stage)


def _loss(logits: Tensor, labels: Tensor, convention: str, replica: Any) -> Tensor:
    """By the definitions; the mean over no label is NaN, as torch has it."""
    total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    count = labels.ne(-100).sum()
    if convention == "local_sum":
        return total
    if convention == "local_mean":
        return total / count
    of_replica = count.clone()
    dist.all_reduce(of_replica, group=replica.sp_group)
    if convention == "local_share":
        return total / of_replica.clamp(min=1)
    totals: Any = _AllGather.apply(total, replica.sp_group)
    return totals.sum() / of_replica.clamp(min=1)


class _AllGather(torch.autograd.Function):
    """torch's, whose backward over gloo fails in groups without rank 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x, group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor, None]:
        grads = grads.contiguous().clone()
        dist.all_reduce(grads, group=ctx.group)
        return grads[dist.get_rank(ctx.group)], None


def test_a_loss_that_contradicts_the_convention_is_refused() -> None:
    first, *others = run_deepspeed(_contradict, 2)
    assert all(other == first for other in others)
    undeclared, declared, copied, forgotten = first
    assert "the loss given to backward differs between the ranks of a replica (by rank ['" in undeclared
    assert '"heterogeneity": {"loss": "local_mean"}' in undeclared
    assert '"heterogeneity.loss" is "local_mean", but the loss given to backward is the same on all ranks' in declared
    assert 'a loss by the convention "local_mean" needs the labels of its batch' in copied
    assert "backward was called on the loss itself" in forgotten


def _contradict(rank: int) -> list[str]:
    import deepspeed

    import ds_hetero
    from ds_hetero.errors import HeteroError

    handle = ds_hetero.register()
    said = []
    for declared, how, copied, checks in (
        (None, "local_mean", 0, "on"),
        ("local_mean", "replica_mean", 0, "off"),  # with checks, the gradient shows that nothing is wrong
        ("local_mean", "local_mean", 1, "on"),
    ):
        model = llama()
        config = ds_config(1, UNEVEN_2)
        config["heterogeneity"] |= {"checks": checks} | ({} if declared is None else {"loss": declared})
        engine, *_ = deepspeed.initialize(model=model, optimizer=sgd(model), config=config)
        batch = next(iter(handle.dataloader([collate(samples(2))], batches="same")))
        if copied:
            batch = {name: entry.clone() for name, entry in batch.items()}
        loss = _loss(engine(**batch).logits, batch["shift_labels"], how, handle.replica)
        with pytest.raises(HeteroError) as caught:
            engine.backward(loss)
            engine.step()
        said.append(str(caught.value))
    batch = next(iter(handle.dataloader([collate(samples(2))], batches="same")))
    _loss(engine(**batch).logits, batch["shift_labels"], "local_mean", handle.replica).backward()
    with pytest.raises(HeteroError) as caught:
        engine.step()
    return [*said, str(caught.value)]
