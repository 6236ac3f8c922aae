"""What ranks write in a store that others can reach, too."""

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from ds_hetero.runtime.peers import board as board_module
from ds_hetero.runtime.peers.board import FAILED, Board, End, sign_with


@pytest.fixture
def store(monkeypatch):
    store = HashStore()
    monkeypatch.setattr(board_module, "_get_default_store", lambda: store)
    monkeypatch.setattr(board_module, "_num_boards", 0)
    monkeypatch.setattr(board_module, "_key", None)
    return store


def _boards(number):
    boards = []
    for _ in range(number):  # as on ranks of one job, where each makes its first
        board_module._num_boards = 0
        boards.append(Board("start"))
    return boards


def test_what_is_not_signed_by_the_job_is_as_if_it_were_not_there(store, caplog):
    sign_with(b"t" * 32)
    one, two = _boards(2)
    stranger = dist.PrefixStore("ds_hetero/1/start", store)
    stranger.add("num_ends", 1)
    stranger.set("end/1", '[0, "failed", "ValueError: a lie"]')
    stranger.set("status/0", "nonsense")
    stranger.set("process/1", '{"host": "x", "pid": 1, "started": ""}')
    one.write_end(End(1, FAILED, "ValueError: the truth"))
    assert two.ends() == [End(1, FAILED, "ValueError: the truth")]
    assert two.status(0) is None and two.process(1) is None
    assert "no valid signature" in caplog.text
    stranger.set("end/3", stranger.get("end/2"))  # a signature belongs to its place
    assert len(two.ends()) == 1
    stranger.set("diagnosis", '["a lie"]')
    assert two.diagnosis() is None and two.settle(["the truth"]) == ["the truth"]


def test_ranks_read_each_other_with_a_key_and_without(store):
    for token in (None, b"t" * 32):
        if token is not None:
            sign_with(token)
        one, two = _boards(2)
        one.introduce(0, {"host": "h", "pid": 5, "started": "9"})
        assert two.process(0) == {"host": "h", "pid": 5, "started": "9"}
        assert one.settle(["a"]) == two.settle(["b"]) == ["a"] == two.diagnosis()
        store.delete_key("ds_hetero/1/start/diagnosis")
