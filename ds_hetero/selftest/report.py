"""The report of a self-test, as tables and as JSON, without private data of the hosts."""

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
from ds_hetero.common.text import rank_ranges
from ds_hetero.selftest.lines import Line

_WIDTH = 120
_UNREPORTED_KEYS = ("host", "environment", "type")  # of a rank's description
_STYLES = {"pass": "green", "fail": "bold red", "skip": "yellow", "info": "dim"}


@dataclass
class Report:
    """The descriptions of the ranks, and the lines of all checks that have ended."""

    ranks: list[JsonObject] = field(default_factory=list)  # descriptions by rank, from `ds_hetero.selftest.ranks`
    nodes: tuple[tuple[int, ...], ...] = ()  # ranks of every node
    lines: list[Line] = field(default_factory=list)
    measured: JsonDict = field(default_factory=dict)  # by `ds_hetero.selftest.prediction.check_prediction`
    seconds: float = 0.0
    seconds_of_checks: dict[str, float] = field(default_factory=dict)  # with the wait for the other ranks
    on_line: Callable[[Line], None] | None = None  # called with every line when it is added

    def add(self, lines: Iterable[Line]) -> None:
        """Append lines, and call ``on_line`` with each."""
        for line in lines:
            self.lines.append(line)
            if self.on_line is not None:
                self.on_line(line)

    @property
    def healthy(self) -> bool:
        """Whether no line says "fail"."""
        return not any(line.status == "fail" for line in self.lines)

    def to_dict(self) -> JsonDict:
        """Return the report as JSON."""
        ranks = [{key: value for key, value in rank.items() if key not in _UNREPORTED_KEYS} for rank in self.ranks]
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
        """Return the tables as plain text, which can be attached to an issue."""
        buffer = io.StringIO()
        self.print(Console(file=buffer, width=_WIDTH, force_terminal=False, color_system=None))
        return buffer.getvalue()

    def write(self, out: Path | None, as_json: Path | None) -> None:
        """Write the report as text to ``out``, and as JSON to ``as_json``; neither where the path is None."""
        if out is not None:
            out.write_text(self.text(), encoding="utf-8")
        if as_json is not None:
            as_json.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    def print(self, console: Console) -> None:
        """Print the table of ranks, the table of lines, the overall verdict and the seconds of every check."""
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
        style = _STYLES["fail" if failed else "pass"]
        console.print(f"[{style}]{verdict}[/], {len(self.ranks)} ranks, {self.seconds:.0f} s", highlight=False)
        if self.seconds_of_checks:
            listed = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds_of_checks.items())
            console.print(f"seconds: {listed}", highlight=False)

    def _ranks_table(self) -> Table:
        """The table of ranks, with one row for all ranks of a node that are alike."""
        table = Table("ranks", "node", "device", "memory", "software", "native types", "kernels", title="Ranks")
        ranks_of_cells: dict[tuple[str, ...], list[int]] = {}
        node_of = {rank: number for number, ranks in enumerate(self.nodes) for rank in ranks}
        for rank, described in enumerate(self.ranks):
            if "error" in described:
                ranks_of_cells.setdefault(("?", redacted(described["error"])), []).append(rank)
                continue
            node = str(described.get("host_name", node_of.get(rank, "?")))
            kernels = ", ".join(name for name, reason in described["kernels"].items() if reason is None)
            memory, types = f"{described['memory_gib']} GiB", ", ".join(described["native_types"])
            cells = (node, _device(described), memory, _software(described), types, kernels)
            ranks_of_cells.setdefault(cells, []).append(rank)
        for row, ranks in ranks_of_cells.items():
            table.add_row(rank_ranges(ranks), *row)
        return table


def _device(described: JsonObject) -> str:
    """Return the text of a rank's device, for instance "NVIDIA A10, sm 8.6"."""
    capability = f", sm {described['capability']}" if "capability" in described else ""
    return f"{described['device']}{capability}"


def _software(described: JsonObject) -> str:
    """Return the versions that the description has, for instance "torch 2.9.1, CUDA 12.8"."""
    titles = {"torch": "torch", "cuda": "CUDA", "nccl": "NCCL", "driver": "driver"}
    return ", ".join(f"{title} {described[key]}" for key, title in titles.items() if described.get(key))


def redacted(text: str) -> str:
    """Replace the home folder by "~", this host's name by "HOST", and IP addresses by "ADDRESS"."""
    for private, substitute in ((str(Path.home()), "~"), (socket.gethostname(), "HOST")):
        if len(private) > 1:
            text = text.replace(private, substitute)
    return re.sub(r"\[?\b\d{1,3}(?:\.\d{1,3}){3}\b\]?(?::\d+)?|\[[0-9a-f:]*:[0-9a-f:.%\w]*\](?::\d+)?", "ADDRESS", text)
