"""The self-check raises no alarm on any architecture that is exact: all of them, tiny, in one world each time.

Budget: 150 s in CI, none in a quick run.
"""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch

from tests.integration.architectures import CAUSAL, MASKED, build
from tests.integration.self_checking import batch_of, verdict
from tests.integration.tiny import UNEVEN_2
from tests.support import run_ranks

ARCHITECTURES = [(name, False) for name in CAUSAL] + [(name, True) for name in MASKED]
KINDS = ("plain", "packed", "left", "right")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_exact_architecture_raises_an_alarm(dtype: str, part: int) -> None:
    assert run_ranks(_alarms, 2, dtype, ARCHITECTURES[part::4], timeout_s=500) == [{}, {}]


def _alarms(rank: int, dtype: str, architectures: list[tuple[str, bool]]) -> dict[str, str]:
    """By architecture and kind of batch, what the self-check says; those that pass are left out."""
    alarms: dict[str, str] = {}
    for name, masked in architectures:
        model = build(name, getattr(torch, dtype), masked=masked)
        for kind in KINDS:
            alarms[f"{name}{' masked' * masked}, {kind}"] = _verdict_or_error(model, kind)
    assert len(alarms) == len(architectures) * len(KINDS)
    return {name: text for name, text in alarms.items() if text}


def _verdict_or_error(model: Any, kind: str) -> str:
    try:
        return verdict(model, batch_of(kind), UNEVEN_2)
    except Exception:
        return traceback.format_exc()
