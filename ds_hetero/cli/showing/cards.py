"""``ds-hetero cards``: lists the cards of the catalogue, and prints a stub of a cluster file for other cards."""

from __future__ import annotations

from collections.abc import Sequence

import click

from ds_hetero.cli.options import AS_JSON
from ds_hetero.cli.printing import print_json, print_lines, print_table
from ds_hetero.cluster.catalogue import CATALOGUE, CatalogueEntry
from ds_hetero.cluster.datasheets import NO_DATASHEET
from ds_hetero.cluster.names import card_named
from ds_hetero.common.units import GB, GIB, TERA
from ds_hetero.errors import ClusterError

_STUB = """\
devices:
  {name}:
    peak_tflops: 100    # dense bf16, fp32 accumulation; half of "with sparsity"
    memory_gib: 24
    memory_bandwidth_gb_per_s: 900
    watts: 350          # under load; may be left out
    source: "where these numbers are printed"
"""


@click.command
@click.argument("names", nargs=-1)
@AS_JSON
def cards(names: Sequence[str], as_json: bool) -> None:
    """List the cards of the catalogue, or NAMES of them; of one that it lacks print a stub for a cluster file."""
    entries, missing = _entries_and_missing(names)
    if as_json:
        print_json({"cards": [_to_dict(entry) for entry in entries], "missing": missing})
    elif entries:
        columns = ("card", "TFLOP/s", "GiB", "memory GB/s", "joined by", "link GB/s", "W")
        print_table(columns, [_row(entry) for entry in entries], "Cards")
        print_lines(*_legend(entries, with_sources=bool(names)))
        print("  ds-hetero plan --gpus '4090,3090x2' --model llama-3.2-1b --seq-len 8K")
    for name, reason in missing.items():
        if not as_json:
            print_lines(reason, "", "In a cluster file:", "")
            print(_STUB.format(name=_yaml_key(name)))
    if missing:
        raise click.exceptions.Exit(1)


def _entries_and_missing(names: Sequence[str]) -> tuple[list[CatalogueEntry], dict[str, str]]:
    """Return the entries of these names, and the reason for each name without an entry; no names mean all entries."""
    if not names:
        return list(CATALOGUE.values()), {}
    entries: dict[str, CatalogueEntry] = {}  # each card once, in the order of the names
    missing: dict[str, str] = {}
    for name in names:
        try:
            match = card_named(name)
        except ClusterError as error:
            missing[name] = str(error)
            continue
        for card in (match.name, *match.alternatives):
            entry = CATALOGUE[card]
            entries[entry.device.name] = entry
    return list(entries.values()), missing


def _yaml_key(name: str) -> str:
    """Return a key of YAML for a card: ``My-GPU-2`` for ``My GPU (2)``; ``card`` if no letter or digit is left."""
    allowed = "".join(letter if letter.isalnum() or letter in "-." else " " for letter in name)
    return "-".join(allowed.split()) or "card"


def _row(entry: CatalogueEntry) -> tuple[str, ...]:
    """Return the cells of a card in the table."""
    device = entry.device
    numbers = (device.peak_flops_per_s / TERA, device.memory_bytes / GIB, device.memory_bytes_per_s / GB)
    watts = "-" if device.watts is None else f"{device.watts:g}"
    link = (entry.link_name, f"{entry.link_bytes_per_s / GB:g}")
    return (device.name, *(f"{number:g}" for number in numbers), *link, watts)


def _legend(entries: Sequence[CatalogueEntry], *, with_sources: bool) -> list[str]:
    """Return lines that explain the columns, and name each card's datasheet, or the command that names it."""
    lines = ["TFLOP/s: dense bf16; link GB/s: each way."]
    if with_sources:
        lines += [f"numbers of {entry.device.name} from: {entry.device.source}" for entry in entries]
    else:
        lines.append("ds-hetero cards NAME says where the numbers of a card are from.")
    return [*lines, "Plan with them:"]


def _to_dict(entry: CatalogueEntry) -> dict[str, object]:
    """Return plain data of a card for ``--json``, in the units of a cluster file."""
    device = entry.device
    return {
        "name": device.name,
        "peak_tflops": device.peak_flops_per_s / TERA,
        "memory_gib": device.memory_bytes / GIB,
        "memory_bandwidth_gb_per_s": device.memory_bytes_per_s / GB,
        "link": entry.link_name,
        "link_gb_per_s": entry.link_bytes_per_s / GB,
        "peer_to_peer": entry.peer_to_peer,
        "watts": device.watts,
        "platform": entry.platform,
        "source": device.source,
        "has_datasheet": not device.source.startswith(NO_DATASHEET),
    }
