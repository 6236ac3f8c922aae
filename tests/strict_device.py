"""A rank whose calls return at once, as on NCCL: its device does what was posted, and its host waits where it reads.

A collective of gloo blocks its caller, in torch.distributed. NCCL's is a kernel: the call returns, ``wait()`` lets the
current stream wait and not the host (torch, docs of torch.distributed, "Synchronous and asynchronous collective
operations"), and the host stands still where it needs a number, in ``item()``, ``tolist()``, ``cpu()`` or
``synchronize()``. These are the rules:

at once     Collectives and ``wait()`` return at once. What was waited for has to be over before the next operator on
            tensors of the main thread, which is where a stream would run it; there the host waits, in a function that
            is not of torch.distributed. A barrier blocks, in torch.distributed (WorkNCCL::synchronizeInternal).
silent      Where a peer is gone nothing is raised: its kernel spins until torch's watchdog ends the process
            (ProcessGroupNCCL, TORCH_NCCL_ASYNC_ERROR_HANDLING; the timeout of the group, 10 minutes by default).
unbuffered  A send is over when its receive is posted. gloo's is, too: UnboundBuffer waits for the receiver.
idle        A kernel that waits for a peer keeps the device from being idle. What needs it idle, an allocator that gives
            memory back (cudaFree), the loading of a module, ``synchronize()``, stands still until all that is posted is
            over (CUDA C programming guide, "Lazy Loading", "Concurrent execution"; NVIDIA/nccl#1766). So what is posted
            has to be over without anything that this rank does later: `need_idle` and `allocating_by_free`.
counters    torch's flight recorder counts what was posted and what is over (`ds_hetero.runtime.peers.posted_calls`).

Other threads than the main one wait where they are, as on gloo.
"""

from __future__ import annotations

import functools
import json
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode

_stock_wait = dist.Work.wait
_TORCH_DISTRIBUTED = Path(dist.__file__).parent


class Locked(RuntimeError):
    """The host of a rank waits for a call that never ends."""


class _Posted:
    """A call of this rank that may not have ended."""

    def __init__(self, work: Any, group: str, what: str, storages: set[int], is_message: bool) -> None:
        self.work, self.group, self.what, self.storages = work, group, what, storages
        self.is_barrier = what == "barrier"
        self._is_message = is_message
        self.is_over = self._is_lost = False

    def look(self) -> bool:
        """Return whether the call has ended; gloo reports the end of a message only to a thread that waits for it."""
        if not (self.is_over or self._is_lost or self._is_message) and self.work.is_completed():
            try:
                _stock_wait(self.work)
                self.is_over = True
            except RuntimeError:  # gloo has lost a peer; a kernel would go on waiting
                self._is_lost = True
        return self.is_over


class Device:
    """The calls that this rank has posted to its device.

    Args:
        lock_s: seconds after which a wait is reported as a lock; None to wait without a limit.
    """

    def __init__(self, lock_s: float | None) -> None:
        self._lock_s = lock_s
        self._by_work: dict[int, _Posted] = {}
        self._stream: deque[_Posted] = deque()  # what the main thread's stream waits for
        self._num_posted: Counter[str] = Counter()
        self._allocates_by_free = False

    def post(self, work: Any, group: str, what: str, tensors: Any, is_message: bool = False) -> Any:
        """Record a posted call; return its work."""
        if work is not None and threading.current_thread() is threading.main_thread():
            self._by_work[id(work)] = _Posted(work, group, what, _storages(tensors), is_message)
            self._num_posted[group] += 1
        return work

    def before_posting(self, tensors: Any) -> None:
        """Wait for the operators that ``tensors`` depend on, so that gloo reads their results; a device has streams."""
        if self._stream and any(posted.storages & _storages(tensors) for posted in self._stream):
            self.drain()

    def drain(self) -> None:
        """Wait for all calls that the current stream waits for."""
        while self._stream:
            self._finish(self._stream[0])
            self._by_work.pop(id(self._stream.popleft().work), None)

    def need_idle(self, what: str = "cudaFree") -> None:
        """Wait for all posted calls. Raises `Locked`: one of them waits for a later action of this rank."""
        self.drain()
        for posted in list(self._by_work.values()):
            self._finish(posted, f"{what} needs an idle device, which waits for ")

    def record(self, *args: object) -> bytes:
        """Return the counters as torch's flight recorder of NCCL writes them."""
        unfinished = Counter(posted.group for posted in list(self._by_work.values()) if not posted.look())
        status = {
            str(number): {"last_enqueued_collective": str(of), "last_completed_collective": str(of - unfinished[group])}
            for number, (group, of) in enumerate(list(self._num_posted.items()))
        }
        return json.dumps({"pg_status": status}).encode()

    def _finish(self, posted: _Posted, why: str = "the device waits for ") -> None:
        if not posted.look():
            block = block_inside_torch if posted.is_barrier else _block
            timeouts = () if self._lock_s is None else (timedelta(seconds=self._lock_s),)
            began = time.monotonic()
            try:
                block(_stock_wait, posted.work, *timeouts)
            except RuntimeError as error:
                if self._lock_s is not None and time.monotonic() - began > 0.9 * self._lock_s:
                    raise Locked(f"locked for {self._lock_s:g} s: {why}{posted.what}") from error
                _stand_still(block)
            posted.is_over = True

    def _waited(self, work: Any, *args: Any, **kwargs: Any) -> bool:
        """Replace ``Work.wait``: let the stream wait for the work, and return at once."""
        posted = self._by_work.get(id(work))
        if posted is None or threading.current_thread() is not threading.main_thread():
            return bool(_stock_wait(work, *args, **kwargs))
        if posted.is_barrier:
            self.drain()
            self._finish(posted)
        if posted.is_over:
            del self._by_work[id(work)]  # a message of gloo cannot be waited for twice
        elif posted not in self._stream:
            self._stream.append(posted)
        return True

    def install(self) -> None:
        """Apply the rules to the main thread, until the process ends."""
        waited = self._waited

        @functools.wraps(dist.Work.wait)
        def wait(work: Any, *args: Any, **kwargs: Any) -> bool:
            return waited(work, *args, **kwargs)

        seem_of_torch(wait)

        wait.device = self  # type: ignore[attr-defined]
        dist.Work.wait = wait  # type: ignore[method-assign]
        for name in ("tolist", "numpy", "cpu", "__reduce_ex__"):  # which no dispatch mode sees
            setattr(torch.Tensor, name, self._reading(getattr(torch.Tensor, name)))
        torch._C._distributed_c10d._dump_nccl_trace_json = self.record  # type: ignore[attr-defined]
        _Operators(self).__enter__()

    def _reading(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def read(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                self.drain()
            return stock(tensor, *args, **kwargs)

        return read

    def before_operator(self) -> None:
        """Wait for the calls that have to end before an operator runs."""
        if self._allocates_by_free:
            self.need_idle()
        elif self._stream:
            self.drain()

    @contextmanager
    def allocating_by_free(self) -> Iterator[None]:
        """Simulate little memory: every operator frees memory before it allocates, which needs an idle device."""
        self._allocates_by_free = True
        try:
            yield
        finally:
            self._allocates_by_free = False


class _Operators(TorchDispatchMode):
    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._device.before_operator()
        return func(*_as_tensors(func, args), **(kwargs or {}))


def _as_tensors(func: Any, args: Sequence[Any]) -> Sequence[Any]:
    """Convert arguments of an operator with one tensor: a number that autograd keeps as a tensor arrives as a number.

    A number beside a tensor stays a number, so that it does not decide the dtype of the result.
    """
    first = func._schema.arguments[0] if func._schema.arguments else None
    if first is None or str(first.type) != "Tensor" or not isinstance(args[0], (int, float)) or len(args) > 1:
        return args
    return [torch.scalar_tensor(args[0], dtype=torch.int64 if isinstance(args[0], int) else torch.float64)]


def _storages(tensors: Any) -> set[int]:
    if isinstance(tensors, torch.Tensor):
        return {tensors.untyped_storage().data_ptr()}
    if isinstance(tensors, (list, tuple)):
        return {storage for tensor in tensors for storage in _storages(tensor)}
    return set()


def _block(call: Callable[..., Any], *args: Any) -> None:
    """Make a blocking call; stacks of the thread end here, in no function of torch.distributed."""
    call(*args)


def block_inside_torch(call: Callable[..., Any], *args: Any) -> None:
    """Make a call that blocks; the thread seems to stand in the function of torch.distributed that it has called."""
    code = _of_torch(_block.__code__).replace(co_name=_public_call())
    FunctionType(code, globals())(call, *args)


def _public_call() -> str:
    """Name of the innermost function of torch.distributed that this thread is in, such as "barrier"."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename != distributed_c10d.__file__:
        frame = frame.f_back
    return "wait" if frame is None else frame.f_code.co_name


def seem_of_torch(*functions: Any) -> None:
    """Let stacks show these functions as code of torch: `ds_hetero.runtime.peers.stack` judges by the file."""
    for function in functions:
        function.__code__ = _of_torch(function.__code__)


def _of_torch(code: CodeType) -> CodeType:
    inner = tuple(_of_torch(const) if isinstance(const, CodeType) else const for const in code.co_consts)
    return code.replace(co_filename=str(_TORCH_DISTRIBUTED / Path(code.co_filename).name), co_consts=inner)


def _stand_still(block: Callable[..., None]) -> None:
    """Never return, in one call that lets other threads run."""
    never = threading.Lock()
    never.acquire()
    block(never.acquire)


seem_of_torch(block_inside_torch, Device._finish, Device._waited, _stand_still)
