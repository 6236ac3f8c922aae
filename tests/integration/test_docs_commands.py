"""What README.md and docs/ say trains on two ranks does.

Budget: 25 s.
"""

from __future__ import annotations

import json
import os
import runpy
import shlex
import sys
from typing import Any

import pytest

from tests.integration.tiny import UNEVEN_2, batches, ds_config, llama
from tests.markdown import BLOCKS, write_files
from tests.support import run_deepspeed

ON_RANKS = [block for block in BLOCKS if block.on_ranks]


@pytest.mark.parametrize("block", ON_RANKS, ids=lambda block: block.name)
def test_block_trains_on_two_ranks(block, tmp_path, capsys):
    write_files(block.page, tmp_path)
    run_deepspeed(_snippet if block.language == "python" else _launched, 2, block.text, str(tmp_path))
    shown = {line.removeprefix("[rank 0] ").removeprefix("[rank 1] ") for line in capsys.readouterr().out.splitlines()}
    for line in (block.prints or "").splitlines():
        assert line in shown


def _snippet(rank: int, code: str, folder: str) -> None:
    """A snippet that is given a model, a loader of whole batches and a configuration."""
    with open("ds_config.json", "w") as file:
        optimizer = {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}}
        json.dump(ds_config(2, UNEVEN_2, optimizer=optimizer), file)
    names: dict[str, Any] = {"__name__": "docs", "model": llama(), "loader": batches(2)}
    exec(compile(code, "snippet", "exec"), names)
    assert "engine" not in names or names["engine"].global_steps == 2


def _launched(rank: int, commands: str, folder: str) -> None:
    """The script of a torchrun command, in ranks that exist already."""
    os.chdir(folder)
    for command in commands.splitlines():
        program, *arguments = shlex.split(command, comments=True)
        if program == "torchrun":
            assert arguments[:2] == ["--nproc-per-node", "2"]
            sys.argv = arguments[2:]
            runpy.run_path(sys.argv[0], run_name="__main__")
        else:
            assert program == "export"
