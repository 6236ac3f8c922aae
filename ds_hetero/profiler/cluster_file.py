"""From what the ranks have timed to a cluster file: kinds of devices, links, shared ports, and the errors of the fits.

Samples are plain data, one mapping per rank: ``peak_flops_per_s``, ``memory_bytes_per_s``, ``layers``, ``attention``
(tuples of `ds_hetero.profiler.fit`), ``links`` by the name of the round, ``message_overhead_s``. Nothing here imports
torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from statistics import median
from typing import NamedTuple, TypeVar

from ds_hetero.cluster.catalogue import CATALOGUE
from ds_hetero.cluster.file_values import LINK_RATIO, OVERHEAD_S, POSITIVE, Bounds
from ds_hetero.cluster.topology import Efficiency
from ds_hetero.common.reading import JsonDict, JsonObject
from ds_hetero.common.units import GB, GIB, MICRO, TERA
from ds_hetero.errors import ClusterError
from ds_hetero.profiler.fit import (
    AttentionSample,
    FitError,
    LayerSample,
    TransferFit,
    TransferSample,
    fit_efficiency,
    fit_transfer,
)
from ds_hetero.profiler.pair_rounds import rounds_between

VERSION = 1
CIRCUMSTANCES = ("measured_at", "machine")  # of a measurement: ISO 8601 in UTC, `ds_hetero.profiler.machine.Quietness`
SAME_SPEED = 1.08  # devices of one name are one kind unless their rates differ by more
SHARED_PORT = 0.8  # a NIC or switch is shared if all pairs together get less than this share of what each got alone
USUAL_LINK = (0.8, 1.25)  # a link whose bandwidth is outside this share of the usual one has an entry of its own

Nodes = Mapping[str, Sequence[int]]
Samples = Sequence[JsonObject]
Sample = TypeVar("Sample")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFacts:
    """Description of a rank, before anything is timed."""

    node: str  # the same for ranks that share a machine and its network
    host: str
    device: str  # the catalogue's name where it has one
    memory_bytes: int  # of the device; of a CPU, the rank's share
    torch: str
    dtype: str
    attention: str  # name of the kernel that is timed
    head_dim: int | None = None  # width of the heads that it is timed with; None in profiles of earlier releases
    softcap: float | None = None  # bound of the attention scores that it is timed with; None for no bound


def cluster_content(ranks: Sequence[RankFacts], samples: Samples, circumstances: JsonObject | None = None) -> JsonDict:
    """Content of a cluster file for ranks and samples, in order; ``circumstances`` by names of `CIRCUMSTANCES`."""
    nodes = nodes_of(ranks)
    names, devices, errors = _devices(ranks, samples)
    entries = []
    for node, members in nodes.items():
        entry: JsonDict = {"name": node, "devices": [names[rank] for rank in members]}
        entry["link"], link_errors = _inside(node, members, samples)
        errors |= link_errors
        nic = _shared_nic(members, samples)
        entry["nics"] = {"count": 1, "bandwidth_gb_per_s": nic / GB} if nic else "per_rank"
        entries.append(entry)
    content: JsonDict = {
        "description": f"measured on {len(ranks)} ranks, {ranks[0].dtype}, "
        f"{', '.join(dict.fromkeys(rank.attention for rank in ranks))} of torch {ranks[0].torch}",
        "nodes": entries,
    }
    if len(nodes) > 1:
        content["network"], content["links"], network_errors = _network(nodes, samples)
        errors |= network_errors
    content["devices"] = devices
    content["profile"] = {
        "version": VERSION,
        "fingerprint": fingerprint(ranks),
        **(circumstances or {}),
        "ranks": [asdict(rank) for rank in ranks],
        "fit_errors": {term: asdict(error) for term, error in errors.items()},
        "samples": list(samples),
    }
    plain: JsonDict = json.loads(json.dumps(content))  # lists for tuples, as they will be read back
    return plain


def fingerprint(ranks: Sequence[RankFacts]) -> str:
    """Short hash of what must be the same for a profile to hold."""
    names = ("host", "device", "memory_bytes", "torch", "dtype", "attention", "head_dim", "softcap")
    facts = [[getattr(rank, name) for name in names] for rank in ranks]
    return hashlib.sha256(json.dumps([VERSION, facts]).encode()).hexdigest()[:16]


def _devices(
    ranks: Sequence[RankFacts], samples: Samples
) -> tuple[list[str], dict[str, JsonDict], dict[str, FitError]]:
    """Kind of every rank, the kinds as entries of the file, and the errors of their fits."""
    names = [""] * len(ranks)
    entries: dict[str, JsonDict] = {}
    errors: dict[str, FitError] = {}
    for kind in _kinds(ranks, samples):
        name = _unused(ranks[kind[0]].device, entries)
        entries[name], kind_errors = _device(ranks[kind[0]], kind, [samples[rank] for rank in kind])
        errors |= {f"{name}, {term}": error for term, error in kind_errors.items()}
        for rank in kind:
            names[rank] = name
    return names, entries, errors


def _device(facts: RankFacts, ranks: Sequence[int], samples: Samples) -> tuple[JsonDict, dict[str, FitError]]:
    """Entry of one kind of device from the samples of its ``ranks``, and the errors of the fits.

    Peaks are the catalogue's where it has the device, and what was reached elsewhere.
    """
    known = CATALOGUE.get(facts.device) if facts.device != "CPU" else None
    if known:
        flops_per_s, bytes_per_s = known.device.peak_flops_per_s, known.device.memory_bytes_per_s
    else:
        flops_per_s = median(map(_best_rate, samples))
        bytes_per_s = median(sample["memory_bytes_per_s"] for sample in samples)
    efficiency, errors = fit_efficiency(
        flops_per_s,
        bytes_per_s,
        _medians(LayerSample, [sample["layers"] for sample in samples]),
        _medians(AttentionSample, [sample["attention"] for sample in samples]),
    )
    host_s = median(sample.get("message_overhead_s", 0.0) for sample in samples)  # earlier releases have none
    efficiency = replace(efficiency, message_overhead_s=_within(host_s, OVERHEAD_S))
    flops_per_s, bytes_per_s, efficiency = _with_peaks_reached(flops_per_s, bytes_per_s, efficiency)
    entry: JsonDict = {
        "peak_tflops": flops_per_s / TERA,
        "memory_gib": facts.memory_bytes / GIB,
        "memory_bandwidth_gb_per_s": bytes_per_s / GB,
        "reserved_gib": known.device.reserved_bytes / GIB if known else 0,
        "source": f"measured on ranks {', '.join(map(str, ranks))}",
        "efficiency": asdict(efficiency),
    }
    return entry | _attention_times(samples), errors


def _attention_times(samples: Samples) -> JsonDict:
    """Measured times of attention by tokens, the medians over ranks; earlier releases have none."""
    tables = [sample["attention_table"] for sample in samples if "attention_table" in sample]
    if not tables:
        return {}
    times = {}
    for row in zip(*tables, strict=True):  # (tokens, seconds) of every rank
        times[str(row[0][0])] = median(seconds for _, seconds in row)
    return {"attention_s": times}


def _with_peaks_reached(
    flops_per_s: float, bytes_per_s: float, efficiency: Efficiency
) -> tuple[float, float, Efficiency]:
    """Raise peaks that fits exceed, caches or an extrapolation to large sizes, until no share is above 1."""
    shares = {name: getattr(efficiency, name) for name in ("matmul", "attention_forward", "attention_backward")}
    exceeded = max(1.0, *shares.values())
    below = {name: min(share / exceeded, 1.0) for name, share in shares.items()}
    reached = replace(efficiency, **below, memory=min(1.0, efficiency.memory))
    return flops_per_s * exceeded, bytes_per_s * max(1.0, efficiency.memory), reached


def _best_rate(sample: JsonObject) -> float:
    """The best rate that was measured on a device that no catalogue knows."""
    layers = [LayerSample(*layer) for layer in sample["layers"]]
    return max([float(sample["peak_flops_per_s"]), *(float(layer.flops / layer.forward_s) for layer in layers)])


def _kinds(ranks: Sequence[RankFacts], samples: Samples) -> list[list[int]]:
    """Ranks by kind of device: equal hardware with one kernel is one kind, unless something slows some of it down."""
    speed = [1 / _layers_s(sample) for sample in samples]
    hardware = [(rank.device, rank.memory_bytes, rank.attention) for rank in ranks]
    kinds: list[list[int]] = []
    for rank in sorted(range(len(ranks)), key=lambda rank: (hardware[rank], -speed[rank], rank)):
        fastest = kinds[-1][0] if kinds else rank
        if kinds and hardware[fastest] == hardware[rank] and speed[fastest] < SAME_SPEED * speed[rank]:
            kinds[-1].append(rank)
        else:
            kinds.append([rank])
    return sorted(map(sorted, kinds))


def _layers_s(sample: JsonObject) -> float:
    """Forward and backward of all layers that a rank has timed."""
    layers = [LayerSample(*layer) for layer in sample["layers"]]
    return sum(layer.forward_s + layer.backward_s for layer in layers)


def _medians(kind: Callable[..., Sample], samples_by_rank: Sequence[Sequence[Sequence[float]]]) -> list[Sample]:
    """Samples of the medians over ranks; fields that are not times are the same on all ranks."""

    def median_of(values: Sequence[float]) -> float:
        return values[0] if len(set(values)) == 1 else median(values)

    medians = []
    for same_sample in zip(*samples_by_rank, strict=True):
        fields = zip(*same_sample, strict=True)
        medians.append(kind(*map(median_of, fields)))
    return medians


def _unused(name: str, taken: JsonObject) -> str:
    """The name, or the first of ``name#2``, ``name#3``, ... that nothing has."""
    numbered = (f"{name}#{number}" for number in range(2, 10_000))
    return next(unused for unused in chain([name], numbered) if unused not in taken)


def _inside(node: str, members: Sequence[int], samples: Samples) -> tuple[dict[str, float], dict[str, FitError]]:
    """Link inside a node: alone, all pairs at once, and in an all-to-all."""
    if len(members) < 2:
        return {"bandwidth_gb_per_s": 1000.0, "latency_us": 0.0}, {}  # a file needs a link, and nobody uses this one
    alone = _fit(samples[members[0]]["links"]["inside"])
    entry = {"bandwidth_gb_per_s": _bandwidth(alone), "latency_us": alone.latency_s / MICRO}
    pairs = _link_samples("inside, all at once", members, samples)
    if pairs:
        total_bytes_per_s = _together(pairs)
        if total_bytes_per_s < SHARED_PORT * len(pairs) * alone.bytes_per_s:
            entry["total_gb_per_s"] = total_bytes_per_s / GB
    ports = [_port_of_rank(rank, members) for rank in members]
    exchange = _all_to_all(f"all-to-all inside {node}", members, samples, ports)
    entry["all_to_all_efficiency"] = _within(exchange.bytes_per_s / alone.bytes_per_s, LINK_RATIO)
    entry["all_to_all_latency_us"] = exchange.latency_s / MICRO
    return entry, {f"inside {node}": alone.error, f"all-to-all inside {node}": exchange.error}


def _network(nodes: Nodes, samples: Samples) -> tuple[dict[str, float], list[JsonDict], dict[str, FitError]]:
    """The usual link between nodes, links that differ from it by a fifth, and the errors of the fits."""
    node_of = {rank: node for node, members in nodes.items() for rank in members}
    fits: dict[tuple[str, str], TransferFit] = {}
    for name, pairs in rounds_between(list(nodes.values())).items():
        if name == "between, all at once":
            continue
        for sender, receiver in pairs:
            fits[node_of[sender], node_of[receiver]] = _fit(samples[sender]["links"][name])
    usual = median(fit.bytes_per_s for fit in fits.values())
    latency_s = median(fit.latency_s for fit in fits.values())
    ports = []
    for members in nodes.values():
        others = [rank for rank in node_of if rank not in members]
        ports += [_Port([rank], others) for rank in members]
        if nic := _shared_nic(members, samples):
            ports.append(_Port(members, others, usual / nic))
    exchange = _all_to_all("all-to-all of all", list(node_of), samples, ports)
    entry = {
        "bandwidth_gb_per_s": _within(usual / GB, POSITIVE),
        "latency_us": latency_s / MICRO,
        "all_to_all_efficiency": _within(exchange.bytes_per_s / usual, LINK_RATIO),
        "all_to_all_latency_us": exchange.latency_s / MICRO,
    }
    overrides: list[JsonDict] = []
    for ends, fit in fits.items():
        if not USUAL_LINK[0] < fit.bytes_per_s / usual < USUAL_LINK[1]:
            link = {"bandwidth_gb_per_s": _bandwidth(fit), "latency_us": fit.latency_s / MICRO}
            overrides.append({"between": list(ends), **link})
    worst = max((fit.error for fit in fits.values()), key=lambda error: error.median)
    return entry, overrides, {"network": worst, "all-to-all of all": exchange.error}


def _shared_nic(members: Sequence[int], samples: Samples) -> float | None:
    """Bandwidth of all ranks of a node together towards another node, if it is less than each got alone."""
    pairs = _link_samples("between, all at once", members, samples)
    alone = _link_samples("between 0", members, samples)
    if not alone or len(pairs) < 2:
        return None
    alone_bytes_per_s, total_bytes_per_s = _fit(alone[0]).bytes_per_s, _together(pairs)
    if total_bytes_per_s > SHARED_PORT * len(pairs) * alone_bytes_per_s:
        return None
    return max(total_bytes_per_s, alone_bytes_per_s)


def _link_samples(name: str, members: Sequence[int], samples: Samples) -> list[Sequence[Sequence[float]]]:
    """Samples of one round of transfers, of the ranks that took part in it."""
    of_ranks = [samples[rank]["links"].get(name) for rank in members]
    return [of_rank for of_rank in of_ranks if of_rank]


def _together(pairs: Sequence[Sequence[Sequence[float]]]) -> float:
    """Bytes per second of ranks that exchange at once: of all their bytes in the time of the last to be done.

    Their own rates would add up to more than there is where one is done early and the others go on without it.
    """
    together = []
    for same_size in zip(*pairs, strict=True):
        num_bytes, seconds = zip(*same_size, strict=True)
        together.append(TransferSample(sum(num_bytes), max(seconds)))
    return fit_transfer(together).bytes_per_s


class _Port(NamedTuple):
    """A port of ranks, their own or a NIC that they share."""

    near: Sequence[int]  # ranks behind it
    far: Sequence[int]  # ranks beyond it
    slower: float = 1.0  # how many times as long a byte takes as at a rank's own port

    def load(self, sent_bytes: Mapping[int, float]) -> float:
        """Bytes at the port, as at a rank's own, if every rank sends so many to each other one."""
        leaving = sum(sent_bytes[rank] for rank in self.near) * len(self.far)
        arriving = sum(sent_bytes[rank] for rank in self.far) * len(self.near)
        return self.slower * max(leaving, arriving)


def _port_of_rank(rank: int, members: Sequence[int]) -> _Port:
    return _Port([rank], [other for other in members if other != rank])


def _all_to_all(name: str, members: Sequence[int], samples: Samples, ports: Sequence[_Port]) -> TransferFit:
    """Bytes at the busiest port against the time of the slowest rank."""
    times = []
    of_ranks = [samples[rank]["links"][name] for rank in members]
    for step in zip(*of_ranks, strict=True):  # (bytes that every rank sends to each other one, (_, seconds)) by rank
        sent_bytes = dict(zip(members, step[0][0], strict=True))
        busiest_bytes = max(port.load(sent_bytes) for port in ports)
        times.append(TransferSample(busiest_bytes, max(seconds for _, (_, seconds) in step)))
    return fit_transfer(times)


def _bandwidth(fit: TransferFit) -> float:
    """Bandwidth of a fit in GB/s, within bounds: timings that hardly grow with the size would give any number."""
    return _within(fit.bytes_per_s / GB, POSITIVE)


def _within(value: float, bounds: Bounds) -> float:
    return min(max(value, bounds.least), bounds.most)


def _fit(samples: Sequence[Sequence[float]]) -> TransferFit:
    return fit_transfer([TransferSample(*sample) for sample in samples])


def nodes_of(ranks: Sequence[RankFacts]) -> dict[str, list[int]]:
    """Ranks by node, named by host, in order. Raises `ClusterError`: ranks of other nodes lie between."""
    by_node: dict[str, list[int]] = {}
    for number, rank in enumerate(ranks):
        by_node.setdefault(rank.node, []).append(number)
    named: dict[str, list[int]] = {}
    for members in by_node.values():
        if members != list(range(members[0], members[-1] + 1)):
            raise ClusterError(
                f"ranks {members} share the host {ranks[members[0]].host}, but ranks of other hosts lie between them. "
                "Launch the ranks of each host consecutively."
            )
        named[_unused(ranks[members[0]].host, named)] = members
    return named
