"""Terms beside a loss that was weighed, where ranks take different batches: which of them no rank has weighed.

Budget: 5 s.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ds_hetero.engine.unlike_losses import term_of_rank
from ds_hetero.runtime.loss import scaled_loss

MODEL = nn.Linear(4, 3)
WEIGHED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "itself": lambda loss, term, outputs: loss,
    "of micro-batches": lambda loss, term, outputs: loss.float() / 3,
    "a mean of one number": lambda loss, term, outputs: loss.mean(),
    "a stack of losses": lambda loss, term, outputs: torch.stack([loss, 0.1 * term]).sum(),
    "a guard": lambda loss, term, outputs: torch.nan_to_num(loss),
    "a penalty": lambda loss, term, outputs: loss + sum(p.square().sum() for p in MODEL.parameters()),
    "a learned weight": lambda loss, term, outputs: loss * torch.exp(-MODEL.bias[0]) + MODEL.bias[0],
}
OF_A_RANK: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "MeanBackward0": lambda loss, term, outputs: loss + 0.1 * outputs.square().mean(),
    "SumBackward0": lambda loss, term, outputs: torch.stack([loss, outputs.square().mean()]).sum(),
    "LogsumexpBackward0": lambda loss, term, outputs: term + loss + outputs.reshape(-1).logsumexp(0),
}


def _found(make: Callable[[Tensor, Tensor, Tensor], Tensor]) -> str | None:
    outputs = MODEL(torch.ones(5, 4))
    term = outputs.logsumexp(-1).sum() / 7 * 2  # of handle.mean with num_items
    assert term.grad_fn is not None
    return term_of_rank(make(scaled_loss(outputs.square().sum(), 2.0), term, outputs), [term.grad_fn])


@pytest.mark.parametrize("name", WEIGHED)
def test_what_is_made_of_weighed_losses_and_of_parameters_is_right(name: str) -> None:
    assert _found(WEIGHED[name]) is None


@pytest.mark.parametrize("name", OF_A_RANK)
def test_a_term_of_the_samples_of_a_rank_is_named(name: str) -> None:
    assert _found(OF_A_RANK[name]) == name
