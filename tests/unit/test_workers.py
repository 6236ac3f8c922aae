"""Tasks in worker processes: their results, and an error that names a worker which was killed."""

import ast
import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest

import benchmarks
from benchmarks.measure.workers import WorkerError, as_completed, in_order

# Python 3.12 warns of every fork beside threads; these workers compute nothing.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")


def _squared(number):
    if number == 0:
        time.sleep(0.2)  # the first task ends last
    return number * number


def _pid(_):
    return os.getpid()


def _killed(number):
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def _gone_before_its_child(_):
    if os.fork() == 0:
        time.sleep(2)  # holds the pipe of the worker
        os._exit(0)
    os._exit(3)


def _failed(number):
    raise ValueError(f"no such number: {number}")


@pytest.mark.parametrize("one_task_each", [True, False])
def test_results_come_in_the_order_of_the_tasks(one_task_each):
    tasks = [0, 1, 2, 3, 4]
    assert list(in_order(_squared, tasks, 2, start_method="fork", one_task_each=one_task_each)) == [0, 1, 4, 9, 16]


def test_results_that_come_first_are_yielded_first():
    order = [index for index, _ in as_completed(_squared, [0, 1], 2, start_method="fork")]
    assert order == [1, 0]


def test_a_worker_takes_one_task_or_many():
    assert len(set(in_order(_pid, range(3), 1, start_method="fork"))) == 3
    assert len(set(in_order(_pid, range(3), 1, start_method="fork", one_task_each=False))) == 1


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_a_killed_worker_is_named_with_its_exit_code(start_method):
    """`multiprocessing.Pool` starts another worker, and waits for the result of the first for ever."""
    with pytest.raises(WorkerError, match=r"Process-\d+ \(process \d+\) ended with exit code -9 \(SIGKILL\).*task 1"):
        list(in_order(_killed, [0, 1], 2, start_method=start_method))


def test_a_worker_is_gone_even_if_a_process_that_it_started_is_not():
    begin = time.monotonic()
    with pytest.raises(WorkerError, match="exit code 3 in the task 7"):
        list(in_order(_gone_before_its_child, [7], 1, start_method="fork"))
    assert time.monotonic() - begin < 1.5


def test_an_exception_comes_with_its_traceback():
    with pytest.raises(WorkerError, match=r"(?s)task 5.*in _failed.*ValueError: no such number: 5"):
        list(in_order(_failed, [5], 1, start_method="fork"))


def test_workers_are_prepared_before_their_first_task(tmp_path):
    note = partial((tmp_path / "prepared").touch, exist_ok=False)  # raises if it is called twice
    assert list(in_order(_squared, [1, 2], 1, start_method="fork", one_task_each=False, prepare=note)) == [1, 4]


def test_no_benchmark_uses_a_pool_that_waits_for_killed_workers():
    pools = {"Pool", "ProcessPoolExecutor"}
    for file in Path(benchmarks.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", None))
                assert name not in pools, f"{file}:{node.lineno}: use benchmarks.measure.workers"
