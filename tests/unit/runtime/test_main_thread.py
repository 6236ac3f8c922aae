"""Where the main thread is: its callers are read only while it stands still."""

from __future__ import annotations

import sys
from types import FrameType

import pytest

from ds_hetero.runtime.peers import main_thread
from ds_hetero.runtime.peers.main_thread import Stay


def _here() -> FrameType:
    return sys._getframe()


def test_callers_are_read_only_of_a_thread_that_has_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = _here(), _here()
    positions = iter([first, second, second, second, first])
    read: list[FrameType] = []

    def line_of_script(frame: FrameType) -> None:
        read.append(frame)

    monkeypatch.setattr(main_thread, "_innermost_frame", lambda: next(positions))
    monkeypatch.setattr(main_thread, "line_of_script", line_of_script)
    stay = Stay()
    stay.look()
    assert not read
    stay.look()
    stay.look()
    assert read == [second, second]
    stay.look()  # it has moved again
    assert read == [second, second]


def test_a_thread_that_stands_still_is_shown_with_its_line_from_the_second_look_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frame = _here()
    monkeypatch.setattr(main_thread, "_innermost_frame", lambda: frame)
    stay = Stay()
    assert stay.place.text == "_here"
    since_s = stay.since_s
    stay.look()
    assert stay.place.text.startswith("_here at test_main_thread.py:")
    assert stay.since_s == since_s
