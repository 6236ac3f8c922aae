"""Checks of a step see a wrong loss at the step where it begins, on all ranks, and leave right ones alone.

Every case trains three steps; a loss is wrong from a certain step on. Budget: 40 s.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.nn.functional import all_reduce

from tests.integration.tiny import UNEVEN_2, ds_config, llama, mean_over_group
from tests.support import run_deepspeed

STEPS = 3


class Case(NamedTuple):
    loss: Callable[..., Tensor]  # of (step, outputs, batch, handle, memory)
    begins: int | None  # step at which it becomes wrong; None where it is right
    says: str = ""
    declared: str | None = None
    zero_head: bool = False
    accumulation: int = 1
    warns: str = ""


def _ce(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100, **options)


def _local(step: int, outputs: Any, batch: Any, handle: Any, memory: Any) -> Tensor:
    return _ce(outputs.logits, batch["shift_labels"])


def _recipe(step: int, outputs: Any, batch: Any, handle: Any, memory: Any) -> Tensor:
    return mean_over_group(_local(step, outputs, batch, handle, memory), batch["shift_labels"], handle.replica.sp_group)


def _mean_of_means(step: int, outputs: Any, batch: Any, handle: Any, memory: Any) -> Tensor:
    return all_reduce(_local(step, outputs, batch, handle, memory)) / dist.get_world_size()


def _later(wrong: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda step, *rest: (wrong if step else _recipe)(step, *rest)


def _without_gradient(step: int, outputs: Any, batch: Any, handle: Any, memory: Any) -> Tensor:
    local, right = (f(step, outputs, batch, handle, memory) for f in (_local, _recipe))
    return local + (right - local).detach()


def _half_gradient(step: int, outputs: Any, batch: Any, handle: Any, memory: Any) -> Tensor:
    right = _recipe(step, outputs, batch, handle, memory)
    return 0.5 * right + 0.5 * right.detach()


def _stale_counts(step: int, outputs: Any, batch: Any, handle: Any, memory: Any) -> Tensor:
    memory.setdefault("labels", batch["shift_labels"])
    local = _local(step, outputs, batch, handle, memory)
    return mean_over_group(local, memory["labels"], handle.replica.sp_group)


def _by_tokens(step: int, outputs: Any, batch: Any, handle: Any, memory: Any) -> Tensor:
    local = _local(step, outputs, batch, handle, memory)
    return mean_over_group(local, torch.ones_like(batch["shift_labels"]), handle.replica.sp_group)


def _fewer_labels(step: int, outputs: Any, batch: Any, handle: Any, memory: Any) -> Tensor:
    labels = batch["shift_labels"].clone()
    if step and dist.get_rank() == 0:
        labels[:, ::2] = -100
    return _ce(outputs.logits, labels)


def _by_class(step: int, outputs: Any, batch: Any, handle: Any, memory: Any) -> Tensor:
    weights = torch.linspace(0.5, 2, outputs.logits.shape[-1])
    total = _ce(outputs.logits, batch["shift_labels"], weight=weights, reduction="sum")
    counts = weights[batch["shift_labels"].clamp(min=0)] * batch["shift_labels"].ne(-100)
    return all_reduce(total) / all_reduce(counts.sum())


def _smoothed(step: int, outputs: Any, batch: Any, handle: Any, memory: Any) -> Tensor:
    squares = outputs.logits[batch["shift_labels"].ne(-100)].square()
    local = _ce(outputs.logits, batch["shift_labels"], label_smoothing=0.1) + squares.mean()
    return mean_over_group(local, batch["shift_labels"], handle.replica.sp_group)


def _penalty_over_all_tokens(step: int, outputs: Any, batch: Any, handle: Any, memory: Any) -> Tensor:
    local = _ce(outputs.logits, batch["shift_labels"], label_smoothing=0.1) + outputs.logits.square().mean()
    return mean_over_group(local, batch["shift_labels"], handle.replica.sp_group)


def _averaged(**options: Any) -> Callable[..., Tensor]:
    """The average of the ranks' means of a loss that is not plain cross entropy."""

    def loss(step: int, outputs: Any, batch: Any, handle: Any, memory: Any) -> Tensor:
        return all_reduce(_ce(outputs.logits, batch["shift_labels"], **options)) / dist.get_world_size()

    return loss


def _focal(logits: Tensor, labels: Tensor) -> Tensor:
    by_token = _ce(logits, labels, reduction="none")
    return (by_token * (1 - (-by_token).exp()).square()).sum()


def _averaged_focal(step: int, outputs: Any, batch: Any, handle: Any, memory: Any) -> Tensor:
    mean = _focal(outputs.logits, batch["shift_labels"]) / batch["shift_labels"].ne(-100).sum()
    return all_reduce(mean) / dist.get_world_size()


def _focal_by_recipe(step: int, outputs: Any, batch: Any, handle: Any, memory: Any) -> Tensor:
    count = batch["shift_labels"].ne(-100).sum()
    dist.all_reduce(count)
    return all_reduce(_focal(outputs.logits, batch["shift_labels"])) / count


def _of_few(combine: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """A quarter of a loss of batches of which rank 0 has no label."""

    def loss(step: int, outputs: Any, batch: Any, handle: Any, memory: Any) -> Tensor:
        labels = batch["shift_labels"].clone()
        if dist.get_rank() == 0:
            labels[:] = -100
        return 0.25 * combine(_ce(outputs.logits, labels, reduction="sum"), labels.ne(-100).sum().float())

    return loss


def _mean_of_few(total: Tensor, count: Tensor) -> Tensor:
    dist.all_reduce(count)
    return all_reduce(total) / count


def _mean_of_means_of_few(total: Tensor, count: Tensor) -> Tensor:
    return all_reduce(total / count.clamp(min=1)) / dist.get_world_size()


def _stacked_means_of_few(step: int, outputs: Any, batch: Any, handle: Any, memory: Any) -> Tensor:
    """The average of the ranks' means weighted by class, made of a stack; rank 0 has no label."""
    labels = batch["shift_labels"].clone()
    if dist.get_rank() == 0:
        labels[:] = -100
    total = _ce(outputs.logits, labels, weight=torch.linspace(0.5, 2, 64), reduction="sum")
    means = all_reduce(torch.stack([total / labels.ne(-100).sum().clamp(min=1)]))
    return means[0] / dist.get_world_size()


def _by_sequence(step: int, outputs: Any, batch: Any, handle: Any, memory: Any) -> Tensor:
    """The mean over sequences of the mean over the labels of each, as of a loss by sample."""
    labels = batch["shift_labels"]
    by_token = _ce(outputs.logits, labels, reduction="none").view(labels.shape)
    counts = labels.ne(-100).sum(1)
    dist.all_reduce(counts)
    return (all_reduce(by_token.sum(1)) / counts).mean()


WRONG = {
    "average of the ranks' means": Case(_mean_of_means, 0, "weighs labels by rank"),
    "the same, later": Case(_later(_mean_of_means), 1, "weighs labels by rank"),
    "local means, later": Case(_later(_local), 1, "differs between the ranks of a replica"),
    "local means under a head of zeros": Case(_local, 0, "weighs labels by rank", zero_head=True),
    "a sum over ranks without a gradient": Case(_later(_without_gradient), 1, "weighs labels by rank"),
    "half the gradient": Case(_later(_half_gradient), 1, "0.5 times its gradient"),
    "counts of the first batch": Case(_stale_counts, 1, "weighs labels by rank"),
    "tokens counted for labels": Case(_by_tokens, 0, "weighs labels by rank"),
    "fewer labels than declared": Case(_fewer_labels, 1, "is something else", declared="local_mean"),
    "a sum where a mean is declared": Case(
        lambda step, outputs, batch, *rest: _ce(outputs.logits, batch["shift_labels"], reduction="sum"),
        0,
        "is something else",
        declared="local_mean",
    ),
    "average of means weighted by class": Case(
        _averaged(weight=torch.linspace(0.5, 2, 64)), 0, "weighs the sums of ranks"
    ),
    "average of means with smoothing": Case(_averaged(label_smoothing=0.5), 0, "weighs the sums of ranks"),
    "average of focal means": Case(_averaged_focal, 0, "weighs the sums of ranks"),
    "mean of weights declared as one of labels": Case(
        lambda step, outputs, batch, *rest: _ce(
            outputs.logits, batch["shift_labels"], weight=torch.linspace(0.5, 2, 64)
        ),
        0,
        "weighs the sums of ranks",
        declared="local_mean",
    ),
    "penalty over tokens without labels": Case(_penalty_over_all_tokens, 0, "weighs the sums of ranks"),
    "average of means of which one is empty": Case(_of_few(_mean_of_means_of_few), 0, "weighs the sums of ranks"),
    "average of stacked means of which one is empty": Case(_stacked_means_of_few, 0, "weighs the sums of ranks"),
    "in the second micro-batch": Case(_later(_mean_of_means), 1, "weighs labels by rank", accumulation=2),
}
RIGHT = {
    "the engine's": Case(lambda step, outputs, *rest: outputs.loss, None),
    "by the recipe": Case(_recipe, None),
    "squared": Case(lambda step, outputs, *rest: outputs.loss**2, None),
    "scaled": Case(lambda *given: 3 * _recipe(*given), None),
    "declared": Case(_local, None, declared="local_mean"),
    "declared, under a head of zeros": Case(_local, None, declared="local_mean", zero_head=True),
    "accumulated": Case(_recipe, None, accumulation=3),
    "with a term of z": Case(
        lambda step, outputs, batch, handle, memory: (
            outputs.loss + 1e-2 * handle.mean(outputs.logits.logsumexp(-1).square(), batch)
        ),
        None,
    ),
    "by class": Case(_by_class, None, warns="weighs tokens unlike each other"),
    "focal": Case(_focal_by_recipe, None, warns="weighs tokens unlike each other"),
    "by sequence": Case(_by_sequence, None),
    "a quarter, of which one rank has nothing": Case(_of_few(_mean_of_few), None),
    "smoothed, with a penalty": Case(_smoothed, None, warns="is not the cross entropy of single tokens"),
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[tuple[int | None, str, list[str]]]]:
    """By case and rank: the step that was refused, the message, and warnings."""
    by_rank = run_deepspeed(_train_all, 2, timeout_s=200)
    return {name: [of_rank[name] for of_rank in by_rank] for name in {**WRONG, **RIGHT}}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_loss_is_refused_at_the_step_where_it_begins(name: str, outcomes: Any) -> None:
    (step, text, _), *others = outcomes[name]
    assert all(other[:2] == (step, text) for other in others), outcomes[name]
    assert step == WRONG[name].begins and WRONG[name].says in text, (step, text)


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_loss_is_left_alone(name: str, outcomes: Any) -> None:
    for rank, (step, text, warnings) in enumerate(outcomes[name]):
        assert step is None, text
        expected = [RIGHT[name].warns] if RIGHT[name].warns and rank == 0 else []
        assert len(warnings) == len(expected) and all(map(str.__contains__, warnings, expected)), warnings


def _batches(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    batches = []
    for number in range(count):
        ids = torch.randint(3, 64, (2, 37), generator=generator)
        labels = ids.clone()
        labels[:, : 3 + 5 * number] = -100  # in the part of rank 0 alone, more from step to step
        batches.append({"input_ids": ids, "labels": labels})
    return batches


def _train_all(rank: int) -> dict[str, tuple[int | None, str, list[str]]]:
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ds_hetero.runtime.step_checks").addHandler(handler)
    outcomes = {}
    for name, case in {**WRONG, **RIGHT}.items():
        warnings.clear()
        step, text = _train(case)
        outcomes[name] = step, text, list(warnings)
    return outcomes


def _train(case: Case) -> tuple[int | None, str]:
    import deepspeed

    import ds_hetero
    from ds_hetero.errors import HeteroError

    handle = ds_hetero.register()
    model = llama()
    if case.zero_head:
        torch.nn.init.zeros_(model.lm_head.weight)
    config = ds_config(1, UNEVEN_2, gradient_accumulation_steps=case.accumulation)
    config["heterogeneity"] |= {"verify": "off", **({"loss": case.declared} if case.declared else {})}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    memory: dict[str, Any] = {}
    micro_batches = _batches(STEPS * case.accumulation)
    for number, batch in enumerate(handle.dataloader(micro_batches, batches="same")):
        step, micro_step = divmod(number, case.accumulation)
        outputs = engine(**batch)
        # Of an accumulation the last micro-batch is the wrong one.
        wrong = step if micro_step == case.accumulation - 1 or case.begins is None else 0
        try:
            engine.backward(case.loss(wrong, outputs, batch, handle, memory))
            engine.step()
        except HeteroError as error:
            handle.undo()
            return step, str(error)
    handle.undo()
    return None, ""
