"""Node servers over real sockets of this machine, each in a thread."""

import contextlib
import socket
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ds_hetero.elastic.node.node_server import NodeServer
from ds_hetero.elastic.node.node_server_requests import ask, fetch, put
from ds_hetero.elastic.node.place import NODE, TOKEN, NodePlace, token_of
from ds_hetero.elastic.node.rounds import RoundRules
from ds_hetero.elastic.node.wire import WireError, connect
from ds_hetero.elastic.segments import Header, Save, SegmentFile, is_undamaged, read_header, signed
from ds_hetero.errors import ConfigError
from tests.support import ROOT

TOKEN_BYTES = b"t" * 32
SAVE = Save(step=4, start="1", world_size=2)


@pytest.fixture
def node_servers(tmp_path):
    made = []

    def make(node="n0", memory_bytes=None):
        node_server, listener, thread = _started(tmp_path / node, node, memory_bytes)
        made.append((node_server, listener, thread))
        return node_server, listener.getsockname()[:2]

    yield make
    for node_server, listener, thread in made:
        node_server.has_ended.set()
        thread.join(5)
        listener.close()


def _started(folder, node="n0", memory_bytes=None):
    """A node server, the socket that it listens at, and its thread."""
    place = NodePlace(job="job", node=node, folder=folder)
    place.make()
    node_server = NodeServer(place, TOKEN_BYTES, RoundRules(min_agents=1, agents_at_start=1), memory_bytes)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=node_server.serve, args=(listener,), daemon=True)
    thread.start()
    return node_server, listener, thread


def _signed(content, **fields):
    return signed(Header(**fields, end_bytes=len(content), index_bytes=0), memoryview(content), TOKEN_BYTES)


def _write(node_server, name, content=b"content", **changes):
    fields = {"job": "job", "model": "m", "save": SAVE, "rank": 0}
    header = _signed(content, **{**fields, **changes})
    file = SegmentFile(node_server.place.folder / name)
    room = file.begin(len(content))
    room[:] = content
    room.release()
    file.finish(header)
    file.close()
    return header


def test_segments_are_put_over_one_connection_listed_and_fetched(node_servers, tmp_path):
    (one, _), (two, at_two) = node_servers("n0"), node_servers("n1")
    content = bytes(range(256)) * 20_000  # several chunks
    header = _write(one, "own-a-A.seg", content)
    wire = connect(*at_two, TOKEN_BYTES, 5)
    put(wire, "from-a-A.seg", header, memoryview(content))
    (listed,) = ask(at_two, TOKEN_BYTES, {"do": "list"})["segments"]
    assert listed == {"name": "from-a-A.seg", **asdict(header)}
    assert fetch(at_two, TOKEN_BYTES, "from-a-A.seg", SegmentFile(tmp_path / "got.seg")) == header
    assert (tmp_path / "got.seg").read_bytes()[4096 : 4096 + len(content)] == content
    header = _write(one, "own-a-A.seg", b"newer", save=replace(SAVE, step=6))
    put(wire, "from-a-A.seg", header, memoryview(b"newer"))
    assert read_header(two.place.folder / "from-a-A.seg").save.step == 6
    wire.close()


NUM_SAVES = 150


def test_saves_and_events_leave_nothing_in_use(tmp_path):
    """Nor in Python's lists of freed tuples, which the server empties itself.

    In a process of its own, as a node server is: here other tests have threads that use memory, and a collection, of
    which there is one for each save, would look at millions of objects.
    """
    command = "import tests.unit.elastic.test_node_server as here; here._print_blocks_in_use()"
    run = subprocess.run([sys.executable, "-c", command, tmp_path / "n0"], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    in_use, first, last = map(int, run.stdout.split())
    # Without the server's collections these are 8 blocks a save; what is left are other caches, which fill up.
    assert in_use < 2 * NUM_SAVES
    assert (first, last) == (151, 200)


def _print_blocks_in_use():
    """Print the blocks that `NUM_SAVES` saves leave in use after 50 others, and the steps of the events kept."""
    node_server, listener, _ = _started(Path(sys.argv[1]))
    wire = connect(*listener.getsockname()[:2], TOKEN_BYTES, 20)
    content = memoryview(bytes(1000))

    def save(first_step, num_saves):
        for step in range(first_step, first_step + num_saves):
            header = _signed(content, job="job", model="m", save=replace(SAVE, step=step), rank=0)
            put(wire, f"from-a-{'AB'[step % 2]}.seg", header, content)
            node_server.do_event(_Deaf(), {"event": {"kind": "commit", "step": step}})
        return sys.getallocatedblocks()

    warm = save(1, 50)
    in_use = save(51, NUM_SAVES) - warm
    wire.close()
    steps = [event["step"] for event in node_server.events]
    assert steps == list(range(steps[0], steps[-1] + 1))
    print(in_use, steps[0], steps[-1])


class _Deaf:
    """A wire whose answers nobody reads."""

    def send(self, message):
        pass


def test_another_token_is_refused_on_either_side(node_servers):
    _, address = node_servers()
    with pytest.raises(OSError, match="closed"):
        ask(address, b"x" * 32, {"do": "list"})
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def pretend():
            connected, _ = impostor.accept()
            connected.sendall(b"dshet/2\n" + bytes(32))
            connected.recv(1000)
            connected.sendall(bytes(32))
            with contextlib.suppress(OSError):
                connected.recv(1)
            connected.close()

        threading.Thread(target=pretend, daemon=True).start()
        with pytest.raises(WireError, match="another token"):
            connect(*impostor.getsockname()[:2], TOKEN_BYTES, 5)


@pytest.mark.parametrize(
    ("message", "answer"),
    [
        ({"do": "get", "name": "../secret.seg"}, "not a valid name"),
        ({"do": "get", "name": "none.seg"}, "not a complete segment"),
        ({"do": "put", "name": "x.seg", "header": "00"}, "malformed"),
        ({"do": "put", "name": "x.seg"}, "header"),
        ({"do": "_answer"}, "no request"),
        ({"do": "free", "kept": {"step": 1}}, "missing"),
        ({}, "no request"),
    ],
)
def test_nonsense_is_answered_and_harms_nothing(node_servers, message, answer):
    node_server, address = node_servers()
    header = _write(node_server, "own-a-A.seg")
    with pytest.raises(WireError, match=answer):
        ask(address, TOKEN_BYTES, message)
    assert read_header(node_server.place.folder / "own-a-A.seg") == header


def test_a_copy_that_is_cut_off_or_damaged_does_not_count(node_servers):
    node_server, address = node_servers()
    header = _signed(b"12345678", job="job", model="m", save=SAVE, rank=1)
    for sent in (b"1234", b"1234567X"):
        wire = connect(*address, TOKEN_BYTES, 5)
        wire.send({"do": "put", "name": "from-b-A.seg", "header": header.to_bytes().hex()})
        assert wire.receive() == {"ready": True}
        wire.send_content(memoryview(sent))
        if len(sent) == 8:
            assert "HMAC" in wire.receive()["error"]
        wire.close()
        assert read_header(node_server.place.folder / "from-b-A.seg") is None
    assert ask(address, TOKEN_BYTES, {"do": "list"})["segments"] == []


@pytest.mark.parametrize(
    ("job", "size", "answer"),
    [("other", 10, "another job"), ("job", 20_000, r"24,096 bytes do not fit into 10,000")],
)
def test_a_copy_of_another_job_or_without_room_is_refused(node_servers, job, size, answer):
    (one, _), (_, at_two) = node_servers("n0"), node_servers("n1", memory_bytes=10_000)
    header = _write(one, "own-a-A.seg", bytes(size), job=job)
    wire = connect(*at_two, TOKEN_BYTES, 5)
    with pytest.raises(WireError, match=answer):
        put(wire, "from-a-A.seg", header, memoryview(bytes(size)))
    wire.close()


def test_what_is_older_than_a_save_is_freed_but_not_what_is_written_again(node_servers):
    node_server, address = node_servers()
    _write(node_server, "own-a-A.seg", save=replace(SAVE, step=2))
    _write(node_server, "own-gone-A.seg", save=replace(SAVE, step=2))
    _write(node_server, "from-b-A.seg", save=replace(SAVE, step=2))
    _write(node_server, "from-b-B.seg")
    _write(node_server, "got-1.seg", save=replace(SAVE, step=2))
    ask(address, TOKEN_BYTES, {"do": "free", "kept": asdict(SAVE), "in_use": ["own-a-"]})
    assert sorted(path.name for path in node_server.place.folder.glob("*.seg")) == ["from-b-B.seg", "own-a-A.seg"]
    ask(address, TOKEN_BYTES, {"do": "free"})
    assert list(node_server.place.folder.glob("*.seg")) == []


def test_the_meeting_is_served_and_a_lost_connection_breaks_it(node_servers):
    node_server, address = node_servers()
    node_server.rounds.rules = RoundRules(min_agents=1, agents_at_start=2)
    hello = {"do": "meet", "round": {"number": 0, "members": []}, "last": {}}
    one, two = (connect(*address, TOKEN_BYTES, 5) for _ in range(2))
    one.send({**hello, "agent": "a", "info": {"node": "a", "terms": {}}})
    two.send({**hello, "agent": "b", "info": {"node": "b", "terms": {}}})
    assert one.receive()["round"]["members"] == two.receive()["round"]["members"] == ["a", "b"]
    one.send({"do": "store", "store": ["host", 1], "number": 1})
    assert two.receive() == one.receive() == {"store": ["host", 1], "number": 1}
    one.close()
    assert "broken" in two.receive()
    assert ask(address, TOKEN_BYTES, {"do": "status"})["is_broken"]
    two.close()


def test_the_node_server_runs_without_torch():
    code = "import ds_hetero.elastic.node.node_server, sys; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_names_and_secrets_that_cannot_be_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="name of a node"):
        NodePlace.of_environment({"DS_HETERO_ELASTIC_JOB": "j", NODE: "../x"})
    with pytest.raises(ConfigError, match="16 characters"):
        token_of("job", {TOKEN: "short"})
    kept = token_of("job", {"XDG_CACHE_HOME": str(tmp_path)})
    assert (
        kept == token_of("job", {"XDG_CACHE_HOME": str(tmp_path)}) != token_of("b", {"XDG_CACHE_HOME": str(tmp_path)})
    )
    assert (tmp_path / "ds_hetero/elastic-token").stat().st_mode & 0o077 == 0


def test_damage_in_a_fetched_segment_is_an_error(node_servers, tmp_path):
    node_server, address = node_servers()
    header = _write(node_server, "own-a-A.seg")
    raw = bytearray((node_server.place.folder / "own-a-A.seg").read_bytes())
    raw[4100] ^= 1
    (node_server.place.folder / "own-a-A.seg").write_bytes(raw)
    with pytest.raises(WireError, match="damaged"):
        fetch(address, TOKEN_BYTES, "own-a-A.seg", SegmentFile(tmp_path / "got.seg"))
    assert not is_undamaged(node_server.place.folder / "own-a-A.seg", header, TOKEN_BYTES)


def test_a_newcomer_is_sent_to_the_node_server_where_the_round_is(node_servers):
    (one, at_one), (two, at_two) = node_servers("n0"), node_servers("n1")
    two.place.write("node_server.json", {"host": at_two[0], "port": at_two[1], "pid": 1})
    hello = {"do": "meet", "round": {"number": 0, "members": []}, "last": {}}
    running = connect(*at_two, TOKEN_BYTES, 5)
    running.send({**hello, "agent": "a", "info": {"node": "a", "terms": {}}})
    assert "round" in running.receive()
    one.rounds.rules = RoundRules(min_agents=1, agents_at_start=2)  # a round would begin there after a while
    one.place.write("node_server.json", {"host": at_one[0], "port": at_one[1]})
    one.place.write("rendezvous-n0-0.json", {"host": at_two[0], "port": at_two[1]})
    newcomer = connect(*at_one, TOKEN_BYTES, 5)
    newcomer.send({**hello, "agent": "b", "info": {"node": "b", "terms": {}}})
    assert newcomer.receive() == {"redirect": list(at_two)}
    running.close()
    newcomer.close()


def _hello(agent, round_=None, node_server=None):
    info = {"node": agent, "terms": {}, "node_server": node_server}
    return {"do": "meet", "agent": agent, "info": info, "last": {}, "round": round_ or {"number": 0, "members": []}}


def _place(node_server, address):
    node_server.place.write("node_server.json", {"host": address[0], "port": address[1], "pid": 1})


def test_who_was_cut_off_is_sent_to_where_the_others_went_on(node_servers):
    (one, at_one), (two, at_two) = node_servers("a"), node_servers("b")
    _place(one, at_one), _place(two, at_two)
    for node_server in (one, two):
        node_server.rounds.rules = replace(node_server.rounds.rules, needs_majority=False)
    before = {"number": 4, "members": ["a", "b"], "node_servers": {"a": at_one, "b": at_two}}
    one.rounds.rules = replace(one.rounds.rules, attach_s=0.2)
    left = connect(*at_one, TOKEN_BYTES, 5)
    left.send(_hello("a", before, at_one))
    assert left.receive()["round"]["number"] == 5  # the other node server has no round: it is the job
    right = connect(*at_two, TOKEN_BYTES, 5)
    right.send(_hello("b", before, at_two))
    assert right.receive() == {"redirect": list(at_one)}
    left.close(), right.close()


def test_of_two_jobs_that_run_the_lesser_ends_its_round_and_is_sent_on(node_servers):
    (one, at_one), (two, at_two) = node_servers("a"), node_servers("b")
    agents = []
    for (node_server, address), node, number in (((one, at_one), "a", 8), ((two, at_two), "b", 4)):
        _place(node_server, address)
        agents.append(connect(*address, TOKEN_BYTES, 15))
        known = {"number": number, "members": [node], "node_servers": {"a": at_one, "b": at_two}}
        agents[-1].send({**_hello(node, known, address), "do": "attach"})
    assert str(at_one[1]) in agents[1].receive()["broken"]
    agents[1].send(_hello("b", {"number": 4, "members": ["b"]}, at_two))
    assert agents[1].receive() == {"redirect": list(at_one)}
    for agent in agents:
        agent.close()


def test_a_node_that_comes_back_by_its_first_command_is_fetched_by_the_job_that_runs(node_servers):
    (one, at_one), (two, at_two) = node_servers("a"), node_servers("b")
    _place(one, at_one), _place(two, at_two)
    running = connect(*at_two, TOKEN_BYTES, 15)
    known = {"number": 4, "members": ["b"], "node_servers": {"a": at_one, "b": at_two}}
    running.send({**_hello("b", known, at_two), "do": "attach"})
    one.rounds.rules = RoundRules(min_agents=1, agents_at_start=2)  # a round would begin there after a while
    back = connect(*at_one, TOKEN_BYTES, 15)
    back.send(_hello("a", None, at_one))
    assert back.receive() == {"redirect": list(at_two)}
    running.close(), back.close()


def test_an_agent_hears_that_its_node_server_lives(node_servers):
    _, address = node_servers()
    agent = connect(*address, TOKEN_BYTES, 5)
    agent.send(_hello("a"))
    assert "round" in agent.receive()
    agent.send({"do": "alive"})
    assert agent.receive() == {"alive": True}
    agent.close()


def test_an_agent_that_was_silent_is_told_of_no_error(node_servers, monkeypatch):
    """A node that was stopped for a while meets again; a message of its former node server would end it."""
    monkeypatch.setattr("ds_hetero.elastic.node.node_server.SILENCE_S", 0.1)
    node_server, address = node_servers()
    agent = connect(*address, TOKEN_BYTES, 5)
    agent.send(_hello("a"))
    assert "round" in agent.receive()
    with pytest.raises(WireError, match="the connection was closed"):
        while True:
            assert "error" not in agent.receive()
    assert node_server.rounds.is_broken
    agent.close()
