"""The report of a run: tables for people, JSON for machines, neither with private data."""

from __future__ import annotations

import io
import json
import re
import socket
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ds_hetero.common.reading import JsonDict, JsonObject
from ds_hetero.selftest.lines import Line

_WIDTH = 120
_PRIVATE = ("host", "environment", "type")  # of a rank's description
_STYLES = {"pass": "green", "fail": "bold red", "skip": "yellow", "info": "dim"}


@dataclass
class Report:
    """Results so far."""

    ranks: list[JsonObject] = field(default_factory=list)  # descriptions by rank, from `ds_hetero.selftest.ranks`
    nodes: tuple[tuple[int, ...], ...] = ()  # by node, its ranks
    lines: list[Line] = field(default_factory=list)
    measured: JsonDict = field(default_factory=dict)  # numbers of `ds_hetero.selftest.prediction`
    seconds: float = 0.0
    seconds_of_checks: dict[str, float] = field(default_factory=dict)  # of this rank, until all had come to the end
    hears: Callable[[Line], None] | None = None  # told of every line as soon as it is known

    def add(self, lines: Iterable[Line]) -> None:
        """Add lines behind those that are there."""
        for line in lines:
            self.lines.append(line)
            if self.hears is not None:
                self.hears(line)

    @property
    def healthy(self) -> bool:
        """Whether nothing has failed."""
        return not any(line.status == "fail" for line in self.lines)

    def to_dict(self) -> JsonDict:
        """Return the report as JSON."""
        ranks = [{key: value for key, value in rank.items() if key not in _PRIVATE} for rank in self.ranks]
        return {
            "version": 1,
            "healthy": self.healthy,
            "seconds": round(self.seconds, 1),
            "seconds_of_checks": {name: round(seconds, 1) for name, seconds in self.seconds_of_checks.items()},
            "nodes": [list(ranks) for ranks in self.nodes],
            "ranks": ranks,
            **({"measured": self.measured} if self.measured else {}),
            "lines": [{**asdict(line), "detail": redacted(line.detail)} for line in self.lines],
        }

    def text(self) -> str:
        """Return the tables as plain text, to be attached to an issue."""
        buffer = io.StringIO()
        self.print(Console(file=buffer, width=_WIDTH, force_terminal=False, color_system=None))
        return buffer.getvalue()

    def write(self, out: Path | None, as_json: Path | None) -> None:
        """Write the files that were asked for."""
        if out is not None:
            out.write_text(self.text(), encoding="utf-8")
        if as_json is not None:
            as_json.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    def print(self, console: Console) -> None:
        """Print ranks, verdicts and the sum of it."""
        if self.ranks:
            console.print(self._ranks_table())
        verdicts = Table("check", "verdict", "ranks", "detail", title="Self-test")
        for line in self.lines:
            style = _STYLES[line.status]
            detail = redacted(line.detail).replace("[", "\\[")
            ranks = ", ".join(map(str, line.ranks)) or "all"
            verdicts.add_row(line.name, f"[{style}]{line.status}[/]", ranks, detail)
        console.print(verdicts)
        failed = sum(line.status == "fail" for line in self.lines)
        verdict = f"FAIL: {failed} of {len(self.lines)} lines" if failed else "PASS"
        console.print(f"{verdict}, {len(self.ranks)} ranks, {self.seconds:.0f} s", highlight=False)
        if self.seconds_of_checks:
            listed = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds_of_checks.items())
            console.print(f"seconds: {listed}", highlight=False)

    def _ranks_table(self) -> Table:
        table = Table("rank", "node", "device", "memory", "software", "native types", "kernels", title="Ranks")
        node_of = {rank: number for number, ranks in enumerate(self.nodes) for rank in ranks}
        for rank, described in enumerate(self.ranks):
            if "error" in described:
                table.add_row(str(rank), "?", redacted(described["error"]))
                continue
            node = str(described.get("host_name", node_of.get(rank, "?")))
            kernels = ", ".join(name for name, reason in described["kernels"].items() if reason is None)
            memory, types = f"{described['memory_gib']} GiB", ", ".join(described["native_types"])
            table.add_row(str(rank), node, _device(described), memory, _software(described), types, kernels)
        return table


def _device(described: JsonObject) -> str:
    capability = f", sm {described['capability']}" if "capability" in described else ""
    return f"{described['device']}{capability}"


def _software(described: JsonObject) -> str:
    names = {"torch": "torch", "cuda": "CUDA", "nccl": "NCCL", "driver": "driver"}
    return ", ".join(f"{text} {described[key]}" for key, text in names.items() if described.get(key))


def redacted(text: str) -> str:
    """Return the text without this host's name, addresses and the user's folder."""
    for private, stand_in in ((str(Path.home()), "~"), (socket.gethostname(), "HOST")):
        if len(private) > 1:
            text = text.replace(private, stand_in)
    return re.sub(r"\[?\b\d{1,3}(?:\.\d{1,3}){3}\b\]?(?::\d+)?|\[[0-9a-f:]*:[0-9a-f:.%\w]*\](?::\d+)?", "ADDRESS", text)
