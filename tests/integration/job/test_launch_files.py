"""Files of ``ds-hetero launch-files``, as they are, start one job on two hosts of 2 + 1 ranks.

The hosts are network namespaces of this machine, joined by a link of 1 Gbit/s. ssh and pdsh are scripts that run a
command in the namespace of the host.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks.emulation.network import EmulationError, Network, emulate
from benchmarks.emulation.relay import DEVICE
from ds_hetero.cli import main
from tests.integration.tiny import SMALL_BUCKETS
from tests.support import ROOT, free_port

pytestmark = [pytest.mark.slow, pytest.mark.alone]  # ranks that import everything, under four launchers

CLUSTER = """
nodes:
  - {name: big, device: H100-SXM-80GB, count: 2, link: {bandwidth_gb_per_s: 450, latency_us: 5}}
  - {name: small, device: A100-SXM-80GB, count: 1, link: {bandwidth_gb_per_s: 300, latency_us: 5}}
network: {bandwidth_gb_per_s: 0.125, latency_us: 100}
"""
SCHEDULE = {"layout": "zigzag", "ring": [0], "groups": [{"ranks": [0, 1, 2], "tokens": [3, 2, 1], "heads": [4, 4, 2]}]}
SSH = """#!{python}
import os, sys
words = sys.argv[1:]
while words[0] == "-o":
    words = words[2:]
os.execvp("nsenter", ["nsenter", "--net=" + {namespaces}[words[0]], "bash", "-c", " ".join(words[1:])])
"""
PDSH = """#!{python}
import subprocess, sys
hosts, words = sys.argv[sys.argv.index("-w") + 1].split(","), sys.argv[sys.argv.index("-w") + 2:]
ssh = __file__.replace("pdsh", "ssh")
ranks = [subprocess.Popen([ssh, host, *(w.replace("%n", str(n)) for w in words)]) for n, host in enumerate(hosts)]
sys.exit(max(rank.wait() for rank in ranks))
"""


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    try:
        with emulate(nodes=2, rate_bit_per_s=1e9, methods=("veth", "relay")) as made:
            yield made
    except EmulationError as error:
        pytest.skip(f"no network namespaces here: {error}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, network: Network) -> Path:
    """Where the job runs: its plan and configuration, the files that start it, and ssh and pdsh."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "cluster.yaml").write_text(CLUSTER)
    plan = folder / "plan.json"
    words = ["--cluster", folder / "cluster.yaml", "--model", "llama-3.2-1b", "--seq-len", "16384", "--out", plan]
    words += ["--parallel", "sequence", "--zero-stage", "3"]
    _cli("plan", *words)
    plan.write_text(json.dumps(json.loads(plan.read_text()) | {"num_heads": 10, "num_kv_heads": 5} | SCHEDULE))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1, **SMALL_BUCKETS},
        "heterogeneity": {"schedule": str(plan)},
    }
    (folder / "ds_config.json").write_text(json.dumps(config))
    hosts = ",".join(node.address for node in network.nodes)
    command = f"{ROOT}/examples/deepspeed_loop.py --steps 3 --tokens 128 --ds-config {folder}/ds_config.json"
    options = ["--hosts", hosts, "--interface", DEVICE, "--port", free_port(), "--command", command]
    _cli("launch-files", plan, "--out", folder / "launch", *options)
    (folder / "bin").mkdir()
    namespaces = {node.address: node.namespace for node in network.nodes}
    for name, text in {"ssh": SSH, "pdsh": PDSH}.items():
        program = folder / "bin" / name
        program.write_text(text.replace("{python}", sys.executable).replace("{namespaces}", repr(namespaces)))
        program.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def on_one_host(folder: Path) -> list[str]:
    line = next(line for line in (folder / "launch/torchrun.sh").read_text().splitlines() if line.startswith("exec"))
    command = ["torchrun", "--nproc-per-node", "3", "--master-port", str(free_port()), *line.split()[-7:]]
    return _losses(_run(folder, [command])[0])


@pytest.mark.parametrize("script", ["torchrun.sh", "accelerate.sh"])
def test_a_script_with_the_number_of_its_host_starts_the_plan(
    script: str, folder: Path, network: Network, on_one_host: list[str]
) -> None:
    output = _run(folder, [_on(network, node, f"launch/{script}", str(node)) for node in range(2)])
    assert _losses(output[0]) == on_one_host


def test_deepspeed_reaches_the_other_host_from_the_first(
    folder: Path, network: Network, on_one_host: list[str]
) -> None:
    assert _losses(_run(folder, [_on(network, 0, "launch/deepspeed.sh")])[0]) == on_one_host


def test_hosts_of_other_versions_are_refused_by_name(folder: Path, network: Network) -> None:
    version = "lambda name: '0.0.1' if name == 'ds-hetero' else real(name)"
    other = f"import importlib.metadata as m; real = m.version; m.version = {version}"
    (folder / "other").mkdir()
    (folder / "other" / "sitecustomize.py").write_text(other)
    commands = [_on(network, node, "launch/torchrun.sh", str(node)) for node in range(2)]
    outputs = _run(folder, [commands[0], ["env", f"PYTHONPATH={folder}/other:{ROOT}", *commands[1]]], succeed=False)
    for output in outputs:
        assert re.search(r"version of ds-hetero: \S+ on rank 0, 1; 0\.0\.1 on rank 2", output), output[-3000:]


def _cli(*words: object) -> None:
    with contextlib.suppress(SystemExit):
        main([str(word) for word in words])


def _on(network: Network, node: int, *command: str) -> list[str]:
    return ["nsenter", f"--net={network.nodes[node].namespace}", "bash", *command]


def _losses(output: str) -> list[str]:
    losses = re.findall(r"step \d+: loss \S+, gradient norm \S+", output)
    assert len(losses) == 3, output[-3000:]
    return losses


def _run(folder: Path, commands: Sequence[Sequence[str]], *, succeed: bool = True) -> list[str]:
    """What commands print that run side by side; none of their processes outlives them."""
    path = os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {"PATH": path, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        for command in commands
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert all((process.returncode == 0) is succeed for process in started), "\n".join(outputs)[-6000:]
    return outputs
