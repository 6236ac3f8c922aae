"""The self-test from its first call to its exit status."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.distributed_c10d import PrefixStore

from ds_hetero.errors import ConfigError, PeerError
from ds_hetero.runtime.devices import default_device
from ds_hetero.selftest.call_watch import CallWatch
from ds_hetero.selftest.collectives import check_collectives
from ds_hetero.selftest.communicator_memory import check_communicator_memory
from ds_hetero.selftest.communicators import check_communicators
from ds_hetero.selftest.device_rates import check_rates
from ds_hetero.selftest.exchange import check_exchange
from ds_hetero.selftest.gradient_sync import check_gradient_sync
from ds_hetero.selftest.kernel_checks import check_kernels
from ds_hetero.selftest.killed_rank import check_killed_rank
from ds_hetero.selftest.lines import Line, merge
from ds_hetero.selftest.meeting import Failure, Meeting, meet
from ds_hetero.selftest.pipeline_step import check_pipelines
from ds_hetero.selftest.prediction import check_prediction
from ds_hetero.selftest.ranks import check_ranks, describe_rank, nodes_of_ranks, trained_dtype_of
from ds_hetero.selftest.report import Report
from ds_hetero.selftest.routed_documents import check_routed_documents
from ds_hetero.selftest.session import Session
from ds_hetero.selftest.training import check_training
from ds_hetero.selftest.uneven_partitions import check_uneven_partitions

_WIDTH = 150  # of tables that do not go to a terminal
_SLOWEST = 10.0  # a check of other ranks may take so many limits of a call

CHECKS: dict[str, Callable[[Session], Iterable[Line]]] = {
    "kernels": check_kernels,
    "collectives": check_collectives,
    "exchange and ring": check_exchange,
    "documents": check_routed_documents,
    "gradient sync": check_gradient_sync,
    "training": check_training,
    "pipelines": check_pipelines,
    "uneven partitions": check_uneven_partitions,
    "communicators": check_communicators,  # over the groups that those before have made
    "memory of a communicator": check_communicator_memory,  # NCCL's kernels are loaded by then
    "a killed rank": check_killed_rank,
}
"""Checks with a verdict, in their order; those after them inform."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the user."""

    quick: bool
    measure: bool  # time steps too, and compare them with what is predicted
    limit_s: float  # seconds that a call may take
    out: Path | None  # file for the report as text
    as_json: Path | None  # file for the report as JSON
    with_host_names: bool
    hears: Callable[[Line], None] | None = None  # on each rank told of every line as soon as the rank knows it


def run(options: Options) -> bool:
    """Test the ranks of the launcher, or this process alone; return whether everything works.

    Caller: every rank. A rank that hangs or dies ends all processes with exit status 1, after a report.
    """
    begin_s, report = time.perf_counter(), Report(hears=options.hears)
    try:
        meeting, aside = meet(options.limit_s)
        report.ranks = meeting.gather("the start", describe_rank(options.with_host_names), options.limit_s)
    except PeerError as error:  # each rank says what it sees: they cannot talk
        report.add([Line("the start", "fail", str(error))])
        return _finish(report, options, begin_s)
    try:
        check_ranks(report.ranks)
    except ConfigError as error:
        report.add([Line("ranks", "fail", str(error))])
    else:
        report.nodes = nodes_of_ranks(report.ranks)
        report.add([Line("ranks", "pass", "devices of one kind, versions and variables alike")])
        _run_checks(_Run(meeting, aside, report, options, begin_s))
    if meeting.rank == 0:
        _finish(report, options, begin_s)
    meeting.leave(options.limit_s)
    return report.healthy


@dataclass
class _Run:
    """A run under way."""

    meeting: Meeting  # to exchange lines with the other ranks
    aside: Meeting
    report: Report  # with the checks that are over
    options: Options
    begin_s: float
    own_lines: list[Line] = field(default_factory=list)  # what the check that runs has said of this rank

    def report_failure(self, failure: Failure, standing: Sequence[str]) -> None:
        """Print and write the report of a run that ends here; see `CallWatch`."""
        own = (self.meeting.rank,) if self.meeting.size > 1 else ()
        self.report.add(replace(line, ranks=own) for line in self.own_lines)
        where = "\n".join(standing)
        detail = f"{failure.cause} (seen by rank {failure.rank})\n{where}"
        self.report.add([Line(failure.call, "fail", detail)])
        self.report.add([Line("what comes after", "skip", "process groups cannot be used after a failed call")])
        _finish(self.report, self.options, self.begin_s)


def _run_checks(state: _Run) -> None:
    """Make the process group and run every check; the lines of all ranks go into the report of each."""
    meeting, limit_s = state.meeting, state.options.limit_s
    device = default_device()
    watch = CallWatch(state.aside, device, limit_s, state.report_failure)
    with watch.call("making the process group"):
        _make_process_group(meeting, device, limit_s)
    session = Session(
        rank=meeting.rank,
        size=meeting.size,
        device=device,
        watch=watch,
        nodes=state.report.nodes,
        quick=state.options.quick,
        trained_dtype=trained_dtype_of(state.report.ranks),
    )
    checks: dict[str, Callable[[], Iterable[Line]]]
    checks = {name: partial(check, session) for name, check in CHECKS.items()}
    checks["rates"] = partial(check_rates, session, state.report.ranks[session.rank])
    if state.options.measure:
        checks["prediction"] = partial(check_prediction, session, state.report.measured)
    for index, (name, check) in enumerate(checks.items(), 1):
        began = time.perf_counter()
        watch.begin_check(2 * index)
        for line in check():
            state.own_lines.append(line)
        watch.begin_check(2 * index + 1)
        with watch.call(f"the end of the check of {name}", times=_SLOWEST):
            own = [(line.name, line.status, line.detail, line.per_s) for line in state.own_lines]
            lines_of_ranks: list[list[Any]] = meeting.gather(name, own, 2 * _SLOWEST * limit_s)
        state.report.seconds_of_checks[name] = time.perf_counter() - began
        state.own_lines.clear()
        state.report.add(merge([[Line(*line) for line in lines] for lines in lines_of_ranks]))
    watch.begin_check(2 * len(checks) + 2)
    with watch.call("ending the process groups"):  # NCCL's teardown may hang, and the report is not written yet
        dist.destroy_process_group()
        meeting.gather("the end", None, 2 * limit_s)  # a rank whose teardown hangs is named before others say PASS
    watch.close()


def _make_process_group(meeting: Meeting, device: torch.device, limit_s: float) -> None:
    """Make the default process group over the store where the ranks met; the watch's limit ends before its own."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        os.environ.setdefault(name, value)  # DeepSpeed reads them, also in a process without a launcher
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore("group", meeting.store),
        rank=meeting.rank,
        world_size=meeting.size,
        timeout=timedelta(seconds=20 * limit_s),
        # The communicator is made here, by all ranks, and not at a first call that only some of them may make.
        device_id=device if device.type == "cuda" else None,
    )
    # Without the device torch would take the rank's number over all nodes for it, which is wrong where they have
    # unequally many.
    dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)


def _finish(report: Report, options: Options, begin_s: float) -> bool:
    """Print the report and write its files; return whether nothing has failed."""
    report.seconds = time.perf_counter() - begin_s
    report.print(Console() if sys.stdout.isatty() else Console(width=_WIDTH))
    report.write(options.out, options.as_json)
    return report.healthy
