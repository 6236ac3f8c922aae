"""Make, verify and remove an emulated cluster on one Linux machine: speeds, memory and links of every rank.

    with emulate(cluster) as emulated:
        results = emulated.run(fn, arguments)      # fn(lab, *arguments) on every rank; lab is a `RankLab`

It uses network namespaces with a relay or token buckets between them (`network`), the kernel's scheduler (`quota`) or
counted CPU time (`throttle`), RLIMIT_DATA, and cores that do not halt (`awake`). Each has a fallback for machines that
do not allow it; `RankLab.describe` says what was used, and what was measured.
"""

from __future__ import annotations

import re
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.emulation import network as networks
from benchmarks.emulation.awake import awake_cores
from benchmarks.emulation.cluster import EmulatedCluster
from benchmarks.emulation.network import Network
from benchmarks.emulation.quota import SpeedLimits, speed_limits
from benchmarks.emulation.throttle import (
    METHODS,
    SpeedMeasurement,
    Throttle,
    describe_speeds,
    measure_speed,
    reference_rate,
)
from benchmarks.measure import ranks
from benchmarks.measure.ranks import Report

NETWORK_METHODS = (*networks.METHODS, "none")


@dataclass(frozen=True)
class RankSettings:
    """Settings by which a rank takes its place in the cluster; picklable."""

    cluster: EmulatedCluster
    limits: SpeedLimits
    speed_methods: tuple[str, ...]
    network: str
    own_pids: tuple[int, ...]


@dataclass(frozen=True)
class Emulation:
    """An emulated cluster, seen from the process that made it.

    Args:
        settings: of its ranks.
        network: its nodes.
    """

    settings: RankSettings
    network: Network

    @property
    def nodes(self) -> list[networks.Node]:
        """Nodes by rank, each with the link that the rank uses."""
        links, nodes = self.network.links, self.settings.cluster.nodes
        within = [(node, rank % links) for node, each in enumerate(nodes) for rank in range(len(each.speeds))]
        return [self.network.nodes[node * links + link] for node, link in within]

    def run(self, fn: Callable[..., Any], *args: Any, on_report: Report = lambda done, now: None) -> list[Any]:
        """Run ``fn(lab, *args)`` on every rank; return the results by rank, see `benchmarks.measure.ranks.run`."""
        return ranks.run(_on_rank, self.nodes, fn, self.settings, args, on_report=on_report)


@contextmanager
def emulate(
    cluster: EmulatedCluster,
    *,
    speed_methods: Sequence[str] = METHODS,
    network_methods: Sequence[str] = NETWORK_METHODS,
) -> Iterator[Emulation]:
    """Make the cluster's links and CPU groups, and remove them at the end.

    Args:
        cluster: to emulate.
        speed_methods: to try in this order, from `benchmarks.emulation.throttle.METHODS`.
        network_methods: to try in this order; ``"none"`` connects all nodes by loopback.

    Raises:
        EmulationError: no network method works, and ``"none"`` is not among them.
    """
    count = len(cluster.nodes)
    links: dict[str, Any] = {"rate_bit_per_s": 1.0, "methods": ["none"]}
    if cluster.has_links:
        ends = [(i, node.link_delay_s) for i, node in enumerate(cluster.nodes) for _ in range(node.links)]
        links = {
            "rate_bit_per_s": [cluster.nodes[i].link_bit_per_s for i, _ in ends],
            "delay_s": [[0.0 if i == j else a + b for j, b in ends] for i, a in ends],
            "methods": list(network_methods),
            "links": cluster.nodes[0].links,
        }
    with (
        speed_limits(len(cluster.speeds)) as limits,
        networks.emulate(nodes=count, **links) as network,
        awake_cores() as awake,
    ):
        described = network.describe()
        if cluster.has_links and network.method == "none":
            described = "loopback, NOT shaped as asked for: this machine lets us do neither of relay and veth"
        own_pids = (*network.pids, *awake)
        yield Emulation(RankSettings(cluster, limits, tuple(speed_methods), described, own_pids), network)


def _on_rank(rank: int, report: Report, fn: Callable[..., Any], settings: RankSettings, args: Sequence[Any]) -> Any:
    return fn(RankLab(rank, report, settings), *args)


class RankLab:
    """The emulated cluster, seen from one of its ranks.

    Attributes:
        cluster: as requested.
        rank: this one.
        speeds: `SpeedMeasurement` of every rank, from the last `set_speeds`.
        own_pids: process ids of the emulation besides the ranks.
    """

    def __init__(self, rank: int, report: Report, settings: RankSettings) -> None:
        self.cluster, self.rank, self._settings, self._report = settings.cluster, rank, settings, report
        self.own_pids = settings.own_pids
        self.speeds: list[SpeedMeasurement] = []
        self._throttle = Throttle(settings.limits, rank, settings.speed_methods)
        self._reference = reference_rate()
        if (budget := self.cluster.memory_bytes[rank]) is not None:
            limit_memory(budget)
        self.set_speeds(self.cluster.cores)

    def report(self, done: float, now: str) -> None:
        """Report the share of the measurement that is done, and the current part; only rank 0's report counts."""
        if self.rank == 0:
            self._report(done, now)

    def set_speeds(self, cores: Sequence[float]) -> list[SpeedMeasurement]:
        """Give every rank its share of a core from now on, and measure the speeds. Caller: every rank."""
        self.speeds = measure_speed(self._throttle, cores, self._reference)
        return self.speeds

    @contextmanager
    def at_speed(self, cores: float) -> Iterator[None]:
        """Give this rank another share of a core inside, without measuring it; for work that is not measured."""
        self.change_speed(cores)
        yield
        self.change_speed(self.speeds[self.rank].asked)

    def change_speed(self, cores: float) -> None:
        """Change the speed of this rank alone, at once, without measuring it."""
        self._throttle.set(cores)

    @property
    def method(self) -> str:
        """Method by which speeds are made."""
        return self._throttle.method

    @property
    def late_s(self) -> float:
        """See `Throttle.late_s`."""
        return self._throttle.late_s

    def describe(self) -> str:
        """Describe request and measurement, in a line each for speeds and links."""
        return f"{describe_speeds(self.method, self.speeds)}\nemulated links: {self._settings.network}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for result files."""
        return {
            "cluster": self.cluster.to_dict(),
            "method": self.method,
            "speeds": [asdict(speed) | {"error": speed.error, "good": speed.good} for speed in self.speeds],
            "links": self._settings.network,
        }


def limit_memory(budget_bytes: int) -> None:
    """Let this process allocate ``budget_bytes`` more than it has now; beyond, torch raises its out-of-memory error."""
    match = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    limit = int(match[1]) * 1024 + budget_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
