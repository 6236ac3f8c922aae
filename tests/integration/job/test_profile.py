"""``ds-hetero profile`` under launchers, on real ranks. Budget: 40 s."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ds_hetero.cluster import load_cluster
from tests.support import ROOT, free_port

pytestmark = [pytest.mark.slow, pytest.mark.alone]  # a launcher and its ranks import everything from nothing

LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m"],
    "deepspeed": ["-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--module"],
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_writes_one_cluster_file_with_measurements(launcher: str, tmp_path: Path) -> None:
    out = tmp_path / "cluster.yaml"
    port = {"torchrun": "--master-port", "deepspeed": "--master_port"}[launcher]
    start, *options = LAUNCHERS[launcher][1:]
    command = [sys.executable, "-m", start, port, str(free_port()), *options, "ds_hetero.cli"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    run = subprocess.run(
        [*command, "profile", "--out", str(out), "--window-s", "0.001"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("2 ranks on 1 node measured in ") == 1
    assert run.stderr.count("measuring ") == 1  # one bar, of rank 0
    cluster = load_cluster(out)
    assert cluster.num_ranks == 2 and cluster.devices[0].peak_flops_per_s > 1e8
    text = out.read_text()
    assert "fit_errors" in text and "samples" in text
