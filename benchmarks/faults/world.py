"""Run the ranks of a job as processes without a launcher: survivors must end by themselves, and a watch waits for it.

Ranks are forked from a server that has imported everything. Each is a session of its own, writes its output into a
file, and ends like an interpreter: traceback, exit functions, threads that are not daemons.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from benchmarks.faults.jobs import ENDLESS, PAUSE, Job
from benchmarks.faults.plant import FAULT_FILE
from benchmarks.measure.ports import free_port

_STRICT = "STRICT_GROUP"
_PAUSE_S = 2.0
_STACKS_S = 0.7  # for the ranks to write their stacks
_PR_SET_PDEATHSIG = 1
_server = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class RankEnd:
    """How the process of one rank ended.

    Args:
        exit_code: negative for a signal; None if the watch had to end it.
        ended_at_s: on the monotonic clock.
        output: of the process; for a rank that hung, its stacks are at the end.
    """

    exit_code: int | None
    ended_at_s: float
    output: str


def run_world(job: Job, folder: Path, limit_s: float, resume: bool = False, strict: bool = False) -> list[RankEnd]:
    """Run the ranks of a job, and watch them until all have ended, or torchrun's agent that restarts them.

    Args:
        job: to run.
        folder: of the job, which exists.
        limit_s: seconds per start after which ranks that still run are killed, with their stacks in their output.
        resume: see `benchmarks.faults.training.train`.
        strict: let ranks connect, wait and stay silent like those on NCCL, see `tests.strict_group`.
    """
    _server.set_forkserver_preload(["benchmarks.faults.preload"])
    store = _host_store(job.ranks) if job.store == "launcher" else None
    port = free_port() if store is None else store.port
    limit_s *= 1 + job.strikes * job.is_restarted
    env = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": str(store is not None),
        "WORLD_SIZE": str(job.ranks),
        "LOCAL_WORLD_SIZE": str(job.ranks),
        "CROSS_RANK": "0",
        "CROSS_SIZE": "1",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "ACCELERATE_USE_CPU": "false",  # accelerate leaves DeepSpeed alone where it is told to use the CPU
        "TRANSFORMERS_VERBOSITY": "error",
        _STRICT: str(int(strict)),
        "STRICT_GROUP_LOCK_S": "0",  # no wait of theirs is called a lock: the watch has to end it
    }
    if job.is_restarted:
        processes = [_server.Process(target=_run_agent, args=(job, folder, env))]
    else:
        mains = [(job, rank, folder, resume, env) for rank in range(job.ranks)]
        processes = [_server.Process(target=_main, args=args, daemon=True) for args in mains]
    try:
        for process in processes:
            process.start()
        ended = _watch(processes, job, folder, limit_s, resume)
    finally:
        for process in processes:
            _end(process)
    codes = [process.exitcode for process in processes]
    ends = []
    for rank in range(job.ranks):
        output = _output(folder, rank, resume).read_text(errors="replace")
        number = 0 if job.is_restarted else rank
        hung = ended[number] is None
        ends.append(RankEnd(None if hung else codes[number], ended[number] or time.monotonic(), output))
    return ends


def _watch(processes: Sequence[Any], job: Job, folder: Path, limit_s: float, resume: bool) -> dict[int, float | None]:
    """Return the end of each process; None for those that run longer than ``limit_s``."""
    deadline = time.monotonic() + limit_s
    ended: dict[int, float | None] = dict.fromkeys(range(len(processes)))
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    stopped = {job.victim} if job.fault in ENDLESS and not resume else set()
    goes_on_at: float | None = None
    while set(running.values()) - stopped and time.monotonic() < deadline:
        for sentinel in wait(list(running), timeout=0.1):
            ended[running.pop(sentinel)] = time.monotonic()  # type: ignore[index]
        if job.fault == PAUSE and not resume and goes_on_at is None and (folder / FAULT_FILE).exists():
            goes_on_at = float((folder / FAULT_FILE).read_text()) + _PAUSE_S
        if goes_on_at is not None and time.monotonic() > goes_on_at:
            os.kill(processes[job.victim].pid, signal.SIGCONT)
            goes_on_at = float("inf")
    hanging = [rank for rank in running.values() if rank not in stopped]
    for rank in hanging:
        os.kill(processes[rank].pid, signal.SIGUSR1)
    time.sleep(_STACKS_S if hanging else 0)
    return ended


def _end(process: Any) -> None:
    """Kill a rank and the processes that it started."""
    if process.pid is None:
        return
    if process.is_alive():
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:  # not yet the leader of a session
            process.kill()
    process.join()


def _host_store(ranks: int) -> Any:
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", 0, ranks, is_master=True, wait_for_workers=False)


def _output(folder: Path, rank: int, resume: bool) -> Path:
    return folder / f"{'check' if resume else 'output'}{rank}.txt"


def _run_agent(job: Job, folder: Path, env: Mapping[str, str]) -> None:
    """Run torchrun's agent with ranks that are forked here, so that they need no imports."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _begin_process(folder / "torchrun.txt")
    os.environ.update(env)
    is_static = job.store.endswith("static")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=job.ranks,
        run_id="faults",
        rdzv_backend="static" if is_static else "c10d",
        rdzv_endpoint=f"127.0.0.1:{env['MASTER_PORT'] if is_static else 0}",
        rdzv_configs={"rank": 0} if is_static else {},
        max_restarts=job.strikes,
        monitor_interval=0.1,
        start_method="fork",
    )
    elastic_launch(config, _run_restarted)(job, folder)


def _run_restarted(job: Job, folder: Path) -> None:
    """Run a rank that torchrun has started."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # forked, it has the agent's handler
    _main(job, int(os.environ["RANK"]), folder, os.environ["TORCHELASTIC_RESTART_COUNT"] != "0", {})


def _begin_process(output: Path) -> None:
    """Make this process a session of its own that ends with its parent and writes into a file."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # the server ends with the watch, we with the server
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)


def _main(job: Job, rank: int, folder: Path, resume: bool, env: Mapping[str, str]) -> None:
    """Run a rank."""
    _begin_process(_output(folder, rank, resume and not job.is_restarted))
    os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank))
    os.chdir(folder)
    gc.freeze()  # a full collection over what the server has loaded would copy all of its pages
    warnings.simplefilter("ignore")
    import torch

    from benchmarks.faults.training import train

    torch.set_num_threads(1)
    if os.environ.get(_STRICT) == "1":
        _keep_rules_of_nccl(folder, rank, resume)
    code = 0
    try:
        train(job, rank, folder, resume)
    except BaseException:
        code = 1
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    os.seteuid(os.getuid())  # of a rank that has given its rights up
    atexit._run_exitfuncs()
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    sys.stdout.flush()
    sys.stderr.flush()
    if job.is_restarted and code == 0:
        return  # torchrun waits for what its ranks return
    os._exit(code)  # the rest of the interpreter's way out takes seconds after DeepSpeed


def _keep_rules_of_nccl(folder: Path, rank: int, resume: bool) -> None:
    """Let this rank keep NCCL's rules."""
    from tests.strict_group import install

    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    of_ranks = folder / f"strict-{start}-{resume}"  # which have never met those of another start
    of_ranks.mkdir(exist_ok=True)
    install(str(of_ranks), rank)
