"""A job whose router prefers an expert names its rank, offers other shares, and writes the loads into run.json.

Budget: 10 s.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

from ds_hetero.reporting.run_file import read_run
from tests.integration.loops.test_experts import config_of, mixture
from tests.integration.tiny import UNEVEN_2, adam, batches
from tests.support import run_deepspeed

STEPS = 8  # two are not observed, then an observation every two


def test_an_expert_that_all_tokens_choose_is_named_and_recorded(tmp_path: Path) -> None:
    lines, others = run_deepspeed(_train, 2, str(tmp_path))
    assert others == []
    (line,) = lines
    assert "the experts of rank 1 compute 50% of all rows, planned were 25%; expert 3 alone gets 50%" in line
    assert '{"experts": [4, 0]} would save 33% of the experts\' time' in line
    loads = read_run(tmp_path / "run.json").experts
    assert loads is not None and loads["experts"] == [3, 1]
    assert loads["planned_share"] == [0.75, 0.25] and loads["share"] == [0.5, 0.5]
    (rows,) = loads["rows"]  # the first layer is dense; 74 tokens choose two experts each, in 6 steps
    assert sum(rows) == 74 * 2 * 6 and len(rows) == 4 and rows[3] == 74 * 6


def _train(rank: int, folder: str) -> list[str]:
    """Train, and return the announcements of rank 0."""
    import deepspeed

    import ds_hetero

    handle = ds_hetero.register()
    model = mixture("deepseek")
    for module in model.modules():
        bias = getattr(module, "e_score_correction_bias", None)
        if bias is not None:
            bias[3] = 100.0  # every token chooses expert 3
    schedule: dict[str, Any] = {**UNEVEN_2, "num_kv_heads": 4}
    config = config_of(1, schedule, [3, 1], steps_per_print=2)
    config["heterogeneity"]["report"] = folder
    lines: list[str] = []
    with mock.patch("ds_hetero.job.monitor.announce", lines.append):
        engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=config)
        for batch in handle.dataloader(batches(STEPS), batches="same"):
            engine.backward(engine(**batch).loss)
            engine.step()
        engine.destroy()
    return [line for line in lines if line.startswith("step")]
