"""Run functions on ranks in tests: `run_ranks` on gloo, `run_deepspeed` in an environment like that of a launcher.

    def test_sum():
        assert run_ranks(_sum, 3, 10) == [33, 33, 33]

    def _sum(rank, base):                    # module level, so that a child can import it by name
        x = torch.tensor(base + rank)
        dist.all_reduce(x)
        return x.item()

Ranks are forked from a server that has imported torch, one per test session, so that a call takes about a tenth of a
second. `start_server` starts it in advance, for integration tests with DeepSpeed and transformers imported. Every rank
runs one thread, in deterministic mode, in which ``torch.empty`` is filled with NaN. The output of ranks is shown as
that of the test.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.measure.ports import free_port
from benchmarks.proof.order import violations

ROOT = Path(__file__).resolve().parents[1]

# What a rank says when another one failed first.
_SECONDARY = ("closed by peer", "reset by peer", "Broken pipe", "Timed out waiting", "killed by run_ranks")
_PR_SET_PDEATHSIG = 1
_PYTESTS_OWN = "PYTEST_CURRENT_TEST"  # changes while a test runs
_GRACE_S = 10  # for the other ranks to report, once one has failed

_server = multiprocessing.get_context("forkserver")
# What a rank would import anyway, and what torch imports late: for deterministic mode, and in the first backward.
_preload = ["tests.support", "torch", "torch.distributed", "torch._inductor.config", "sympy"]


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 240,
    env: Mapping[str, str] | None = None,
    nccl_rules: bool = True,
    strict: bool = False,
) -> list[Any]:
    """Run ``fn(rank, *args)`` on gloo ranks of their own and return what each returned, in rank order.

    Args:
        fn: a module-level function; the default process group exists when it is called.
        world_size: number of ranks; each is a process.
        args: passed to every rank; they and the result must pickle.
        timeout_s: a collective gives up after half of it; a rank still running at the end is killed, its stack shown.
        env: environment variables of the ranks.
        nccl_rules: hold what the ranks post to what NCCL demands, see `benchmarks.proof.order`; not where ranks fail on
            purpose or use gloo for what NCCL cannot do.
        strict: block the ranks where NCCL would block them, see `tests.strict_group`.

    Raises:
        AssertionError: a rank raised, died or hung, or the ranks break NCCL's rules. Shows every failed rank, the cause
            before its consequences.
    """
    body = partial(_recorded, _in_process_group) if nccl_rules else _in_process_group
    body = partial(_strict, body) if strict or is_strict() else body
    return _run(body, fn, world_size, args, timeout_s, dict(env or {}))


def run_deepspeed(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 240,
    env: Mapping[str, str] | None = None,
    nccl_rules: bool = False,
    strict: bool = False,
) -> list[Any]:
    """Like `run_ranks`, in the environment that DeepSpeed's launcher makes, and with no process group yet.

    ``deepspeed.initialize``, ``deepspeed.init_distributed``, accelerate and the HF Trainer find RANK, LOCAL_RANK,
    WORLD_SIZE, MASTER_ADDR and MASTER_PORT and set the process group up themselves, on the CPU accelerator. The working
    directory is a temporary one.
    DeepSpeed's shared-memory extension is compiled once and kept in .cache/, see `start_server`. ``nccl_rules`` holds
    DeepSpeed's calls to NCCL's rules as well; it takes a tenth of a second.
    """
    launcher_env = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "CROSS_RANK": "0",
        "CROSS_SIZE": "1",
        "ACCELERATE_USE_CPU": "true",
        **_deepspeed_env(),
    }
    body = partial(_recorded, _in_launcher_env) if nccl_rules else _in_launcher_env
    body = partial(_strict, body) if strict or is_strict() else body
    return _run(body, fn, world_size, args, timeout_s, {**launcher_env, **(env or {})})


@dataclass(frozen=True)
class Ending:
    """How a rank ended.

    Args:
        code: its exit code; negative for a signal.
        output: what it printed on both streams.
    """

    code: int
    output: str


def run_to_the_end(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 240, env: Mapping[str, str] | None = None
) -> list[Ending]:
    """Run like `run_deepspeed`, but end ranks as scripts end: errors go to ``sys.excepthook``, exit functions run."""
    return run_deepspeed(_to_the_end, world_size, fn, args, timeout_s=timeout_s, env=env)


@contextlib.contextmanager
def same_environment() -> Iterator[None]:
    """Put the environment back at the end: ranks and launchers that later tests start would inherit what was set."""
    before = {name: value for name, value in os.environ.items() if name != _PYTESTS_OWN}
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys() - {_PYTESTS_OWN}:
            del os.environ[name]
        os.environ.update(before)


def start_server(modules: Sequence[str], *, deepspeed: bool) -> None:
    """Start the server that ranks are forked from, so that its start counts for no test's timeout.

    Args:
        modules: modules of the tests, which every rank would import otherwise.
        deepspeed: import DeepSpeed and transformers, too. The first time in a clone this compiles DeepSpeed's
            shared-memory extension.
    """
    if deepspeed:
        os.environ.update(_deepspeed_env())
        _preload.append("tests.preload_deepspeed")
        extension = Path(os.environ["TORCH_EXTENSIONS_DIR"], "deepspeed_shm_comm", "deepspeed_shm_comm.so")
        if shutil.which(os.environ.get("CXX", "c++")) and not extension.exists():
            print("compiling DeepSpeed's shared-memory extension, once, for a minute or two", file=sys.__stderr__)
            build = subprocess.run([sys.executable, "-m", "tests.preload_deepspeed"], cwd=ROOT, capture_output=True)
            assert build.returncode == 0, build.stderr.decode()
    _server.set_forkserver_preload([*_preload, *modules])
    first = _server.Process(target=int)
    first.start()  # returns when the server has forked it
    first.join()


# --- the parent's side ------------------------------------------------------------------------------


def _run(
    body: Callable[..., Any],
    fn: Callable[..., Any],
    world_size: int,
    args: Sequence[Any],
    timeout_s: float,
    env: dict[str, str],
) -> list[Any]:
    with tempfile.TemporaryDirectory(prefix="run_ranks_") as folder:
        ranks = []
        for rank in range(world_size):
            receiver, sender = _server.Pipe(duplex=False)
            process = _server.Process(
                target=_rank_main, args=(body, fn, rank, world_size, args, timeout_s, env, folder, sender), daemon=True
            )
            process.start()
            sender.close()
            ranks.append((process, receiver))
        try:
            outcomes = _collect(ranks, timeout_s)
        finally:
            for process, _ in ranks:
                process.kill()
                process.join()
        outputs = [Path(folder, f"output{rank}").read_text(errors="replace") for rank in range(world_size)]
        broken = _broken_rules(folder, world_size)
    failures = {rank: text for rank, (ok, text) in outcomes.items() if not ok}
    if broken:
        broken = f"{fn.__qualname__} breaks NCCL's rules: {broken}\n"
    if failures:
        raise AssertionError(broken + _report(fn, world_size, failures, outputs))
    assert not broken, broken
    for rank, output in enumerate(outputs):
        print("".join(f"[rank {rank}] {line}" for line in output.splitlines(keepends=True)), end="")
    return [pickle.loads(outcomes[rank][1]) for rank in range(world_size)]


def _broken_rules(folder: str, world_size: int) -> str:
    """Return how the recorded calls of the ranks break NCCL's rules; empty if they do not, or a record is missing."""
    files = [Path(folder, f"events{rank}") for rank in range(world_size)]
    if not all(file.exists() for file in files):
        return ""
    return "\n".join(violations([pickle.loads(file.read_bytes()) for file in files], from_the_start=True))


def _collect(ranks: list[tuple[BaseProcess, Connection]], timeout_s: float) -> dict[int, tuple[bool, Any]]:
    """Return the outcome of every rank, in order of arrival: ``(True, pickled result)`` or ``(False, error text)``."""
    outcomes: dict[int, tuple[bool, Any]] = {}
    running = {receiver: rank for rank, (_, receiver) in enumerate(ranks)}
    deadline = time.monotonic() + timeout_s
    reason = f"still running after timeout_s={timeout_s}"
    while running and (remaining_s := deadline - time.monotonic()) > 0:
        for receiver in wait(list(running), timeout=remaining_s):
            rank = running.pop(receiver)
            try:
                outcomes[rank] = receiver.recv()
            except EOFError:
                outcomes[rank] = (False, _cause_of_death(ranks[rank][0]))
            if not outcomes[rank][0] and deadline - time.monotonic() > _GRACE_S:
                deadline = time.monotonic() + _GRACE_S
                reason = f"still running {_GRACE_S} s after rank {rank} failed, killed by run_ranks"
    for rank in running.values():
        os.kill(ranks[rank][0].pid, signal.SIGUSR1)
    time.sleep(0.5 if running else 0)  # the ranks write their stacks
    outcomes |= dict.fromkeys(running.values(), (False, f"{reason}; its stack is in its output"))
    return outcomes


def _cause_of_death(process: BaseProcess) -> str:
    process.join(_GRACE_S)
    code = process.exitcode
    how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
    return f"died of {how} without an exception"


def _report(fn: Callable[..., Any], world_size: int, failures: dict[int, str], outputs: list[str]) -> str:
    cause_first = sorted(failures, key=lambda rank: any(sign in failures[rank] for sign in _SECONDARY))
    parts = [f"{fn.__qualname__} failed on {len(failures)} of {world_size} ranks"]
    for rank in cause_first:
        parts.append(f"--- rank {rank} ---\n{failures[rank].rstrip()}")
        if outputs[rank]:
            parts.append(f"--- rank {rank}, end of its output ---\n{_last_words(outputs[rank]).rstrip()}")
    return "\n".join(parts)


def _last_words(output: str) -> str:
    """Return the end of a rank's output; of a crash report the beginning, which has the stack of the thread."""
    crash = output.rfind("Fatal Python error")
    return output[-4000:] if crash < 0 else output[crash:][:8000]


def _deepspeed_env() -> dict[str, str]:
    # The build files name folders of this environment: one that another environment left behind would be built again.
    build = f"{sys.implementation.cache_tag}-torch-{version('torch')}-{zlib.crc32(sys.prefix.encode()):08x}"
    return {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(ROOT / ".cache" / "torch_extensions" / build)}


# --- the rank's side --------------------------------------------------------------------------------


def _rank_main(
    body: Callable[..., Any],
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    args: Sequence[Any],
    timeout_s: float,
    env: dict[str, str],
    folder: str,
    sender: Connection,
) -> None:
    output = os.open(f"{folder}/output{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    os.environ.update(env)
    gc.freeze()  # A full collection over what the server has loaded would copy all of its pages: two seconds each time.
    import torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        result = pickle.dumps(body(fn, rank, world_size, args, timeout_s, folder))
        _save_coverage()
        sender.send((True, result))
        succeeded = True
    except BaseException:
        sender.send((False, traceback.format_exc()))
        succeeded = False
    sender.close()
    sys.stdout.flush()
    sys.stderr.flush()
    if succeeded:
        # A peer may still be connecting to this rank, and would report it as gone: `_run` ends all ranks at once.
        time.sleep(timeout_s)
    os._exit(0)  # the interpreter's own way out takes longer than most tests


def _save_coverage() -> None:
    """Write which lines this rank has run, under `tests.coverage_table`, before `_run` sees its result and kills it."""
    if "coverage" in sys.modules and (measured := sys.modules["coverage"].Coverage.current()) is not None:
        measured.save()


def _in_process_group(
    fn: Callable[..., Any], rank: int, world_size: int, args: Sequence[Any], timeout_s: float, folder: str
) -> Any:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s / 2),
    )
    return fn(rank, *args)


def is_strict() -> bool:
    """Return whether every run of ranks is strict: ``STRICT_GROUP=1 bash tests/run.sh tests/dist``."""
    return os.environ.get("STRICT_GROUP") == "1"


def half_of(nodeid: str) -> int:
    """Half of the suite that a test belongs to, 0 or 1; the same on every machine and in every run."""
    return zlib.crc32(nodeid.encode()) % 2


def _strict(
    body: Callable[..., Any],
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    args: Sequence[Any],
    timeout_s: float,
    folder: str,
) -> Any:
    """Run ``body`` on a rank that blocks where a rank on NCCL would block; return its result."""
    from tests.strict_group import install

    device = install(folder, rank)
    try:
        return body(fn, rank, world_size, args, timeout_s, folder)
    finally:
        if sys.exc_info()[0] is None:
            device.drain()  # before the process ends, with what others wait for


def _recorded(
    body: Callable[..., Any],
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    args: Sequence[Any],
    timeout_s: float,
    folder: str,
) -> Any:
    """Run ``body``, and write every call that the rank posts to a file, also if it fails; return its result."""
    from benchmarks.proof.recording import recording

    with recording() as events:
        try:
            return body(fn, rank, world_size, args, timeout_s, folder)
        finally:
            Path(folder, f"events{rank}").write_bytes(pickle.dumps(events))


def _in_launcher_env(
    fn: Callable[..., Any], rank: int, world_size: int, args: Sequence[Any], timeout_s: float, folder: str
) -> Any:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    os.chdir(folder)
    return fn(rank, *args)


def _to_the_end(rank: int, fn: Callable[..., Any], args: Sequence[Any]) -> Ending:
    with tempfile.TemporaryFile() as output:
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            code = 0
            try:
                fn(rank, *args)
            except BaseException:
                code = 1
                sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        _, status = os.waitpid(pid, 0)
        output.seek(0)
        return Ending(os.waitstatus_to_exitcode(status), output.read().decode(errors="replace"))
