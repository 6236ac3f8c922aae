"""A torchrun of the user's own on two emulated nodes, by its ``--rdzv-backend``; workers import for themselves."""

import os
import random
import signal
import subprocess
import sys

import pytest

from benchmarks.elastic.faults import FaultRun
from benchmarks.elastic.nodes import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.alone]

EVERY = 2


def _start(cluster, node, num_nodes, steps):
    """torchrun on one node, with its output in the node's log."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", f"1:{num_nodes}", "--max-restarts", "100"]
    command += ["--nproc-per-node", str(node.workers), "--monitor-interval", "0.1", "--rdzv-id", cluster.job]
    command += ["--rdzv-backend", "ds_hetero", "--rdzv-endpoint", cluster.nodes[0].address, "-m", "ds_hetero.run"]
    script = [str(cluster.script), "--events", str(cluster.log), "--steps", str(steps), *cluster.arguments]
    with (cluster.folder / f"{node.name}.log").open("ab") as log:
        return subprocess.Popen(
            [*command, *script],
            env={**cluster.environment, "DS_HETERO_ELASTIC_NODE": node.name},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def test_workers_of_two_nodes_go_on_after_a_kill_and_nothing_is_left_at_the_end(tmp_path):
    cluster = Cluster(tmp_path, [1, 1], ["--stage", "1", "--every", str(EVERY)], None)
    agents = [_start(cluster, node, 2, steps=16) for node in cluster.nodes]
    try:
        assert cluster.wait_for(lambda events: any(e["event"] == "step" and e["step"] > 3 for e in events), 240)
        os.kill(cluster.nodes[0].worker_pids()[0], signal.SIGKILL)
        codes = [agent.wait(150) for agent in agents]
        logs = {path.name: path.read_text()[-3000:] for path in cluster.folder.glob("*.log")}
        assert codes == [0, 0], logs
        run = FaultRun(cluster, random.Random(0), EVERY, 1.0)
        line = run.judge(0.0, 0.0)
        assert max(e["step"] for e in cluster.events() if e["event"] == "step") == 16
        assert {e["world_size"] for e in cluster.events() if e["event"] == "ready"} == {2}, logs
        assert line["steps_missing"] == 0 and line["lost_steps"] <= 2 * EVERY - 1, line
        assert line["loss_difference"] < 1e-6 and line["parameter_difference"] < 1e-7, line
        assert not any(node.place.folder.exists() for node in cluster.nodes), "node servers end, and free their memory"
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
        cluster.end()
