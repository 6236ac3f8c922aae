"""Who made a call, as its stack tells: the script, or an engine for it; whatever decorators stand between."""

from __future__ import annotations

import contextlib
import functools
import sys
import sysconfig
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist
import typing_extensions

from ds_hetero.runtime.peers.posted_calls import PostedCalls
from ds_hetero.runtime.peers.stack import is_call_of_script, outside_of_recorder

_TORCH = dist.distributed_c10d.__file__  # type: ignore[attr-defined]
_ENGINE, _SCRIPT = "/site-packages/deepspeed/runtime/zero/partition_parameters.py", "/home/user/train.py"
# Of the Python that a venv with --system-site-packages was made with: below the standard library of both.
_ENGINE_OF_BASE = f"{sysconfig.get_path('stdlib')}{_ENGINE}"


def _in_file(file: str, call: Callable[[], bool]) -> Callable[[], bool]:
    """A function of ``file`` that makes a call."""
    names: dict[str, Any] = {"call": call}
    exec(compile("def made():\n    return call()\n", file, "exec"), names)
    made: Callable[[], bool] = names["made"]
    return made


def _seen_from_torch() -> bool:
    return is_call_of_script(sys._getframe(1))


@contextlib.contextmanager
def _nothing() -> Iterator[None]:
    yield


@pytest.mark.filterwarnings("ignore:old:FutureWarning")
@pytest.mark.parametrize(
    "decorate", [lambda call: call, typing_extensions.deprecated("old", category=FutureWarning), _nothing()]
)
@pytest.mark.parametrize(("caller", "is_scripts"), [(_ENGINE, False), (_ENGINE_OF_BASE, False), (_SCRIPT, True)])
def test_decorators_of_libraries_are_nobodys_call(decorate: Any, caller: str, is_scripts: bool) -> None:
    collective = decorate(_in_file(_TORCH, _seen_from_torch))
    made_by = _in_file(_SCRIPT, _in_file(caller, collective))
    assert made_by() is is_scripts


def test_torch_calls_collectives_of_deepspeed_deprecated_by_such_a_decorator() -> None:
    """Once no release does, the entry of `ds_hetero.runtime.peers.stack` can go."""
    wrapped = dist.all_gather_into_tensor
    files = set()
    while wrapped is not None:
        files.add(wrapped.__code__.co_filename)
        wrapped = getattr(wrapped, "__wrapped__", None)
    assert any(file.endswith("typing_extensions.py") for file in files), files


@pytest.mark.parametrize(("caller", "is_scripts"), [(_ENGINE, False), (_SCRIPT, True)])
def test_a_call_that_blocks_in_the_backend_is_its_callers_and_not_that_of_the_wrapper_which_notes_it(
    monkeypatch: pytest.MonkeyPatch, caller: str, is_scripts: bool
) -> None:
    """As a barrier on NCCL, below which there is no Python frame."""
    monkeypatch.setattr(PostedCalls, "_record", lambda *_: None)
    noted = PostedCalls()._recording(
        "barrier", sys._getframe
    )  # gets a number in the place of its process group: its own frame
    collective = _in_file(_TORCH, functools.partial(noted, 0))
    frame: Any = _in_file(_SCRIPT, _in_file(caller, collective))()
    assert frame.f_code.co_name == "recording"
    assert outside_of_recorder(frame).f_code.co_name != "recording"
    assert is_call_of_script(frame) is is_scripts
