"""Terms beside a loss that was weighed, where ranks take different batches: which of them no rank has weighed.

Budget: 5 s.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_hetero.engine.trained.loss_unit import LossUnit
from ds_hetero.engine.trained.unlike_losses import UnlikeLosses, _items_of_script, find_unweighed_term
from ds_hetero.errors import ConfigError
from ds_hetero.runtime.data.loss_graph import read_terms
from ds_hetero.runtime.data.loss_units import UnitCounts
from ds_hetero.runtime.data.loss_weights import RankLoss, weigh_terms
from ds_hetero.runtime.data.probe_pace import ProbeTimes
from ds_hetero.runtime.loss import scaled_loss

MODEL = nn.Linear(4, 3)
PENALTIES: dict[str, Callable[[Tensor], Tensor]] = {
    "std": lambda weight: weight.std(),
    "var of rows": lambda weight: weight.var(1).sum(),
    "std and mean": lambda weight: torch.std_mean(weight)[0],
    "max": lambda weight: weight.abs().max(),
    "max of rows": lambda weight: weight.max(1).values.sum(),
    "min": lambda weight: weight.min(),
    "amax": lambda weight: weight.amax(),
    "logsumexp": lambda weight: weight.logsumexp((0, 1)),
    "entropy": lambda weight: -(weight.softmax(1) * weight.log_softmax(1)).sum(),
    "median": lambda weight: weight.median(),
    "product": lambda weight: weight.prod(),
    "inverse": lambda weight: (1 / weight.norm()) + weight.square().sum().rsqrt(),
    "clamped": lambda weight: weight.clamp(max=0.1).log1p().sum(),
}
WEIGHED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "itself": lambda loss, term, outputs: loss,
    "of micro-batches": lambda loss, term, outputs: loss.float() / 3,
    "a mean of one number": lambda loss, term, outputs: loss.mean(),
    "a stack of losses": lambda loss, term, outputs: torch.stack([loss, 0.1 * term]).sum(),
    "a guard": lambda loss, term, outputs: torch.nan_to_num(loss),
    "a penalty": lambda loss, term, outputs: loss + sum(p.square().sum() for p in MODEL.parameters()),
    "a learned weight": lambda loss, term, outputs: loss * torch.exp(-MODEL.bias[0]) + MODEL.bias[0],
    **{
        f"a penalty by {name}": lambda loss, term, outputs, of=penalty: loss + 0.1 * of(MODEL.weight)  # type: ignore[misc]
        for name, penalty in PENALTIES.items()
    },
}
OF_A_RANK: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "MeanBackward0": lambda loss, term, outputs: loss + 0.1 * outputs.square().mean(),
    "SumBackward0": lambda loss, term, outputs: torch.stack([loss, outputs.square().mean()]).sum(),
    "PowBackward0": lambda loss, term, outputs: loss.square(),
    "MulBackward0": lambda loss, term, outputs: loss * term,
    "DivBackward0": lambda loss, term, outputs: 1.0 * term / loss,
    "ClampBackward1": lambda loss, term, outputs: loss + term.clamp(max=10.0),
    "LogsumexpBackward0": lambda loss, term, outputs: term + loss + outputs.reshape(-1).logsumexp(0),
}


def _found(make: Callable[[Tensor, Tensor, Tensor], Tensor]) -> str | None:
    outputs = MODEL(torch.ones(5, 4))
    term = outputs.logsumexp(-1).sum() / 7 * 2  # of handle.mean with num_items
    assert term.grad_fn is not None
    return find_unweighed_term(make(scaled_loss(outputs.square().sum(), 2.0), term, outputs), [term.grad_fn])


@pytest.mark.parametrize("name", WEIGHED)
def test_what_is_made_of_weighed_losses_and_of_parameters_is_right(name: str) -> None:
    assert _found(WEIGHED[name]) is None


@pytest.mark.parametrize("name", PENALTIES)
def test_a_penalty_on_parameters_is_the_same_on_all_ranks(name: str) -> None:
    outputs = MODEL(torch.ones(5, 4))
    read = read_terms(outputs.square().mean() + PENALTIES[name](MODEL.weight), 5)
    assert read.problem is None and {term.kind for term in read.terms} == {"mean", "common"}
    of_samples = read_terms(outputs.square().mean() + PENALTIES[name](outputs), 5)
    assert of_samples.problem is not None or all(term.kind != "common" for term in of_samples.terms)


@pytest.mark.parametrize("name", OF_A_RANK)
def test_a_term_of_the_samples_of_a_rank_is_named(name: str) -> None:
    assert _found(OF_A_RANK[name]) == name


def _read(samples: int, items: float, beside: bool) -> RankLoss:
    """The loss of a rank with so many samples: a term of handle.mean with ``num_items``, a mean ``beside`` it."""
    outputs = MODEL(torch.ones(samples, 4))
    term = outputs.square().sum() / items * 2
    assert term.grad_fn is not None
    loss = 0.1 * term + (outputs.square().mean() if beside else 0.0)
    terms = read_terms(loss, samples, [term.grad_fn])
    counts = UnitCounts(samples, samples, samples)
    return RankLoss([*terms.terms], terms.problem, samples, counts, [[] for _ in terms.terms], {}, False, None, TIMES)


TIMES = ProbeTimes(0.0, 0.0)


@pytest.mark.parametrize("beside", [False, True])
def test_a_term_by_num_items_needs_no_loss_by_num_items_beside_it(beside: bool) -> None:
    of_ranks = [_read(3, 28.0, beside), _read(1, 28.0, beside)]
    assert _items_of_script(of_ranks) == 28
    weights = weigh_terms(of_ranks, 0, "Model", {}, _items_of_script(of_ranks))
    assert [(one.kind, one.factor) for one in weights if one.kind != "mean"] == [("items", 1.0)]
    assert [one.factor for one in weights if one.kind == "mean"] == [1.5] * beside


def test_a_term_by_num_items_under_a_declared_unit_is_refused() -> None:
    """Weighed by the samples of the rank once more, it would be too large on some ranks, and too small on others."""
    term = MODEL(torch.ones(3, 4)).sum()
    unit = LossUnit()
    unit.declare("sample_mean")
    batches: Any = SimpleNamespace(model=MODEL, unit=unit, times_ranks=[term.grad_fn])
    batch: Any = None
    with pytest.raises(ConfigError, match="Leave num_items out of handle"):
        UnlikeLosses(batches).weigh(term, batch, 1)
