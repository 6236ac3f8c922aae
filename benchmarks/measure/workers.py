"""Run tasks in worker processes, and raise if a worker dies.

A pool of `multiprocessing` replaces a worker that was killed, for example by the kernel for want of memory, and waits
for its result for ever. Here the caller gets the worker's name, its exit code, and the task that it ran.
"""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

StartMethod = Literal["fork", "spawn"]
_POLL_S = 0.5  # chosen, never measured: a dead worker is noticed after it at the latest
_ENDS_WITHIN_S = 10  # a process whose pipe is closed; chosen, never measured


class WorkerError(RuntimeError):
    """A worker process died, or its task raised."""


def as_completed(
    fn: Callable[[Any], Any],
    tasks: Sequence[Any],
    processes: int,
    *,
    start_method: StartMethod,
    one_task_each: bool = True,
    prepare: Callable[[], None] | None = None,
) -> Iterator[tuple[int, Any]]:
    """Run ``fn(task)`` for every task; yield (index of the task, result) as tasks end.

    Args:
        fn: a function of a module. It, the tasks and the results must pickle.
        processes: workers that run at a time.
        one_task_each: whether a worker ends after its first task, so that the next one begins with fresh memory.
        prepare: called by every worker before its first task.

    Raises:
        WorkerError: a worker died, or a task raised. All workers are killed then, as they are if the caller stops.
    """
    waiting = deque(enumerate(tasks))
    workers: list[_Worker] = []
    try:
        while waiting or workers:
            while waiting and len(workers) < processes:
                worker = _Worker(fn, start_method, one_task_each, prepare)
                workers.append(worker)
                worker.begin(*waiting.popleft())
            for worker in _ready(workers):
                index, result = worker.result()
                if waiting and not one_task_each:
                    worker.begin(*waiting.popleft())
                else:
                    workers.remove(worker)
                    worker.end()
                yield index, result
    finally:
        for worker in workers:
            worker.kill()


def in_order(
    fn: Callable[[Any], Any],
    tasks: Sequence[Any],
    processes: int,
    *,
    start_method: StartMethod,
    one_task_each: bool = True,
    prepare: Callable[[], None] | None = None,
) -> Iterator[Any]:
    """Run tasks as `as_completed` does; yield their results in the order of the tasks."""
    results: dict[int, Any] = {}
    next_index = 0
    completed = as_completed(
        fn, tasks, processes, start_method=start_method, one_task_each=one_task_each, prepare=prepare
    )
    for index, result in completed:
        results[index] = result
        while next_index in results:
            yield results.pop(next_index)
            next_index += 1


class _Worker:
    """A process that runs one task at a time, and the caller's end of its pipe."""

    def __init__(
        self,
        fn: Callable[[Any], Any],
        start_method: StartMethod,
        one_task_each: bool,
        prepare: Callable[[], None] | None,
    ) -> None:
        context: Any = multiprocessing.get_context(start_method)
        self.connection, end_of_worker = context.Pipe()
        arguments = (fn, end_of_worker, self.connection, one_task_each, prepare)
        self.process = context.Process(target=_work, args=arguments, daemon=True)
        self.process.start()
        end_of_worker.close()
        self._index, self._task = -1, None

    def begin(self, index: int, task: Any) -> None:
        """Send a task to the process."""
        self._index, self._task = index, task
        try:
            self.connection.send(task)
        except OSError:
            raise self._death() from None

    def result(self) -> tuple[int, Any]:
        """Return the index and the result of the task. Raises `WorkerError`."""
        if not self.connection.poll():  # it has ended, and a process that it has started holds its pipe
            raise self._death()
        try:
            failure, value = self.connection.recv()
        except (EOFError, OSError):
            raise self._death() from None
        if failure:
            raise WorkerError(f"{self.process.name} failed in the task {self._task!r}:\n{failure}")
        return self._index, value

    def end(self) -> None:
        """Wait for the end of a process that gets no further task."""
        self.connection.close()
        self.process.join(_ENDS_WITHIN_S)
        self.kill()

    def kill(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.join()
        self.connection.close()

    def _death(self) -> WorkerError:
        """Return the error of a process that has ended before its task."""
        self.process.join(_ENDS_WITHIN_S)
        code = self.process.exitcode
        return WorkerError(
            f"{self.process.name} (process {self.process.pid}) ended with exit code {code}{_signal_name(code)} in the "
            f"task {self._task!r}. A worker that is killed by signal 9 has usually taken more memory than there is: "
            "run fewer at a time."
        )


def _ready(workers: Sequence[_Worker]) -> list[_Worker]:
    """Wait for workers that have sent something or have ended."""
    while True:
        arrived = wait([worker.connection for worker in workers], timeout=_POLL_S)
        # Children of a dead process may hold its pipe open, so that no end of file arrives.
        ready = [worker for worker in workers if worker.connection in arrived or not worker.process.is_alive()]
        if ready:
            return ready


def _signal_name(code: int | None) -> str:
    """Return the signal of an exit code: `` (SIGKILL)`` of -9."""
    return f" ({signal.Signals(-code).name})" if code is not None and code < 0 else ""


def _work(
    fn: Callable[[Any], Any],
    connection: Connection,
    end_of_caller: Connection,
    one_task_each: bool,
    prepare: Callable[[], None] | None,
) -> None:
    """Run one task, or tasks until the caller closes its end of the pipe."""
    end_of_caller.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's, who kills this process
    is_first = True
    while is_first or not one_task_each:
        try:
            task = connection.recv()
        except EOFError:
            return
        try:
            if is_first and prepare is not None:
                prepare()
            reply: tuple[str | None, Any] = None, fn(task)
        except Exception:
            reply = traceback.format_exc(), None
        connection.send(reply)
        is_first = False
