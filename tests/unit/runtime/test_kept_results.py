"""Results of a checkpointed piece's first run are taken by its own recomputation, once and in order, or not at all."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ds_hetero.errors import ModelError
from ds_hetero.runtime.attention.kept_results import checkpoint_keeping_attention, keep_or_compute

REENTRANT, OTHER = partial(checkpoint, use_reentrant=True), partial(checkpoint, use_reentrant=False)
both = pytest.mark.parametrize("torch_checkpoint", [REENTRANT, OTHER], ids=["reentrant", "non-reentrant"])


class _Attention(torch.autograd.Function):
    """A phase that says how often it is computed, and squares its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, computed: list[str], name: str) -> Tensor:
        def compute() -> list[Tensor]:
            computed.append(name)
            return [x * x, x.exp()]

        out, saved = keep_or_compute(name, (x,), compute)
        ctx.save_for_backward(x, saved)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, saved = ctx.saved_tensors
        return 2 * x * grad * (saved / x.exp()), None, None


def _run(torch_checkpoint: Any, layer: Any, x: Tensor) -> Tensor:
    return checkpoint_keeping_attention(torch_checkpoint, False, layer, x)


def _attention(x: Tensor, computed: list[str], name: str = "ring") -> Tensor:
    return _Attention.apply(x, computed, name)  # type: ignore[no-untyped-call, no-any-return]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # in the evaluation
@both
def test_a_layer_called_twice_in_two_micro_batches_takes_each_time_its_own(torch_checkpoint: Any) -> None:
    computed: list[str] = []

    def layer(x: Tensor) -> Tensor:
        return _attention(_attention(x.sin(), computed, "first"), computed, "second").cos()

    def model(x: Tensor, kept: bool) -> Tensor:
        for _ in range(2):
            x = _run(torch_checkpoint, layer, x) if kept else layer(x)
        return x.sum()

    inputs = [torch.linspace(0.1, 1, 5, dtype=torch.float64) * scale for scale in (1, 2)]
    grads = []
    for kept in (False, True):
        leaves = [x.clone().requires_grad_() for x in inputs]
        computed.clear()
        losses = [model(x, kept) for x in leaves]  # the forwards of both come before the backward of the first
        with torch.no_grad():
            model(leaves[0], kept)  # an evaluation between them
        for loss in losses:
            loss.backward()
        grads.append([x.grad for x in leaves])
        assert computed == ["first", "second"] * 6
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@both
def test_results_are_given_away_and_freed(torch_checkpoint: Any) -> None:
    """In the backward layer by layer, and with the graph if there is no backward."""
    kept: list[Any] = []
    alive: list[int] = []

    class Noting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            def compute() -> list[Tensor]:
                result = x * 1
                kept.append(weakref.ref(result.untyped_storage()))
                return [result + 1, result]

            out, _ = keep_or_compute("ring", (x,), compute)
            return out.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            gc.collect()
            alive.append(sum(storage() is not None for storage in kept))
            return grad

    def model() -> Tensor:
        x = torch.ones(3, requires_grad=True)
        for _ in range(3):
            x = _run(torch_checkpoint, lambda x: Noting.apply(x.sin()).sin(), x)
        return x.sum()

    model().backward()
    assert alive == sorted(alive, reverse=True)
    assert alive[-1] == 0
    kept.clear()
    loss = model()
    gc.collect()
    assert all(storage() is not None for storage in kept)
    del loss
    gc.collect()
    assert all(storage() is None for storage in kept)


def test_a_retained_graph_can_be_gone_through_again() -> None:
    computed: list[str] = []
    x = torch.ones(3, requires_grad=True)
    loss = _run(OTHER, lambda x: _attention(x.sin(), computed).sin(), x).sum()
    loss.backward(retain_graph=True)
    once = x.grad.clone()
    loss.backward()
    assert torch.equal(x.grad, 2 * once)
    assert len(computed) == 1


@both
def test_a_recomputation_that_differs_is_refused(torch_checkpoint: Any) -> None:
    names = iter(("ring", "all_to_all"))
    x = torch.ones(3, requires_grad=True)
    loss = _run(torch_checkpoint, lambda x: _attention(x.sin(), [], next(names)).sin(), x).sum()
    with pytest.raises(ModelError, match=r"phase 1 was ring of \(3,\) float32 and is now all_to_all of"):
        loss.backward()


def test_a_recomputation_with_more_attention_is_refused() -> None:
    """Reentrant; the other kind ends a recomputation where the first run has ended."""
    counts = iter((1, 2))

    def more(x: Tensor) -> Tensor:
        for _ in range(next(counts)):
            x = _attention(x.sin(), []).sin()
        return x

    x = torch.ones(3, requires_grad=True)
    with pytest.raises(ModelError, match="more attention than its first run"):
        _run(REENTRANT, more, x).sum().backward()


@both
def test_a_result_that_the_model_writes_into_is_refused(torch_checkpoint: Any) -> None:
    x = torch.ones(3, requires_grad=True)
    loss = _run(torch_checkpoint, lambda x: _attention(x.sin(), []).mul_(2).sin(), x).sum()
    with pytest.raises(ModelError, match="has written into it in place"):
        loss.backward()


@both
def test_an_error_in_the_first_run_leaves_nothing_behind(torch_checkpoint: Any) -> None:
    computed: list[str] = []

    def fails(x: Tensor) -> Tensor:
        _attention(x, computed)
        raise RuntimeError("out of memory")

    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="out of memory"):
        _run(torch_checkpoint, fails, x)
    _attention(x, computed).sum().backward()  # outside of any checkpoint
    _run(torch_checkpoint, lambda x: _attention(x, computed).sin(), x).sum().backward()
    assert len(computed) == 3
