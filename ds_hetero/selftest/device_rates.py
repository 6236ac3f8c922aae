"""Measure the rates of this rank's device and links, and print them beside those of the catalogue, for information."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ds_hetero.cluster.catalogue import CATALOGUE, CatalogueEntry
from ds_hetero.cluster.names import catalogue_name
from ds_hetero.common.reading import JsonObject
from ds_hetero.common.units import GB, GIB, TERA
from ds_hetero.profiler.device_probes import Timer, matmul_probe, memory_probe
from ds_hetero.profiler.link_probes import pair_round
from ds_hetero.profiler.pair_rounds import rounds_between, rounds_inside
from ds_hetero.runtime.devices import default_dtype
from ds_hetero.selftest.lines import Line
from ds_hetero.selftest.session import Session, dtype_name

# Names of lines are part of the report, which `ds-hetero measured` reads: matmuls stay "products" there.
_MATMULS, _COPIES = "products", "copies in memory"


def check_rates(session: Session, description: JsonObject) -> Iterator[Line]:
    """Yield one line for matmuls, one for copies, and one for every kind of link that this rank has measured.

    Args:
        description: this rank, by `describe_rank`.
    """
    entry = _catalogue_entry(session.device, description)
    timer = Timer(session.device, 0.05 if session.quick else 0.2)
    dtype = default_dtype(session.device)
    with session.watch.call(_MATMULS):
        flops_per_s = matmul_probe(timer, dtype)
    peak_flops_per_s = entry.device.peak_flops_per_s if entry else None
    text = f"{flops_per_s / TERA:.3g} TFLOPS in {dtype_name(dtype)}"
    yield Line(_MATMULS, "info", text + _share_of_catalogue(flops_per_s, peak_flops_per_s, TERA), flops_per_s)
    with session.watch.call(_COPIES):
        bytes_per_s = memory_probe(timer)
    peak_bytes_per_s = entry.device.memory_bytes_per_s if entry else None
    text = f"{bytes_per_s / GB:.3g} GB/s"
    yield Line(_COPIES, "info", text + _share_of_catalogue(bytes_per_s, peak_bytes_per_s, GB), bytes_per_s)
    yield from _check_links(session, entry.link_bytes_per_s if entry else None)


def _check_links(session: Session, catalogued_bytes_per_s: float | None) -> Iterator[Line]:
    """Yield one line for every kind of link that this rank has measured. Every rank takes part in all rounds.

    Args:
        catalogued_bytes_per_s: rate between two such devices inside a node; the catalogue knows no networks.
    """
    nodes: Sequence[Sequence[int]] = session.nodes
    for where, pairs in (rounds_inside(nodes) | rounds_between(nodes)).items():
        name = f"links {where}"
        with session.watch.call(name):
            samples = pair_round(pairs, session.rank, session.device)
        if not samples:
            continue
        largest = samples[-1]
        bytes_per_s = largest.num_bytes / largest.seconds
        expected = catalogued_bytes_per_s if where.startswith("inside") else None
        text = f"{bytes_per_s / GB:.3g} GB/s each way" + _share_of_catalogue(bytes_per_s, expected, GB)
        yield Line(name, "info", text, bytes_per_s)


def _catalogue_entry(device: torch.device, description: JsonObject) -> CatalogueEntry | None:
    """Return the catalogue's entry of this rank's GPU; None for CPUs and for GPUs that it does not have."""
    if device.type == "cpu":
        return None
    name = catalogue_name(description["device"], int(description["memory_gib"] * GIB))
    return None if name is None else CATALOGUE[name]


def _share_of_catalogue(measured: float, catalogued: float | None, unit: float) -> str:
    """Return for instance ", 71 % of the catalogue's 312"; nothing without a rate in the catalogue."""
    if not catalogued:
        return ""
    return f", {100 * measured / catalogued:.0f} % of the catalogue's {catalogued / unit:.4g}"
