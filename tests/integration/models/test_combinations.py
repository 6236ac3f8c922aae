"""Six random combinations of model, schedule, ZeRO stage, batch and adapter train as one process.

`python -m tests.integration.combinations --seed N` runs a hundred others.

Budget: 40 s in CI, none in a quick run.
"""

from __future__ import annotations

import pytest

from tests.integration.combinations import described, outcomes_of

_SEED = 7


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_random_combinations_train_as_one_process() -> None:
    outcomes = outcomes_of(list(range(54, 60)), _SEED)
    inexact = {n: (outcome, described(_SEED, n)) for n, outcome in outcomes.items() if outcome.kind != "exact"}
    assert not inexact, inexact
