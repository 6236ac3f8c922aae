import os
import signal
import subprocess
import sys
import time
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from ds_hetero.elastic.node import rendezvous
from ds_hetero.elastic.node.wire import NodePlace
from ds_hetero.errors import ConfigError


@pytest.mark.parametrize("name", rendezvous.PRIVATE_NAMES)
def test_private_names_still_exist(name):
    module, _, attributes = name.partition(":")
    owner = import_module(module)
    for attribute in attributes.split("."):
        owner = getattr(owner, attribute)


def test_the_variable_that_spares_reads_of_the_dead_is_still_read():
    api = import_module("torch.distributed.elastic.agent.server.api")
    assert "TORCH_ELASTIC_WORKER_IDENTICAL" in Path(api.__file__).read_text()


def test_torchrun_finds_the_handler_by_its_entry_point():
    setup = (Path(__file__).parents[3] / "setup.cfg").read_text()
    value = "ds_hetero.elastic.node.rendezvous:get_handler"
    assert f"torchrun.handlers =\n    ds_hetero = {value}\n" in setup
    assert EntryPoint("ds_hetero", value, "torchrun.handlers").load()() is rendezvous.create_handler


@pytest.mark.parametrize("endpoint", ["", "host", "host:0", "host:x", ":12"])
def test_an_endpoint_that_nobody_could_reach_is_refused(endpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("DS_HETERO_ELASTIC_SHM", str(tmp_path))
    with pytest.raises(ConfigError, match="--rdzv-endpoint must be HOST:PORT"):
        rendezvous.create_handler(RendezvousParameters("ds_hetero", endpoint, "job", 1, 2))


@pytest.mark.parametrize(
    ("is_stopped", "silent_s", "is_killed"), [(True, 9, True), (False, 9, False), (False, 60, True)]
)
def test_a_worker_that_runs_may_be_silent_for_longer_than_one_that_is_stopped(
    is_stopped, silent_s, is_killed, tmp_path, monkeypatch
):
    monkeypatch.setenv("DS_HETERO_ELASTIC_SILENCE_S", "5")
    place = NodePlace(job="job", node="n", folder=tmp_path)
    handler = rendezvous.KeeperRendezvous(place, "n-0", ("127.0.0.1", 1), "127.0.0.1", {}, "ds_hetero")
    with subprocess.Popen(["sleep", "60"]) as worker:
        if is_stopped:
            worker.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, worker.pid, os.WSTOPPED)
        place.write("beat-n-0-0.json", {"pid": worker.pid, "round": 0})
        os.utime(tmp_path / "beat-n-0-0.json", (0, time.time() - silent_s))
        handler._end_silent_workers()
        lives = worker.poll() is None if not is_killed else _lives_after(worker, 5)
        worker.kill()  # also where it was not to be: a stopped process would be waited for without end
    assert lives != is_killed


def _lives_after(process, seconds):
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return True
    return False


def test_a_worker_whose_agent_was_killed_before_it_could_notice_ends():
    code = "from ds_hetero.elastic.node.wire import end_with_agent; end_with_agent(); print('lives')"
    gone = subprocess.Popen(["true"])
    os.waitid(os.P_PID, gone.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    for pid, out in ((gone.pid, ""), (os.getpid(), "lives\n")):
        environment = {**os.environ, "DS_HETERO_ELASTIC_AGENT_PID": str(pid)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout) == (int(not out), out)
    gone.wait()
