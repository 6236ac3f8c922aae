"""Verdicts on copies of a model that ranks hold: where they differ, and where that may be right."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ds_hetero.errors import ModelError
from ds_hetero.runtime.step_checks import SameSwitches, Undecided, Verdict, same_parameters, same_untrained
from ds_hetero.runtime.step_checks.same_values import SameValues

RANKS = 4
REPLICAS = [(0, 1), (2, 3)]


def _copies() -> list[nn.Module]:
    def copy() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 300), nn.BatchNorm1d(300), nn.Linear(300, 300), nn.Dropout(0.1))

    return [copy() for _ in range(RANKS)]


def _verdict(
    copies: list[nn.Module], check_of: Callable[[nn.Module], SameValues | SameSwitches], steps: int = 1
) -> Verdict:
    checks = [check_of(copy) for copy in copies]
    for _ in range(steps):
        rows = [
            [float(number) for part in map(torch.as_tensor, check.numbers()) for number in part.reshape(-1)]
            for check in checks
        ]
        verdicts = [check.verdict(rows) for check in checks]
        assert len({str(verdict) for verdict in verdicts}) == 1
        if verdicts[0] is not None:
            return verdicts[0]
    return None


def _untrained(module: nn.Module) -> SameValues:
    return same_untrained(module, frozen=True, replicas=REPLICAS)


def _switches(module: nn.Module) -> SameSwitches:
    return SameSwitches(module, is_split=True)


def test_equal_copies_are_left_alone() -> None:
    for check_of in (same_parameters, _untrained, _switches):
        assert _verdict(_copies(), check_of, steps=3) is None


@torch.no_grad()
def test_statistics_may_differ_between_replicas_and_not_inside_one() -> None:
    copies = _copies()
    for rank in REPLICAS[1]:
        copies[rank][1].running_mean += 0.5  # type: ignore[operator]
    told = _verdict(copies, _untrained)
    assert isinstance(told, Undecided) and "1.running_mean" in told.text
    copies[3][1].running_mean += 0.5  # type: ignore[operator]
    refused = _verdict(copies, _untrained)
    assert isinstance(refused, ModelError) and "1.running_mean" in str(refused)


@torch.no_grad()
def test_caches_of_other_lengths_are_told() -> None:
    copies = _copies()
    for rank, copy in enumerate(copies):
        copy.register_buffer("cosines", torch.ones(64 + 64 * rank), persistent=False)
    assert isinstance(_verdict(copies, _untrained), Undecided)


@torch.no_grad()
def test_rows_of_a_large_weight_are_found_within_its_parts() -> None:
    copies = _copies()
    copies[1][2].weight[-1] *= 1.5  # type: ignore[index]  # 90,000 numbers: the last rows are in the second part
    assert _verdict(copies, same_parameters) is None
    assert isinstance(_verdict(copies, same_parameters, steps=2), ModelError)


@torch.no_grad()
def test_rounding_of_other_gpus_is_left_alone() -> None:
    copies = _copies()
    for copy in copies[1:]:
        for parameter in copy.parameters():
            parameter *= 1 + 2e-7 * torch.randn_like(parameter)
    assert _verdict(copies, same_parameters) is None


def test_frozen_weights_and_adapters_are_compared_each_by_their_rule() -> None:
    copies = _copies()
    for copy in copies:
        copy[0].requires_grad_(False)
    assert _verdict(copies, same_parameters) is _verdict(copies, _untrained) is _verdict(copies, _switches) is None
    with torch.no_grad():
        copies[2][0].weight += 1  # type: ignore[operator]
    assert _verdict(copies, same_parameters) is None
    assert isinstance(_verdict(copies, _untrained), ModelError)


def test_hooks_of_a_logger_on_one_rank_are_told_and_frozen_layers_refused() -> None:
    copies = _copies()
    copies[0][0].weight.register_hook(lambda gradient: None)  # type: ignore[operator]
    told = _verdict(copies, _switches)
    assert isinstance(told, Undecided) and told.subject == "hooks"
    copies[0][2].requires_grad_(False)
    refused = _verdict(copies, _switches)
    assert isinstance(refused, ModelError) and "requires_grad" in str(refused)
