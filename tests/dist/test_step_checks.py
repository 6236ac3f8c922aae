"""Checks of a step: one exchange, one verdict on all ranks, what is undecided said once. Budget: 10 s."""

from __future__ import annotations

import logging

import torch

from ds_hetero.errors import BatchError, ConfigError, HeteroError
from ds_hetero.runtime.step_checks import StepChecks, Undecided
from tests.support import run_ranks


class Sums:
    """A check whose numbers must add up to zero over the ranks; above ten it cannot tell."""

    width = 2

    def __init__(self, own):
        self.own = own

    def numbers(self):
        if isinstance(self.own, Exception):
            raise self.own
        return torch.tensor([self.own, 0.0])

    def verdict(self, rows):
        total = sum(row[0] for row in rows)
        if total > 10:
            return Undecided("the sums are too large to tell")
        return ConfigError(f"the sum is {total:g}") if total else None


def test_all_ranks_judge_the_numbers_of_all():
    outcomes = run_ranks(_judge, 2)
    for rank, (fine, wrong, failed, late) in enumerate(outcomes):
        assert fine == "" and wrong == "ConfigError: the sum is 3" and late == "ConfigError: the sum is 5"
        assert failed == ("BatchError: no number" if rank else "BatchError: on rank 1: no number")


def test_what_is_undecided_is_said_once_by_rank_0():
    assert run_ranks(_count_warnings, 2) == [1, 0]


def _judge(rank):
    first, second = Sums(0.0), Sums(0.0)
    checks = StepChecks([first])
    StepChecks().run()  # without checks there is no collective
    outcomes = [_text(checks)]
    first.own = 1.0 + rank
    outcomes.append(_text(checks))
    first.own = BatchError("no number") if rank else 0.0
    outcomes.append(_text(checks))
    first.own, second.own = 0.0, 5.0 * rank
    checks.add(second)
    outcomes.append(_text(checks))
    return outcomes


def _text(checks):
    try:
        checks.run()
    except HeteroError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _count_warnings(rank):
    seen = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    logging.getLogger("ds_hetero").addHandler(handler)
    checks = StepChecks([Sums(20.0)])
    checks.run()
    checks.run()
    return seen.count("the sums are too large to tell")
