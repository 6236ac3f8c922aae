"""Threads wait in the place of the one that computes: as many as are needed at once, and no more however long."""

import threading
import time

import pytest

from ds_hetero.runtime.attention.round_order import _Waiters


def test_threads_that_wait_are_used_again():
    waiters, before = _Waiters(), threading.active_count()
    for _ in range(5):
        gates = [threading.Event() for _ in range(3)]
        arrivals = [waiters.submit(gate.wait) for gate in gates]
        for gate in gates:
            gate.set()
        for arrival in arrivals:
            arrival.result(timeout=10)
        deadline = time.monotonic() + 1
        while waiters._num_free < 3 and time.monotonic() < deadline:  # a thread is free a moment after its result
            time.sleep(0.001)
    assert threading.active_count() - before == 3


def test_an_error_of_waiting_is_raised_where_the_result_is_asked_for():
    def fail():
        raise RuntimeError("closed by peer")

    with pytest.raises(RuntimeError, match="closed by peer"):
        _Waiters().submit(fail).result(timeout=10)
