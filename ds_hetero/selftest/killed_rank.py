"""A rank is killed in a job of processes of its own, and the others say who is gone, as in training.

Every rank starts one process more on its device. These make a process group at the store of this test and add up
tensors; the last one is killed (SIGKILL) between two sums. The others then wait for what never comes. They have to end
by themselves, with a message that names the rank: by the backend's error where it gives one, as gloo does, and by the
watch where it does not, as NCCL. A process ends with the rank that has started it, whose end it sees by its input.

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
_TIMES = 2.0  # the limit of a call: torch is imported by a new process
_STORE = "DS_HETERO_SELFTEST_STORE"  # in the environment of these processes: a name of our own
_BEGIN = "waits since"
_TAKEN = "CUDA-capable device(s) is/are busy"  # cudaErrorDevicesUnavailable, of devices in an exclusive compute mode
_ELEMENTS = 2**18
_OTHERS_S = 5.0  # that rank 0 waits for what the others say: 0.1 on an idle machine, seconds on a busy one
_LONGEST_MESSAGE = 200  # characters of a message that the table shows
_COMMAND = [sys.executable, "-m", "ds_hetero.selftest.killed_rank"]


class _Ending(NamedTuple):
    """How the process of a rank ended."""

    code: int | None  # None if it had to be killed
    seconds: float  # from its last call on
    text: str  # the last line of its output


def check_killed_rank(session: Session) -> Iterator[Line]:
    """Return one line: what the others said, and after how many seconds the last of them had ended."""
    if session.size == 1 or "MASTER_ADDR" not in os.environ:
        yield Line(_NAME, "skip", "one process has nobody who would miss it")
        return
    with session.watch.call(_NAME, times=2 * _TIMES):
        name = on_all_ranks(lambda: uuid.uuid4().hex)[0]
        limit_s = _TIMES * session.watch.limit_s
        endings = on_all_ranks(lambda: _run_process(name, limit_s, session.rank == session.size - 1))
    yield _line(endings)


def _line(endings: list[_Ending]) -> Line:
    """Return the verdict of all ranks, the same on each."""
    victim = len(endings) - 1
    if any(_TAKEN in ending.text for ending in endings):
        return Line(
            _NAME, "skip", "the device takes one process at a time: nvidia-smi --compute-mode=DEFAULT lets it try"
        )
    for rank, ending in enumerate(endings[:victim]):
        if ending.code is None:
            return Line(_NAME, "fail", f"rank {rank} did not end after rank {victim} was killed. {ending.text}")
        if ending.code == 0 or f"rank {victim} gone" not in ending.text:
            return Line(_NAME, "fail", f"rank {rank} ended with {ending.code}, and does not name it: {ending.text}")
    if endings[victim].code != -signal.SIGKILL:
        text = endings[victim].text
        return Line(_NAME, "fail", f"rank {victim} ended before it was killed, with {endings[victim].code}: {text}")
    slowest_s = max(ending.seconds for ending in endings[:victim])
    return Line(_NAME, "pass", f"the others ended after {slowest_s:.1f} s: {endings[0].text}")


def _run_process(name: str, limit_s: float, is_victim: bool) -> _Ending:
    """Start the process of this rank, and wait until it has ended."""
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
    began = [float(line.rpartition(" ")[2]) for line in lines if line.startswith(_BEGIN)]
    seconds = ended_s - began[-1] if began else 0.0
    said = [line for line in lines if "Error" in line and not is_victim] or lines or [""]
    return _Ending(code, seconds, said[-1].rpartition("Error: ")[2].partition(". ")[0][:_LONGEST_MESSAGE])


def main() -> None:
    """One of these processes."""
    threading.Thread(target=_end_with_the_test, name="ds_hetero selftest", daemon=True).start()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = default_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    of_test = TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False
    )
    store = PrefixStore(f"ds_hetero/selftest/{os.environ[_STORE]}", of_test)
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
        watch.say_last_words(FAILED, f"PeerError: {error}")  # as the hook of a job does
        _leave(store, rank, size)
        atexit._run_exitfuncs()  # the words are read; NCCL would wait for its kernels if the interpreter ended
        os._exit(1)
    os._exit(0)


def _end_with_the_test() -> None:
    """End this process when the other end of its input is closed: the rank that has started it is gone."""
    while os.read(0, 1):
        pass
    os._exit(1)


def _leave(store: PrefixStore, rank: int, size: int) -> None:
    """Let rank 0 end after the other survivors, as in a job, whose store it keeps: else it might be blamed by them."""
    store.set(f"said/{rank}", "")
    if rank == 0:
        others = [f"said/{other}" for other in range(1, size - 1)]
        with contextlib.suppress(RuntimeError):  # one that does not come is found by its own line
            store.wait(others, timedelta(seconds=_OTHERS_S))


if __name__ == "__main__":
    main()
