r"""Any command on an emulated cluster of unequal ranks.

    python -m benchmarks.lab.launch CLUSTER.yaml -- python train.py
    python -m benchmarks.lab.launch CLUSTER.yaml -- torchrun --nnodes {nodes} --nproc-per-node {ranks} \
        --node-rank {node} --master-addr {master} --master-port {port} train.py
    python -m benchmarks.lab.launch CLUSTER.yaml -- deepspeed --num_gpus {ranks} --master_port {port} train.py
    python -m benchmarks.lab.launch CLUSTER.yaml -- deepspeed --no_ssh --hostfile HOSTS --node_rank {node} \
        --master_addr {master} --master_port {port} train.py

Without ``{node}`` or ``{ranks}`` in it the command is started once per rank with RANK, LOCAL_RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT in its environment; with one of them, once per node, and the command starts its ranks.
Filled in are {nodes}, {node}, {ranks} (of this node), {world}, {master} and {port}. HOSTS is DeepSpeed's own list, one
line "NAME slots=RANKS" per node; names are not looked up.

CLUSTER.yaml is described in `benchmarks.emulation.cluster.read_cluster`. Every command starts inside its node's
network. A Python process with RANK in its environment gets its speed and its memory limit when torch.distributed's
process group exists, so that imports are not slowed down; it then measures its speed together with the others, and rank
0 says what was asked for and what is there (``--no-verify`` skips that). Other programs keep the full speed of a core.
Where there is an NVIDIA GPU and MPS can be started, each rank is limited to its share of the GPU as well (not yet run
on a GPU).

Everything is removed at the end, also after Ctrl-C or SIGKILL. Exit status: the first non-zero one of the commands.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch.utils.cpp_extension import get_default_build_root

from benchmarks.emulation.cluster import EmulatedCluster, read_cluster
from benchmarks.emulation.emulator import NETWORK_METHODS, Emulation, emulate
from benchmarks.emulation.extension_locks import remove_abandoned_locks
from benchmarks.emulation.mps import active_share, mps
from benchmarks.emulation.throttle import METHODS
from benchmarks.measure.ports import free_port

VARIABLE = "DS_HETERO_LAB"
"""Environment variable that tells a rank what it is to become; see `benchmarks.emulation.inject`."""

_ROOT = Path(__file__).resolve().parents[2]
_INJECT = _ROOT / "benchmarks" / "emulation" / "inject"
_POLL_S = 0.05
_PER_NODE = ("{node}", "{ranks}")  # a command with one of these starts the ranks of its node
_GRACE_S = 10.0  # for the rest, once a command has failed or Ctrl-C was pressed
_PR_SET_PDEATHSIG = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    options = _parser().parse_args(arguments)
    cluster = read_cluster(options.cluster)
    for lock in remove_abandoned_locks(Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())):
        print(f"removed {lock}: a rank was killed there, and DeepSpeed would wait for it without end", file=sys.stderr)
    with emulate(cluster, speed_methods=options.speed, network_methods=options.network) as emulated:
        print(f"emulated links: {emulated.settings.network}", file=sys.stderr)
        with mps() as (clients, mps_text):
            print(f"GPU: {mps_text}", file=sys.stderr)
            return _run(_commands(options.command, cluster, emulated, options.verify, clients))


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lab.launch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("cluster", type=Path, help="YAML or JSON")
    parser.add_argument("command", nargs="+", help="after --")
    parser.add_argument("--no-verify", dest="verify", action="store_false", help="do not measure the ranks' speeds")
    parser.add_argument("--speed", nargs="+", choices=METHODS, default=METHODS, help="methods to try, in this order")
    parser.add_argument("--network", nargs="+", choices=NETWORK_METHODS, default=NETWORK_METHODS, help="likewise")
    return parser


def _commands(
    command: Sequence[str],
    cluster: EmulatedCluster,
    emulated: Emulation,
    verify: bool,
    clients: Mapping[str, str] | None,
) -> list[tuple[list[str], dict[str, str]]]:
    """Return (words, environment) of every process to start."""
    port = str(free_port())
    master = emulated.network.nodes[0].address
    settings = {
        "cores": cluster.cores,
        "memory_bytes": cluster.memory_bytes,
        "group": emulated.settings.limits.group and str(emulated.settings.limits.group),
        "speed_methods": emulated.settings.speed_methods,
        "verify": verify,
        "root": str(_ROOT),
        # Read before CUDA starts; see `benchmarks.emulation.inject`.
        "environment": [
            {} if clients is None else {**clients, **active_share(speed, max(cluster.speeds))}
            for speed in cluster.speeds
        ],
    }
    common = {
        VARIABLE: json.dumps(settings),
        "PYTHONPATH": os.pathsep.join([str(_INJECT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": master,
        "MASTER_PORT": port,
    }
    commands = []
    world, first = len(cluster.speeds), 0
    for index, node in enumerate(cluster.nodes):
        place = emulated.network.nodes[index]
        enter = ["nsenter", f"--net={place.namespace}"] if place.namespace else []
        environment = common | place.environment
        values = {"nodes": len(cluster.nodes), "node": index, "ranks": len(node.speeds), "world": world}
        filled = [_fill(word, values | {"master": master, "port": port}) for word in command]
        if any(name in word for word in command for name in _PER_NODE):
            commands.append(([*enter, *filled], environment))
        else:
            for local in range(len(node.speeds)):
                rank_variables = {"RANK": str(first + local), "LOCAL_RANK": str(local), "WORLD_SIZE": str(world)}
                commands.append(([*enter, *filled], environment | rank_variables))
        first += len(node.speeds)
    return commands


def _fill(word: str, values: Mapping[str, object]) -> str:
    """Replace known names in braces; leave other braces alone, because words may be JSON."""
    for name, value in values.items():
        word = word.replace("{" + name + "}", str(value))
    return word


def _run(commands: Sequence[tuple[list[str], dict[str, str]]]) -> int:
    """Start all commands and wait for them; when one fails or at Ctrl-C, end the others."""
    processes = []
    try:
        for words, environment in commands:
            processes.append(
                subprocess.Popen(words, env=os.environ | environment, start_new_session=True, preexec_fn=_die_with_us)
            )
        while any(process.poll() is None for process in processes):
            if any(process.returncode for process in processes):
                break
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        print("interrupted: ending the ranks", file=sys.stderr)
        _end(processes)
        return 130
    _end(processes)
    return next((abs(process.returncode) for process in processes if process.returncode), 0)


def _die_with_us() -> None:
    """In the child: request a SIGTERM for the time when this process ends, so that launchers end their children."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Send SIGTERM to the process groups that still run, later SIGKILL to those that remain."""
    for number, grace_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, _GRACE_S)):
        give_up = time.monotonic() + grace_s
        running = [process for process in processes if process.poll() is None]
        for process in running:
            os.killpg(process.pid, number)
        while time.monotonic() < give_up and any(process.poll() is None for process in running):
            time.sleep(_POLL_S)


if __name__ == "__main__":
    sys.exit(main())
