"""Run the self-test: connect the ranks, run the checks, and write the report."""

from __future__ import annotations

import os
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

from ds_hetero.common.terminal import terminal_width
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
from ds_hetero.selftest.pipeline_step import check_pipelines
from ds_hetero.selftest.prediction import check_prediction
from ds_hetero.selftest.ranks import check_ranks, describe_rank, nodes_of_ranks, trained_dtype_of
from ds_hetero.selftest.report import Report
from ds_hetero.selftest.routed_documents import check_routed_documents
from ds_hetero.selftest.session import Session
from ds_hetero.selftest.store_connection import Failure, StoreConnection, connect_to_store
from ds_hetero.selftest.training import check_training
from ds_hetero.selftest.uneven_partitions import check_uneven_partitions

_WIDTH = 150  # characters of a line of tables that do not go to a terminal
_MAX_WAIT = 10.0  # a rank waits for the slowest rank at the end of a check, for so many limits of a call

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
"""Checks that pass or fail, in order. The lines of `_run_checks`' further checks are for information."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the command line."""

    quick: bool
    measure: bool  # time training steps, too, and compare them with predictions
    limit_s: float  # seconds that a call may take
    out: Path | None  # file for the report as text
    as_json: Path | None  # file for the report as JSON
    with_host_names: bool
    on_line: Callable[[Line], None] | None = None  # called on every rank with every line, as soon as it is known there


def run(options: Options) -> bool:
    """Test the ranks of the launcher, or this process alone; return whether no check has failed.

    Caller: every rank. A rank that hangs or dies ends all processes with exit status 1, after a report.
    """
    begin_s, report = time.perf_counter(), Report(on_line=options.on_line)
    try:
        connection, watch_connection = connect_to_store(options.limit_s)
        report.ranks = connection.gather("the start", describe_rank(options.with_host_names), options.limit_s)
    except PeerError as error:  # without a store every rank reports for itself
        report.add([Line("the start", "fail", str(error))])
        return _finish(report, options, begin_s)
    try:
        check_ranks(report.ranks)
    except ConfigError as error:
        report.add([Line("ranks", "fail", str(error))])
    else:
        report.nodes = nodes_of_ranks(report.ranks)
        report.add([Line("ranks", "pass", "devices of one kind, versions and variables alike")])
        _run_checks(_Run(connection, watch_connection, report, options, begin_s))
    if connection.rank == 0:
        _finish(report, options, begin_s)
    connection.leave(options.limit_s)
    return report.healthy


@dataclass
class _Run:
    """What a run of the self-test needs to write its report, also after a failure."""

    connection: StoreConnection  # to exchange lines with the other ranks
    watch_connection: StoreConnection  # the connection of the watch's thread
    report: Report  # with the lines of the checks that have ended
    options: Options
    begin_s: float
    check_lines: list[Line] = field(default_factory=list)  # of the running check, on this rank

    def report_failure(self, failure: Failure, positions: Sequence[str]) -> None:
        """Print and write the report of a run that ends with a failed call.

        Args:
            positions: of the ranks, see `StoreConnection.describe_positions`.
        """
        ranks = (self.connection.rank,) if self.connection.size > 1 else ()
        self.report.add(replace(line, ranks=ranks) for line in self.check_lines)
        listed = "\n".join(positions)
        detail = f"{failure.cause} (seen by rank {failure.rank})\n{listed}"
        self.report.add([Line(failure.call, "fail", detail)])
        self.report.add([Line("what comes after", "skip", "process groups cannot be used after a failed call")])
        _finish(self.report, self.options, self.begin_s)


def _run_checks(state: _Run) -> None:
    """Make the process group and run every check. The report of every rank gets the lines of all ranks."""
    connection, limit_s = state.connection, state.options.limit_s
    device = default_device()
    watch = CallWatch(state.watch_connection, device, limit_s, state.report_failure)
    with watch.call("making the process group"):
        _make_process_group(connection, device, limit_s)
    session = Session(
        rank=connection.rank,
        size=connection.size,
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
        check_begin_s = time.perf_counter()
        watch.begin_check(2 * index)
        for line in check():
            state.check_lines.append(line)
        watch.begin_check(2 * index + 1)
        with watch.call(f"the end of the check of {name}", times=_MAX_WAIT):
            as_json = [(line.name, line.status, line.detail, line.per_s) for line in state.check_lines]
            lines_of_ranks: list[list[Any]] = connection.gather(name, as_json, 2 * _MAX_WAIT * limit_s)
        state.report.seconds_of_checks[name] = time.perf_counter() - check_begin_s
        state.check_lines.clear()
        state.report.add(merge([[Line(*line) for line in lines] for lines in lines_of_ranks]))
    watch.begin_check(2 * len(checks) + 2)
    with watch.call("ending the process groups"):  # NCCL's teardown may hang, and the report is not written yet
        dist.destroy_process_group()
        connection.gather("the end", None, 2 * limit_s)  # a rank whose teardown hangs is named before others say PASS
    watch.close()


def _make_process_group(connection: StoreConnection, device: torch.device, limit_s: float) -> None:
    """Make the default process group over the ranks' store. Its timeout is 20 limits, so that the watch ends first."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        os.environ.setdefault(name, value)  # DeepSpeed reads them, also in a process without a launcher
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore("group", connection.store),
        rank=connection.rank,
        world_size=connection.size,
        timeout=timedelta(seconds=20 * limit_s),
        # With a device NCCL makes the communicator here, on all ranks, and not at the first call, which some ranks may
        # never make.
        device_id=device if device.type == "cuda" else None,
    )
    # Without a device torch would derive it from the global rank, which is wrong if nodes have unequal numbers of GPUs.
    dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)


def _finish(report: Report, options: Options, begin_s: float) -> bool:
    """Print the report and write its files; return whether no check has failed."""
    report.seconds = time.perf_counter() - begin_s
    report.print(Console(width=terminal_width() or _WIDTH))
    report.write(options.out, options.as_json)
    return report.healthy
