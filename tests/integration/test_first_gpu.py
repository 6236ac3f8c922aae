"""The first GPU run, rehearsed from end to end: every part has an outcome, and every finding its row. Budget: 90 s."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.first_gpu.__main__ import main
from benchmarks.first_gpu.findings import REHEARSED
from benchmarks.first_gpu.judgements import FINDINGS
from benchmarks.first_gpu.plan import SECTIONS
from benchmarks.first_gpu.record import parts_of

pytestmark = [pytest.mark.alone, pytest.mark.slow]  # every section, on all its ranks, each part against a clock


def test_every_section_runs_in_the_rehearsal(tmp_path: Path) -> None:
    output = tmp_path / "rehearsed.json"
    assert main(["--rehearse", "--output", str(output)]) == 0, output.with_suffix(".md").read_text()
    result, page = json.loads(output.read_text()), output.with_suffix(".md").read_text()
    entries = {f"{entry['section']}: {entry['part']}": entry for entry in result["parts"]}
    assert set(entries) == {f"{section.name}: {part.name}" for section, part in parts_of(SECTIONS)}
    for name, part in ((f"{section.name}: {part.name}", part) for section, part in parts_of(SECTIONS)):
        entry = entries[name]
        assert entry["outcome"] in part.outcomes, (name, entry)
        assert (entry["outcome"] == "left out") == bool(part.not_rehearsed), (name, entry)
        assert entry["rows"] or part.not_rehearsed, f"{name} has reported nothing"
        for row in entry["rows"]:
            assert "refused" not in row, (name, row)
            assert row.get("right", True) and row.get("same", True), (name, row)
    assert [each["name"] for each in result["findings"]] == [each.name for each in FINDINGS]
    for each in result["findings"]:
        assert each["verdict"] == REHEARSED, each
        assert each["figure"].startswith("rehearsed, confirms nothing: "), each
        assert f"| {each['name']} |" in page
