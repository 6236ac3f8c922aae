"""Three hundred mutated inputs through the readers; `benchmarks.fuzz` tries 30,000."""

from __future__ import annotations

import random

import pytest

from benchmarks.fuzz.kinds import KINDS
from benchmarks.fuzz.trials import fuzz


@pytest.mark.parametrize("name", KINDS)
def test_mutated_input_is_refused_clearly_or_makes_sense(name, caplog):
    caplog.set_level("CRITICAL")
    tally = fuzz(KINDS[name], 43, random.Random(name))
    assert tally.is_clean, "\n".join(tally.faults)
    assert tally.outcomes["accepted"] and tally.outcomes["clear error"]


@pytest.mark.parametrize("name", KINDS)
def test_the_examples_themselves_are_accepted(name):
    KINDS[name].read(KINDS[name].example)
