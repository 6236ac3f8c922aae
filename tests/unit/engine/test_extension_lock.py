"""Locks of extensions that are compiled, as processes that were killed leave them."""

import os
import threading
import time

import pytest
from torch.utils.file_baton import FileBaton

from ds_hetero.engine import extension_lock
from ds_hetero.engine.patching import Patches


@pytest.fixture
def patched(monkeypatch):
    monkeypatch.setattr(extension_lock, "ABANDONED_S", 0.1)
    monkeypatch.setattr(extension_lock, "COMPILING_S", 0.3)
    monkeypatch.setenv("LOCAL_RANK", "0")
    patches = Patches()
    extension_lock.install(patches)
    yield
    patches.undo()


def _wait_for(lock, seconds):
    waiting = threading.Thread(target=FileBaton(str(lock), wait_seconds=0.02).wait)
    waiting.start()
    time.sleep(seconds)
    assert waiting.is_alive()
    lock.unlink()
    waiting.join(5)
    assert not waiting.is_alive()


def test_a_lock_that_was_left_is_told_with_its_age_its_maker_and_the_remedy(patched, tmp_path, capfd):
    lock = tmp_path / "lock"
    lock.touch()
    os.utime(lock, (0, time.time() - 7200))
    _wait_for(lock, 0.6)
    said = capfd.readouterr().err
    assert f"waits for {lock}, made 120 min ago by user" in said, said
    assert "no process that can be seen from here has it open" in said and "delete the file" in said
    assert said.count("waits for") == 1


def test_a_process_that_compiles_is_named_when_it_takes_long(patched, tmp_path, capfd):
    baton = FileBaton(str(tmp_path / "lock"))
    assert baton.try_acquire()
    _wait_for(tmp_path / "lock", 0.8)
    os.close(baton.fd)
    assert f"waits for process {os.getpid()}, which compiles" in capfd.readouterr().err


@pytest.mark.parametrize("local_rank", ["0", "3"])
def test_a_short_wait_and_other_ranks_say_nothing(patched, tmp_path, capfd, monkeypatch, local_rank):
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    (tmp_path / "lock").touch()
    _wait_for(tmp_path / "lock", 0.04 if local_rank == "0" else 0.4)
    assert capfd.readouterr().err == ""
