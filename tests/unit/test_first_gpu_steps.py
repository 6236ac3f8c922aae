"""Steps of the first GPU run: each way of a job has the whole card, also after one that did not fit."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.first_gpu.lifted import lift_checks
from benchmarks.first_gpu.parts import Context
from benchmarks.first_gpu.sections import steps
from ds_hetero import registration


class _Model:
    """Refers to itself, as modules with hooks do: the collector alone frees it."""

    def __init__(self) -> None:
        self.own = self


@pytest.mark.parametrize("fits", [True, False])
def test_a_way_begins_without_the_model_of_the_one_before(
    fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models: list[weakref.ref[_Model]] = []
    left: list[int] = []

    def train_one(context: Context, job: Any) -> dict[str, float]:
        left.append(sum(model() is not None for model in models))
        model = _Model()
        models.append(weakref.ref(model))
        if not fits:
            raise torch.OutOfMemoryError("planted")
        return {"loss": 1.0, "grad_norm": 1.0}

    @contextlib.contextmanager
    def way(context: Context, name: str) -> Iterator[Any]:
        yield dict

    for name, stand_in in (("_steps", train_one), ("_way", way)):
        monkeypatch.setattr(steps, name, stand_in)
    monkeypatch.setattr(steps, "_be_one_rank", lambda context: None)
    monkeypatch.setattr(steps, "_predicted_s", lambda context, job: None)
    monkeypatch.setattr(steps, "lift_checks", list)
    rows: list[dict[str, Any]] = []
    context = Context(rank=0, ranks=1, rehearsal=True, folder=tmp_path, report=rows.append)
    gc.disable()
    try:
        steps.train(context, job=steps._SHORT)
    finally:
        gc.enable()
    assert len(left) == len(steps._SHORT.ways) > 1
    assert left == [0] * len(left)
    assert all(("left_out" in row) == (not fits) for row in rows)


def test_a_job_registers_on_releases_that_the_package_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "expect_package", registration.expect_package)  # put back at the end
    refusals = lift_checks()
    assert registration.expect_package("torch", "<1", ()) == ()
    assert registration.expect_package("torch", ">1", ()) == ()
    (refusal,) = refusals
    assert "Install torch<1" in refusal
