"""Files that start a plan on its hosts, also where hosts have different numbers of devices.

Ranks are numbered in the order of the nodes, so every launcher must be told which host is which. torchrun does that
with its static rendezvous alone: it adds up the ranks of the hosts before by ``--node-rank``, whereas its others number
hosts as they come. DeepSpeed takes the order of its hostfile. accelerate's own launcher gives every host the same
number of ranks; it can start DeepSpeed's launcher on every host instead, with a filter that names the devices.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ds_hetero.cluster import Node
from ds_hetero.common.reading import shortened
from ds_hetero.errors import PlanError

COMMAND = "train.py --deepspeed ds_config.json"
PORT = 29500
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
_HERE = 'here=$(cd "$(dirname "$0")" && pwd)'


@dataclass(frozen=True, kw_only=True)
class JobLaunch:
    """A start of a job."""

    hosts: tuple[str, ...]  # names or addresses under which the hosts reach each other, in the order of the ranks
    slots: tuple[int, ...]  # ranks of every host
    command: str = COMMAND  # script and its arguments, as words of a shell; ``-m`` before it says that it is a module
    port: int = PORT  # of the first host, where the ranks meet
    interface: str | None = None  # network interface between the hosts; None lets NCCL and gloo choose

    @classmethod
    def of(cls, nodes: Sequence[Node], *, hosts: Sequence[str] = (), **options: Any) -> JobLaunch:
        """Start of a plan for ``nodes``, under their own names where ``hosts`` gives none."""
        names = tuple(hosts or (node.name.replace(" ", "-") for node in nodes))
        return cls(hosts=names, slots=tuple(len(node.devices) for node in nodes), **options)

    def check(self) -> None:
        """Refuse what no launcher takes. Raises `PlanError`: names the option, its value and what is accepted."""
        if len(self.hosts) != len(self.slots):
            raise PlanError(f"--hosts names {len(self.hosts)} hosts, and the plan is for {len(self.slots)} nodes.")
        for host in self.hosts:
            if not _HOST.fullmatch(host):
                raise PlanError(f"host {shortened(host)}: give names or IPv4 addresses, as ssh takes them, by --hosts.")
        if len(set(self.hosts)) != len(self.hosts):
            raise PlanError(f"hosts {', '.join(self.hosts)}: two have one name. Give every node its own by --hosts.")
        if not 0 < self.port < 2**16:
            raise PlanError(f"--port {self.port} is no port; it is between 1 and 65535.")
        if not self.command.strip() or "\n" in self.command:
            raise PlanError("--command is the script and its arguments, in one line.")
        if self.interface is not None and not re.fullmatch(r"[^\s'\"$`\\/]{1,64}", self.interface):
            raise PlanError(f"--interface {shortened(self.interface)} is no name of a network interface, such as eth0.")

    @property
    def deepspeed_line(self) -> str:
        """Line of DeepSpeed's launcher, next to the hostfile."""
        if len(self.hosts) == 1:
            return f"deepspeed --no_local_rank --num_gpus {self.slots[0]} --master_port {self.port} {self._program}"
        meets = f"--master_addr {self.hosts[0]} --master_port {self.port}"
        return f"deepspeed --no_local_rank --hostfile hostfile {meets} {self._program}"

    @property
    def hostfile(self) -> str:
        """DeepSpeed's list of hosts."""
        return "".join(f"{host} slots={count}\n" for host, count in zip(self.hosts, self.slots, strict=True))

    @property
    def _program(self) -> str:
        command = self.command.strip()
        return f"--module {command[3:].strip()}" if command.startswith("-m ") else command

    def torchrun_line(self, node: str, ranks: str) -> str:
        """Line of torchrun for one host."""
        return (
            f"torchrun --nnodes {len(self.hosts)} --node-rank {node} --nproc-per-node {ranks} "
            f"--master-addr {self.hosts[0]} --master-port {self.port} {self._program}"
        )


def launch_contents(launch: JobLaunch) -> dict[str, str]:
    """Content of every file, by its name, for one folder; scripts run in the training's. Raises `PlanError`."""
    launch.check()
    files = {
        "env.sh": _env(launch),
        "torchrun.sh": _torchrun(launch),
        "deepspeed.sh": _deepspeed(launch),
        "accelerate.yaml": _accelerate_config(launch),
        "accelerate.sh": _accelerate(launch),
        "slurm.sh": _slurm(launch),
    }
    if len(launch.hosts) > 1:
        variables = "".join(f"{name}={value}\n" for name, value in _variables(launch).items())
        files |= {"hostfile": launch.hostfile, "deepspeed_env": variables}
    return files


def _variables(launch: JobLaunch) -> dict[str, str]:
    return {} if launch.interface is None else dict.fromkeys(_VARIABLES, launch.interface)


def _env(launch: JobLaunch) -> str:
    lines = [f"export {name}={value}" for name, value in _variables(launch).items()]
    if not lines:
        lines = ["# NCCL and gloo choose the interface; to name the one between the hosts, make these files anew with"]
        lines += ["# --interface NAME (ip -br address lists them)."]
    return _lines(*lines, f"export MASTER_ADDR={launch.hosts[0]}", f"export MASTER_PORT={launch.port}")


def _lines(*lines: str) -> str:
    return "\n".join(lines) + "\n"


def _script(*lines: str, node: bool = False) -> str:
    takes = ["node=${1:?give the number of this host, from 0 in the order of the hostfile}"] if node else []
    return _lines("#!/usr/bin/env bash", "set -euo pipefail", _HERE, *takes, *lines)


def _torchrun(launch: JobLaunch) -> str:
    slots = f"slots=({' '.join(map(str, launch.slots))})  # ranks of every host"
    return _script(slots, '. "$here/env.sh"', "exec " + launch.torchrun_line('"$node"', '"${slots[$node]}"'), node=True)


def _deepspeed(launch: JobLaunch) -> str:
    line = launch.deepspeed_line.replace("--hostfile hostfile", '--hostfile "$here/hostfile"')
    return _script(
        '. "$here/env.sh"',
        'export DS_ENV_FILE="$here/deepspeed_env"  # variables that the launcher sets on all hosts',
        f"exec {line}",
    )


def _accelerate_config(launch: JobLaunch) -> str:
    devices = "@".join(
        f"{host}:{','.join(map(str, range(count)))}" for host, count in zip(launch.hosts, launch.slots, strict=True)
    )
    several = [
        "  deepspeed_multinode_launcher: nossh",
        "  deepspeed_hostfile: hostfile",
        f"  deepspeed_inclusion_filter: {devices}",
    ]
    return _lines(
        "# accelerate gives every host num_processes / num_machines ranks, unless a filter names devices,",
        '# and it reads the filter with the launchers of DeepSpeed alone (nossh, pdsh), not with "standard".',
        "# Scripts without --deepspeed want a line deepspeed_config_file: ds_config.json in deepspeed_config.",
        "compute_environment: LOCAL_MACHINE",
        "distributed_type: DEEPSPEED",
        "deepspeed_config:",
        *(several if len(launch.hosts) > 1 else []),
        "  zero3_init_flag: false",
        f"num_machines: {len(launch.hosts)}",
        f"num_processes: {sum(launch.slots)}",
        "machine_rank: 0",
        f"main_process_ip: {launch.hosts[0]}",
        f"main_process_port: {launch.port}",
    )


def _accelerate(launch: JobLaunch) -> str:
    hostfile = ' --deepspeed_hostfile "$here/hostfile"' if len(launch.hosts) > 1 else ""
    return _script(
        '. "$here/env.sh"',
        "export DS_ENV_FILE=$(mktemp)  # accelerate adds the whole environment to this file",
        f'exec accelerate launch --config_file "$here/accelerate.yaml" --machine_rank "$node"{hostfile} '
        f"{launch._program}",
        node=True,
    )


def _slurm(launch: JobLaunch) -> str:
    """A heterogeneous job, since one of Slurm's jobs has as many GPUs on every node; a component is a host."""
    parts = []
    for node, (host, count) in enumerate(zip(launch.hosts, launch.slots, strict=True)):
        parts += ["#SBATCH hetjob"] if node else []
        parts.append(f"#SBATCH --nodes=1 --ntasks=1 --nodelist={host} --gpus-per-node={count} --exclusive")
    starts = [f'srun --het-group={node} bash "$here/torchrun.sh" {node} &' for node in range(len(launch.hosts))]
    if len(launch.hosts) == 1:
        starts = ['srun bash "$here/torchrun.sh" 0 &']
    # Slurm runs a copy of the script, so its folder is named by the one who submits it.
    here = "here=${LAUNCH_FILES:?sbatch --export=ALL,LAUNCH_FILES=FOLDER slurm.sh, FOLDER with all paths from the root}"
    waits = f"for _ in {' '.join(['host'] * len(launch.hosts))}; do wait -n; done  # ends with the first that fails"
    return _lines("#!/usr/bin/env bash", *parts, "set -euo pipefail", here, *starts, waits)
