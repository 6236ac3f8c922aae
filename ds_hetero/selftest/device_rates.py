"""Rates of devices and links, beside those of the catalogue; for information."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ds_hetero.cluster.catalogue import CATALOGUE
from ds_hetero.cluster.names import catalogue_name
from ds_hetero.common.reading import JsonObject
from ds_hetero.common.units import GB, GIB, TERA
from ds_hetero.profiler.device_probes import Timer, matmul_probe, memory_probe
from ds_hetero.profiler.link_probes import pair_round
from ds_hetero.profiler.pair_rounds import rounds_between, rounds_inside
from ds_hetero.runtime.devices import default_dtype
from ds_hetero.selftest.lines import Line
from ds_hetero.selftest.session import Session


def check_rates(session: Session, described: JsonObject) -> Iterator[Line]:
    """Yield one line per part, with what this rank measured."""
    name = catalogue_name(described["device"], int(described["memory_gib"] * GIB))
    entry = None if name is None or session.device.type == "cpu" else CATALOGUE[name]
    timer = Timer(session.device, 0.05 if session.quick else 0.2)
    dtype = default_dtype(session.device)
    with session.watch.call("products"):
        flops_per_s = matmul_probe(timer, dtype)
    text = f"{flops_per_s / TERA:.3g} TFLOPS in {str(dtype).removeprefix('torch.')}"
    text += _of(flops_per_s, None if entry is None else entry.device.peak_flops_per_s, TERA)
    yield Line("products", "info", text, flops_per_s)
    with session.watch.call("copies in memory"):
        bytes_per_s = memory_probe(timer)
    peak = None if entry is None else entry.device.memory_bytes_per_s
    yield Line("copies in memory", "info", f"{bytes_per_s / GB:.3g} GB/s" + _of(bytes_per_s, peak, GB), bytes_per_s)
    nodes: Sequence[Sequence[int]] = session.nodes
    for where, pairs in (rounds_inside(nodes) | rounds_between(nodes)).items():
        with session.watch.call(f"links {where}"):
            samples = pair_round(pairs, session.rank, session.device)
        if samples:
            largest = samples[-1]
            rate = largest.num_bytes / largest.seconds
            link = entry.link_bytes_per_s if entry is not None and where.startswith("inside") else None
            yield Line(f"links {where}", "info", f"{rate / GB:.3g} GB/s each way" + _of(rate, link, GB), rate)


def _of(measured: float, catalogued: float | None, unit: float) -> str:
    if not catalogued:
        return ""
    return f", {100 * measured / catalogued:.0f} % of the catalogue's {catalogued / unit:.4g}"
