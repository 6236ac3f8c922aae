"""Every architecture of transformers with a head of text, tiny, on uneven shards: exact, or refused by name.

Nothing is silently wrong, and no error leaves its reason out. All names, with what becomes of each, are in
sweep_outcomes.json, from which docs/architectures.md is made.

Budget: 480 s in CI, none in a quick run.
"""

from __future__ import annotations

import pytest

from tests.integration.sweep import architectures, outcomes
from tests.support import run_deepspeed
from tests.sweep_table import recorded

_PARTS = 16


@pytest.mark.slow
def test_every_architecture_of_transformers_is_in_the_record() -> None:
    names = [" ".join(name) for name in architectures()]
    assert sorted(recorded()) == sorted(names)
    assert {kind for kind, _ in recorded().values()} == {"exact", "refused", "not built"}
    kinds = [kind for kind, _ in recorded().values()]
    assert kinds.count("exact") + kinds.count("refused") >= 120


@pytest.mark.sweep(keep=4)
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", range(_PARTS))
def test_every_architecture_is_exact_or_refused_by_name(part: int) -> None:
    names = architectures()[part::_PARTS]
    first, second = run_deepspeed(outcomes, 2, names, timeout_s=250)
    assert {name: outcome.kind for name, outcome in first.items()} == {name: o.kind for name, o in second.items()}
    faults = {name: outcome for name, outcome in first.items() if outcome.kind in ("wrong", "obscure")}
    assert not faults, faults
    changed = {name: outcome for name, outcome in first.items() if outcome.kind != recorded()[name][0]}
    assert not changed, f"the record is not of this code; python -m tests.integration.sweep writes it anew: {changed}"
