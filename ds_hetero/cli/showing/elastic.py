"""``ds-hetero elastic``: what an elastic job on this node is doing."""

from __future__ import annotations

import socket
import time

import click

from ds_hetero.cli.options import AS_JSON
from ds_hetero.cli.printing import print_json
from ds_hetero.common.units import GIB
from ds_hetero.elastic.node.keeper_requests import ask
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
    """Ask the keeper of this node: the round, its members, newcomers, saves in memory, and the latest events."""
    place = NodePlace.of(job, node)
    address = place.address()
    try:
        if address is None:
            raise OSError(f"there is no {place.folder / 'keeper.json'}")
        known = ask(address, token_of(job), {"do": "status"})
    except OSError as error:
        raise ConfigError(
            f"no keeper of job {job!r} answers on node {node!r}: {error}. Name it with --job and --node."
        ) from error
    if as_json:
        print_json(known)
        return
    for line in _lines(known):
        print(line)


def _lines(known: Message) -> list[str]:
    state = "meeting" if known["is_broken"] else "running"
    if not known["round"]:
        state = "the meeting is at another node's keeper"
    lines = [f"job {known['job']}, node {known['node']}: {known['closed'] or state}, round {known['round']}"]
    if known["members"]:
        lines.append(f"ranks      {', '.join(known['members'])}")
    if known["newcomers"]:
        lines.append(f"waiting    {', '.join(known['newcomers'])}, until the next save")
    used = sum(segment["end_bytes"] for segment in known["segments"])
    lines.append(f"memory     {used / GIB:.2f} GiB of saves, {known['free_bytes'] / GIB:.2f} GiB free")
    segments = sorted(known["segments"], key=lambda one: (-one["save"]["step"], one["rank"]))
    lines += [f"           step {one['save']['step']}, rank {one['rank']}: {one['name']}" for one in segments]
    return [*lines, *map(_event_line, known["events"])]


def _event_line(event: Message) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(event['time']))}   {event['kind']}: {event_text(event)}"
