"""The wire under somebody who has no token, and under a member that sends nonsense."""

import contextlib
import json
import random
import socket
import struct
import threading
import time

import pytest

from ds_hetero.elastic.node import admission, wire
from ds_hetero.elastic.node.node_server import NodeServer
from ds_hetero.elastic.node.node_server_requests import ask
from ds_hetero.elastic.node.place import NodePlace
from ds_hetero.elastic.node.rounds import RoundRules
from ds_hetero.elastic.node.wire import Wire, WireError, connect, parse_message, welcome

TOKEN = b"t" * 32


@pytest.fixture
def pair():
    made = []

    def make(timeout_s=5.0):
        server, client = _sockets()
        ends = []
        thread = threading.Thread(target=lambda: ends.append(welcome(server, TOKEN, 5.0, timeout_s)))
        thread.start()
        made.append(_connect_over(client, timeout_s))
        thread.join()
        made.append(ends[0])
        return made[-2], made[-1]

    yield make
    for one in made:
        one.close()


def _sockets():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname(), timeout=5)
        server, _ = listener.accept()
    return server, client


def _connect_over(client, timeout_s, token=TOKEN):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire.socket, "create_connection", lambda *_, **__: client)
        return connect("host", 1, token, timeout_s)


@pytest.fixture
def node_server(tmp_path):
    place = NodePlace(job="job", node="n0", folder=tmp_path / "n0")
    place.make()
    one = NodeServer(place, TOKEN, RoundRules(min_agents=1, agents_at_start=1))
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        thread = threading.Thread(target=one.serve, args=(listener,), daemon=True)
        thread.start()
        yield one, listener.getsockname()
        one.has_ended.set()
        thread.join(5)


def test_messages_go_both_ways_and_the_token_never_does(pair):
    server, client = _sockets()
    seen = bytearray()
    real = socket.socket.sendall

    client_wire, server_wire = pair()
    client_wire.send({"a": [1, {"b": "c"}]})
    assert server_wire.receive() == {"a": [1, {"b": "c"}]}
    server_wire.send({"é": None})
    assert client_wire.receive() == {"é": None}
    client_wire.send_content(memoryview(b"x" * 3_000_000))
    room = bytearray(3_000_000)
    server_wire.receive_into(memoryview(room))
    assert room == b"x" * 3_000_000 and TOKEN not in seen and real is socket.socket.sendall
    server.close(), client.close()


def _frames(number):
    """Bytes of a number of messages from a client to a server, and the keys that both have."""
    keys = b"s" * 32, b"c" * 32
    frames = []
    for one in range(number):
        text = json.dumps({"n": one}).encode()
        frames.append(struct.pack(">I", len(text)) + wire._mac_of(keys[0], one, text) + text)
    return frames, keys


@pytest.mark.parametrize(
    "order", [[0, 0], [1], [0, 2], [0, 1, 0], "other side"], ids=["again", "left out", "skipped", "later", "reflected"]
)
def test_messages_that_are_repeated_left_out_or_reflected_do_not_count(order):
    server, client = _sockets()
    frames, (to_server, to_client) = _frames(3)
    keys = (to_server, to_client) if order == "other side" else (to_client, to_server)
    receiver = Wire(server, 5.0, keys)
    order = [0] if order == "other side" else order
    client.sendall(b"".join(frames[one] for one in order))
    for number in range(len(order) - 1):
        assert receiver.receive() == {"n": number}
    with pytest.raises(WireError, match="HMAC"):
        receiver.receive()
    receiver.close(), client.close()


@pytest.mark.parametrize("place", range(0, 46, 3))
def test_a_message_with_a_changed_byte_does_not_count(place):
    server, client = _sockets()
    frames, (to_server, to_client) = _frames(1)
    raw = bytearray(frames[0])
    raw[min(place, len(raw) - 1)] ^= 1
    client.sendall(raw)
    client.close()
    receiver = Wire(server, 1.0, (to_client, to_server))
    with pytest.raises(OSError):
        receiver.receive()
    receiver.close()


@pytest.mark.parametrize(
    "text", [b"[" * 100_000, b'{"a":' * 500 + b"1" + b"}" * 500, b"[]", b"1", b"\xff", b"{", b'{"a": [' + b"{" * 40]
)
def test_texts_that_are_nested_too_deep_or_no_objects_are_refused(text):
    with pytest.raises(WireError):
        parse_message(text)


def test_brackets_in_texts_do_not_nest():
    assert parse_message(json.dumps({"a": '[[["\\' * 50}).encode())["a"].startswith("[[[")


def test_each_byte_of_a_handshake_does_not_renew_its_time(monkeypatch):
    server, client = _sockets()
    ends = []
    begin_s = time.monotonic()

    def serve():
        try:
            welcome(server, TOKEN, 0.6, 5.0)
        except OSError as error:
            ends.append((time.monotonic() - begin_s, error))

    thread = threading.Thread(target=serve)
    thread.start()
    while thread.is_alive():
        with contextlib.suppress(OSError):
            client.sendall(b"x")
        time.sleep(0.1)
    assert 0.5 < ends[0][0] < 1.5 and isinstance(ends[0][1], TimeoutError)
    server.close(), client.close()


def test_each_byte_of_a_message_does_not_renew_its_time(pair):
    client, server = pair(timeout_s=0.5)
    begin_s = time.monotonic()
    thread = threading.Thread(target=lambda: [client._socket.send(b"\0") or time.sleep(0.1) for _ in range(10)])
    thread.start()
    with pytest.raises(TimeoutError):
        server.receive()
    assert time.monotonic() - begin_s < 0.9
    thread.join()


def test_a_node_server_that_is_flooded_by_strangers_serves_its_job(node_server, monkeypatch):
    monkeypatch.setattr(admission, "MAX_WAITING", 16)
    monkeypatch.setattr(admission, "HANDSHAKE_S", 60.0)  # a busy machine ends the threads of closed connections late
    _, address = node_server
    before = threading.active_count()
    strangers = []
    for _ in range(120):
        strangers.append(socket.create_connection(address, timeout=5))
        strangers[-1].sendall(b"GET / HTTP/1.1\r\n")
    end_s = time.monotonic() + admission.HANDSHAKE_S / 2  # threads of strangers that wait would all be there until then
    while threading.active_count() - before > 16 + 4 and time.monotonic() < end_s:
        time.sleep(0.05)
    assert threading.active_count() - before <= 16 + 4
    assert ask(address, TOKEN, {"do": "status"}, 5)["job"] == "job"
    for one in strangers:
        one.close()


def test_a_stranger_is_closed_after_the_time_of_a_handshake(node_server, monkeypatch):
    monkeypatch.setattr(admission, "HANDSHAKE_S", 0.3)
    _, address = node_server
    with socket.create_connection(address, timeout=5) as stranger:
        begin_s = time.monotonic()
        while stranger.recv(100):
            pass
        assert time.monotonic() - begin_s < 2


def test_a_node_server_outlives_whatever_strangers_and_members_send(node_server, monkeypatch, caplog):
    monkeypatch.setattr(admission, "HANDSHAKE_S", 0.2)
    one, address = node_server
    rng = random.Random(7)
    words = [b"GET / HTTP/1.1\r\n\r\n", b"{" * 5000, b"[" * 5000, b"\n" * 64, b'{"answer": "x"}\n', bytes(200), b""]
    for _ in range(60):  # without the token
        with socket.create_connection(address, timeout=5) as stranger, contextlib.suppress(OSError):
            stranger.sendall(rng.choice(words) + rng.randbytes(rng.randrange(200)))
    kinds = [name[3:] for name in dir(one) if name.startswith("do_") and name not in ("do_end",)]
    values = [None, 1, -1, 1e308, "x", "../x", [], {}, [[1]], {"step": 1}, True, "own-a-A.seg", "00", ["h", 1], 2**70]
    keys = ["do", "name", "header", "kept", "in_use", "least", "memory_bytes", "event", "to", "agent", "info", "last"]
    keys += ["round", "store", "number"]
    for _ in range(300):  # of the job, and out of its mind
        message = {key: rng.choice(values) for key in rng.sample(keys, rng.randrange(1, len(keys)))}
        message["do"] = rng.choice([*kinds, rng.choice(values)])
        with contextlib.suppress(OSError):
            member = connect(*address, TOKEN, 0.05)
            try:
                member.send(message)
                member.receive()
            finally:
                member.close()
    one.rounds.number, one.rounds.members = 0, []
    assert ask(address, TOKEN, {"do": "list"}, 5)["segments"] == []
    assert "could not be answered" not in caplog.text or all(
        "RecursionError" not in record.getMessage() for record in caplog.records
    )
