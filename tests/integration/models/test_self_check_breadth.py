"""The self-check raises no alarm on any architecture that is exact: all of them, tiny, each behind an engine.

Budget: 150 s in CI, none in a quick run.
"""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch

from tests.integration.architectures import CAUSAL, MASKED, build
from tests.integration.self_checking import batch_of, unchanged
from tests.integration.tiny import UNEVEN_2, ds_config
from tests.support import run_deepspeed

ARCHITECTURES = [(name, False) for name in CAUSAL] + [(name, True) for name in MASKED]
KINDS = ("plain", "packed", "left", "right")


@pytest.mark.sweep(keep=2)
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_exact_architecture_raises_an_alarm(dtype: str, part: int) -> None:
    assert run_deepspeed(_alarms, 2, dtype, ARCHITECTURES[part::4], timeout_s=500) == [{}, {}]


def _alarms(rank: int, dtype: str, architectures: list[tuple[str, bool]]) -> dict[str, str]:
    """By architecture and kind of batch, what the self-check says; those that pass are left out."""
    alarms: dict[str, str] = {}
    for name, masked in architectures:
        model = build(name, getattr(torch, dtype), masked=masked)
        for kind, alarm in _alarms_of(model, dtype).items():
            alarms[f"{name}{' masked' * masked}, {kind}"] = alarm
    assert len(alarms) == len(architectures) * len(KINDS)
    return {name: text for name, text in alarms.items() if text}


def _alarms_of(model: Any, dtype: str) -> dict[str, str]:
    """By kind of batch, what the loader of an engine says before it gives the batch out."""
    import deepspeed

    import ds_hetero
    from ds_hetero.frameworks.transformers.model.model_checks import head_counts

    handle = ds_hetero.register()
    num_heads, num_kv_heads = head_counts(model)
    schedule = {**UNEVEN_2, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
    config = ds_config(0, schedule, gradient_clipping=0.0, bf16={"enabled": dtype == "bfloat16"})
    config["heterogeneity"]["verify"] = "always"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    alarms = {kind: _alarm_or_error(model, handle.for_engine(engine), kind) for kind in KINDS}
    engine.destroy()
    handle.registry.find(model).restore()
    return alarms


def _alarm_or_error(model: Any, handle: Any, kind: str) -> str:
    batch = batch_of(kind)
    try:
        with unchanged(model):
            list(handle.dataloader([batch], batches="same"))
        return ""
    except Exception:
        return traceback.format_exc()
