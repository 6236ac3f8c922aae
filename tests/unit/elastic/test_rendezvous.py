import os
import signal
import socket
import subprocess
import sys
import time
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousParameters

from ds_hetero.elastic.node import place as place_of
from ds_hetero.elastic.node import rendezvous, round_store
from ds_hetero.elastic.node.place import NodePlace
from ds_hetero.elastic.worker import Worker
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
    handler = rendezvous.AgentRendezvous(place, "n-0", ("127.0.0.1", 1), "127.0.0.1", {}, "ds_hetero")
    with subprocess.Popen(["sleep", "60"]) as worker:
        if is_stopped:
            _stop(worker)
        place.show_life("n-0-0", worker.pid, 0, has_stepped=False)
        os.utime(tmp_path / "beat-n-0-0.json", (0, time.time() - silent_s))
        handler._end_silent_workers()
        lives = worker.poll() is None if not is_killed else _lives_after(worker, 5)
        worker.kill()  # also where it was not to be: a stopped process would be waited for without end
    assert lives != is_killed


@pytest.mark.parametrize(("round_s", "is_killed"), [(1, False), (9, True)])
def test_a_worker_that_was_stopped_before_its_first_sign_of_life_is_killed(round_s, is_killed, tmp_path, monkeypatch):
    monkeypatch.setenv("DS_HETERO_ELASTIC_SILENCE_S", "5")
    place = NodePlace(job="job", node="n", folder=tmp_path)
    place.show_life("n-0-0", os.getpid(), 7, has_stepped=True)  # of an earlier round, and no sign of this one
    handler = rendezvous.AgentRendezvous(place, "n-0", ("127.0.0.1", 1), "127.0.0.1", {}, "ds_hetero")
    handler._round_began_s = time.monotonic() - round_s
    with subprocess.Popen(["sleep", "60"]) as worker, subprocess.Popen(["sleep", "60"]) as running:
        _stop(worker)
        handler._end_silent_workers()
        lives = worker.poll() is None if not is_killed else _lives_after(worker, 5)
        assert running.poll() is None
        worker.kill()
        running.kill()
    assert lives != is_killed


def _stop(process):
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)


def test_the_first_sign_of_life_of_a_forked_worker_is_its_servers(tmp_path):
    names = {"JOB": "job", "NODE": "n", "AGENT": "n-0", "ROUND": "3", "SHM": str(tmp_path)}
    environment = {**os.environ, "LOCAL_RANK": "0", **{place_of.PREFIX + name: one for name, one in names.items()}}
    place = NodePlace.of("job", "n", environment)
    place.make()
    path = tmp_path / "socket"
    code = f"from ds_hetero.elastic.node.fork_server import ForkServer; ForkServer({str(path)!r}).serve()"
    client = [sys.executable, "-S", "-E", place_of.__file__.replace("place.py", "client.py"), str(path)]
    with subprocess.Popen([sys.executable, "-c", code]) as server:
        while not path.exists():
            assert server.poll() is None
            time.sleep(0.02)
        (tmp_path / "silent.py").write_text("print('ran')")
        done = subprocess.run(
            [*client, "--", "-m", "silent"],
            env={**environment, "PYTHONPATH": str(tmp_path)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        sign = place.read("beat-n-0-0.json")
        server.kill()
    assert (done.returncode, done.stdout) == (0, "ran\n"), done
    assert sign is not None and (sign["round"], sign["has_stepped"]) == (3, False)


def test_the_last_words_are_of_the_worker_that_did_not_end_with_another(tmp_path):
    place = NodePlace(job="job", node="n", folder=tmp_path)
    handler = rendezvous.AgentRendezvous(place, "n-0", ("127.0.0.1", 1), "127.0.0.1", {}, "ds_hetero")
    for rank, (error, is_of_peer) in enumerate([("PeerError: gone", True), ("ValueError: x", False), ("Peer", True)]):
        worker = Worker(place=place, agent="n-0", local_rank=rank, round_number=0)
        worker.note_step(5)
        worker.note_error(error, is_of_peer=is_of_peer)
        for one in worker._wakeup:
            one.close()
    words = handler._last_words()
    assert words["error"] == "ValueError: x" and words["step"] == 5 and words["has_stepped"]
    assert handler._last_words() == {"has_stepped": True}


def _lives_after(process, seconds):
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return True
    return False


def test_a_worker_whose_agent_was_killed_before_it_could_notice_ends():
    code = "from ds_hetero.elastic.node.processes import end_with_agent; end_with_agent(); print('lives')"
    gone = subprocess.Popen(["true"])
    os.waitid(os.P_PID, gone.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    for pid, out in ((gone.pid, ""), (os.getpid(), "lives\n")):
        environment = {**os.environ, "DS_HETERO_ELASTIC_AGENT_PID": str(pid)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout) == (int(not out), out)
    gone.wait()


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "localhost"])
def test_the_store_of_a_round_listens_at_its_address_alone(address):
    store = round_store.store_at(address)
    bound = _listeners()[store.port]
    assert bound == {socket.inet_aton(socket.gethostbyname(address))}
    client = TCPStore(address, store.port, is_master=False, wait_for_workers=False)
    client.set("a", "b")
    assert store.get("a") == b"b"
    assert round_store.interface_of("127.0.0.1") == "lo" and round_store.interface_of("0.0.0.0") is None


def _listeners():
    """Addresses at which this machine listens, by port; all that the kernel lists."""
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            host, port = line.split()[1].split(":")
            if line.split()[3] == "0A":
                found.setdefault(int(port, 16), set()).add(bytes.fromhex(host)[::-1])
    return found


def test_an_address_of_another_machine_ends_the_agent_with_the_remedy():
    with pytest.raises(RendezvousClosedError, match=r"cannot listen at 192\.0\.2\.77: .*--listen"):
        round_store.store_at("192.0.2.77")
