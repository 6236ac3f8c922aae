"""``ds-hetero cards``: the cards of the catalogue, and a stub for one that it does not have."""

from __future__ import annotations

from collections.abc import Sequence

import click

from ds_hetero.cli.options import AS_JSON
from ds_hetero.cli.printing import print_json, print_table
from ds_hetero.cluster.catalogue import CATALOGUE, CatalogueEntry
from ds_hetero.cluster.datasheets import NO_DATASHEET
from ds_hetero.cluster.names import card_named
from ds_hetero.common.units import GB, GIB, TERA
from ds_hetero.errors import ClusterError

_STUB = """\
devices:
  {name}:
    peak_tflops: 100                 # dense bf16 with fp32 accumulation; half of a figure "with sparsity"
    memory_gib: 24
    memory_bandwidth_gb_per_s: 900
    watts: 350                       # under load; may be left out
    source: "where these numbers are printed"
"""


@click.command
@click.argument("names", nargs=-1)
@AS_JSON
def cards(names: Sequence[str], as_json: bool) -> None:
    """List the cards of the catalogue, or NAMES of them; of one that it lacks print a stub for a cluster file."""
    found, missing = _named(names)
    if as_json:
        print_json({"cards": [_to_dict(entry) for entry in found], "missing": missing})
    elif found:
        columns = ("card", "TFLOP/s", "GiB", "GB/s", "joined by", "GB/s each way", "W", "numbers from")
        print_table(columns, [_row(entry) for entry in found], "Cards; TFLOP/s are dense bf16 of the datasheet")
        print("a line of them is a cluster: ds-hetero plan --gpus '4090,3090x2' --model llama-3.2-1b --seq-len 8K")
    for name, reason in missing.items():
        if not as_json:
            print(f"{reason}\n\nIn a cluster file:\n\n{_STUB.format(name=_key(name))}")
    if missing:
        raise click.exceptions.Exit(1)


def _named(names: Sequence[str]) -> tuple[list[CatalogueEntry], dict[str, str]]:
    """Entries of these names, all where there are none, and why others have no entry."""
    if not names:
        return list(CATALOGUE.values()), {}
    entries: dict[str, CatalogueEntry] = {}  # once each, in the order of the names
    missing: dict[str, str] = {}
    for name in names:
        meant = _meant(name)
        if isinstance(meant, str):
            missing[name] = meant
            continue
        for card in meant:
            entry = CATALOGUE[card]
            entries[entry.device.name] = entry
    return list(entries.values()), missing


def _meant(name: str) -> tuple[str, ...] | str:
    """Cards that a name may mean, or why it means none."""
    try:
        meant = card_named(name)
    except ClusterError as error:
        return str(error)
    return (meant.name, *meant.others)


def _key(name: str) -> str:
    """The name as a key of YAML."""
    return "-".join("".join(letter if letter.isalnum() or letter in "-." else " " for letter in name).split()) or "card"


def _row(entry: CatalogueEntry) -> tuple[str, ...]:
    device = entry.device
    numbers = (device.peak_flops_per_s / TERA, device.memory_bytes / GIB, device.memory_bytes_per_s / GB)
    watts = "-" if device.watts is None else f"{device.watts:g}"
    link = (entry.link_name, f"{entry.link_bytes_per_s / GB:g}")
    return (device.name, *(f"{number:g}" for number in numbers), *link, watts, device.source)


def _to_dict(entry: CatalogueEntry) -> dict[str, object]:
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
