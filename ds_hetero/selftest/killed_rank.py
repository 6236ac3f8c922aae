"""Kill one rank of a small job, and check that the other ranks end by themselves and name it, as in training.

Every rank of the self-test starts a second process on its device. These processes form a process group over the
self-test's store and add up tensors. The process of the last rank kills itself (SIGKILL) between two sums, so the
others wait for a message that never comes. gloo raises an error then; NCCL raises none, and ds_hetero's watch has to
notice the loss. A process also ends when the rank that has started it ends: its standard input is closed then.

    python -m ds_hetero.selftest.killed_rank        one of these processes; `check_killed_rank` sets its environment
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from ds_hetero.errors import PeerError
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.devices import default_device
from ds_hetero.runtime.peers.board import FAILED
from ds_hetero.runtime.peers.watch import start_watch, waiting_for_peers
from ds_hetero.selftest.lines import Line
from ds_hetero.selftest.session import Session

_NAME = "killed rank"
_TIMES = 2.0  # limits of a call that a process may take: it imports torch
_STORE = "DS_HETERO_SELFTEST_STORE"  # environment variable: prefix of the processes' keys in the self-test's store
_BEGIN = "waits since"  # begins the line that a process prints before its last sum, with the time
_DEVICE_BUSY = "CUDA-capable device(s) is/are busy"  # cudaErrorDevicesUnavailable: the compute mode is exclusive
_ELEMENTS = 2**18
_SURVIVORS_S = 5.0  # seconds that rank 0 waits for the other survivors: idle machines need 0.1 s, busy ones seconds
_MAX_MESSAGE_LENGTH = 200  # characters of a message that the table shows
_COMMAND = [sys.executable, "-m", "ds_hetero.selftest.killed_rank"]


class _Ending(NamedTuple):
    """How the process of a rank ended."""

    code: int | None  # exit code; None if the process hung and had to be killed
    seconds: float  # from the begin of its last sum to its end
    message: str  # the last error that it printed, or else its last line of output; see `_last_message`


def check_killed_rank(session: Session) -> Iterator[Line]:
    """Yield one line: the survivors' message, and the seconds until the last of them had ended."""
    if session.size == 1 or "MASTER_ADDR" not in os.environ:
        yield Line(_NAME, "skip", "one process has nobody who would miss it")
        return
    with session.watch.call(_NAME, times=2 * _TIMES):
        name = on_all_ranks(lambda: uuid.uuid4().hex)[0]
        limit_s = _TIMES * session.watch.limit_s
        endings = on_all_ranks(lambda: _run_process(name, limit_s, session.rank == session.size - 1))
    yield _line(endings)


def _line(endings: list[_Ending]) -> Line:
    """Return the line from the endings of all ranks, the same on every rank."""
    victim = len(endings) - 1
    if any(_DEVICE_BUSY in ending.message for ending in endings):
        return Line(
            _NAME, "skip", "the device takes one process at a time: nvidia-smi --compute-mode=DEFAULT lets it try"
        )
    for rank, ending in enumerate(endings[:victim]):
        if ending.code is None:
            return Line(_NAME, "fail", f"rank {rank} did not end after rank {victim} was killed. {ending.message}")
        if ending.code == 0 or f"rank {victim} gone" not in ending.message:
            return Line(_NAME, "fail", f"rank {rank} ended with {ending.code}, and does not name it: {ending.message}")
    if endings[victim].code != -signal.SIGKILL:
        code, message = endings[victim].code, endings[victim].message
        return Line(_NAME, "fail", f"rank {victim} ended before it was killed, with {code}: {message}")
    slowest_s = max(ending.seconds for ending in endings[:victim])
    return Line(_NAME, "pass", f"the others ended after {slowest_s:.1f} s: {endings[0].message}")


def _run_process(name: str, limit_s: float, is_victim: bool) -> _Ending:
    """Start the process of this rank, wait until it has ended, and read its output."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "output")
        with output.open("wb") as file:
            environment = {**os.environ, _STORE: name}
            process = subprocess.Popen(
                _COMMAND, stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT, env=environment
            )
            code: int | None
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                code = None
            ended_s = time.monotonic()
            assert process.stdin is not None
            process.stdin.close()
        lines = output.read_text(errors="replace").strip().splitlines()
    begin_times_s = [float(line.rpartition(" ")[2]) for line in lines if line.startswith(_BEGIN)]
    seconds = ended_s - begin_times_s[-1] if begin_times_s else 0.0
    return _Ending(code, seconds, _last_message(lines, is_victim))


def _last_message(lines: list[str], is_victim: bool) -> str:
    """Return the first sentence of the last error in a process's output, without the error's class.

        ["waits since 7.5", "PeerError: rank 1 gone: killed. Look at its log."]    "rank 1 gone: killed"

    Without an error, and for the victim, the last line stands for it.
    """
    errors = [] if is_victim else [line for line in lines if "Error" in line]
    last_line = (errors or lines or [""])[-1]
    message = last_line.rpartition("Error: ")[2]
    first_sentence = message.partition(". ")[0]
    return first_sentence[:_MAX_MESSAGE_LENGTH]


def main() -> None:
    """Run one of the processes: join the process group, add up tensors, and report a lost peer."""
    threading.Thread(target=_exit_with_parent, name="ds_hetero selftest", daemon=True).start()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = default_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    selftest_store = TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False
    )
    store = PrefixStore(f"ds_hetero/selftest/{os.environ[_STORE]}", selftest_store)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=600),
        device_id=device if device.type == "cuda" else None,
    )
    watch = start_watch(600.0)
    x = torch.ones(_ELEMENTS, device=device)
    try:
        with waiting_for_peers("adding up tensors"):
            dist.all_reduce(x)
            assert x[0].item() == size  # waits for the device
            if rank == size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            print(f"{_BEGIN} {time.monotonic()}", flush=True)
            dist.all_reduce(x)
            x[0].item()
    except PeerError as error:
        print(f"PeerError: {error}", flush=True)
        watch.say_last_words(FAILED, f"PeerError: {error}")  # as the excepthook of a training job does
        _leave(store, rank, size)
        atexit._run_exitfuncs()  # and no normal exit: NCCL would wait for its kernels
        os._exit(1)
    os._exit(0)


def _exit_with_parent() -> None:
    """Exit when standard input is closed: the rank that has started this process has ended."""
    while os.read(0, 1):
        pass
    os._exit(1)


def _leave(store: PrefixStore, rank: int, size: int) -> None:
    """Let rank 0 end last, as in a job in which it keeps the store.

    If rank 0 ended first, a survivor could report rank 0 as the lost rank.
    """
    store.set(f"said/{rank}", "")
    if rank == 0:
        survivor_keys = [f"said/{survivor}" for survivor in range(1, size - 1)]
        with contextlib.suppress(RuntimeError):  # a survivor that does not come fails the check by its exit code
            store.wait(survivor_keys, timedelta(seconds=_SURVIVORS_S))


if __name__ == "__main__":
    main()
