"""The lab's commands by name: their options, measurements and tables."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any, Protocol

from rich.console import Console

from benchmarks.lab.table_coupling import CouplingTable
from benchmarks.lab.table_experts import ExpertsTable
from benchmarks.lab.table_growth import GrowthTable
from benchmarks.lab.table_kept import KeptTable
from benchmarks.lab.table_mesh import MeshTable
from benchmarks.lab.table_qlora import QloraTable
from benchmarks.lab.table_replan import ReplanTable
from benchmarks.lab.table_ring import RingTable
from benchmarks.measure.ranks import Report


class LabTable(Protocol):
    """One command of the lab."""

    help: str

    def add_options(self, parser: ArgumentParser) -> None:
        """Add options besides the common ones."""

    def run(self, options: Namespace, report: Report) -> dict[str, Any]:
        """Measure; return plain data with ``rows``."""

    def show(self, result: dict[str, Any], console: Console) -> None:
        """Print the tables."""


TABLES: dict[str, LabTable] = {
    "ring": RingTable(),
    "mesh": MeshTable(),
    "growth": GrowthTable(),
    "kept": KeptTable(),
    "coupling": CouplingTable(),
    "qlora": QloraTable(),
    "experts": ExpertsTable(),
    "replan": ReplanTable(),
}
