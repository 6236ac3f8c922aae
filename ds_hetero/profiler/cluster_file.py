"""Turn the timings of the ranks into a cluster file: kinds of devices, links, shared NICs, and errors of the fits.

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
MAX_SPEED_RATIO = 1.08  # devices of one name are one kind unless their speeds differ by more
# A NIC or switch is shared if all pairs at once get less than this fraction of the sum of the pairs' rates alone.
MAX_SHARED_FRACTION = 0.8
USUAL_LINK_BOUNDS = (0.8, 1.25)  # a link outside these multiples of the usual bandwidth has an entry of its own

Nodes = Mapping[str, Sequence[int]]
Samples = Sequence[JsonObject]
Sample = TypeVar("Sample")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFacts:
    """What a rank tells about itself before anything is timed: host, device, memory, software."""

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
    """Return the content of a cluster file.

    Args:
        ranks: descriptions, by rank.
        samples: timings, by rank.
        circumstances: of the measurement, by the names in `CIRCUMSTANCES`.
    """
    nodes = nodes_of(ranks)
    names, devices, errors = _device_entries(ranks, samples)
    entries = []
    for node, members in nodes.items():
        entry: JsonDict = {"name": node, "devices": [names[rank] for rank in members]}
        entry["link"], link_errors = _link_inside_node(node, members, samples)
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
    """Return a short hash of the facts of all ranks. A profile can be used by ranks with the same hash."""
    names = ("host", "device", "memory_bytes", "torch", "dtype", "attention", "head_dim", "softcap")
    facts = [[getattr(rank, name) for name in names] for rank in ranks]
    return hashlib.sha256(json.dumps([VERSION, facts]).encode()).hexdigest()[:16]


def _device_entries(
    ranks: Sequence[RankFacts], samples: Samples
) -> tuple[list[str], dict[str, JsonDict], dict[str, FitError]]:
    """Return the name of every rank's kind of device, the file's entries of the kinds, and the errors of their fits."""
    names = [""] * len(ranks)
    entries: dict[str, JsonDict] = {}
    errors: dict[str, FitError] = {}
    for kind in _ranks_by_kind(ranks, samples):
        name = _unused_name(ranks[kind[0]].device, entries)
        entries[name], kind_errors = _device_entry(ranks[kind[0]], kind, [samples[rank] for rank in kind])
        errors |= {f"{name}, {term}": error for term, error in kind_errors.items()}
        for rank in kind:
            names[rank] = name
    return names, entries, errors


def _device_entry(facts: RankFacts, ranks: Sequence[int], samples: Samples) -> tuple[JsonDict, dict[str, FitError]]:
    """Return the entry of one kind of device from the samples of its ``ranks``, and the errors of the fits.

    Peaks are the catalogue's if it has the device; otherwise they are the best rates that were measured.
    """
    catalogued = CATALOGUE.get(facts.device) if facts.device != "CPU" else None
    if catalogued:
        flops_per_s, bytes_per_s = catalogued.device.peak_flops_per_s, catalogued.device.memory_bytes_per_s
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
    efficiency = replace(efficiency, message_overhead_s=_clamp(host_s, OVERHEAD_S))
    flops_per_s, bytes_per_s, efficiency = _with_peaks_reached(flops_per_s, bytes_per_s, efficiency)
    entry: JsonDict = {
        "peak_tflops": flops_per_s / TERA,
        "memory_gib": facts.memory_bytes / GIB,
        "memory_bandwidth_gb_per_s": bytes_per_s / GB,
        "reserved_gib": catalogued.device.reserved_bytes / GIB if catalogued else 0,
        "source": f"measured on ranks {', '.join(map(str, ranks))}",
        "efficiency": asdict(efficiency),
    }
    return entry | _attention_times(samples), errors


def _attention_times(samples: Samples) -> JsonDict:
    """Return the measured times of attention by tokens, medians over ranks; profiles of earlier releases have none."""
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
    """Raise the peaks until no achieved fraction is above 1.

    Fits may exceed a peak, because data were in caches, or because they extrapolate to large sizes.
    """
    shares = {name: getattr(efficiency, name) for name in ("matmul", "attention_forward", "attention_backward")}
    excess = max(1.0, *shares.values())
    shares_of_raised = {name: min(share / excess, 1.0) for name, share in shares.items()}
    new_efficiency = replace(efficiency, **shares_of_raised, memory=min(1.0, efficiency.memory))
    return flops_per_s * excess, bytes_per_s * max(1.0, efficiency.memory), new_efficiency


def _best_rate(sample: JsonObject) -> float:
    """Return the best FLOP/s that was measured on a device that is not in the catalogue."""
    layers = [LayerSample(*layer) for layer in sample["layers"]]
    return max([float(sample["peak_flops_per_s"]), *(float(layer.flops / layer.forward_s) for layer in layers)])


def _ranks_by_kind(ranks: Sequence[RankFacts], samples: Samples) -> list[list[int]]:
    """Return the ranks of every kind of device: the same hardware and kernel, and speeds within `MAX_SPEED_RATIO`."""
    speed = [1 / _layers_s(sample) for sample in samples]
    hardware = [(rank.device, rank.memory_bytes, rank.attention) for rank in ranks]
    kinds: list[list[int]] = []
    for rank in sorted(range(len(ranks)), key=lambda rank: (hardware[rank], -speed[rank], rank)):
        fastest = kinds[-1][0] if kinds else rank
        if kinds and hardware[fastest] == hardware[rank] and speed[fastest] < MAX_SPEED_RATIO * speed[rank]:
            kinds[-1].append(rank)
        else:
            kinds.append([rank])
    return sorted(map(sorted, kinds))


def _layers_s(sample: JsonObject) -> float:
    """Return the seconds of forward and backward of all layers that a rank has timed."""
    layers = [LayerSample(*layer) for layer in sample["layers"]]
    return sum(layer.forward_s + layer.backward_s for layer in layers)


def _medians(kind: Callable[..., Sample], samples_by_rank: Sequence[Sequence[Sequence[float]]]) -> list[Sample]:
    """Return samples whose times are medians over ranks; fields that are not times are the same on all ranks."""

    def median_of(values: Sequence[float]) -> float:
        """Return the median; values that are all equal keep their type, such as int or bool."""
        return values[0] if len(set(values)) == 1 else median(values)

    medians = []
    for same_sample in zip(*samples_by_rank, strict=True):
        fields = zip(*same_sample, strict=True)
        medians.append(kind(*map(median_of, fields)))
    return medians


def _unused_name(name: str, used_names: JsonObject) -> str:
    """Return ``name``, or the first of ``name#2``, ``name#3``, ... that is not in ``used_names``."""
    numbered_names = (f"{name}#{number}" for number in range(2, 10_000))
    return next(candidate for candidate in chain([name], numbered_names) if candidate not in used_names)


def _link_inside_node(
    node: str, members: Sequence[int], samples: Samples
) -> tuple[dict[str, float], dict[str, FitError]]:
    """Return the file's entry of the link inside a node, and the errors of its fits.

    The entry is made from three timings: one pair of ranks alone, all pairs at once, and an all-to-all. A node of one
    rank gets an entry that no message uses.
    """
    if len(members) < 2:
        return {"bandwidth_gb_per_s": 1000.0, "latency_us": 0.0}, {}  # a file needs a link; no message uses this one
    alone = _fit(samples[members[0]]["links"]["inside"])
    entry = {"bandwidth_gb_per_s": _bandwidth(alone), "latency_us": alone.latency_s / MICRO}
    pairs = _link_samples("inside, all at once", members, samples)
    if pairs:
        total_bytes_per_s = _total_bytes_per_s(pairs)
        if total_bytes_per_s < MAX_SHARED_FRACTION * len(pairs) * alone.bytes_per_s:
            entry["total_gb_per_s"] = total_bytes_per_s / GB
    ports = [_port_of_rank(rank, members) for rank in members]
    exchange = _all_to_all(f"all-to-all inside {node}", members, samples, ports)
    entry["all_to_all_efficiency"] = _clamp(exchange.bytes_per_s / alone.bytes_per_s, LINK_RATIO)
    entry["all_to_all_latency_us"] = exchange.latency_s / MICRO
    return entry, {f"inside {node}": alone.error, f"all-to-all inside {node}": exchange.error}


def _network(nodes: Nodes, samples: Samples) -> tuple[dict[str, float], list[JsonDict], dict[str, FitError]]:
    """Return the entries of the usual link between nodes and of links that differ, and the errors of the fits."""
    node_by_rank = {rank: node for node, members in nodes.items() for rank in members}
    fits: dict[tuple[str, str], TransferFit] = {}
    for name, pairs in rounds_between(list(nodes.values())).items():
        if name == "between, all at once":
            continue
        for sender, receiver in pairs:
            fits[node_by_rank[sender], node_by_rank[receiver]] = _fit(samples[sender]["links"][name])
    usual_bytes_per_s = median(fit.bytes_per_s for fit in fits.values())
    latency_s = median(fit.latency_s for fit in fits.values())
    ports = []
    for members in nodes.values():
        remote_ranks = [rank for rank in node_by_rank if rank not in members]
        ports += [_Port([rank], remote_ranks) for rank in members]
        if nic := _shared_nic(members, samples):
            ports.append(_Port(members, remote_ranks, usual_bytes_per_s / nic))
    exchange = _all_to_all("all-to-all of all", list(node_by_rank), samples, ports)
    entry = {
        "bandwidth_gb_per_s": _clamp(usual_bytes_per_s / GB, POSITIVE),
        "latency_us": latency_s / MICRO,
        "all_to_all_efficiency": _clamp(exchange.bytes_per_s / usual_bytes_per_s, LINK_RATIO),
        "all_to_all_latency_us": exchange.latency_s / MICRO,
    }
    overrides: list[JsonDict] = []
    for ends, fit in fits.items():
        if not USUAL_LINK_BOUNDS[0] < fit.bytes_per_s / usual_bytes_per_s < USUAL_LINK_BOUNDS[1]:
            link = {"bandwidth_gb_per_s": _bandwidth(fit), "latency_us": fit.latency_s / MICRO}
            overrides.append({"between": list(ends), **link})
    worst = max((fit.error for fit in fits.values()), key=lambda error: error.median)
    return entry, overrides, {"network": worst, "all-to-all of all": exchange.error}


def _shared_nic(members: Sequence[int], samples: Samples) -> float | None:
    """Return the bandwidth of a NIC that the ranks of a node share, in bytes per second; None if they share none.

    Ranks share a NIC if all of them at once get less bandwidth than the sum of what each gets alone.
    """
    pairs = _link_samples("between, all at once", members, samples)
    alone = _link_samples("between 0", members, samples)
    if not alone or len(pairs) < 2:
        return None
    alone_bytes_per_s, total_bytes_per_s = _fit(alone[0]).bytes_per_s, _total_bytes_per_s(pairs)
    if total_bytes_per_s > MAX_SHARED_FRACTION * len(pairs) * alone_bytes_per_s:
        return None
    return max(total_bytes_per_s, alone_bytes_per_s)


def _link_samples(name: str, members: Sequence[int], samples: Samples) -> list[Sequence[Sequence[float]]]:
    """Return, for each of ``members`` that took part in the round ``name``, its samples of transfers."""
    samples_by_member = [samples[rank]["links"].get(name) for rank in members]
    return [member_samples for member_samples in samples_by_member if member_samples]


def _total_bytes_per_s(pairs: Sequence[Sequence[Sequence[float]]]) -> float:
    """Return the bytes per second of ranks that exchange at once: all their bytes in the time of the slowest rank.

    The sum of the ranks' rates would be too large: a rank that ends early leaves its bandwidth to the others.
    """
    totals = []
    for same_size in zip(*pairs, strict=True):
        num_bytes, seconds = zip(*same_size, strict=True)
        totals.append(TransferSample(sum(num_bytes), max(seconds)))
    return fit_transfer(totals).bytes_per_s


class _Port(NamedTuple):
    """A port to the network: of one rank, or a NIC that several ranks share."""

    near: Sequence[int]  # ranks that use the port
    far: Sequence[int]  # ranks that these reach through the port
    slowdown: float = 1.0  # seconds per byte, as a multiple of those at the port of one rank

    def load(self, sent_bytes: Mapping[int, float]) -> float:
        """Return the bytes through the port, times its slowdown; rank r sends ``sent_bytes[r]`` to each other rank."""
        leaving = sum(sent_bytes[rank] for rank in self.near) * len(self.far)
        arriving = sum(sent_bytes[rank] for rank in self.far) * len(self.near)
        return self.slowdown * max(leaving, arriving)


def _port_of_rank(rank: int, members: Sequence[int]) -> _Port:
    """Return the port of one rank to all other members."""
    return _Port([rank], [other for other in members if other != rank])


def _all_to_all(name: str, members: Sequence[int], samples: Samples, ports: Sequence[_Port]) -> TransferFit:
    """Fit the time of the slowest rank of an all-to-all to the bytes at the busiest port."""
    times = []
    samples_by_member = [samples[rank]["links"][name] for rank in members]
    for same_size in zip(*samples_by_member, strict=True):
        # Of every member: (bytes that each member sends to any other, (_, seconds)); the bytes are the same on all.
        bytes_by_member, _ = same_size[0]
        sent_bytes = dict(zip(members, bytes_by_member, strict=True))
        busiest_bytes = max(port.load(sent_bytes) for port in ports)
        times.append(TransferSample(busiest_bytes, max(seconds for _, (_, seconds) in same_size)))
    return fit_transfer(times)


def _bandwidth(fit: TransferFit) -> float:
    """Return the bandwidth of a fit in GB/s, clamped: times that hardly grow with the size could give any number."""
    return _clamp(fit.bytes_per_s / GB, POSITIVE)


def _clamp(value: float, bounds: Bounds) -> float:
    """Return ``value`` if it is inside the bounds, else the nearest bound."""
    return min(max(value, bounds.minimum), bounds.maximum)


def _fit(samples: Sequence[Sequence[float]]) -> TransferFit:
    """Fit a line to samples of transfers, given as tuples of a profile's JSON."""
    return fit_transfer([TransferSample(*sample) for sample in samples])


def nodes_of(ranks: Sequence[RankFacts]) -> dict[str, list[int]]:
    """Return the ranks of every node, by a name made of its host's.

    Raises:
        ClusterError: ranks of other nodes lie between those of a node.
    """
    by_node: dict[str, list[int]] = {}
    for number, rank in enumerate(ranks):
        by_node.setdefault(rank.node, []).append(number)
    by_name: dict[str, list[int]] = {}
    for members in by_node.values():
        if members != list(range(members[0], members[-1] + 1)):
            raise ClusterError(
                f"ranks {members} share the host {ranks[members[0]].host}, but ranks of other hosts lie between them. "
                "Launch the ranks of each host consecutively."
            )
        by_name[_unused_name(ranks[members[0]].host, by_name)] = members
    return by_name
