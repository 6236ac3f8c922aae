"""The long run and the soak in their quick forms: real ranks, real faults, readings of real processes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.elastic.nodes import environment_of_ranks
from tests.support import ROOT

# Four minutes on two cores: they run before a release, as whole sweeps do.
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(600), pytest.mark.sweep(keep=0)]


def test_a_chain_of_faults_and_resumes_trains_as_one_process(tmp_path):
    code, result = _run("benchmarks.long_run", tmp_path)
    assert code == 0, result["checks"]
    assert result["losses"]["steps"] == result["steps"]
    assert result["losses"]["largest"] < 1e-4
    assert [event["kind"] for event in result["events"]] == ["worker", "resume", "notice", "join", "resume"]
    assert {event["ranks"] for event in result["events"]} == {3, 4}


def test_a_soak_reads_every_process_and_folder_and_no_file_or_thread_is_left_behind(tmp_path):
    _, result = _run("benchmarks.long_run.soak", tmp_path)  # most of its steps are a warm-up, in which memory may grow
    assert (result["steps"], result["starts"]) == (600, 1)
    rows = {row["of"]: row for row in result["rows"]}
    processes = [*(f"rank {rank}" for rank in range(3)), *(f"agent n{n}" for n in range(3)), "node_server n0"]
    counted = [f"{process} {what}" for process in processes for what in ("open_files", "threads")]
    assert all(rows[name]["mean"] > 1 for name in counted)
    assert [name for name in (*counted, "/dev/shm files", "checkpoint files") if rows[name]["grows"]] == []


def _run(module, folder):
    """Run a command in its quick form; return its exit code and its result."""
    output = folder / "result.json"
    run = subprocess.run(
        [sys.executable, "-m", module, "--quick", "--json", "--folder", folder / "run", "--output", output],
        cwd=ROOT,
        env=environment_of_ranks(),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert output.exists(), run.stdout[-1500:] + run.stderr[-1500:]
    return run.returncode, json.loads(output.read_text())
