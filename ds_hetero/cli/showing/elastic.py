"""``ds-hetero elastic``: prints the state of an elastic job on this node."""

from __future__ import annotations

import socket
import time

import click

from ds_hetero.cli.options import AS_JSON
from ds_hetero.cli.printing import print_json, print_lines
from ds_hetero.common.units import GIB
from ds_hetero.elastic.node.node_server_requests import ask
from ds_hetero.elastic.node.place import NodePlace, token_of
from ds_hetero.elastic.node.wire import Message
from ds_hetero.errors import ConfigError
from ds_hetero.reporting.run_file import event_text


@click.group()
def elastic() -> None:
    """Say what an elastic job that runs on this node is doing, who is there, and what its memory holds."""


@elastic.command()
@click.option("--job", default="job", help="Name of the job, as --job of ds_hetero.run or --rdzv-id of torchrun.")
@click.option("--node", default=socket.gethostname, help="Name of the node; this host's, if left out.")
@AS_JSON
def status(job: str, node: str, as_json: bool) -> None:
    """Ask the server of this node: the round, its members, newcomers, saves in memory, and the latest events."""
    place = NodePlace.of(job, node)
    address = place.address()
    try:
        if address is None:
            raise OSError(f"there is no {place.folder / 'node_server.json'}")
        status_report = ask(address, token_of(job), {"do": "status"})
    except OSError as error:
        raise ConfigError(
            f"no node server of job {job!r} answers on node {node!r}: {error}. Name it with --job and --node."
        ) from error
    if as_json:
        # "keeper" is the key of release 0.2 and earlier; drop it in the release after the next.
        print_json({**status_report, "keeper": status_report["node_server"]})
        return
    print_lines(*_lines(status_report))


def _lines(report: Message) -> list[str]:
    """Return the lines that show a status report to people; saves of the latest step come first."""
    state = "meeting" if report["is_broken"] else "running"
    if not report["round"]:
        state = "the meeting is at another node's server"
    lines = [f"job {report['job']}, node {report['node']}: {report['closed'] or state}, round {report['round']}"]
    if report["members"]:
        lines.append(f"ranks      {', '.join(report['members'])}")
    if report["newcomers"]:
        lines.append(f"waiting    {', '.join(report['newcomers'])}, until the next save")
    used_bytes = sum(segment["end_bytes"] for segment in report["segments"])
    lines.append(f"memory     {used_bytes / GIB:.2f} GiB of saves, {report['free_bytes'] / GIB:.2f} GiB free")
    for segment in sorted(report["segments"], key=lambda segment: (-segment["save"]["step"], segment["rank"])):
        lines.append(f"           step {segment['save']['step']}, rank {segment['rank']}: {segment['name']}")
    return [*lines, *map(_event_line, report["events"])]


def _event_line(event: Message) -> str:
    """Return the line of an event: local time, kind, and text."""
    return f"{time.strftime('%H:%M:%S', time.localtime(event['time']))}   {event['kind']}: {event_text(event)}"
