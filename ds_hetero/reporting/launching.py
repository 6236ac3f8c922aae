"""Launch files that start a plan on its hosts, which may have different numbers of devices.

Ranks are numbered in the order of the nodes, so every launcher must know the order of the hosts:

    torchrun      ``--node-rank`` gives the order. This needs the static rendezvous; the others number hosts as they
                  arrive.
    DeepSpeed     The hostfile gives the order.
    accelerate    The standard launcher gives every host equally many ranks. Therefore accelerate starts DeepSpeed's
                  launcher on every host, with a filter that names the devices.
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
    """Hosts, command and network with which a job is launched."""

    hosts: tuple[str, ...]  # names or addresses by which the hosts reach each other, in the order of the ranks
    slots: tuple[int, ...]  # number of ranks of every host
    command: str = COMMAND  # script and arguments in shell syntax; ``-m`` precedes a module
    port: int = PORT  # port of the first host for the rendezvous
    interface: str | None = None  # network interface between the hosts; None lets NCCL and gloo choose

    @classmethod
    def of(cls, nodes: Sequence[Node], *, hosts: Sequence[str] = (), **options: Any) -> JobLaunch:
        """Make the launch of a plan for ``nodes``; if ``hosts`` is empty, hosts have the names of the nodes."""
        names = tuple(hosts or (node.name.replace(" ", "-") for node in nodes))
        return cls(hosts=names, slots=tuple(len(node.devices) for node in nodes), **options)

    def check(self) -> None:
        """Refuse values that launchers do not accept. Raises `PlanError`, which says option, value and rule."""
        if len(self.hosts) != len(self.slots):
            raise PlanError(
                f"--hosts names {len(self.hosts)} hosts, "
                f"and the plan is for {len(self.slots)} nodes. Give one name per node."
            )
        for host in self.hosts:
            if not _HOST.fullmatch(host):
                raise PlanError(f"host {shortened(host)}: give names or IPv4 addresses, as ssh takes them, by --hosts.")
        if len(set(self.hosts)) != len(self.hosts):
            raise PlanError(
                f"hosts {', '.join(self.hosts)}: two hosts have the same name. Give every node a different one by "
                "--hosts."
            )
        if not 0 < self.port < 2**16:
            raise PlanError(f"--port {self.port} is not a port number; these are 1 to 65535.")
        if not self.command.strip() or "\n" in self.command:
            raise PlanError("--command is the script and its arguments, in one line. Give both, without line breaks.")
        if self.interface is not None and not re.fullmatch(r"[^\s'\"$`\\/]{1,64}", self.interface):
            raise PlanError(
                f"--interface {shortened(self.interface)} is not the name of a network interface, such as eth0."
            )

    @property
    def deepspeed_line(self) -> str:
        """Command line of DeepSpeed's launcher, to run in the folder of the hostfile."""
        if len(self.hosts) == 1:
            return f"deepspeed --no_local_rank --num_gpus {self.slots[0]} --master_port {self.port} {self._program}"
        rendezvous = f"--master_addr {self.hosts[0]} --master_port {self.port}"
        return f"deepspeed --no_local_rank --hostfile hostfile {rendezvous} {self._program}"

    @property
    def hostfile(self) -> str:
        """Content of DeepSpeed's hostfile."""
        return "".join(f"{host} slots={count}\n" for host, count in zip(self.hosts, self.slots, strict=True))

    @property
    def _program(self) -> str:
        """Script or ``--module`` with arguments, as torchrun and DeepSpeed take them."""
        command = self.command.strip()
        return f"--module {command[3:].strip()}" if command.startswith("-m ") else command

    def torchrun_line(self, node: str, ranks: str) -> str:
        """Return the command line of torchrun for one host.

        Args:
            node: number of the host, or the shell variable that has it.
            ranks: number of the host's ranks, or the shell expression for it.
        """
        return (
            f"torchrun --nnodes {len(self.hosts)} --node-rank {node} --nproc-per-node {ranks} "
            f"--master-addr {self.hosts[0]} --master-port {self.port} {self._program}"
        )


def launch_contents(launch: JobLaunch) -> dict[str, str]:
    """Return the content of every launch file, by name. Raises `PlanError`: see `JobLaunch.check`.

    The files must be in one folder; the scripts are run in the folder of the training script.
    """
    launch.check()
    files = {
        "env.sh": _env_script(launch),
        "torchrun.sh": _torchrun_script(launch),
        "deepspeed.sh": _deepspeed_script(launch),
        "accelerate.yaml": _accelerate_config(launch),
        "accelerate.sh": _accelerate_script(launch),
        "slurm.sh": _slurm_script(launch),
    }
    if len(launch.hosts) > 1:
        variables = "".join(f"{name}={value}\n" for name, value in _variables(launch).items())
        files |= {"hostfile": launch.hostfile, "deepspeed_env": variables}
    return files


def _variables(launch: JobLaunch) -> dict[str, str]:
    """Return the environment variables that all hosts need, by name."""
    return {} if launch.interface is None else dict.fromkeys(_VARIABLES, launch.interface)


def _env_script(launch: JobLaunch) -> str:
    """Return the script that sets the environment variables, which the other scripts source."""
    lines = [f"export {name}={value}" for name, value in _variables(launch).items()]
    if not lines:
        lines = ["# NCCL and gloo choose the interface; to name the one between the hosts, make these files anew with"]
        lines += ["# --interface NAME (ip -br address lists them)."]
    return _lines(*lines, f"export MASTER_ADDR={launch.hosts[0]}", f"export MASTER_PORT={launch.port}")


def _lines(*lines: str) -> str:
    """Join lines to the content of a file, which ends with a line break."""
    return "\n".join(lines) + "\n"


def _script(*lines: str, node: bool = False) -> str:
    """Make a shell script; with ``node`` it takes the number of the host as its argument."""
    argument = ["node=${1:?give the number of this host, from 0 in the order of the hostfile}"] if node else []
    return _lines("#!/usr/bin/env bash", "set -euo pipefail", _HERE, *argument, *lines)


def _torchrun_script(launch: JobLaunch) -> str:
    """Return the script that starts torchrun on one host."""
    slots = f"slots=({' '.join(map(str, launch.slots))})  # ranks of every host"
    return _script(slots, '. "$here/env.sh"', "exec " + launch.torchrun_line('"$node"', '"${slots[$node]}"'), node=True)


def _deepspeed_script(launch: JobLaunch) -> str:
    """Return the script that starts all hosts from the first one by DeepSpeed's launcher."""
    line = launch.deepspeed_line.replace("--hostfile hostfile", '--hostfile "$here/hostfile"')
    return _script(
        '. "$here/env.sh"',
        'export DS_ENV_FILE="$here/deepspeed_env"  # variables that the launcher sets on all hosts',
        f"exec {line}",
    )


def _accelerate_config(launch: JobLaunch) -> str:
    """Return accelerate's configuration file."""
    host_filters = []  # such as alice:0,1
    for host, count in zip(launch.hosts, launch.slots, strict=True):
        host_filters.append(f"{host}:{','.join(map(str, range(count)))}")
    devices = "@".join(host_filters)
    several_hosts = [
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
        *(several_hosts if len(launch.hosts) > 1 else []),
        "  zero3_init_flag: false",
        f"num_machines: {len(launch.hosts)}",
        f"num_processes: {sum(launch.slots)}",
        "machine_rank: 0",
        f"main_process_ip: {launch.hosts[0]}",
        f"main_process_port: {launch.port}",
    )


def _accelerate_script(launch: JobLaunch) -> str:
    """Return the script that starts accelerate on one host."""
    hostfile = ' --deepspeed_hostfile "$here/hostfile"' if len(launch.hosts) > 1 else ""
    return _script(
        '. "$here/env.sh"',
        "export DS_ENV_FILE=$(mktemp)  # accelerate adds the whole environment to this file",
        f'exec accelerate launch --config_file "$here/accelerate.yaml" --machine_rank "$node"{hostfile} '
        f"{launch._program}",
        node=True,
    )


def _slurm_script(launch: JobLaunch) -> str:
    """Return the script of a heterogeneous Slurm job with one component per host.

    A plain Slurm job would have equally many GPUs on every node.
    """
    components = []
    for node, (host, count) in enumerate(zip(launch.hosts, launch.slots, strict=True)):
        if node > 0:
            components.append("#SBATCH hetjob")  # separates the components
        components.append(f"#SBATCH --nodes=1 --ntasks=1 --nodelist={host} --gpus-per-node={count} --exclusive")
    if len(launch.hosts) == 1:
        starts = ['srun bash "$here/torchrun.sh" 0 &']
    else:
        starts = [f'srun --het-group={node} bash "$here/torchrun.sh" {node} &' for node in range(len(launch.hosts))]
    # Slurm runs a copy of the script, which cannot find its folder; whoever submits it gives the folder.
    here_line = (
        "here=${LAUNCH_FILES:?sbatch --export=ALL,LAUNCH_FILES=FOLDER slurm.sh, FOLDER with all paths from the root}"
    )
    waits = f"for _ in {' '.join(['host'] * len(launch.hosts))}; do wait -n; done  # ends with the first that fails"
    return _lines("#!/usr/bin/env bash", *components, "set -euo pipefail", here_line, *starts, waits)
