"""The record of a job that ends too early to have one. Budget: 3 s."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_hetero.decision.decide import decide
from ds_hetero.job.run_record import RunRecord
from tests.unit.decision.test_job_decision import cluster, facts_of


def test_a_job_without_measured_steps_says_since_when_they_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = decide(facts_of(cluster=cluster(2), schedule="ring", seq_len=8192), 2, measured=None, on_host=False)
    RunRecord(start, tmp_path / "run.json", lambda: ()).end("normally")
    said = capsys.readouterr().err
    assert "no run.json: the job ended before a step was measured; the first two optimizer steps after" in said
    assert not (tmp_path / "run.json").exists()
