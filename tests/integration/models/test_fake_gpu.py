"""A step of a real model at real size on a GPU that does not exist: no layer waits for the host, no devices mix."""

import json
import subprocess
import sys

import pytest

from tests.support import ROOT


@pytest.mark.slow
def test_a_step_waits_once_and_launches_about_as_much_as_stock_ulysses():
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.fake_gpu", "--quick", "--json"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        timeout=900,
    )
    result = json.loads(run.stdout.splitlines()[-1])
    assert [row for row in result["ranks"] if "error" in row] == []
    assert (result["syncs_in_layers"], result["mixtures"]) == (0, 0)
    for row in result["ranks"]:
        forward = {place: count for place, count in row["sync_places"].items() if place.startswith("forward")}
        assert sum(forward.values()) == 1
        assert "gather_headers" in next(iter(forward))
        assert row["peak_bytes"] > row["resting_bytes"] > 0
    assert all(row["ratio"] <= 1.3 for row in result["launches"])
    assert run.returncode == 0
