"""``ds-hetero launch-files``: writes the files that start a plan on its hosts."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import click

from ds_hetero.cli.options import AS_JSON, FILE
from ds_hetero.cli.printing import check_out, print_json, print_lines, write_out
from ds_hetero.errors import PlanError
from ds_hetero.reporting.described_plan import DescribedPlan, read_described_plan
from ds_hetero.reporting.launching import COMMAND, PORT, JobLaunch, launch_contents


@click.command("launch-files")
@click.argument("plan", type=FILE)
@click.option("--out", type=FILE, help="Folder for the files; left out, they are printed.")
@click.option("--command", default=COMMAND, help="Script and arguments, or -m MODULE and arguments.")
@click.option("--hosts", help="Names or addresses of the hosts, by commas; left out, the names of the nodes.")
@click.option("--interface", help="Network interface between the hosts, such as eth0; left out, NCCL and gloo choose.")
@click.option("--port", type=int, default=PORT, help="Port of the first host.")
@AS_JSON
def launch_files(
    plan: Path, out: Path | None, command: str, hosts: str | None, interface: str | None, port: int, as_json: bool
) -> None:
    """Write hostfile, scripts and configuration that start PLAN on its hosts, unequal ones too."""
    described = read_described_plan(plan)
    if not isinstance(described, DescribedPlan):
        raise PlanError(f"{plan} does not say which hosts it is for. Write it with ds-hetero plan ... --out FILE.")
    nodes = list(chain.from_iterable(cluster.nodes for cluster in described.scenario.clusters))
    names = hosts.split(",") if hosts else ()
    launch = JobLaunch.of(nodes, hosts=names, command=command, port=port, interface=interface)
    files = launch_contents(launch)
    if out is not None:
        check_out(out / "hostfile" if out.exists() else out)
        out.mkdir(exist_ok=True)
        for name, text in files.items():
            write_out(out / name, text)
    if as_json:
        print_json({"out": out and str(out), "hosts": launch.hosts, "slots": launch.slots, "files": files})
    elif out is None:
        print("\n".join(f"--- {name}\n{text}" for name, text in files.items()), end="")
    else:
        _print_start(launch, out)


def _print_start(launch: JobLaunch, out: Path) -> None:
    """Print the commands that start the job, one for each launcher, and the hosts on which to run them.

    Commands stay whole, to be copied; sentences are wrapped to the terminal.
    """
    has_several_hosts = len(launch.hosts) > 1
    node = "NODE" if has_several_hosts else "0"
    print_lines(f"written to {out}", "In the folder of the training, which is the same on all hosts, run one of these:")
    commands = [
        f"  bash {out}/torchrun.sh {node}",
        f"  bash {out}/deepspeed.sh",
        f"  bash {out}/accelerate.sh {node}",
        f"  sbatch --export=ALL,LAUNCH_FILES={out.resolve()} {out}/slurm.sh",
    ]
    print("\n".join(commands))
    if has_several_hosts:
        print_lines(
            "torchrun.sh and accelerate.sh run on every host, each with its own NODE: 0, 1, ...",
            "deepspeed.sh runs on the first host, which must reach the others by ssh and pdsh.",
        )
